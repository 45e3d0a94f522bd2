"""The execution of pipeline schedules on real stages (torch): the executor, chunks of plain PyTorch, and their door."""
