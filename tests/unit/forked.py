"""A new Python for the price of a fork: this process has imported torch, for which a real one takes seconds.

At least one test of each file that uses it starts a real process as well.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def python(arguments: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ...`` or ``python -c CODE ...`` in ``cwd``, and what it said."""
    texts = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            _live(texts, cwd, out.fileno(), err.fileno())
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:  # the test's time is over
            os.kill(pid, signal.SIGKILL)
            raise
        said: list[str] = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(texts, code, *said)


def _live(arguments: list[str], cwd: Path, out: int, err: int) -> NoReturn:
    code = 1
    try:
        _become_new(cwd, out, err)
        code = _run(arguments)
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _become_new(cwd: Path, out: int, err: int) -> None:
    """Nothing of the test runner's is in the way."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False))
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), write_through=True)
    os.chdir(cwd)
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for logger in (logging.getLogger(), logging.getLogger("trimtab")):
        logger.handlers.clear()
    warnings.simplefilter("default")
    gc.callbacks.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]  # what other tests imported is not what the script imports
    atexit._clear()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__


def _run(arguments: list[str]) -> int:
    """As the interpreter does; returns the exit code."""
    how, what, *rest = arguments
    sys.path.insert(0, "")
    sys.argv = [how, *rest]
    try:
        if how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
