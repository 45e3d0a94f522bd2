"""The collector beside the job of ``multi_gpu_scope.py``: it does what the job wishes for, by files in a folder.

A wish ``want-N`` holds ``[layout, condition]``; ``ready-N`` says that it is done. The layout names the run directory.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATTERNS = (
    "layers.*.{input,output}",
    "layers.*.mlp.{hidden,output}",
    "{embedding.output,final_norm.output,logits,loss}",
)
"""100 taps of 24 layers."""
PATIENCE = 20.0
MOST_FAILURES = 3
"""After which the collector does no more, so that the job comes to its end."""


@dataclass
class Seen:
    """What the collector saw."""

    taps: int = 0
    frames: dict[str, int] = field(default_factory=dict[str, int])
    """By condition."""
    bytes: int = 0
    dropped: int = 0
    overhead: dict[str, float] = field(default_factory=dict[str, float])
    """As ranks measure it themselves, the most of any rank, by condition."""
    paused: list[str] = field(default_factory=list[str])
    failures: list[str] = field(default_factory=list[str])


class Collecting(threading.Thread):
    """Does what a job wishes for, until that is over."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.of: dict[str, Seen] = {}
        """By layout."""
        self.seen = Seen()
        """Of the present one."""
        self.over = threading.Event()
        self._folder = folder
        self._condition = ""
        self._names: list[str] = []

    def run(self) -> None:
        """Wish by wish; a collector lives as long as the ranks that it collects from."""
        from trimtab.config import ControlConfig
        from trimtab.scope.collector.opening import open_scope

        number, scope = 1, None
        with ExitStack() as stack:
            while not self.over.wait(0.01):
                wish = self._folder / f"want-{number}"
                if not wish.exists():
                    continue
                layout, condition = json.loads(wish.read_text())
                self.seen = self.of.setdefault(layout, Seen())
                try:
                    if scope is not None:
                        self._end_subscriptions(scope)
                    self._condition = condition
                    if condition == "off":
                        stack.close()
                        scope = None
                    elif len(self.seen.failures) < MOST_FAILURES:
                        if scope is None:
                            scope = stack.enter_context(open_scope(self._folder / layout, ControlConfig(), os.environ))
                            scope.listen(self._hear)
                        self._fulfil(scope, condition)
                except Exception as error:
                    self.seen.failures.append(f"{condition}: {type(error).__name__}: {error}")
                (self._folder / f"ready-{number}").touch()
                number += 1

    def _hear(self, one: Any) -> None:
        from trimtab.scope.collector.interface import Received

        if isinstance(one, Received):
            self.seen.frames[self._condition] = self.seen.frames.get(self._condition, 0) + 1
            self.seen.bytes += len(one.raw)
        elif one.kind in ("paused", "resumed", "error"):
            self.seen.paused.append(f"{self._condition}: rank {one.rank}, step {one.step}: {one.kind} {one.text}")

    def _end_subscriptions(self, scope: Any) -> None:
        beats = scope.status()["ranks"].values()
        most = max((beat["overhead"] for beat in beats), default=0.0)
        self.seen.overhead[self._condition] = max(most, self.seen.overhead.get(self._condition, 0.0))
        self.seen.dropped = max([self.seen.dropped, *(beat["dropped"] for beat in beats)])
        names, self._names = self._names, []
        for name in names:
            scope.unsubscribe(name)

    def _fulfil(self, scope: Any, condition: str) -> None:
        from trimtab.scope.subscription import Subscription, When

        if not scope.wait(lambda ranks: ranks.showing, PATIENCE):
            raise ValueError("ranks did not come")
        if condition == "idle":
            return
        every = 10 if condition == "every 10" else 1
        self.seen.taps = sum(len(scope.taps(pattern)) for pattern in PATTERNS)
        before = self.seen.frames.get(condition, 0)
        self._names = [scope.subscribe(Subscription(pattern, when=When(every=every))) for pattern in PATTERNS]
        enough = before + (self.seen.taps if every == 1 else 0)
        until = time.monotonic() + PATIENCE
        while self.seen.frames.get(condition, 0) < enough or not self._on(scope):
            if time.monotonic() > until:
                raise ValueError(f"no frame of each tap within {PATIENCE:.0f} s: {scope.status()['subscriptions']}")
            time.sleep(0.01)

    def _on(self, scope: Any) -> bool:
        """The step from which on the subscriptions hold has come."""
        status = scope.status()
        return all(status["subscriptions"][name]["step"] <= status["step"] for name in self._names)
