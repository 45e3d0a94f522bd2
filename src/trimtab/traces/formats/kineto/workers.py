"""Files read side by side: decoding JSON keeps one processor busy, so others are given processes of their own.

A process is sent the names of files, one after the other, and answers each with a line of JSON and the events as an
Arrow stream. It is started afresh, not forked (threads run here), and is no child of the user's script, so that nothing
of that runs again.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import msgspec
import polars as pl

from trimtab.traces.formats.kineto.files import About
from trimtab.traces.formats.kineto.part import Part, read_part
from trimtab.traces.own_header import printable

WORTH_BYTES: Final = 4 << 20
"""Of files for each further process: reading fewer takes less time than to start it."""
MOST_PROCESSES: Final = 32


class _Told(msgspec.Struct):
    """What a process answers before the events."""

    problem: str = ""
    about: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    device: str = ""
    device_name: str = ""
    groups: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict[str, tuple[int, ...]])
    said: tuple[str, ...] = ()
    size: int = 0


def read_parts(files: Sequence[Path], processes: int | None = None) -> list[Part | str]:
    """What each file held, or in one line why it could not be read; ``processes`` at most, this one included."""
    if processes is None:
        total = sum(file.stat().st_size for file in files if file.exists())
        processes = min(_processors(), MOST_PROCESSES, 1 + total // WORTH_BYTES)
    work = _Work(files)
    helpers = [threading.Thread(target=work.by_process, daemon=True) for _ in range(min(processes, len(files)) - 1)]
    for helper in helpers:
        helper.start()
    try:
        work.here()
    except BaseException:
        work.stop()
        raise
    finally:
        for helper in helpers:
            helper.join()
    work.here()  # what a process was given that ended before it answered
    return [work.results[place] for place in range(len(files))]


def _processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


class _Work:
    """Files to read, and what has been read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.results: dict[int, Part | str] = {}
        self._files = files
        self._left = list(range(len(files)))[::-1]
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []

    def _next(self) -> int | None:
        with self._lock:
            return self._left.pop() if self._left else None

    def here(self) -> None:
        """Read files in this process until none is left."""
        while (place := self._next()) is not None:
            try:
                self.results[place] = read_part(self._files[place])
            except ValueError as error:
                self.results[place] = str(error)

    def stop(self) -> None:
        """End the processes, whatever they are doing."""
        with self._lock:
            self._left = []
            for process in self._processes:
                process.kill()

    def by_process(self) -> None:
        """Have a process of its own read files until none is left, or it fails; then its file is left to others."""
        with contextlib.suppress(OSError), _started() as process:
            with self._lock:
                self._processes.append(process)
            while (place := self._next()) is not None:
                try:
                    self.results[place] = _ask(process, self._files[place])
                except (OSError, EOFError, msgspec.DecodeError, pl.exceptions.PolarsError):
                    with self._lock:
                        self._left.append(place)
                    return


@contextlib.contextmanager
def _started() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # a Ctrl-C is for the parent, which ends it
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[bytes], file: Path) -> Part | str:
    request, answer = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    request.write(msgspec.json.encode(os.fsencode(file).hex()) + b"\n")
    request.flush()
    told = msgspec.json.decode(answer.readline(), type=_Told)
    if told.problem:
        return told.problem
    content = answer.read(told.size)
    if len(content) < told.size:
        raise EOFError
    events = pl.read_ipc_stream(io.BytesIO(content))
    return Part(About(file, **told.about), events, told.device, told.device_name, told.groups, told.said)


def serve() -> None:
    """Read the files that standard input names, until it ends."""
    answers = sys.stdout.buffer
    for request in sys.stdin.buffer:
        file = Path(os.fsdecode(bytes.fromhex(msgspec.json.decode(request, type=str))))
        content = io.BytesIO()
        try:
            part = read_part(file)
        except ValueError as error:
            told = _Told(problem=str(error) or printable(file))
        else:
            part.events.write_ipc_stream(content)
            about = {name: getattr(part.about, name) for name in About.__slots__ if name != "path"}
            told = _Told("", about, part.device, part.device_name, part.groups, part.said, content.tell())
        answers.write(msgspec.json.encode(told) + b"\n")
        answers.write(content.getbuffer())
        answers.flush()
