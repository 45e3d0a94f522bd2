"""The example script as a job of the tests: on the CPU shim, with or without the engine, in a forked rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import load_script

from trimtab.engines import cpu
from trimtab.engines.megatron import MegatronEngine
from trimtab.record.observe import Call

SCRIPT = "examples/pretrain_gpt.py"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp2": (2, ()),
    "tp2": (2, ("--tp", "2")),
    "pp2": (2, ("--pp", "2")),
    "pp2_vpp2": (2, ("--pp", "2", "--vpp", "2")),
    "tp2_pp2_dp2": (8, ("--tp", "2", "--pp", "2")),
}
"""World size and arguments of each layout."""

_TEXT = load_script(SCRIPT).load_text(None, 1)  # before the fork; hundreds of files


class Listener:
    """An observer that writes everything down: [begin|end, kind, name, layer, microbatch, chunk, step]."""

    def __init__(self) -> None:
        self.heard: list[list[Any]] = []
        self.step = -1
        self.steps: list[int] = []

    def step_begin(self, step: int) -> None:
        self.step = step
        self.steps.append(step)

    def begin(self, call: Call) -> None:
        self._write("begin", call)

    def end(self, call: Call) -> None:
        self._write("end", call)

    def _write(self, what: str, call: Call) -> None:
        self.heard.append([what, str(call.kind), call.name, call.layer, call.microbatch, call.chunk, self.step])


class FakeRecorder:
    """Keeps spans and descriptions."""

    active = True

    def __init__(self) -> None:
        self.spans: list[list[Any]] = []
        self.described: dict[str, Any] = {}

    def span(self, kind: Any, name: str, start: int, end: int, **more: Any) -> None:
        assert start <= end
        self.spans.append([str(kind), name, more.get("stream"), more.get("microbatch", -1)])

    def describe(self, **metadata: Any) -> None:
        self.described |= metadata


def train(*arguments: str, steps: int = 2, prepare: Callable[[Any], None] | None = None) -> list[float]:
    """Losses of the job; ``prepare`` may change the script's functions for this run."""
    script = load_script(SCRIPT)
    functions = dict(vars(script))
    if "--data" not in arguments:
        script.load_text = lambda path, at_least: _TEXT  # pyright: ignore[reportAttributeAccessIssue]
    if prepare is not None:
        prepare(script)
    undo = cpu.install()
    try:
        return script.main(["--steps", str(steps), *arguments])
    finally:
        undo()
        vars(script).update(functions)


def keep_model(kept: list[Any]) -> Callable[[Any], None]:
    """A ``prepare`` that has the model chunks appended to ``kept``."""

    def prepare(script: Any) -> None:
        build = script.build_model

        def build_and_keep(*args: Any) -> Any:
            model = build(*args)
            kept.extend(model)
            return model

        script.build_model = build_and_keep

    return prepare


def change_config(**changes: Any) -> Callable[[Any], None]:
    """A ``prepare`` that changes the TransformerConfig."""

    def prepare(script: Any) -> None:
        make = script.transformer_config

        def changed(args: Any) -> Any:
            config = make(args)
            for name, value in changes.items():
                setattr(config, name, value)
            return config

        script.transformer_config = changed

    return prepare


def listen(*arguments: str, granularity: Any = "layer", **more: Any) -> tuple[list[float], Listener, FakeRecorder]:
    """Losses of the job with the engine attached, and what the engine reported."""
    listener, recorder = Listener(), FakeRecorder()
    engine = MegatronEngine(listener, recorder, granularity)  # pyright: ignore[reportArgumentType]
    engine.install()
    try:
        losses = train(*arguments, **more)
    finally:
        engine.remove()
    return losses, listener, recorder
