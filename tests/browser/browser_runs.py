"""Run directories to be shown: a text that a model has written, a large job, and whatever can be wrong with one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from trimtab.scan import analyze
from trimtab.scan.report.keeping import keep
from trimtab.scope.frame import Frame, encode, split
from trimtab.scope.recording.format import (
    NOTE,
    ROWS,
    STREAMS,
    VERSION,
    Rows,
    pack_file_head,
    pack_record,
    pack_rows,
    pack_streams,
)
from trimtab.scope.recording.recorder import Chunks
from trimtab.scope.subscription import Subscription
from trimtab.scope.vector import vector_of
from trimtab.topology import Topology
from trimtab.traces import own_write
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate

HOSTILE: Final = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(2)</script>',
    "'); alert(3); ('",
    "\u202eright to left",
    "two\nlines\tand\x00\x1b[31m",
    "{{constructor.constructor('alert(4)')()}}",
    "javascript:alert(5)",
    "x" * 10_000,
)
"""Names and texts that a page may take for something else."""
CLEAN, DISTURBED = "20260101-100000-c1ea", "20260101-110000-d157"
ANSWER, LARGE, TROUBLED = "20260101-120000-a175", "20260102-000000-1a96", "20260103-000000-baad"
"""Names of recordings, and of runs as a server calls them:"""
CLEAN_RUN, DISTURBED_RUN = f"trained.{CLEAN}", f"trained.{DISTURBED}"
ANSWER_RUN, LARGE_RUN, HOSTILE_RUN = f"answer.{ANSWER}", f"large.{LARGE}", f"hostile.{TROUBLED}"
LARGE_STEPS, LARGE_RANKS, LARGE_TAP, LARGE_NAN = 1_000, 1_000, "layers.0.output", (777, 421)
_FILE_STEPS: Final = 500
_TP: Final = 8


def write_timings(directory: Path) -> None:
    """What the ranks of a TP2 x PP2 x DP2 job have recorded, rank 3 slow from step 8 on, and what scan says of it."""
    fault = SyntheticFault("slow_compute", ranks=(3,), factor=1.5, steps=(8, None))
    trace = generate(SyntheticJob(Topology(tp=2, pp=2, dp=2), steps=16, faults=(fault,)))
    own_write.write(trace, directory)
    analysis = analyze(trace)
    keep(directory, analysis.report, analysis.plots)


def write_answer(directory: Path) -> None:
    """A small model with random weights has gone on from a text, and what it saw was recorded."""
    import tiny_gguf

    from trimtab.scope.generate.export import Tape
    from trimtab.scope.generate.model import open_model
    from trimtab.scope.generate.sampling import Sampling
    from trimtab.scope.generate.stepping import Generation, Request
    from trimtab.scope.generate.views import Wanted

    directory.mkdir()
    weights = directory / "tiny.gguf"
    tiny_gguf.write(weights, tiny_gguf.weights())
    model = open_model(str(weights))
    heads = tuple((layer, head) for layer in range(tiny_gguf.LAYERS) for head in range(tiny_gguf.HEADS))
    request = Request("ab cab d", 12, 8, Wanted(heads, hidden=True))
    generation = Generation(model, request, Sampling(0.8, 1.0, 7))
    tape = Tape(directory, generation.result, _silent)
    for step in generation:
        tape.step(step)
    tape.close()
    model.close()
    (recorded,) = (directory / "scope").iterdir()
    recorded.rename(recorded.with_name(f"{ANSWER}-00000.ttscope"))


def write_large(directory: Path, steps: int = LARGE_STEPS, ranks: int = LARGE_RANKS) -> None:
    """Statistics of one tensor on all ranks at all steps: other values at each; one rank has a NaN once."""
    folder = directory / "scope"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    base = np.stack([vector_of(rng.normal(size=256) * (1 + rank / ranks)) for rank in range(ranks)])
    headers = [_large_header(rank, ranks, base[rank]) for rank in range(ranks)]
    places = {str(rank): {"tp": rank % _TP, "dp": rank // _TP, "pp": 0} for rank in range(ranks)}
    note = _note("ranks", {"world_size": ranks, "ranks": places})
    stream, microbatch = np.arange(ranks, dtype=np.uint32), np.zeros(ranks, np.int32)
    rows = np.zeros((ranks, 12))
    for number, first in enumerate(range(0, steps, _FILE_STEPS)):
        with (folder / f"{LARGE}-{number:05d}.ttscope").open("wb") as file:
            head = {"recording": LARGE, "number": number, "label": "", "unix_ns": 10**18}
            file.write(pack_file_head(head) + note + pack_record(STREAMS, pack_streams(0, headers)))
            for step in range(first, min(first + _FILE_STEPS, steps)):
                grown = 1.0 + step / steps
                rows[:, :11] = base
                rows[:, 4:11] *= np.power(grown, [1, 1, 2, 3, 4, 1, 1])
                if step == LARGE_NAN[0]:
                    rows[LARGE_NAN[1], 1] = 1
                block = Rows(
                    np.full(ranks, step), np.full(ranks, step * 10**9), microbatch, stream,
                    rows.view(np.uint8).reshape(ranks, -1),
                )  # fmt: skip
                file.write(pack_record(ROWS, pack_rows(block)))


def write_small(directory: Path, label: str = "") -> None:
    """Statistics of two tensors on two ranks at forty steps."""
    _write(directory, label, _statistics(range(40), ["layers.0.output", "layers.1.output"]))


def write_broken(directory: Path) -> list[Path]:
    """Run directories, each with something else that is wrong; their names say what."""
    found = {name: directory / name for name in ("nothing", "empty", "half", "damaged", "newer", "no-recording")}
    for name, path in found.items():
        (path / "scope").mkdir(parents=True)
        if name not in ("nothing", "empty", "newer", "no-recording"):
            write_small(path)
    file = f"{TROUBLED}-00000.ttscope"
    (found["empty"] / "scope" / file).touch()
    (found["newer"] / "scope" / file).write_bytes(pack_file_head({"recording": "x", "number": 0}, VERSION + 1))
    (found["no-recording"] / "scope" / file).write_bytes(b"PK\x03\x04" + bytes(200))
    half, damaged = ((found[name] / "scope" / file) for name in ("half", "damaged"))
    raw = half.read_bytes()
    half.write_bytes(raw[: len(raw) * 2 // 3])
    raw = bytearray(damaged.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 64] = bytes(64)
    damaged.write_bytes(raw)
    return list(found.values())


def write_hostile(directory: Path) -> None:
    """A recording whose names, label, notices and tokens are hostile."""
    shortened = [text[:240] for text in HOSTILE]
    frames = list(_statistics(range(8), [f"layers.0.{text}" for text in shortened]))
    tokens = np.frombuffer(json.dumps((*HOSTILE[:7], "y" * 10_000)).encode(), np.uint8)
    frames += [_next_token(step, tokens) for step in range(8)]
    frames += [_attention(step, tokens) for step in range(8)]
    notices = [
        {"kind": text[:60], "text": text, "rank": 0, "step": 1, "unix_ns": 10**18, "perturbation": text[:60]}
        for text in HOSTILE
    ]
    _write(directory, HOSTILE[0], frames, notices)
    (directory / "scope" / "audit-r0.jsonl").write_text(
        "".join(
            json.dumps({"unix_ns": 10**18, "rank": 0, "event": "activated", "perturbation": text, "step": 2,
                        "tap": text, "kind": text, "text": text}) + "\n"
            for text in HOSTILE
        ),
        encoding="utf-8",
    )  # fmt: skip


def _large_header(rank: int, ranks: int, vector: np.ndarray) -> bytes:
    shard = (("tp", rank % _TP, _TP), ("dp", rank // _TP, -(-ranks // _TP)))
    arrays = {"vector": vector, "shift": np.zeros(1)}
    return bytes(split(encode(Frame(LARGE_TAP, "statistics", "s-1", 0, 0, rank, shard, 0, arrays)))[0].header)


def _statistics(steps: Iterable[int], taps: list[str]) -> Iterable[Frame]:
    rng = np.random.default_rng(1)
    for step in steps:
        for tap in taps:
            for rank in range(2):
                arrays = {"vector": vector_of(rng.normal(size=64)), "shift": np.zeros(1)}
                yield Frame(tap, "statistics", "s-1", step, 0, rank, (("tp", rank, 2),), 0, arrays, {}, 10**18 + step)


def _next_token(step: int, texts: np.ndarray) -> Frame:
    """Beside the chosen token the seven likeliest."""
    logits = np.log(np.array([[0.4, 0.3, 0.1, 0.1, 0.05, 0.03, 0.02]], np.float32))
    arrays = {
        "ids": np.arange(7, dtype=np.int32)[None],
        "logits": logits,
        "lse": np.zeros(1, np.float32),
        "expected": np.full(1, -1.5, np.float32),
        "prompt": np.zeros(1, np.int32),
        "position": np.array([step], np.int32),
        "chosen": np.zeros(1, np.int32),
        "chosen_probability": np.array([0.4], np.float32),
        "texts": texts,
    }
    return Frame("logits", "nexttoken", "3", step, 0, 0, arrays=arrays, meta={"labels": ["row", "k"]})


def _attention(step: int, texts: np.ndarray) -> Frame:
    keys = 8
    rows = np.tril(np.ones((2, keys, keys), np.float32))
    rows /= rows.sum(-1, keepdims=True)
    arrays = {
        "heads": np.arange(2, dtype=np.int32),
        "position": np.arange(keys, dtype=np.int32),
        "key_position": np.arange(keys, dtype=np.int32),
        "entropy": np.ones((2, keys), np.float32),
        "first": rows[:, :, 0].copy(),
        "received": rows.sum(1),
        "queries": np.array([keys], np.int32),
        "probabilities": rows,
        "texts": texts,
    }
    return Frame("layers.0.attention.map", "attention", "4", step, 0, 0, arrays=arrays, meta={"labels": list("bnsd")})


def _write(directory: Path, label: str, frames: Iterable[Frame], notices: Iterable[dict[str, Any]] = ()) -> None:
    folder = directory / "scope"
    folder.mkdir(parents=True, exist_ok=True)
    chunks = Chunks(folder, TROUBLED, label, 1 << 30)
    places = {"0": {"tp": 0, "pp": 0, "dp": 0}, "1": {"tp": 1, "pp": 0, "dp": 0}}
    chunks.note(_json("ranks", {"world_size": 2, "ranks": places}))
    chunks.note(_json("subscription", Subscription("layers.*.output", id="s-1").as_dict()))
    for notice in notices:
        chunks.note(_json("notice", notice))
    for number, frame in enumerate(frames):
        chunks.frame(split(encode(frame))[0])
        if number % 20 == 19:
            chunks.flush()
    chunks.close()


def _json(kind: str, value: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, "unix_ns": 10**18, "value": value}).encode()


def _note(kind: str, value: dict[str, Any]) -> bytes:
    return pack_record(NOTE, _json(kind, value))


def _silent(text: str) -> None:
    raise AssertionError(text)
