"""Faults for drills: what may be asked for, and how it comes about in a running job."""
