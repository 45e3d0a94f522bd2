"""Run directories as users name them."""

from __future__ import annotations

from pathlib import Path


def check_directory(directory: Path, advice: str) -> None:
    """ValueError, in one line that ends with ``advice``, where nothing is there, or a file."""
    if directory.is_dir():
        return
    what = "not a directory" if directory.exists() else "no such directory"
    raise ValueError(f"{directory}: {what}; {advice}")
