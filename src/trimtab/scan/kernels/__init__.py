"""Traces that tell of kernels (torch.profiler, Nsight) or of CPU operators, and not of layers.

Such a trace shows what ran on the streams of a device and when it was launched, but not what waited for what. Here that
is inferred, so that the rest of scan works on the same events as those of our own recorder (``layout``); and kernels
are compared with the same kernels of other ranks (``compare``).
"""
