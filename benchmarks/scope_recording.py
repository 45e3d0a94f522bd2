"""What a recording of a large job costs: to write, to open, and to merge over all ranks.

python benchmarks/scope_recording.py [--steps 10000] [--ranks 1000] [--taps 1]

Statistics of a tap that is cut over 8 tensor-parallel and 125 data-parallel ranks, written in blocks as a recorder
does; then in the same process what a viewer does: open it, merge one tap over all ranks and steps, over the last
hundred, and one rank's own. The first reading checks every block's CRC; the file's pages are in memory by then.
Beside it the way of a frame from a rank through the collector's decoding and into the file.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.scope.frame import Frame, encode, split, unpack
from trimtab.scope.recording.format import (
    ROWS,
    STREAMS,
    Rows,
    pack_file_head,
    pack_record,
    pack_rows,
    pack_streams,
)
from trimtab.scope.recording.reader import open_recording
from trimtab.scope.recording.recorder import Chunks
from trimtab.scope.recording.series import series
from trimtab.scope.vector import vector_of

BLOCK = 2000
CHUNK = 64 << 20


def timed(title: str, act: Callable[[], Any]) -> Any:
    """Print how long it takes."""
    began, cpu = time.perf_counter(), time.process_time()
    found = act()
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"{title:54} {took:8.3f} s, {cpu:7.3f} s of a core", flush=True)
    return found


def frame_of(tap: int, rank: int, step: int, ranks: int) -> Frame:
    """As a rank sends it."""
    shard = (("tp", rank % 8, 8), ("dp", rank // 8, -(-ranks // 8)))
    arrays = {"vector": vector_of([1.0, 2.0]), "shift": np.zeros(1)}
    meta = {"labels": ["s", "b", "h"], "shape": [4096, 1, 1024], "dtype": "bfloat16"}
    name = f"layers.{tap}.mlp.hidden"
    return Frame(name, "statistics", "s-1a2b", step, 0, rank, shard, arrays=arrays, meta=meta, unix_ns=time.time_ns())


def write(folder: Path, taps: int, ranks: int, steps: int) -> None:
    """All of it, without a frame for each."""
    headers = [split(encode(frame_of(tap, rank, 0, ranks)))[0].header for tap in range(taps) for rank in range(ranks)]
    random = np.random.default_rng(0)
    values = np.zeros((BLOCK, 12))
    values[:, 0] = 4096 * 1024
    values[:, 4:11] = random.standard_normal((BLOCK, 7))
    payload = values.view(np.uint8).reshape(BLOCK, 96)
    per_step = len(headers)
    total, done, number = per_step * steps, 0, 0
    while done < total:
        with (folder / f"20260101-000000-aaaa-{number:05d}.ttscope").open("wb") as file:
            head = {"recording": "20260101-000000-aaaa", "number": number, "label": "", "unix_ns": 1}
            file.write(pack_file_head(head))
            file.write(pack_record(STREAMS, pack_streams(0, headers)))
            while done < total and file.tell() < CHUNK:
                rows = np.arange(done, min(done + BLOCK, total))
                step, stream = rows // per_step, (rows % per_step).astype(np.uint32)
                block = Rows(step, step * 10**9, np.zeros(len(rows), np.int32), stream, payload[: len(rows)])
                file.write(pack_record(ROWS, pack_rows(block)))
                done += len(rows)
        number += 1


def way_of_a_frame(folder: Path) -> None:
    """Microseconds a frame, on each part of its way."""
    frames = [frame_of(tap, rank, step, 8) for step in range(50) for rank in range(8) for tap in range(50)]
    began = time.process_time()
    raw = [encode(frame) for frame in frames]
    encoded = time.process_time()
    packed = [one for message in raw for one in split(message)]
    for one in packed:
        unpack(one)
    decoded = time.process_time()
    chunks = Chunks(folder, "20260101-000000-bbbb", "", 1 << 40)
    for one in packed:
        chunks.frame(one)
    chunks.close()
    written = time.process_time()
    each = 1e6 / len(frames)
    print(f"a frame of statistics: {len(raw[0])} bytes on the way, {chunks.written / len(frames):.0f} in the file;")
    print(f"  encode {each * (encoded - began):.1f} us, decode {each * (decoded - encoded):.1f} us, ", end="")
    print(f"write {each * (written - decoded):.1f} us")


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description="A recording of a large job.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=1_000)
    parser.add_argument("--taps", type=int, default=1)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) / "scope"
    folder.mkdir()
    try:
        way_of_a_frame(folder)
        for path in folder.iterdir():
            path.unlink()
        timed("write", lambda: write(folder, args.taps, args.ranks, args.steps))
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{args.taps * args.ranks * args.steps / 1e6:.1f} million frames, {size / 1e9:.2f} GB")
        recording = timed("open (index of all files)", lambda: open_recording(folder.parent))
        tap = "layers.0.mlp.hidden"
        whole = timed("merge a tap over all ranks and steps, CRC checked", lambda: series(recording, tap))
        assert len(whole.step) == args.steps
        assert (whole.parts == args.ranks).all()
        timed("merge it again", lambda: series(recording, tap))
        timed("merge its last 100 steps", lambda: series(recording, tap, args.steps - 100))
        timed("one rank's own", lambda: series(recording, tap, ranks=[7]))
        timed("see that nothing was appended", recording.refresh)
    finally:
        shutil.rmtree(folder.parent)


if __name__ == "__main__":
    main()
