"""What the site needs besides mkdocs' own plugins."""

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)")


def on_post_page(output: str, **_: Any) -> str:
    """Docstrings name other objects as ``:class:`X```; on a page the bare name reads better."""
    return _ROLE.sub("", output)
