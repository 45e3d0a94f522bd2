"""Acting when the job imports a framework, and not before: trimtab itself never decides what a job loads."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` right after the module ``name`` has been imported, once; now if it is already.

    Returns the undo, which calls the action off if it has not happened. ``action`` must not raise.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        action()
        return _nothing
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.remove


def _nothing() -> None:
    """The action has happened; there is nothing to call off."""


class _Finder(MetaPathFinder):
    """Finds one module as all others would, and has its loader report the end of the import."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name or self._searching:
            return None
        self._searching = True  # the search below asks this finder, too
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Reporting(spec, spec.loader, self._imported)
        return spec

    def _imported(self) -> None:
        if self in sys.meta_path:  # not called off meanwhile
            self.remove()
            self._action()

    def remove(self) -> None:
        """Look no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Reporting(Loader):
    """A loader that calls ``action`` after its module was executed; the module itself never sees it."""

    def __init__(self, spec: ModuleSpec, loader: Loader, action: Callable[[], None]) -> None:
        self._spec = spec
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
