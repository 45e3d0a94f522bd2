"""trimtab: see and steer the training of large models."""

__version__ = "0.1.0"
