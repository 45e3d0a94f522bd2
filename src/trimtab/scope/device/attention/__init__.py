"""Attention maps, exact, without the whole matrix and whatever kernel the model itself uses."""
