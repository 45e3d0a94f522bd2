"""The commands: each reads its options and calls one function of one package."""

from trimtab.cli.entry import app, main

__all__ = ["app", "main"]
