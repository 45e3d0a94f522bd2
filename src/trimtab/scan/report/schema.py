"""``report.json``: the report for other programs, and the JSON schema that is its contract."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

from trimtab.scan.model import Report


def json_schema() -> dict[str, Any]:
    """The JSON schema of ``trimtab.report/1`` (draft 2020-12), as it is shipped."""
    text = resources.files(__package__ or "trimtab.scan.report").joinpath("report.schema.json").read_text("utf-8")
    return json.loads(text)


def to_json(report: Report) -> str:
    """The report as JSON text, plain ASCII with a closing newline.

    A number that is not finite is unknown and becomes null: JSON knows neither NaN nor infinity.
    """
    return json.dumps(_plain(report.as_dict()), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):  # numpy's float64, too
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if hasattr(value, "item") and not isinstance(value, str):  # another numpy scalar
        return _plain(value.item())
    return value
