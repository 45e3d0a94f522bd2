"""Scope on a rank: what is connected at which step, what is measured, and how it gets out of the job."""
