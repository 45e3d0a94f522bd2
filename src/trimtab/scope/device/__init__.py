"""What is measured of a tensor where it lies: only small results leave the device, and nothing waits for it."""
