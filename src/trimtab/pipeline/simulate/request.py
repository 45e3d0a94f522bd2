"""What a user asks to be simulated: options, checked and turned into values."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.pipeline.memory import parse_cap
from trimtab.pipeline.orders import ORDERS
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import POLICIES
from trimtab.pipeline.simulate.job import Job

NO_CAP = "none"
MOST_ACTIONS = 2_000_000
SPARE = 1.0
"""Microbatches beyond what the order needs, where no cap is given: as the executor has it."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Options of a job that is described and not recorded. Times are in any unit; transfers in units of F."""

    stages: int | None = None
    chunks: int | None = None
    microbatches: int | None = None
    forward: str | None = None
    backward: str | None = None
    wgrad: str | None = None
    transfer: float | None = None
    latency: float = 0.0
    kept: float = 1.0
    activation: str | None = None


def chosen(name: str, known: Iterable[str], what: str) -> str:
    """``name``, if there is such a thing; ValueError with the nearest one if not."""
    names = list(known)
    if name in names:
        return name
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}"
    raise ValueError(f"there is no {what} {name!r}; {hint}")


def order_named(name: str | None, chunks: int | None) -> str:
    """The order asked for, or one for that many chunks."""
    if name is not None:
        return chosen(name, ORDERS, "order")
    if chunks == 1:
        return "zb-h1"
    return "zb-v" if chunks in (None, 2) else "interleaved"


def policy_named(name: str) -> str:
    """The policy asked for."""
    return chosen(name, POLICIES, "policy")


def described(loads: Loads, order: str) -> Job:
    """The job that the options describe."""
    if loads.stages is None or loads.microbatches is None:
        raise ValueError("give --stages and --microbatches, or --from and the directory of a recorded run")
    chunks = ORDERS[order].chunks if loads.chunks is None else loads.chunks
    counts = {"--stages": loads.stages, "--chunks": chunks, "--microbatches": loads.microbatches}
    for option, number in counts.items():
        if number < 1:
            raise ValueError(f"{option} must be at least 1, not {number}")
    check_size(*counts.values())
    forward = values(loads.forward, loads.stages, "--forward")
    unit = math.fsum(forward) / loads.stages
    return Job(
        loads.stages,
        chunks,
        loads.microbatches,
        forward,
        values(loads.backward, loads.stages, "--backward"),
        values(loads.wgrad, loads.stages, "--wgrad"),
        activation=activation_of(loads.activation),
        kept=share(loads.kept, "--kept"),
        latency=unit * positive(loads.latency, "--latency"),
        transfer=unit * positive(loads.transfer or 0.0, "--transfer"),
    )


def check_size(stages: int, chunks: int, microbatches: int) -> None:
    """Refuse what would take minutes or all memory."""
    if 3 * stages * chunks * microbatches > MOST_ACTIONS:
        raise ValueError(
            f"{stages} stages, {chunks} chunks and {microbatches} microbatches are more than {MOST_ACTIONS:,} actions"
        )


def values(text: str | None, stages: int, option: str) -> tuple[float, ...]:
    """One number for all stages, or one for each."""
    words = ("1" if text is None else text).split(",")
    if len(words) not in (1, stages):
        raise ValueError(f"{option} has {len(words)} values for {stages} stages: give one, or one a stage")
    numbers = [_number(word, option) for word in words]
    return tuple(numbers * stages if len(numbers) == 1 else numbers)


def _number(word: str, option: str) -> float:
    if not re.fullmatch(r"(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", word.strip(), re.ASCII):
        raise ValueError(f"{option}: {word!r} is not a number of at least 0")
    return positive(float(word), option)


def positive(value: float, option: str) -> float:
    """A finite number that is not negative."""
    if not 0 <= value <= 1e12:
        raise ValueError(f"{option} must be at least 0 and finite, not {value:g}")
    return value


def share(value: float, option: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{option} is a share from 0 to 1, not {value:g}")
    return value


def activation_of(text: str | None) -> float:
    """Bytes of a microbatch, or 1: then memory is told in microbatches."""
    if text is None:
        return 1.0
    try:
        amount, is_bytes = parse_cap(text)
    except ValueError:
        amount, is_bytes = 0.0, False
    if not is_bytes:
        raise ValueError(f"--activation {text!r}: give bytes of a microbatch on a stage, such as 1.5GB")
    return amount


def cap_of(text: str | None, job: Job, plan: Plan, policy: str) -> float | None:
    """The cap in the unit of the job's activations; None: no cap.

    Where none is given, a policy that deviates from its plan gets what the plan needs and one microbatch more.
    """
    if text is None:
        return None if policy == "static" else (plan.peak(job.kept) + SPARE) * job.activation
    if text == NO_CAP:
        return None
    amount, is_bytes = parse_cap(text)
    if is_bytes and job.activation == 1.0:
        raise ValueError(f"--cap {text}: to weigh bytes, --activation must say what a microbatch takes on a stage")
    cap = amount if is_bytes else amount * job.activation
    if cap < job.activation * (1 - 1e-9):
        raise ValueError(f"--cap {text} is below one microbatch: raise it, or make microbatches smaller")
    return cap
