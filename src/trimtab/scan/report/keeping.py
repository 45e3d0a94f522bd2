"""The result of a scan, kept with the run: where trimtab scope looks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trimtab.output import write_text
from trimtab.scan.model import Report
from trimtab.scan.plots import ReportPlots
from trimtab.scan.report import plots_json, schema

REPORT: Final = "report.json"
PLOTS: Final = "report-plots.json"


def check(directory: Path) -> None:
    """ValueError, in one line, where nothing can be kept; to be asked before the work."""
    if not directory.is_dir():
        raise ValueError(f"--save: {directory} is no directory; give the run directory, or write with --json FILE")


def keep(directory: Path, report: Report, plots: ReportPlots) -> None:
    """Write both files into ``directory``. The report is written last: who finds a new one finds its figures."""
    write_text(directory / PLOTS, plots_json.to_json(plots))
    write_text(directory / REPORT, schema.to_json(report))
