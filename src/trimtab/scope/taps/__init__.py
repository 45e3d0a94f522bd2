"""Places in a model where its tensors can be seen or changed: what they are called, and how they are connected."""
