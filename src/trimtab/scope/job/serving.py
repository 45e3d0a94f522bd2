"""``trimtab scope serve`` beside the job (``scope.serve``): a child of rank 0 that ends with it, however that ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from trimtab.config import ENVIRONMENT_PREFIX, ControlConfig, ScopeConfig
from trimtab.record.complain import failed

_END_SECONDS: Final = 3.0


class ServerProcess:
    """The server holds a pipe that only this process writes to: it ends when the pipe does, even if we are killed."""

    def __init__(
        self,
        scope: ScopeConfig,
        control: ControlConfig,
        run_directory: Path,
        environment: Mapping[str, str],
        program: Sequence[str] = (sys.executable, "-m", "trimtab", "scope", "serve"),
    ) -> None:
        """Start it. Raises OSError. What it says, its address first of all, goes to this process's stderr."""
        command = [*program, str(run_directory), "--bind", scope.serve, "--parent-pipe"]
        if scope.allow_perturb:
            command.append("--allow-perturb")
        self._pid = os.getpid()
        self._told = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=dict(environment) | _settings(control),
            start_new_session=True,  # a Ctrl-C in the terminal is the job's, and reaches the server by the pipe
        )

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def look(self) -> None:
        """Say so if it has ended, once."""
        if not self._told and os.getpid() == self._pid and self._process.poll() is not None:
            self._told = True
            failed(f"the scope server has ended (exit code {self._process.returncode}); the job goes on without")

    def close(self) -> None:
        """End it, and wait for that a little. May be called again."""
        if os.getpid() != self._pid:  # a forked child
            return
        self._told = True
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _settings(control: ControlConfig) -> dict[str, str]:
    """How the job was told to meet the hub, for a process that does not read the job's configuration."""
    usual = ControlConfig()
    values = {part.name: getattr(control, part.name) for part in fields(control)}
    changed = {name: value for name, value in values.items() if value != getattr(usual, name)}
    return {f"{ENVIRONMENT_PREFIX}CONTROL_{name}".upper(): str(value) for name, value in changed.items()}
