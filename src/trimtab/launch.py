"""What ``trimtab run`` does: attach, then run a script as if Python had been started with it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from trimtab import config as configuration
from trimtab.attach import attach, warn


def run(
    script: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    config: str | os.PathLike[str] | None = None,
    settings: Sequence[str] = (),
) -> None:
    """Run ``script`` (with ``module``: the module of that name) as ``__main__`` with ``arguments``, trimtab attached.

    ``config`` and ``settings`` (``section.key=value``) are read as by :func:`trimtab.config.load`, the environment
    between them. What the script raises, SystemExit included, comes out unchanged, and its traceback shows the
    script's own frames only. Raises ValueError, before anything is attached, if there is no such script.
    """
    if not module and not Path(script).is_file():
        raise ValueError(f"run: {script}: no such file; give the script to run, or -m and a module's name")
    loaded = configuration.load(config, os.environ, settings)
    for problem in loaded.problems:
        warn(problem)
    with (
        _cpu_shim(loaded.config.engine.cpu_shim),
        attach(loaded.config),
        _own_traceback(),
        _started_with(script, module),
    ):
        sys.argv[1:] = arguments
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


@contextmanager
def _cpu_shim(wanted: bool) -> Iterator[None]:
    undo: Callable[[], None] | None = None
    if wanted:
        try:
            from trimtab.engines import cpu

            undo = cpu.install()
        except Exception as error:
            warn(f"the CPU shim for Megatron-Core is off: {error}")
    try:
        yield
    finally:
        if undo is not None:
            undo()


@contextmanager
def _started_with(script: str, module: bool) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as the interpreter sets them for a script or for ``-m``."""
    argv, path = sys.argv[:], sys.path[:]
    sys.argv[:] = [script]
    sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


@contextmanager
def _own_traceback() -> Iterator[None]:
    """If the script raises, the hook that prints it leaves out the frames that led to the script.

    The hook is the last one in force in the script, and stays: the exception is printed after this returns.
    """
    try:
        yield
    except BaseException:
        hook = sys.excepthook

        def trimmed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            trace = _without_ours(trace)
            hook(kind, error.with_traceback(trace), trace)  # the default hook looks at the exception's own

        sys.excepthook = trimmed
        raise


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; None where the script has none (it does not compile)."""
    script = step = trace
    while step is not None:  # our own frames come first, then runpy's, then the script's
        if step.tb_frame.f_code.co_filename == __file__:
            script = step.tb_next
        step = step.tb_next
    while script is not None and "runpy" in script.tb_frame.f_code.co_filename:
        script = script.tb_next
    return script
