"""Would it pay to run forward and backward on different devices? Values in, predictions out: no torch, no job."""
