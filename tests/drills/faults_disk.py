"""Faults of disks and directories: real ones where a process may have its own file system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults_inside import replace_in_trimtab
from scene import Fault, Scene

import trimtab
from trimtab.record import recorder

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_PRIVATE, _MS_REC = 1, 1 << 18, 1 << 14


def much_to_write(scene: Scene) -> None:
    """Every step writes more than a file holds, so that files are rotated all the time."""
    scene.record["rotate_mb"] = 1

    def write(_step: int) -> None:
        for number in range(600):  # of what cannot be compressed to much less
            with trimtab.span("much", number=number, text=secrets.token_hex(1_900)):
                pass

    scene.at_step.append(write)


def small_disk(scene: Scene) -> None:
    """trimtab's directory is a real file system, which is full from one step on."""
    if not scene.hit:
        return
    disk = _mounted(scene, "size=256k", 0)

    def fill() -> None:
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)

    scene.when_due(fill)
    scene.at_phase.append(lambda phase: _bring_out(scene, disk) if phase == "end" else None)


def read_only_disk(scene: Scene) -> None:
    """trimtab's directory cannot be written from the start; an administrator's process could still, elsewhere."""
    if scene.hit:
        _mounted(scene, "size=256k", _MS_RDONLY)


def can_mount() -> bool:
    """Whether this process may make file systems of its own, in a namespace that ends with it."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            _enter_namespace()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _mounted(scene: Scene, options: str, flags: int) -> Path:
    disk = scene.folder / f"scratch{scene.rank}"
    disk.mkdir()
    scene.record["dir"] = str(disk)
    _enter_namespace()
    _call("mount", b"none", bytes(disk), b"tmpfs", ctypes.c_ulong(flags), options.encode())
    return disk


def _enter_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    _call("unshare", _CLONE_NEWNS | _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_PRIVATE | _MS_REC), None)


def _call(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _bring_out(scene: Scene, disk: Path) -> None:
    """What the file system holds, to where it outlives this process."""
    target = scene.folder / "record"
    target.mkdir(exist_ok=True)
    for file in disk.glob("*.arrow"):
        shutil.copy(file, target)


def limited_files(scene: Scene) -> None:
    """No file may become larger than 64 KiB (a quota)."""

    scene.when_due(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY)))


def no_more_files(scene: Scene) -> None:
    """The process has used up its file descriptors."""

    def act() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    scene.when_due(act)
    scene.at_phase.append(
        lambda phase: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)) if phase == "end" else None
    )


class _Sink:
    """A file that ends trouble-free writing after some bytes."""

    def __init__(self, inner: Any, left: int, trouble: Callable[[], None]) -> None:
        self._inner = inner
        self._left = left
        self._trouble = trouble

    def write(self, data: bytes) -> int:
        if self._left <= 0:
            self._trouble()
        written = self._inner.write(data[: max(self._left, 1)])
        self._left -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def write_fails(code: int) -> Fault:
    """A write takes a part of the bytes, and the next one none."""

    def trouble() -> None:
        raise OSError(code, os.strerror(code))

    return _writing(trouble)


def write_hangs(scene: Scene) -> None:
    """A write does not come back, as on a file server that is gone; trimtab's patience is cut short for it."""
    if scene.hit:
        recorder._OPEN_SECONDS = 1.0  # pyright: ignore[reportPrivateUsage]
        recorder.Recorder.close.__defaults__ = (1.0,)
    _writing(lambda: threading.Event().wait())(scene)  # pyright: ignore[reportArgumentType]


def _writing(trouble: Callable[[], None]) -> Fault:
    def fault(scene: Scene) -> None:
        from trimtab.record.files import spool

        opener, left = spool.create_exclusively, scene.random.randrange(20_000)

        def open_badly(path: Path) -> Any:
            return _Sink(opener(path), left, trouble)

        if scene.hit:
            replace_in_trimtab(opener, open_badly)

    return fault


def directory(spoil: Callable[[Path], None]) -> Fault:
    """Somebody spoils trimtab's directory in the course of the job."""

    def fault(scene: Scene) -> None:
        def act() -> None:
            with contextlib.suppress(FileNotFoundError):  # the writer may make files meanwhile
                spoil(scene.directory)

        scene.when_due(act)

    return fault


def replace_by_file(path: Path) -> None:
    """The directory is gone, and a file of its name is there."""
    shutil.rmtree(path)
    path.write_text("not a directory")


def remove_files(path: Path) -> None:
    """The files are gone, the directory stays."""
    for file in path.iterdir():
        file.unlink()


def truncate_files(path: Path) -> None:
    """Somebody cut the files."""
    for file in path.iterdir():
        os.truncate(file, file.stat().st_size // 2)


def scribble(path: Path) -> None:
    """Somebody wrote into the files."""
    for file in path.iterdir():
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(os.urandom(64))


def directory_below_a_file(scene: Scene) -> None:
    """The directory cannot be made."""
    if scene.hit:
        (scene.folder / "scratch").write_text("a file")
        scene.record["dir"] = str(scene.folder / "scratch" / "record")


def leave_directory(scene: Scene) -> None:
    """The job changes to another directory, and the one it came from goes."""
    start = scene.folder / f"scratch{scene.rank}"
    start.mkdir()
    os.chdir(start)
    scene.record["dir"] = "../record"
    scene.when_due(lambda: (os.chdir("/"), start.rmdir())[0])
