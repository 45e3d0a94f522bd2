"""Patches: applied where the version fits, and taken back without a trace."""

from __future__ import annotations

import importlib.util
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engines import patches
from trimtab.engines.patches import ALL_PATCHES, Patch, PatchError, Patches, _release

ORIGINAL = "json:dumps"


class Base:
    def method(self) -> str:
        return "base"


class Derived(Base):
    pass


def _patch(monkeypatch: pytest.MonkeyPatch, version: str | None, **changes: Any) -> Patch:
    monkeypatch.setattr(patches, "installed_version", lambda package: version)
    values: dict[str, Any] = {"name": "test.patch", "target": ORIGINAL, "why": "a test", "versions": ("0.14", "0.20")}
    return Patch(**(values | changes))


def test_apply_and_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    original = json.dumps
    applied = Patches()
    applied.apply(_patch(monkeypatch, "0.16.1"), lambda before: lambda value: "<" + before(value) + ">")
    assert json.dumps([1]) == "<[1]>"
    assert applied.names == ("test.patch",)
    applied.undo()
    assert json.dumps is original
    assert applied.names == ()
    applied.undo()
    assert json.dumps is original


@pytest.mark.parametrize("version", ["0.14", "0.14.0", "0.16.1", "0.19.2", "0.19.2.post1"])
def test_versions_inside(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    assert _patch(monkeypatch, version).problem() is None


@pytest.mark.parametrize("version", ["0.13.1", "0.20", "0.20.0rc1", "1.0", "0.9"])
def test_versions_outside(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    patch = _patch(monkeypatch, version)
    assert patch.problem() == f"megatron-core {version} is outside 0.14 <= version < 0.20"
    with pytest.raises(PatchError, match="outside"):
        Patches().apply(patch, lambda before: before)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _patch(monkeypatch, None).problem() == "megatron-core is not installed"


def test_installed_version_asks_the_installation() -> None:
    assert patches.installed_version("numpy")
    assert patches.installed_version("no-such-distribution-anywhere") is None


def test_a_missing_target_is_an_error_unless_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = Patches()
    for target in ("json:no_such_function", "no_such_module_anywhere:f", "json:JSONEncoder.no_such_method"):
        with pytest.raises(PatchError, match="is not there"):
            applied.apply(_patch(monkeypatch, "0.16", target=target), lambda before: before)
        applied.apply(_patch(monkeypatch, "0.16", target=target, optional=True), lambda before: before)
    assert applied.names == ()


def test_what_was_inherited_is_inherited_again() -> None:
    applied = Patches()
    applied.set("inherited", Derived, "method", lambda self: "patched")
    assert Derived().method() == "patched"
    assert Base().method() == "base"
    applied.undo()
    assert "method" not in vars(Derived)
    assert Derived().method() == "base"


def test_undo_goes_backwards() -> None:
    owner = types.SimpleNamespace(value=0)
    applied = Patches()
    for value in (1, 2, 3):
        applied.set(f"set {value}", owner, "value", value)
    applied.undo()
    assert owner.value == 0


def test_what_others_wrapped_since_is_left() -> None:
    owner = types.SimpleNamespace(value="original", other="original")
    applied = Patches()
    applied.set("wrapped", owner, "value", "ours")
    applied.set("ours alone", owner, "other", "ours")
    owner.value = "theirs around ours"
    applied.undo()
    assert owner.value == "theirs around ours"
    assert owner.other == "original"


def test_an_attribute_that_was_not_there_goes() -> None:
    owner = types.SimpleNamespace()
    applied = Patches()
    applied.set("new", owner, "value", 1)
    applied.undo()
    assert not hasattr(owner, "value")


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.integers(0, 3))
def test_releases_compare_as_numbers(numbers: list[int], zeros: int) -> None:
    text = ".".join(map(str, numbers))
    assert _release(text) == _release(text + ".0" * zeros) == _release(text + "rc1") == _release(text + "+cpu")
    assert _release(text) < _release(f"{numbers[0] + 1}.0")


def test_the_list_is_well_formed() -> None:
    names = [patch.name for patch in ALL_PATCHES]
    assert len(set(names)) == len(names)
    for patch in ALL_PATCHES:
        module, _, attribute = patch.target.partition(":")
        assert module
        assert attribute
        assert patch.why


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_the_installed_megatron_is_supported() -> None:
    assert [patch.problem() for patch in ALL_PATCHES] == [None] * len(ALL_PATCHES)
