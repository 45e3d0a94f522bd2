"""One process of ``benchmarks/fbd_gpu.py``: a device that trains in the ordinary way, runs forwards, or backwards."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from fbd_gpu_parts import Case, ExposedLayer, Exposure, Mark, Measured, Passes, SlowerLink, Told, median
from multi_gpu_part import tell
from pipeline_gpu_model import Model, Sizes, loss_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.config import load
from trimtab.fbd.execute.backward import BackwardRank
from trimtab.fbd.execute.forward import ForwardRank
from trimtab.fbd.execute.program import Program, Tensors
from trimtab.fbd.ranks import Layout, Role
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.random_states import RandomStates
from trimtab.fbd.split.skeleton import shipment_of
from trimtab.transport.opening import group_exchange, open_transport

PATIENCE = 40.0
_BATCHES = 8


class Process:
    """One of them."""

    def __init__(self, rank: int, told: Told, store: dist.TCPStore) -> None:
        self.rank, self.told, self.store = rank, told, store
        self.cuda = told.device == "cuda"
        self.device = torch.device("cuda", told.gpus[rank]) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.model = Model(told.sizes, 1, self.device)
        self.model.fill((0,))
        (self.module,) = self.model.parts((0,))
        self.exposure = Exposure(self.device, idle=told.idle)
        self.module.layers = nn.ModuleList(ExposedLayer(one, self.exposure) for one in self.module.layers)
        self.microbatches = told.microbatches
        self.batches = _batches(told.sizes, self.cuda)
        self.alone: dict[str, float] = {}
        """Of a microbatch while all processes do the same, without waits."""
        self.over = 0
        """Processes that have done their part of a case, once this one is over."""

    def stage(self, module: nn.Module, inputs: Tensors, batch: Tensors) -> Tensors:
        """A microbatch's loss, of its part of the step's."""
        del inputs  # of a stage before, and there is none
        tokens, targets = (one.to(self.device, non_blocking=True) for one in batch)
        return (loss_of(module(tokens), targets) / self.microbatches,)

    def batch(self, step: int, cell: int, microbatch: int) -> Tensors:
        """Tokens on the host, which to compare takes no wait for the device."""
        del cell
        return self.batches[(step * 7 + microbatch) % _BATCHES]

    def calibrate(self) -> None:
        """Forward and backward while all processes do the same, and the speed of the busy wait."""
        cuda = self.cuda
        forward, backward = [], []
        for number in range(10):
            if number == 1:
                dist.barrier()
            marks = [Mark(cuda)]
            (loss,) = self.stage(self.module, (), self.batch(0, 0, number))
            marks.append(Mark(cuda))
            loss.backward()
            marks.append(Mark(cuda))
            self.rest()
            if number > 3:
                forward.append(marks[1].since(marks[0]))
                backward.append(marks[2].since(marks[1]))
        held = [*self.module.parameters(), *self.module.buffers()]
        batch = self.batch(0, 0, 0)
        _, shipment = shipment_of(lambda: self.stage(self.module, (), batch), Places(held, batch))
        self.alone = {"forward": median(forward), "backward": median(backward)}
        self.alone["shipped"] = shipment.manifest.bytes
        self.alone["weights"] = sum(one.numel() * one.element_size() for one in held)
        self.module.zero_grad()
        if cuda:
            self.alone["multiprocessors"] = torch.cuda.get_device_properties(self.device).multi_processor_count
        dist.barrier()
        self.exposure.calibrate()
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self.alone["forward"])
        self.forward = self.alone["unit"] = sum(everybody) / len(everybody)

    def expose(self, kappa: float, *, forward: bool) -> None:
        """Waits of kappa forwards, spread over the layers."""
        each = kappa * self.forward / self.told.sizes.layers
        self.exposure.forward, self.exposure.backward = each * forward, each

    def rest(self) -> None:
        """Until the device is."""
        if self.cuda:
            torch.cuda.synchronize()

    def run(self) -> Iterator[Measured]:
        """All cases, one after the other."""
        self.calibrate()
        for case in self.told.cases:
            self.measured = Measured()
            self.microbatches = case.microbatches or self.told.microbatches
            self.exposure.checkpoint = False
            if self.told.exact:
                self._begin_anew()
            gc.collect()
            if self.cuda:
                self.rest()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            group = dist.new_group(list(range(case.world)))
            self.over += case.world
            dist.barrier()
            if self.rank >= case.world:
                self._fill(case)
            elif case.forwards:
                self._apart(case, group)
            else:
                self._ordinary(case)
            if self.rank < case.world:
                self._over()
            self.measured.peak = torch.cuda.max_memory_allocated() if self.cuda else 0
            self.module.zero_grad()
            dist.barrier()
            yield self.measured

    def _begin_anew(self) -> None:
        """With the weights of the first case."""
        self.model.fill((0,))
        for one in self.module.parameters():
            if one.ndim == 1:
                nn.init.ones_(one)

    def _over(self) -> None:
        """The others need not go on."""
        self.store.add("over", 1)

    def _kappas(self, case: Case) -> Iterator[tuple[int, float]]:
        """Of each step, its number and kappa; the first is there to warm up."""
        wanted = [case.kappas[0], *(one for one in case.kappas for _ in range(case.steps))]
        for step, kappa in enumerate(wanted):
            if self.rank == 0:
                self.store.set("kappa", str(kappa))
            yield step, kappa

    def _fill(self, case: Case) -> None:
        """Keep the device as busy as it is in ordinary training, until all that are measured are done."""
        self.measured.role = case.fill
        under_way = deque[Mark]()
        number = 0
        while self.store.add("over", 0) < self.over:
            if case.fill == "nothing":
                time.sleep(0.02)
                continue
            self.expose(float(self.store.get("kappa")), forward=True)
            with nullcontext() if case.fill == "trains" else torch.no_grad():
                (loss,) = self.stage(self.module, (), self.batch(0, 0, number))
            if case.fill == "trains":
                loss.backward()
            number += 1
            under_way.append(Mark(self.cuda))
            if len(under_way) > 2:
                under_way.popleft().wait()
        self.rest()

    def _finish(self) -> Callable[[nn.Module], None]:
        """The optimizer's step. Gradients are not reduced over replicas: that is the same for every way."""
        optimizer = torch.optim.AdamW(self.module.parameters(), 1e-5, fused=self.cuda)

        def finish(_: nn.Module) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return finish

    def _ordinary(self, case: Case) -> None:
        self.measured.role = "ordinary"
        self.exposure.checkpoint = case.way == "recompute"
        finish = self._finish()
        passes = Passes(self.cuda)
        for step, kappa in self._kappas(case):
            self.expose(kappa, forward=True)
            losses: list[Tensor] = []
            for number in range(self.microbatches):
                with passes.around_forward(step, number):
                    (loss,) = self.stage(self.module, (), self.batch(step, 0, number))
                with passes.around_backward(step, number, last=False):
                    loss.backward()
                losses.append(loss.detach())
            finish(self.module)
            self._ended(kappa)
            self.measured.losses = torch.stack(losses).tolist()
        self.measured.passes = passes.by_kappa(case)

    def _ended(self, kappa: float) -> None:
        self.rest()
        self.measured.ends.append((kappa, time.monotonic()))

    def _apart(self, case: Case, group: Any) -> None:
        layout = Layout(1, forwards=case.forwards, backwards=case.backwards)
        settings = load(None, os.environ).config.transport
        transport: Any = open_transport(
            self.told.transport,  # type: ignore[arg-type]
            self.rank,
            case.world,
            group_exchange(group),
            settings,
            self.device,
        )
        if case.link:
            transport = SlowerLink(transport, case.link)
        program = Program(
            layout,
            self.microbatches * case.backwards,
            self.stage,
            self.batch,
            "ship" if case.way == "ship" else "recompute",
            ahead=case.ahead or None,
            patience=PATIENCE,
            random=RandomStates([self.device.index] if self.cuda else []),
            helped=case.helped,
            hooks=(passes := Passes(self.cuda)),
        )
        (rank,) = program.placement.hosted(self.rank)
        self.measured.role = str(rank.role)
        if rank.role is Role.FORWARD:
            self._forwards(case, ForwardRank(program, rank, self.module, transport))
            self.measured.rate = max((one.bytes_per_s for one in transport.links().values()), default=0.0)
        else:
            self._backwards(case, BackwardRank(program, rank, self.module, self._finish(), transport))
        self.measured.passes = passes.by_kappa(case)
        transport.drain(PATIENCE)
        dist.barrier(group)
        transport.close()

    def _forwards(self, case: Case, worker: ForwardRank) -> None:
        """Nothing is exposed: these are not divided over devices."""
        for step, kappa in self._kappas(case):
            self.expose(kappa, forward=False)
            losses = worker.step(step)
            self.measured.losses = [float(one) for one in losses]

    def _backwards(self, case: Case, worker: BackwardRank) -> None:
        """Where the forward is run again it is one of a tensor parallel group, as the backward is."""
        last = case.steps * len(case.kappas)
        for step, kappa in self._kappas(case):
            self.expose(kappa, forward=True)
            losses = worker.step(step, last=step == last)
            self._ended(kappa)
            self.measured.losses = torch.stack(losses).tolist()


def _batches(sizes: Sizes, pinned: bool) -> list[Tensors]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(sizes.vocabulary, (_BATCHES, 1, sizes.sequence + 1), generator=generator)
    pairs = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]
    return [(a.pin_memory(), b.pin_memory()) if pinned else (a, b) for a, b in pairs]


@contextmanager
def joined(rank: int, world: int) -> Iterator[dist.TCPStore]:
    """A member of the processes' group, which only they talk over that have nothing to do; and its store."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Told by the first argument."""
    told = Told.read(sys.argv[1])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(told.exact)
    backend = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if told.device == "cuda" else nullcontext()
    with joined(rank, len(told.gpus)) as store, backend:
        process = Process(rank, told, store)
        cases: list[dict[str, Any]] = []
        for measured in process.run():
            cases.append(asdict(measured))
            tell({"alone": process.alone, "cases": cases})


if __name__ == "__main__":
    main()
