"""Forward/backward disaggregation: forward and backward passes on different devices, where it pays."""
