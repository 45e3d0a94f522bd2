"""``python tests/drills``: hundreds of drills at random, a table, and exit code 1 if one of them failed."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from plan import ALL_JOBS, Case, Drill
from runner import Runner, Verdict

from drills import DRILLS


def draw(count: int, seed: int, drills: Sequence[Drill], jobs: Sequence[str]) -> list[Case]:
    """Cases: every drill once, then at random by their weights, until there are ``count``."""
    chance = random.Random(seed)
    usable = [drill for drill in drills if set(drill.jobs) & set(jobs)]
    drawn = usable[:count]
    drawn += chance.choices(usable, [drill.weight for drill in usable], k=max(count - len(drawn), 0))
    chance.shuffle(drawn)
    return [Case(d, chance.choice([j for j in d.jobs if j in jobs]), chance.randrange(1 << 31)) for d in drawn]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drills that were asked for."""
    parser = argparse.ArgumentParser(prog="python tests/drills", description=__doc__)
    parser.add_argument("--drills", type=int, default=300, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with this one of the draw")
    parser.add_argument("--until", type=int, default=None, metavar="N", help="and stop before that one")
    parser.add_argument("--only", metavar="NAME", help="only drills whose name contains this")
    parser.add_argument("--job", choices=ALL_JOBS, help="only this job")
    parser.add_argument("--case", type=int, metavar="SEED", help="one case again, as a failure names it")
    options = parser.parse_args(arguments)
    drills = [d for d in DRILLS if options.only is None or options.only in d.name]
    drills = [d for d in drills if d.possible is None or d.possible()]
    jobs = (options.job,) if options.job else ALL_JOBS
    if not drills:
        parser.error(f"no drill is named like {options.only!r}")
    if options.case is None:
        cases = draw(options.drills, options.seed, drills, jobs)[options.first : options.until]
    else:
        cases = [Case(drill, name, options.case) for drill in drills for name in drill.jobs if name in jobs]
    return _run(cases)


def _run(cases: Sequence[Case]) -> int:
    began = time.monotonic()
    runner = Runner(long_steps=160, latest_shot=2.0)
    verdicts: list[Verdict] = []
    for number, case in enumerate(cases, 1):
        verdict = runner.run(case)
        verdicts.append(verdict)
        _say(_line(number, len(cases), verdict))
        if not verdict.passed:
            _say(_failure(verdict))
    _say(_table(verdicts))
    failed = sum(not verdict.passed for verdict in verdicts)
    _say(f"{len(verdicts)} drills, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _line(number: int, count: int, verdict: Verdict) -> str:
    case = verdict.case
    word = "passed" if verdict.passed else "FAILED"
    warned = max(map(len, verdict.warned), default=0)
    return (
        f"{number:4}/{count} {word} {case.drill.name} | {case.job} | {verdict.seconds:.1f} s | warned {warned}"
        f"{' | ' if verdict.told else ''}{verdict.told}"
    )


def _failure(verdict: Verdict) -> str:
    case = verdict.case
    again = f'python tests/drills --only "{case.drill.name}" --job {case.job} --case {case.seed}'
    return "\n".join([*(f"    {problem}" for problem in verdict.problems), f"    again: {again}", verdict.output])


def _table(verdicts: Sequence[Verdict]) -> str:
    lines = ["", "| drill | runs | failed | warned |", "|---|---|---|---|"]
    for name in dict.fromkeys(drill.name for drill in DRILLS):
        own = [verdict for verdict in verdicts if verdict.case.drill.name == name]
        if own:
            failed = sum(not verdict.passed for verdict in own)
            warned = sum(any(verdict.warned) for verdict in own)
            lines.append(f"| {name} | {len(own)} | {failed} | {warned} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
