"""Filling the tree from a TOML file, the environment and arguments, whatever of them can be read."""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from trimtab.config.tree import Config

ENVIRONMENT_PREFIX = "TRIMTAB_"
_MOST = {
    "min_share": 1.0,
    "stage_share": 1.0,
    "confidence": 1.0,
    "ring_events": 1 << 24,
    "flush_seconds": 3600.0,
    "counter_seconds": 3600.0,
    "request_seconds": 3600.0,
}
"""Largest values that make sense: shares, and what a rank has memory and patience for."""
_NO_SETTINGS = ("TRIMTAB_CONTROL_SECRET",)
"""Variables that look like settings and are none: no configuration may hold a secret."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and what was wrong with its sources, one line each."""

    config: Config
    problems: tuple[str, ...] = ()

    def strict(self) -> Config:
        """The configuration; raises ValueError with the problems, if there are any."""
        if self.problems:
            raise ValueError("\n".join(self.problems))
        return self.config


def load(
    file: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Iterable[str] = (),
    base: Config | None = None,
) -> Loaded:
    """Read a TOML ``file``, then ``environment`` (``TRIMTAB_SECTION_KEY``), then ``section.key=value`` arguments.

    Whatever cannot be read keeps its default (``base``, if given) and is named in :attr:`Loaded.problems`.
    """
    problems: list[str] = []
    config = base or Config()
    if file is not None:
        config = _apply(config, _read_toml(Path(file), problems), str(file), problems)
    config = _apply(config, _from_environment(environment or {}, problems), "environment", problems)
    config = _apply(config, _from_arguments(arguments, problems), "arguments", problems)
    return Loaded(config, tuple(problems))


def _read_toml(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{path}: cannot read the configuration ({error.strerror}); defaults are used")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path}: not valid TOML ({error}); defaults are used")
    return {}


def _from_environment(environment: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    names = {
        f"{ENVIRONMENT_PREFIX}{section}_{key}".replace(".", "_").upper(): (section, key)
        for section, part in _sections(Config()).items()
        for key in _settings(part)
    }
    tree: dict[str, Any] = {}
    for name, value in environment.items():
        if name in names:
            section, key = names[name]
            _table(tree, section)[key] = value
        elif name.startswith(ENVIRONMENT_PREFIX) and name not in _NO_SETTINGS:
            problems.append(f"environment: {name} is not a setting{_hint(name, names)}; it is ignored")
    return tree


def _from_arguments(arguments: Iterable[str], problems: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        section, dot, key = name.rpartition(".")
        if not (equals and dot):
            problems.append(f"arguments: {argument!r} is not of the form section.key=value")
            continue
        values = _table(tree, section)
        if section == "faults" and key == "inject":  # a fault itself holds commas and equal signs
            values.setdefault(key, []).append(value)
        else:
            values[key.strip()] = value
    return tree


def _table(tree: dict[str, Any], section: str) -> dict[str, Any]:
    """The table ``section`` (``record.window``) of a tree, made where it is missing."""
    for name in section.split("."):
        inner = tree.get(name.strip())
        if not isinstance(inner, dict):
            inner = tree[name.strip()] = {}
        tree = cast(dict[str, Any], inner)
    return tree


def _sections(part: Any, prefix: str = "") -> dict[str, Any]:
    """Every section below ``part`` by its name, as it stands in a file: ``record``, ``record.window``."""
    found: dict[str, Any] = {}
    for inner in fields(part):
        value = getattr(part, inner.name)
        if is_dataclass(value):
            found[prefix + inner.name] = value
            found |= _sections(value, f"{prefix}{inner.name}.")
    return found


def _settings(part: Any) -> list[str]:
    return [inner.name for inner in fields(part) if not is_dataclass(getattr(part, inner.name))]


def _apply(config: Config, tree: Mapping[str, Any], source: str, problems: list[str]) -> Config:
    changes: dict[str, Any] = {}
    for name, values in tree.items():
        if name in _sections(config):
            changes[name] = _applied(getattr(config, name), values, name, source, problems)
        else:
            close = _hint(name, _sections(config))
            problems.append(f"{source}: unknown section [{name}]{close}; it is ignored")
    return replace(config, **changes)


def _applied(part: Any, values: Any, section: str, source: str, problems: list[str]) -> Any:
    """The section ``part`` with ``values`` in the place of what they name, and so on in the sections within it."""
    if not isinstance(values, Mapping):
        problems.append(f"{source}: [{section}] must be a table; it is ignored")
        return part
    types: dict[str, Any] = get_type_hints(part.__class__)
    for key, value in cast(Mapping[str, Any], values).items():
        where = f"{source}: {section}.{key}"
        if key not in types:
            problems.append(f"{where} is not a setting{_hint(key, types)}; it is ignored")
            continue
        if is_dataclass(types[key]):
            part = replace(part, **{key: _applied(getattr(part, key), value, f"{section}.{key}", source, problems)})
            continue
        try:
            part = replace(part, **{key: _bounded(_convert(value, types[key]), key)})
        except ValueError as error:
            problems.append(f"{where} = {value!r}: {error}; the default is used")
    return part


def _hint(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _convert(value: Any, target: Any) -> Any:
    """``value`` from TOML (typed) or from text, as ``target``; ValueError says what was expected."""
    if get_origin(target) is Literal:
        if value not in get_args(target):
            raise ValueError(f"choose from {', '.join(map(str, get_args(target)))}")
        return value
    if get_origin(target) is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(map(str, cast(Iterable[Any], value)))
        return tuple(item for item in str(value).split(";") if item)
    if target is bool:
        return _boolean(value)
    if isinstance(value, bool) or (target in (int, float) and isinstance(value, str) and not value.strip()):
        raise ValueError(f"expected {target.__name__}")
    if target is str:
        return str(value)
    try:
        number = target(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"expected {target.__name__}") from None
    if target is int and isinstance(value, float) and value != number:
        raise ValueError("expected int")
    if not 0 <= number < math.inf:  # also refuses NaN
        raise ValueError("must be a finite number, and not negative")
    return number


def _bounded(value: Any, key: str) -> Any:
    if key in _MOST and value > _MOST[key]:
        raise ValueError(f"must be at most {_MOST[key]:g}")
    return value


def _boolean(value: Any) -> bool:
    words = {
        "true": True,
        "1": True,
        "yes": True,
        "on": True,
        "false": False,
        "0": False,
        "no": False,
        "off": False,
    }
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError("expected true or false")
