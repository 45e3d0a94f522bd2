"""Acting on the job's own import, exactly once and invisibly."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.engines.when_imported import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "frame_work").mkdir()
    (tmp_path / "frame_work" / "__init__.py").write_text("")
    (tmp_path / "frame_work" / "core.py").write_text("READY = True")
    (tmp_path / "frame_work" / "broken.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield "frame_work.core"
    for name in [name for name in sys.modules if name.startswith("frame_work")]:
        del sys.modules[name]
    assert sys.meta_path == before


def test_the_action_follows_the_import_once(package: str) -> None:
    seen: list[bool] = []
    when_imported(package, lambda: seen.append(sys.modules[package].READY))
    assert importlib.util.find_spec(package) is not None, "looking for a module is not importing it"
    assert seen == []
    module = importlib.import_module(package)
    importlib.reload(module)
    assert seen == [True]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_a_module_that_is_there_already(package: str) -> None:
    importlib.import_module(package)
    seen: list[int] = []
    when_imported(package, lambda: seen.append(1))()
    assert seen == [1]


def test_called_off(package: str) -> None:
    seen: list[int] = []
    when_imported(package, lambda: seen.append(1))()
    importlib.import_module(package)
    assert seen == []


def test_called_off_between_search_and_import(package: str) -> None:
    seen: list[int] = []
    undo = when_imported(package, lambda: seen.append(1))
    spec = importlib.util.find_spec(package)
    undo()
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert seen == []


def test_a_failing_import_is_the_jobs_own(package: str) -> None:
    seen: list[int] = []
    undo = when_imported("frame_work.broken", lambda: seen.append(1))
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module("frame_work.broken")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("frame_work.absent")
    assert seen == []
    undo()
