"""Several forward ranks in one process, as threads: one computes while the others wait for messages and collectives."""
