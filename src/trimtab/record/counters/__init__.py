"""Counters: what NVML says of the rank's GPU and the system of its host, sampled beside the training."""
