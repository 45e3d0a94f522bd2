"""A recorded training run with all that scope records: a real model trained in this process, its tensors measured by
scope's own functions, cut as TP2 x PP2 x DP2 would cut them, and written by the recorder's writer.

It is trained twice from the same state, clean and disturbed. Everything is the same each time but the clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from browser_model import HEADS, LAYERS, SCALE, TinyGpt, batch
from browser_runs import CLEAN, DISTURBED

from trimtab.scope.device.attention import AttentionState, measure_attention
from trimtab.scope.device.measure import MeasureState, measure
from trimtab.scope.frame import Frame, encode, split
from trimtab.scope.names import Pattern, Shard, Tap
from trimtab.scope.perturb.audit import Audit
from trimtab.scope.recording.recorder import Chunks
from trimtab.scope.subscription import Subscription, When
from trimtab.scope.taps.points import AttentionInput
from trimtab.scope.vector import exponents_of, vector_of

STEPS, MICROBATCHES, TP, PP, DP = 40, 2, 2, 2, 2
WORLD = TP * PP * DP
UNIX_NS = 1_767_261_600 * 10**9
FLIPPED, FLIP_STEPS, FLIP_BIT = "layers.1.mlp.output", range(20, 23), 28
BROKEN, BREAK_STEPS, BREAK_BIT = "layers.2.mlp.output", range(30, 31), 30
"""Perturbations of the disturbed run: the first changes what comes after it, the second makes numbers infinite."""
_RATE = 0.5
_CUT = {"attention.q": 2, "attention.k": 2, "attention.v": 2, "mlp.hidden": 2}
"""Which dimension tensor parallel ranks divide; what is not here they hold alike."""
WANTED = (
    Subscription("layers.*.{residual,mlp.output,output,output.grad,attention.output}", id="s-0001"),
    Subscription("{embedding.output,final_norm.output,logits,loss}", id="s-0002"),
    Subscription("layers.*.output", "histogram", id="s-0003"),
    Subscription("layers.*.{attention.{q,k,v},mlp.hidden,residual}", "tiles", When(every=4), id="s-0004"),
    Subscription("layers.*.attention.map", "attention", When(every=4), parameters={"rows": [5, 23]}, id="s-0005"),
    Subscription("layers.*.output", "pca", When(every=2, microbatches=(0,)), parameters={"components": 3}, id="s-0006"),
    Subscription("layers.*.residual", "rows", When(every=8), parameters={"rows": [0, 1]}, id="s-0007"),
)


def rank_of(tp: int, dp: int, pp: int) -> int:
    """As Megatron-Core orders them."""
    return tp + TP * dp + TP * DP * pp


def record_training(directory: Path) -> None:
    """Both recordings, and the log of what was disturbed, below ``directory``/scope."""
    folder = directory / "scope"
    folder.mkdir(parents=True)
    for name, label, disturbed in ((CLEAN, "clean", False), (DISTURBED, "disturbed", True)):
        chunks = Chunks(folder, name, label, 1 << 30)
        _Training(chunks, directory, disturbed).run()
        chunks.close()


@dataclass
class _Training:
    """One run of it."""

    chunks: Chunks
    directory: Path
    disturbed: bool
    states: dict[str, Any] = field(default_factory=dict[str, Any])
    step: int = 0
    audits: list[Audit] = field(default_factory=list[Audit])

    def run(self) -> None:
        """Train, and write down."""
        torch.manual_seed(0)
        self.note("begin", {"label": "disturbed" if self.disturbed else "clean"})
        places = {
            str(rank_of(tp, dp, pp)): {"tp": tp, "pp": pp, "dp": dp, "cp": 0, "ep": 0, "vpp": 0}
            for tp in range(TP)
            for dp in range(DP)
            for pp in range(PP)
        }
        self.note("ranks", {"world_size": WORLD, "ranks": places}, "ranks")
        for wish in WANTED:
            self.note("subscription", wish.as_dict(), f"subscription {wish.id}")
        self.audits = [Audit(self.directory, rank, lambda: self.now) for rank in range(WORLD)]
        model = TinyGpt()
        for self.step in range(STEPS):
            for replica in range(DP):
                for microbatch in range(MICROBATCHES):
                    self._pass(model, replica, microbatch)
            _learn(list(model.parameters()))
        for audit in self.audits:
            audit.close()

    @property
    def now(self) -> int:
        """Nanoseconds; a step takes half a second."""
        return UNIX_NS + self.step * 500_000_000

    def note(self, kind: str, value: dict[str, Any], lasting: str = "") -> None:
        """As the recorder writes it."""
        said = {"kind": kind, "unix_ns": self.now, "value": value}
        self.chunks.note(json.dumps(said, separators=(",", ":")).encode(), lasting)

    def _pass(self, model: TinyGpt, replica: int, microbatch: int) -> None:
        """Forward and backward of one microbatch of one replica."""
        tokens, labels = batch(self.step, replica, microbatch)
        kept: dict[str, torch.Tensor] = {}
        gradients: dict[str, torch.Tensor] = {}

        def see(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
            changed = self._disturb(name, tensor, replica, microbatch)
            tensor = tensor if changed is None else changed
            kept[name] = tensor.detach()
            if name.endswith(".output") and name.count(".") == 2:
                tensor.register_hook(lambda gradient: gradients.__setitem__(f"{name}.grad", gradient))
            return tensor

        logits = model(tokens, see)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        (loss / (MICROBATCHES * DP)).backward()
        for name, tensor in (kept | gradients | {"loss": loss.detach()}).items():
            self._measure(name, tensor, replica, microbatch)
        for layer in range(LAYERS):
            self._attention(layer, kept, replica, microbatch)

    def _disturb(self, name: str, tensor: torch.Tensor, replica: int, microbatch: int) -> torch.Tensor | None:
        """Flip a bit of the first element on the ranks of replica 0, and write it down before."""
        plan = ((FLIPPED, FLIP_STEPS, FLIP_BIT, "p-0001"), (BROKEN, BREAK_STEPS, BREAK_BIT, "p-0002"))
        for tap, steps, bit, perturbation in plan:
            if not (self.disturbed and name == tap and self.step in steps and replica == 0):
                continue
            changed = tensor.detach().clone()
            bits = changed.view(torch.int32).flatten()
            before = int(bits[0])
            bits[0] ^= 1 << bit
            text = f"flips bit {bit} of 1 element in {tap}, steps {steps[0]}-{steps[-1]}"
            more = {"tap": tap, "step": self.step, "microbatch": microbatch, "elements": 1}
            for rank in _ranks(name, replica):
                shown = {"before": f"{before & 0xFFFFFFFF:#010x}", "after": f"{int(bits[0]) & 0xFFFFFFFF:#010x}"}
                self.audits[rank].append("activated", perturbation, kind="bit-flip", **more, **shown, text=text)
                if microbatch == 0 and self.step == steps[0]:
                    said = {"kind": "activated", "text": text, "rank": rank, "perturbation": perturbation}
                    self.note("notice", said | {"step": self.step, "microbatch": microbatch, "unix_ns": self.now})
            return tensor + (changed - tensor).detach()
        return None

    def _measure(self, name: str, tensor: torch.Tensor, replica: int, microbatch: int) -> None:
        """Whatever is wanted of it, on each rank that holds a part."""
        for wish in WANTED:
            if not (wish.when.matches(self.step, microbatch) and _matches(wish.pattern, name)):
                continue
            measured: dict[int, tuple[Any, dict[str, Any]]] = {}
            for rank, tap, part in _parts(name, tensor, replica):
                if part.data_ptr() not in measured:  # replicas hold the same
                    state = self.states.setdefault(f"{wish.id} {name} {rank}", MeasureState())
                    state.labels, state.tap = tap.labels, tap
                    arrays = _numbers(part, wish) or measure(part, wish, state)
                    measured[part.data_ptr()] = arrays, state.meta | _about(part)
                self._write(wish, tap, rank, microbatch, *measured[part.data_ptr()])

    def _attention(self, layer: int, kept: dict[str, torch.Tensor], replica: int, microbatch: int) -> None:
        wish = WANTED[4]
        if not wish.when.matches(self.step, microbatch):
            return
        of = f"layers.{layer}.attention"
        keys = {rank: part for rank, _, part in _parts(f"{of}.k", kept[f"{of}.k"], replica)}
        for rank, tap, queries in _parts(f"{of}.q", kept[f"{of}.q"], replica):
            state = self.states.setdefault(f"attention {layer} {rank}", AttentionState())
            given = (x.permute(1, 2, 0, 3) for x in (queries, keys[rank]))
            first = tap.heads[0] if tap.heads else 0
            arrays = measure_attention(AttentionInput(*given, SCALE, head_offset=first), wish, state)
            named = Tap(f"{of}.map", "attention", ("b", "n", "s", "d"), shard=tap.shard, layer=layer, heads=tap.heads)
            self._write(wish, named, rank, microbatch, arrays, dict(state.meta))

    def _write(
        self, wish: Subscription, tap: Tap, rank: int, microbatch: int, arrays: dict[str, Any], meta: dict[str, Any]
    ) -> None:
        plain = {key: np.asarray(value) for key, value in arrays.items()}
        about = {"labels": list(tap.labels), **meta} | ({"heads": list(tap.heads)} if tap.heads else {})
        frame = Frame(
            tap.name, wish.what, wish.id, self.step, microbatch, rank, tap.shard, tap.replica, plain, about, self.now
        )
        self.chunks.frame(split(encode(frame))[0])


def _learn(parameters: list[torch.nn.Parameter]) -> None:
    """Gradient descent; an optimizer of torch's would take longer to import than this run takes."""
    for parameter in parameters:
        assert parameter.grad is not None
        torch.nan_to_num_(parameter.grad, 0.0, 0.0, 0.0)  # as mixed precision passes over what is not finite
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with torch.no_grad():
        for parameter in parameters:
            parameter -= _RATE * parameter.grad
            parameter.grad = None


@cache
def _matches(pattern: str, name: str) -> bool:
    return Pattern(pattern).matches(name)


def _numbers(part: torch.Tensor, wish: Subscription) -> dict[str, Any]:
    """Statistics without a kernel: the definition."""
    if wish.what not in ("statistics", "histogram"):
        return {}
    arrays = {"vector": vector_of(part.numpy().ravel()), "shift": np.zeros(1)}
    return arrays | ({"exponents": exponents_of(part.numpy().ravel())} if wish.what == "histogram" else {})


def _about(part: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(part.shape), "dtype": str(part.dtype).removeprefix("torch.")}


def _stage(name: str) -> int:
    """The first one has the embedding, the last one the loss."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) * PP // LAYERS
    return 0 if name == "embedding.output" else PP - 1


def _ranks(name: str, replica: int) -> list[int]:
    return [rank_of(tp, replica, _stage(name)) for tp in range(TP)]


def _parts(name: str, tensor: torch.Tensor, replica: int) -> Iterator[tuple[int, Tap, torch.Tensor]]:
    """What each rank holds of it: (rank, tap, part)."""
    part = next((part for part in _CUT if name.endswith(part)), "")
    layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
    labels = ("s", "b", "n", "d") if part.startswith("attention") else ("s", "b", "h")[: tensor.dim()]
    pieces = tensor.chunk(TP, _CUT[part]) if part else [tensor] * TP
    for tp, (rank, piece) in enumerate(zip(_ranks(name, replica), pieces, strict=True)):
        shard: Shard = (("tp", tp, TP),) if part else ()
        heads = (tp * HEADS // TP, HEADS // TP, HEADS) if part.startswith("attention") else None
        kind = "gradient" if name.endswith(".grad") else "activation"
        shard += (("dp", replica, DP),)
        yield rank, Tap(name, kind, labels, shard=shard, replica=0 if part else tp, layer=layer, heads=heads), piece
