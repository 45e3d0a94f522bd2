"""A dashboard for Grafana over the metrics of ``trimtab watch``, as the JSON that its import takes."""

from __future__ import annotations

from typing import Any, Final

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH: Final = 24
_STATES: Final = (("gets on", "green"), ("hangs", "red"))

Queries = tuple[tuple[str, str], ...]
"""Each with its legend."""

# title, width, height, kind of panel, unit, queries
_PANELS: Final[tuple[tuple[str, int, int, str, str, Queries], ...]] = (
    ("Job", 4, 4, "stat", "none", (("trimtab_hanging", ""),)),
    ("Step", 4, 4, "stat", "none", (("trimtab_step", ""),)),
    ("Step time", 4, 4, "stat", "s", (("trimtab_step_seconds", ""),)),
    ("Alarms", 4, 4, "stat", "none", (("sum(trimtab_alarms) or vector(0)", ""),)),
    (
        "Ranks",
        8,
        4,
        "stat",
        "none",
        (
            ("trimtab_ranks", "in the job"),
            ("trimtab_ranks_heard", "heard"),
            ("trimtab_ranks_silent", "silent"),
        ),
    ),
    ("Step time", 12, 8, "timeseries", "s", (("trimtab_step_seconds", "step"),)),
    ("Lost in each step", 12, 8, "timeseries", "s", (("trimtab_lost_seconds_per_step", "{{kind}}"),)),
    ("Ranks over their peers", 24, 9, "timeseries", "percentunit", (("trimtab_rank_excess", "rank {{rank}}"),)),
    (
        "Over their peers, quantiles of ranks",
        12,
        8,
        "timeseries",
        "percentunit",
        (("trimtab_excess_quantile", "{{quantile}}"),),
    ),
    (
        "Where the slowest ranks' steps go",
        12,
        8,
        "timeseries",
        "s",
        (
            (
                "trimtab_rank_seconds and on(rank) topk(3, trimtab_rank_excess)",
                "rank {{rank}} {{work}}",
            ),
        ),
    ),
    ("Alarms raised", 12, 7, "timeseries", "none", (("increase(trimtab_alarms_raised_total[5m])", "{{kind}}"),)),
    ("Seconds without progress", 12, 7, "timeseries", "s", (("trimtab_standing_seconds", "standing"),)),
)


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    x = y = row = 0
    for number, (title, width, height, kind, unit, queries) in enumerate(_PANELS, start=1):
        if x + width > _WIDTH:
            x, y, row = 0, y + row, 0
        panels.append(_panel(number, title, (x, y, width, height), kind, unit, queries))
        x, row = x + width, max(row, height)
    return {
        "uid": "trimtab-watch",
        "title": "trimtab watch",
        "tags": ["trimtab", "training"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(
    number: int,
    title: str,
    place: tuple[int, int, int, int],
    kind: str,
    unit: str,
    queries: tuple[tuple[str, str], ...],
) -> dict[str, Any]:
    x, y, width, height = place
    defaults: dict[str, Any] = {"unit": unit}
    if queries[0][0] == "trimtab_hanging":
        options = {str(n): {"text": text, "color": colour, "index": n} for n, (text, colour) in enumerate(_STATES)}
        defaults["mappings"] = [{"type": "value", "options": options}]
    return {
        "id": number,
        "title": title,
        "type": kind,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for place, (query, legend) in enumerate(queries)
        ],
    }
