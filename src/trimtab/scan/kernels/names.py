"""Names of kernels, short enough for a sentence."""

from __future__ import annotations

import re

MOST = 60
_NOISE = re.compile(r"^void |\(anonymous namespace\)::|at::native::|c10::")
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def short(name: str) -> str:
    """A kernel's name without arguments, namespaces that say nothing and what is long in its template.

    A name is what a file says: characters that a terminal would act on are left out.
    """
    name = _HIDDEN.sub("", _NOISE.sub("", name))
    depth, end = 0, len(name)
    for place, letter in enumerate(name[:4000]):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0 and place:
            end = place
            break
    name = name[:end].strip()
    return name if len(name) <= MOST else f"{name[: MOST - 3]}..."
