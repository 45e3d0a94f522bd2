"""Recordings of a run: append-only chunk files, readable without the trainer and after a crash."""
