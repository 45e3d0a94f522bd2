"""What processes of ``benchmarks/fbd_gpu.py`` are told and tell, and what they are measured with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from pipeline_gpu_model import Sizes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.fbd.execute.hooks import Hooks
from trimtab.fbd.execute.program import SHIPMENT
from trimtab.transport.interface import Label
from trimtab.transport.sending import Sending


@dataclass(frozen=True)
class Case:
    """A way to train."""

    way: str = "ordinary"
    """ordinary, recompute (ordinary with full recompute), ship, again (the stage's input is sent)."""
    forwards: int = 0
    """Devices that run forwards only."""
    backwards: int = 1
    """Devices that train."""
    helped: float = 1.0
    """Share of the microbatches whose forwards run on the forward devices."""
    ahead: int = 0
    """See :class:`Program`; 0: its default."""
    kappas: tuple[float, ...] = (0.0,)
    steps: int = 2
    """Measured ones at each kappa, after one that does not count."""
    fill: str = "trains"
    """What processes that are not part of it do meanwhile: trains (in the ordinary way), forwards, nothing."""
    microbatches: int = 0
    """Of each training device in a step; 0: as of the others."""
    link: float = 0.0
    """Bytes a second of an emulated link from each forward device; 0: as fast as it is."""

    @property
    def world(self) -> int:
        """Processes."""
        return self.forwards + self.backwards

    def __str__(self) -> str:
        if not self.forwards:
            return self.way + ("" if self.fill == "trains" else f", beside it {self.fill}")
        share = "" if self.helped == 1 else f", {self.helped:.1%} of the forwards"
        ahead = f", ahead {self.ahead}" if self.ahead else ""
        link = f", link of {self.link / 1e9:.0f} GB/s" if self.link else ""
        more = f", {self.microbatches} microbatches" if self.microbatches else ""
        return f"{self.way} {self.forwards}:{self.backwards}{share}{ahead}{link}{more}"


@dataclass(frozen=True)
class Told:
    """What the processes of a job are told."""

    device: str
    sizes: Sizes
    cases: tuple[Case, ...]
    microbatches: int
    """Of each training device in a step."""
    gpus: tuple[int, ...] = (0,)
    """That of each process."""
    transport: str = "ucx"
    idle: bool = False
    """Emulated communication leaves the device idle, as it would be; the others are then faster meanwhile."""
    exact: bool = False
    """With deterministic kernels and the same first weights, so that losses can be compared bit for bit."""

    @classmethod
    def read(cls, text: str) -> Told:
        """The way back from JSON."""
        told = json.loads(text)
        sizes = Sizes(**{**told.pop("sizes"), "microbatches": ()})
        cases = tuple(Case(**{**one, "kappas": tuple(one["kappas"])}) for one in told.pop("cases"))
        return cls(sizes=sizes, cases=cases, gpus=tuple(told.pop("gpus")), **told)


class Exposure:
    """Emulated tensor parallel communication that no compute hides.

    The device's stream is busy with something that nobody needs, products of matrices, for so long. It could also do
    nothing: but then the other devices, which are on the same GPU, would be faster meanwhile, which devices are not.
    """

    def __init__(self, device: torch.device, *, idle: bool = False) -> None:
        """``idle``: do nothing all the same."""
        self._device = device
        self._idle = idle
        self._unit = 1e-3
        """Seconds of a product, or of 1000 cycles."""
        self.forward = 0.0
        """Seconds in each layer's forward, and in its backward."""
        self.backward = 0.0
        self.checkpoint = False

    def calibrate(self) -> None:
        """While all processes do."""
        cuda = self._device.type == "cuda"
        count = 200 if not (self._idle and cuda) else 20_000
        for _ in range(2):  # once to warm up
            begin = Mark(cuda)
            self._spend(count)
            end = Mark(cuda)
            end.wait()
            self._unit = end.since(begin) / count

    def wait(self, seconds: float) -> None:
        """On the device."""
        if seconds > 0:
            self._spend(round(seconds / self._unit))

    def _spend(self, count: int) -> None:
        if self._idle and self._device.type == "cuda":
            torch.cuda._sleep(1000 * count)
            return
        a, b, out = _matrices(self._device)
        with torch.no_grad():
            for _ in range(count):
                torch.mm(a, b, out=out)


@lru_cache(maxsize=1)
def _matrices(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Not attributes of what a graph keeps: they would have to be sent."""
    inner, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (64, torch.float32)
    a, b = (torch.randn(rows, inner, device=device, dtype=dtype) for rows in (512, inner))
    return a, b, torch.empty_like(a)


class _Exposed(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exposure: Exposure) -> Tensor:
        ctx.exposure = exposure
        exposure.wait(exposure.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.exposure.wait(ctx.exposure.backward)
        return gradients[0], None


class ExposedLayer(nn.Module):
    """A layer and its emulated communication."""

    def __init__(self, layer: nn.Module, exposure: Exposure) -> None:
        super().__init__()
        self.layer, self.exposure = layer, exposure

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        """As the layer's."""
        if self.exposure.checkpoint:
            found = checkpoint(self._through, x, *tables, use_reentrant=False)
            assert isinstance(found, Tensor)
            return found
        return self._through(x, *tables)

    def _through(self, x: Tensor, *tables: Tensor) -> Tensor:
        return _Exposed.apply(self.layer(x, *tables), self.exposure)  # type: ignore[return-value]


class SlowerLink:
    """A transport on which shipments leave one after the other at a given rate, once they have been made."""

    def __init__(self, inner: Any, bytes_per_s: float) -> None:
        self._inner, self._rate = inner, bytes_per_s
        self._free = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, to: int, label: Label, tensors: Sequence[Tensor], ready: Any = None, due: float = 0.0) -> Sending:
        """As the transport's."""
        if label.chunk == SHIPMENT and label.part > 0:
            ready = self._later(ready or (lambda: True), sum(one.numel() * one.element_size() for one in tensors))
        return self._inner.send(to, label, tensors, ready, due)  # type: ignore[no-any-return]

    def _later(self, ready: Callable[[], bool], size: int) -> Callable[[], bool]:
        leaves = 0.0

        def left() -> bool:
            nonlocal leaves
            if not leaves:
                if not ready():
                    return False
                leaves = self._free = max(self._free, time.monotonic()) + size / self._rate
            return time.monotonic() >= leaves

        return left


@dataclass
class Measured:
    """What a process tells of a case."""

    role: str = ""
    ends: list[tuple[float, float]] = field(default_factory=list)
    """Kappa and the end of each step, by the host's monotonic clock; the first step does not count."""
    peak: int = 0
    passes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By kappa, median seconds of a microbatch's forward and backward on the device, with waits; 0: it had none."""
    rate: float = 0.0
    """Bytes a second of the link, as the transport has measured."""
    losses: list[float] = field(default_factory=list)
    """Of the last step."""


class Passes(Hooks):
    """How long passes take on their device. Own forwards of a training device are among the backwards."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._marks: dict[tuple[int, bool], list[tuple[Mark, Mark]]] = {}

    @contextmanager
    def around_forward(self, step: int, microbatch: int) -> Iterator[None]:
        """One of them."""
        del microbatch
        with self._around(step, False):
            yield

    @contextmanager
    def around_backward(self, step: int, microbatch: int, *, last: bool) -> Iterator[None]:
        """One of them."""
        del microbatch, last
        with self._around(step, True):
            yield

    @contextmanager
    def _around(self, step: int, backward: bool) -> Iterator[None]:
        begin = Mark(self._cuda)
        yield
        self._marks.setdefault((step, backward), []).append((begin, Mark(self._cuda)))

    def by_kappa(self, case: Case) -> dict[str, tuple[float, float]]:
        """Medians, forward and backward, of the steps that count."""
        found: dict[str, tuple[float, float]] = {}
        for number, kappa in enumerate(case.kappas):
            steps = range(1 + number * case.steps, 1 + (number + 1) * case.steps)
            forward, backward = (
                [end.since(begin) for step in steps for begin, end in self._marks.get((step, kind), ())]
                for kind in (False, True)
            )
            found[f"{kappa:g}"] = (median(forward), median(backward))
        return found


class Mark:
    """A point of the device's stream."""

    def __init__(self, cuda: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if cuda else None
        self.time = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def since(self, other: Mark) -> float:
        """Seconds between them."""
        if self.event is not None and other.event is not None:
            return other.event.elapsed_time(self.event) / 1e3
        return self.time - other.time

    def wait(self) -> None:
        """Until the device has come to it."""
        if self.event is not None:
            self.event.synchronize()


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
