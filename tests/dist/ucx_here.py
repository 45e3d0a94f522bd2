"""Whether UCX is there; tests that need it say so loudly where it is not."""

from __future__ import annotations

import pytest

from trimtab.transport.ucx.library import load_ucx


def _missing() -> str:
    try:
        load_ucx()
    except (OSError, ValueError) as error:
        return f"NOT TESTED: {error}"
    return ""


NO_UCX = _missing()
needs_ucx = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)
