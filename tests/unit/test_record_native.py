"""Finding, loading and building the compiled kernels. What they do is tested where the Python ones are."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trimtab import cli  # noqa: E402
from trimtab.record.communication import native  # noqa: E402
from trimtab.record.compiled import cache_directory, only_ours  # noqa: E402


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    return cache


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A shell script in the place of the compiler; ``$OUT`` is the file it is to make."""
    path = folder / "c++"
    find_out = 'while [ "$1" != -o ]; do shift; done; OUT="$2"\n'
    path.write_text(f"#!/bin/sh\n{find_out}{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/trimtab")
    monkeypatch.setenv("HOME", "/home/me")
    for environment in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_directory(environment) == Path("/home/me/.cache/trimtab")


def test_what_is_not_there_or_is_no_module_is_not_loaded(cache: Path) -> None:
    assert native.load(None) is None
    assert native.load(cache) is None
    path = native._path(cache)
    assert path is not None
    path.write_text("no module")
    assert native.load(cache) is None


def test_what_others_could_have_put_there_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("it was about to be loaded")

    monkeypatch.setattr(native.importlib.machinery, "ExtensionFileLoader", loaded)
    path = native._path(cache)
    assert path is not None
    path.touch(mode=0o700)
    cache.chmod(0o777)
    assert native.load(cache) is None
    cache.chmod(0o700)
    path.chmod(0o720)
    assert native.load(cache) is None
    path.chmod(0o700)
    with pytest.raises(AssertionError):
        native.load(cache)


def test_a_change_of_any_source_asks_for_a_new_module(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {name: cache.parent / name for name in ("native.cpp", "native_ring.hpp")}
    for path in sources.values():
        path.write_text("one")
    monkeypatch.setattr(native, "_SOURCE", sources["native.cpp"])
    names = {native._path(cache)}
    for path in sources.values():
        path.write_text("another")
        names.add(native._path(cache))
    assert len(names) == 3


def test_a_build_leaves_the_module_and_nothing_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(cache.parent, monkeypatch, 'echo made > "$OUT"')
    path = native._path(cache)
    assert path is not None
    assert native.build(cache)
    assert list(cache.iterdir()) == [path]
    assert path.read_text() == "made\n"
    assert only_ours(path)
    assert not native.build(cache), "it is there"


@pytest.mark.parametrize("script", ["exit 1", "kill -TERM $$"])
def test_a_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    compiler(cache.parent, monkeypatch, script)
    assert not native.build(cache)
    assert list(cache.iterdir()) == []


def test_where_nothing_can_be_built_or_written_nothing_happens(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    compiler(cache.parent, monkeypatch, 'echo made > "$OUT"')
    assert not native.build(cache / "file" / "below")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert not native.build(cache)


def test_one_process_builds_and_what_a_killed_one_left_is_forgotten(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(cache.parent, monkeypatch, 'echo made > "$OUT"')
    path = native._path(cache)
    assert path is not None
    lock = path.with_suffix(".building")
    lock.touch()
    assert not native.build(cache)
    assert lock.exists(), "another process has it"
    long_ago = time.time() - 10_000
    os.utime(lock, (long_ago, long_ago))
    assert native.build(cache)
    assert list(cache.iterdir()) == [path]


def test_a_build_in_the_background_ends_with_the_job(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = cache.parent / "pipe"
    os.mkfifo(pipe)
    compiler(cache.parent, monkeypatch, f"echo $$ > {pipe}\nexec sleep 1000")
    monkeypatch.setattr(native, "_memory_available", lambda: 1 << 40)
    build = native.BackgroundBuild(cache, after_seconds=0)
    process = int(pipe.read_text())
    build.stop()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "trimtab-build"]
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("available", [0, 1 << 30])
def test_a_background_build_waits_and_spares_the_jobs_memory(
    cache: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr(native, "_memory_available", lambda: available)
    monkeypatch.setattr(native, "build", lambda *_: pytest.fail("it was built"))
    for after in (0, 3_600):
        build = native.BackgroundBuild(cache, after)
        build.stop()
        for thread in threading.enumerate():
            if thread.name == "trimtab-build":
                thread.join(20)
                assert not thread.is_alive()


def test_this_system_says_how_much_memory_is_available() -> None:
    assert native._memory_available() > 1 << 20


def test_the_command_says_whether_there_are_kernels_now(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, capsys.readouterr().err

    monkeypatch.setattr(sys, "argv", ["trimtab", "compile"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    compiler(cache.parent, monkeypatch, "exit 1")
    code, said = run()
    assert code == 2
    assert "C++ compiler" in said
    monkeypatch.setattr(native, "load", lambda _: object())
    assert run() == (0, f"compiled for this environment, in {cache / 'trimtab'}\n")
