"""Scan while the job runs: what ranks say of themselves, and what follows from it. Needs neither tables nor torch."""
