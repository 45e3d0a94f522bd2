"""Which rank each file is of, and which of the files found make up one run."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from trimtab.traces.own_header import MAX_WORLD, printable, rank_list

_RANK: Final = re.compile(r"(?<![a-z])(?:rank|worker)[-_.]?(\d{1,8})(?!\d)", re.IGNORECASE | re.ASCII)
"""rank0, rank-0, rank_0, worker0, wherever it stands in a name."""
_BARE: Final = re.compile(r"(?:^|[_.-])(\d{1,5})(?=\.)", re.ASCII)
"""A number of its own before the ending: ``trace_0.json``."""
_ENDING: Final = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?\Z|\.gz\Z|\.json\Z", re.IGNORECASE)
_STAMP: Final = re.compile(r"\d{9,}", re.ASCII)
"""A time, or something like it."""
_HANDLER: Final = re.compile(r"(?P<host>.+)_(?P<pid>\d+)\.(?P<time>\d{10,})\.pt\.trace\.json(\.gz)?\Z", re.ASCII)
"""As torch.profiler's tensorboard_trace_handler names its files."""
HOW: Final = "put it into the names, for example rank0.json.gz, rank1.json.gz"


@dataclass(frozen=True, slots=True)
class About:
    """What is known of one file's process before its events are looked at."""

    path: Path
    rank: int | None
    """By the file's head."""
    named: int | None
    """By the file's name."""
    world_size: int | None
    host: str
    run: str
    """Equal for the files of one run, by their names."""


def about(path: Path, metadata: dict[str, Any]) -> About:
    """What the head and the name of a file say."""
    said = metadata.get("distributedInfo")
    info = cast(dict[str, Any], said) if isinstance(said, dict) else {}
    handler = _HANDLER.match(path.name)
    host = metadata.get("host_name")
    return About(
        path,
        _number(info.get("rank")),
        rank_in(path.name),
        _number(info.get("world_size")),
        host if isinstance(host, str) and host else handler["host"] if handler and rank_in(path.name) is None else "",
        run_in(path.name),
    )


def _number(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 9:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_WORLD else None


def rank_in(name: str) -> int | None:
    """The rank that a file's name says, if it does."""
    found = _RANK.search(name)
    if found is None and _HANDLER.match(name) is None:
        found = _BARE.search(name)
    return int(found[1]) if found else None


def run_in(name: str) -> str:
    """What is left of a file's name without rank, times and ending."""
    if _HANDLER.match(name) and not _RANK.search(name):
        return ""
    plain = _RANK.sub("", name, count=1) if _RANK.search(name) else _BARE.sub("", name, count=1)
    return _STAMP.sub("", _ENDING.sub("", plain)).strip("-_.")


def choose(files: Sequence[About], newest: Sequence[int], said: list[str]) -> tuple[str, dict[int, list[int]]]:
    """The run to read and, by rank, which of ``files`` (their positions) are of it; ``newest`` are their last times.

    What is left out, and on which grounds, is added to ``said``. Raises ValueError where no rank can be told.
    """
    ranks = _ranks(files, said)
    runs: dict[str, list[int]] = defaultdict(list)
    for place, file in enumerate(files):
        runs[file.run].append(place)
    apart = len(runs) > 1 and len(set(ranks)) < len(ranks)
    chosen = max(runs, key=lambda run: (max(newest[place] for place in runs[run]), run)) if apart else ""
    if apart:
        others = ", ".join(f"'{printable(run)}'" for run in sorted(runs) if run != chosen)
        said.append(
            f"files of {len(runs)} runs in one place: '{printable(chosen)}' is read, the newest, and not {others} "
            "(to read another one, give its files)"
        )
    by_rank: dict[int, list[int]] = defaultdict(list)
    for place in runs[chosen] if apart else range(len(files)):
        by_rank[ranks[place]].append(place)
    run = chosen if apart else next(iter(runs)) if len(runs) == 1 else ""
    return run, dict(sorted(by_rank.items()))


def _ranks(files: Sequence[About], said: list[str]) -> list[int]:
    """The rank of each file: by its head, or else by its name."""
    if len(files) == 1:
        one = files[0]
        rank = one.rank if one.rank is not None else one.named
        if rank is None:
            said.append(f"{printable(one.path)}: says no rank; it is taken as rank 0")
        return [rank or 0]
    named = [file.named for file in files]
    heads = {file.rank for file in files}
    if len(heads) == 1 and None not in heads and None not in named and len(set(named)) > 1:
        said.append(f"all files say that they are of rank {heads.pop()}; the ranks in their names are taken")
        return [one or 0 for one in named]
    ranks = [file.rank if file.rank is not None else file.named for file in files]
    unknown = [file for file, rank in zip(files, ranks, strict=True) if rank is None]
    if unknown:
        raise ValueError(
            f"{printable(unknown[0].path)}: neither the file nor its name says which rank it is of "
            f"({len(unknown)} of {len(files)} files): {HOW}"
        )
    by_name = [rank for file, rank in zip(files, ranks, strict=True) if file.rank is None and rank is not None]
    if by_name:
        said.append(f"{rank_list(by_name)}: the rank is known by the file's name only")
    return [rank or 0 for rank in ranks]
