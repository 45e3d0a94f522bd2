"""What the demo shows in the browser: it is recorded while the demo trains, and served afterwards."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Final

from trimtab.config import ControlConfig
from trimtab.scope.collector.interface import Scope
from trimtab.scope.collector.opening import open_scope
from trimtab.scope.collector.ranks import Ranks
from trimtab.scope.server import visiting
from trimtab.scope.subscription import Subscription, When

IDLE_MINUTES: Final = 30.0
"""For so long the server stays after somebody has looked."""
LOG: Final = "scope.log"
_NEEDED: Final = ("starlette", "uvicorn", "websockets")
_LOOK_SECONDS: Final = 0.2
_ENDS_WITHIN: Final = 15.0
_FIGURES: Final = 6
"""Moments of which statistics are recorded. The steps between them are as if nobody looked: the demo is to show what
slows a job, and on two cores eight ranks have no time to spare."""
_PICTURES: Final = 3
"""Moments of which heat maps, attention and components are recorded, too."""
Talk = Callable[[str], None]


@contextlib.contextmanager
def recording(run_directory: Path, steps: int, environment: Mapping[str, str], talk: Talk) -> Generator[None]:
    """Record what passes through the model of the job that runs meanwhile; the demo goes on where that cannot be."""
    run_directory.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()
    arguments = (run_directory, _wishes(steps), environment, talk, ended)
    thread = threading.Thread(target=_record, args=arguments, name="trimtab-demo-scope")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_ENDS_WITHIN)


def _wishes(steps: int) -> tuple[Subscription, ...]:
    """Something for every view, of one microbatch, and what is large seldom: a demo on two cores has none to spare."""
    each = When(every=max(steps // _FIGURES, 1), microbatches=(0,))
    seldom = When(every=max(steps // _PICTURES, 1), microbatches=(0,))
    return (
        Subscription("{embedding.output,layers.*.mlp.output,layers.*.output,logits,loss}", when=each),
        Subscription("layers.*.output", "histogram", each),
        Subscription("layers.*.{attention.{q,k,v},residual,mlp.hidden,mlp.output,output}", "tiles", seldom),
        Subscription("layers.*.attention.map", "attention", seldom),
        Subscription("layers.*.output", "pca", seldom),
    )


def _record(
    run_directory: Path,
    wishes: Sequence[Subscription],
    environment: Mapping[str, str],
    talk: Talk,
    ended: threading.Event,
) -> None:
    try:
        with open_scope(run_directory, ControlConfig(), environment) as scope:
            while not scope.wait(_have_begun, _LOOK_SECONDS):
                if ended.is_set():
                    return
            scope.record("demo")
            _ask(scope, wishes, talk)
            ended.wait()
    except ValueError as error:
        talk(f"trimtab: {error}; the demo goes on, and there is less to see in the browser")


def _have_begun(ranks: Ranks) -> bool:
    """All are in their second step: a rank shows its model in the first one."""
    return ranks.complete and all(beat.step > 0 for beat in ranks.beats.values())


def _ask(scope: Scope, wishes: Sequence[Subscription], talk: Talk) -> None:
    for wish in wishes:
        try:
            scope.subscribe(wish)
        except ValueError as error:
            talk(f"trimtab: {wish.what} of {wish.pattern}: {error}")


def show(run_directory: Path) -> None:
    """Serve it until Ctrl-C, and open a browser."""
    from trimtab.output import talk
    from trimtab.scope.server.serve import Options, serve

    def ready(link: str) -> None:
        talk(f"In the browser: {link}\nCtrl-C ends the server.")
        threading.Thread(target=visiting.browse, args=(link, os.environ, talk)).start()

    with contextlib.suppress(KeyboardInterrupt):  # the demo is over by then, and went well
        serve(Options((run_directory,), live=False), ControlConfig(), os.environ, talk, ready)


def check_installed() -> None:
    """Raises ModuleNotFoundError for what a server needs and is not there."""
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def leave_open(run_directory: Path, log: Path) -> str:
    """Have it served by a process of its own, which ends when nobody looks any more; lines that say where it is."""
    try:
        check_installed()
    except ModuleNotFoundError:
        return f"In the browser: pip install 'trimtab[scope]', and then trimtab scope open {run_directory}"
    try:
        found = visiting.start(run_directory, ["--no-live", "--idle-minutes", f"{IDLE_MINUTES:g}"], log)
    except ValueError as error:
        return f"trimtab: {error}\nIn the browser: trimtab scope open {run_directory}"
    return (
        f"In the browser: {found.link}\n"
        f"  (until nobody has looked for {IDLE_MINUTES:g} minutes; trimtab scope close {run_directory} ends it now, "
        f"trimtab scope open {run_directory} serves it again)"
    )
