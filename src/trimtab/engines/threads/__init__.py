"""What a framework keeps once a process, for each of several threads that are ranks: torch.distributed, Megatron-Core.

It changes hands with the turn (:mod:`trimtab.fbd.threads.turns`), so nothing that looks at it is replaced.
"""
