"""Windows of torch.profiler, joined with the recorder's own events."""
