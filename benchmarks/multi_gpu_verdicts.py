"""What scan and watch said of a run, and whether that is the truth."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def alarms(folder: Path) -> list[dict[str, Any]]:
    """What watch said, alarms only."""
    log = folder / "own" / "trimtab-watch.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [said for said in map(json.loads, lines) if said["event"] == "alarm"]


def scanned(place: str) -> dict[str, Any]:
    """What scan says of the traces there; in a process of its own."""
    from trimtab.scan import analyze
    from trimtab.traces.read import read

    began = time.perf_counter()
    report = analyze(read(place)).report
    findings = [
        {
            "kind": one.kind.value,
            "ranks": list(one.ranks),
            "ratio": one.ratio,
            "lost_ms": 1e3 * one.seconds_lost_per_step,
            "onset": one.onset,
            "evidence": list(one.evidence),
        }
        for one in report.findings
    ]
    took = time.perf_counter() - began
    return {"verdict": report.verdict.value, "findings": findings, "warnings": list(report.warnings), "seconds": took}


def judged(scan: dict[str, Any], due: str, victim: int) -> str:
    """The verdict in words, and whether it is the truth."""
    named = [
        f"{one['kind']} {'+'.join(map(str, one['ranks']))} x{one['ratio']:.2f} ({one['lost_ms']:.1f} ms a step"
        + (f", from {one['onset']})" if one["onset"] is not None else ")")
        for one in scan["findings"]
    ]
    said = f"{scan['verdict']}{': ' if named else ''}{'; '.join(named)}"
    right = [_is_due(one, due, victim) for one in scan["findings"]]
    if all(right) and bool(right) == bool(due) and scan["verdict"] != "inconclusive":
        return f"{said} - right"
    return f"{said} - {'right, and more' if any(right) else 'WRONG'}"


def _is_due(finding: dict[str, Any], due: str, victim: int) -> bool:
    return finding["kind"] == due and (due == "slow_link" or finding["ranks"] == [victim])


def told_by_watch(said: list[dict[str, Any]], due: str, victim: int, onset_ns: int, onset: int) -> str:
    """The first alarm after the onset, how long after it, and what else there was."""
    early = sum(one["step"] < onset for one in said)
    after = [one for one in said if one["step"] >= onset]
    right = [one for one in after if one["alarm"]["kind"] == due and (due == "slow_link" or one["ranks"] == [victim])]
    others = sorted({one["alarm"]["kind"] for one in said if one not in right})
    words = []
    if right:
        first = right[0]
        words.append(
            f"{due}: step {first['step'] - onset + 1} of the fault, {(first['unix_ns'] - onset_ns) / 1e9:.2f} s"
        )
    elif due:
        words.append("no alarm of this kind")
    if others:
        words.append(f"also {', '.join(others)}" + (f" ({early} before the onset)" if early else ""))
    return "; ".join(words) or "no alarm"
