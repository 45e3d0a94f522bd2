"""One process of ``benchmarks/fbd_gpu.py``: a device that trains in the ordinary way, runs forwards, or backwards."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from multi_gpu_part import tell
from pipeline_gpu_model import Model, Sizes, loss_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from trimtab.config import load
from trimtab.fbd.execute.backward import BackwardRank
from trimtab.fbd.execute.forward import ForwardRank
from trimtab.fbd.execute.program import Program, Tensors
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.random_states import RandomStates
from trimtab.fbd.split.skeleton import shipment_of
from trimtab.transport.opening import group_exchange, open_transport

PATIENCE = 40.0
_BATCHES = 8
_CYCLES = 20_000_000
"""Of the busy wait by which cycles are turned into seconds."""


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

    @property
    def world(self) -> int:
        """Processes."""
        return self.forwards + self.backwards

    def __str__(self) -> str:
        if not self.forwards:
            return self.way
        share = "" if self.helped == 1 else f", {self.helped:.0%} of the forwards"
        return f"{self.way} {self.forwards}:{self.backwards}{share}"


@dataclass(frozen=True)
class Told:
    """What a process is told."""

    device: str
    sizes: Sizes
    case: Case
    kappas: tuple[float, ...]
    steps: int
    """Measured ones at each kappa."""
    microbatches: int
    """Of each training device in a step."""
    transport: str = "ucx"
    gpus: tuple[int, ...] = ()
    """That of each process."""
    forward: float = 0.0
    """Seconds of a forward by which waits are set; 0: as measured here."""
    ahead: int = 2
    exact: bool = False
    """With deterministic kernels, so that losses can be compared bit for bit."""

    @classmethod
    def read(cls, text: str) -> Told:
        """The way back from JSON."""
        told = json.loads(text)
        sizes = Sizes(**{**told.pop("sizes"), "microbatches": ()})
        lists = {name: tuple(told.pop(name)) for name in ("kappas", "gpus")}
        return cls(sizes=sizes, case=Case(**told.pop("case")), **lists, **told)


@dataclass
class Exposure:
    """Emulated tensor parallel communication that no compute hides: the device's stream is blocked for so long."""

    cuda: bool
    cycles: float = 1.0
    """A second."""
    forward: float = 0.0
    """Seconds in each layer's forward, and in its backward."""
    backward: float = 0.0
    checkpoint: bool = False

    def wait(self, seconds: float) -> None:
        """On the device; on a CPU here."""
        if seconds <= 0:
            return
        if self.cuda:
            torch.cuda._sleep(int(seconds * self.cycles))
        else:
            time.sleep(seconds)


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


@dataclass
class Measured:
    """What a process tells."""

    role: str = ""
    ends: list[tuple[float, float]] = field(default_factory=list)
    """Kappa and the end of each step, by the host's monotonic clock; the first step does not count."""
    peak: int = 0
    forward: float = 0.0
    """Seconds of a forward and of a backward of a microbatch, without waits, while all processes do the same."""
    backward: float = 0.0
    shipped: int = 0
    """Bytes of a microbatch's shipment."""
    losses: list[float] = field(default_factory=list)
    """Of the last step."""
    waited: float = 0.0
    """Seconds that the forward device's host spent in its last step."""


class Process:
    """One of them."""

    def __init__(self, rank: int, told: Told) -> None:
        self.rank, self.told = rank, told
        self.cuda = told.device == "cuda"
        self.device = torch.device("cuda", told.gpus[rank]) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        model = Model(told.sizes, 1, self.device)
        model.fill((0,))
        (self.module,) = model.parts((0,))
        self.exposure = Exposure(self.cuda)
        self.module.layers = nn.ModuleList(ExposedLayer(one, self.exposure) for one in self.module.layers)
        self.batches = _batches(told.sizes, self.cuda)
        self.measured = Measured()

    def stage(self, module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
        """A microbatch's loss, of its part of the step's."""
        del inputs  # of a stage before, and there is none
        tokens, targets = (one.to(self.device, non_blocking=True) for one in batch)
        return (loss_of(module(tokens), targets) / self.told.microbatches,)

    def batch(self, step: int, cell: int, microbatch: int) -> Tensors:
        """Tokens on the host, which to compare takes no wait for the device."""
        del cell
        return self.batches[(step * 7 + microbatch) % _BATCHES]

    def calibrate(self) -> None:
        """Forward and backward while all processes do the same, and the speed of the busy wait."""
        told, cuda = self.told, self.cuda
        forward, backward = [], []
        for number in range(5):
            if number == 1:
                dist.barrier()
            marks = [Mark(cuda)]
            (loss,) = self.stage(self.module, (), self.batch(0, 0, number))
            marks.append(Mark(cuda))
            loss.backward()
            marks.append(Mark(cuda))
            self.rest()
            if number > 1:
                forward.append(marks[1].since(marks[0]))
                backward.append(marks[2].since(marks[1]))
        held = [*self.module.parameters(), *self.module.buffers()]
        batch = self.batch(0, 0, 0)
        _, shipment = shipment_of(lambda: self.stage(self.module, (), batch), Places(held, batch))
        self.measured.shipped = shipment.manifest.bytes
        self.module.zero_grad()
        if cuda:
            marks = [Mark(cuda)]
            torch.cuda._sleep(_CYCLES)
            marks.append(Mark(cuda))
            self.rest()
            self.exposure.cycles = _CYCLES / marks[1].since(marks[0])
        self.measured.forward, self.measured.backward = _median(forward), _median(backward)
        everybody: list[Any] = [None] * told.case.world
        dist.all_gather_object(everybody, self.measured.forward)
        self.forward = told.forward or sum(everybody) / len(everybody)

    def expose(self, kappa: float, *, forward: bool) -> None:
        """Waits of kappa forwards, spread over the layers."""
        each = kappa * self.forward / self.told.sizes.layers
        self.exposure.forward, self.exposure.backward = each * forward, each

    def rest(self) -> None:
        """Until the device is."""
        if self.cuda:
            torch.cuda.synchronize()

    def kappas(self) -> Iterator[tuple[int, float]]:
        """Of each step, its number and kappa; the first is there to warm up."""
        wanted = [self.told.kappas[0], *(one for one in self.told.kappas for _ in range(self.told.steps))]
        return enumerate(wanted)

    def run(self) -> Measured:
        """All steps."""
        self.calibrate()
        if self.cuda:
            self.rest()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        if self.told.case.forwards:
            self._apart()
        else:
            self._ordinary()
        self.measured.peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        return self.measured

    def _finish(self) -> Callable[[nn.Module], None]:
        """The optimizer's step. Gradients are not reduced over replicas: that is the same for every way."""
        optimizer = torch.optim.AdamW(self.module.parameters(), 1e-5, fused=self.cuda)

        def finish(_: nn.Module) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return finish

    def _ordinary(self) -> None:
        self.measured.role = "ordinary"
        self.exposure.checkpoint = self.told.case.way == "recompute"
        finish = self._finish()
        for step, kappa in self.kappas():
            self.expose(kappa, forward=True)
            losses: list[Tensor] = []
            for number in range(self.told.microbatches):
                (loss,) = self.stage(self.module, (), self.batch(step, 0, number))
                loss.backward()
                losses.append(loss.detach())
            finish(self.module)
            self._ended(kappa)
            self.measured.losses = torch.stack(losses).tolist()

    def _ended(self, kappa: float) -> None:
        self.rest()
        self.measured.ends.append((kappa, time.monotonic()))

    def _apart(self) -> None:
        case = self.told.case
        layout = Layout(1, forwards=case.forwards, backwards=case.backwards)
        settings = load(None, os.environ).config.transport
        transport = open_transport(
            self.told.transport,  # type: ignore[arg-type]
            self.rank,
            case.world,
            group_exchange(),
            settings,
            self.device,
        )
        random = RandomStates([self.device.index] if self.cuda else [])
        more: dict[str, Any] = {} if case.helped == 1 else {"helped": case.helped}
        program = Program(
            layout,
            self.told.microbatches * case.backwards,
            self.stage,
            self.batch,
            "ship" if case.way == "ship" else "recompute",
            ahead=self.told.ahead,
            patience=PATIENCE,
            random=random,
            **more,
        )
        (rank,) = program.placement.hosted(self.rank)
        self.measured.role = str(rank.role)
        if rank.role is Role.FORWARD:
            self._forwards(ForwardRank(program, rank, self.module, transport))
        else:
            self._backwards(program, rank, transport)
        transport.drain(PATIENCE)
        dist.barrier()
        transport.close()

    def _forwards(self, worker: ForwardRank) -> None:
        """Nothing is exposed: these are not divided over devices."""
        for step, kappa in self.kappas():
            self.expose(kappa, forward=False)
            began = time.monotonic()
            losses = worker.step(step)
            self.measured.waited = time.monotonic() - began
            self.measured.losses = [float(one) for one in losses]

    def _backwards(self, program: Program, rank: VirtualRank, transport: Any) -> None:
        """Where the forward is run again it is one of a tensor parallel group, as the backward is."""
        worker = BackwardRank(program, rank, self.module, self._finish(), transport)
        last = self.told.steps * len(self.told.kappas)
        for step, kappa in self.kappas():
            self.expose(kappa, forward=True)
            losses = worker.step(step, last=step == last)
            self._ended(kappa)
            self.measured.losses = torch.stack(losses).tolist()


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


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _batches(sizes: Sizes, pinned: bool) -> list[Tensors]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(sizes.vocabulary, (_BATCHES, 1, sizes.sequence + 1), generator=generator)
    pairs = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]
    return [(a.pin_memory(), b.pin_memory()) if pinned else (a, b) for a, b in pairs]


@contextmanager
def joined(rank: int, world: int) -> Iterator[None]:
    """A member of the processes' group, which only they talk over that have nothing to do."""
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Told by the first argument."""
    told = Told.read(sys.argv[1])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(told.exact)
    backend = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if told.device == "cuda" else nullcontext()
    with joined(rank, told.case.world), backend:
        tell(vars(Process(rank, told).run()))


if __name__ == "__main__":
    main()
