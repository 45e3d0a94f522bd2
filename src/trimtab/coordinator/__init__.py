"""Collectives of many virtual ranks launched in one order everywhere, whatever order their threads reach them in."""
