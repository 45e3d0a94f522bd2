"""A forward pass on one device, its backward on another: what autograd saved travels, and nothing else has to."""
