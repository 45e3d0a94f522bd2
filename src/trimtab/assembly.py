"""What a session is made of: builds device, recorder, counters, windows and interception from the configuration.

Every part that goes into the process says how it is taken out again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from trimtab.config import Config
from trimtab.engines.graphs import GraphSpans
from trimtab.record.clocks import CpuDevice, DeferredDevice, Device, clock_domain, unix_offset_ns
from trimtab.record.communication import native
from trimtab.record.communication.collectives import Interception
from trimtab.record.communication.native import Native
from trimtab.record.compiled import cache_directory
from trimtab.record.complain import failed, tell
from trimtab.record.counters.gpu import CudaReadings
from trimtab.record.counters.sampler import Sampler, start_sampler
from trimtab.record.cuda import CudaDevice, current_gpu
from trimtab.record.gc_pauses import GcWatch
from trimtab.record.injection.faults import Fault, Faults, parse_fault
from trimtab.record.injection.injection import Injection
from trimtab.record.live.live import Live, start_live
from trimtab.record.observe import Observer, Observers
from trimtab.record.pipeline import clear_parts, set_arrived, set_parts
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity, directory_of, make_header
from trimtab.record.spans import SpanObserver, set_recorder
from trimtab.record.windows.window import Windows, start_windows
from trimtab.scope.job.session import ScopeSession

if TYPE_CHECKING:
    from trimtab.engines.emulate import EmulatedDevice


class Assembly:
    """The parts of one session; what takes them out again is left with ``undo``."""

    def __init__(self, config: Config, identity: Identity, undo: contextlib.ExitStack) -> None:
        self.recorder: Recorder | None = None
        self.injection: Injection | None = None
        self.observer: Observer = Observers(())
        """Whom engines are to tell what runs."""
        self.windows: Windows | None = None
        self.live: Live | None = None
        self.scope: ScopeSession | None = None
        self._sampler: Sampler | None = None
        self._interception: Interception | None = None
        self._native: Native | None = None
        self._config = config
        self._identity = identity
        self._undo = undo

    def build(self) -> bool:
        """Every part in its place; False where there is nothing to do."""
        config = self._config
        injection = self.injection = _injection(config.faults.inject, self._identity)
        emulated: EmulatedDevice | None = None
        if config.emulate.enabled:
            from trimtab.engines.emulate import EmulatedDevice

            emulated = EmulatedDevice(config.emulate, injection.factor if injection else None)
        if config.record.enabled or injection is not None or emulated is not None:
            self._native = self._compiled()
        device: Device = emulated or _real_device(self._native)
        if config.record.enabled:
            self.recorder = self._start_recorder(device)
        if injection is not None:
            injection.use(device)
            injection.announce(self.recorder)
        self._start_scope()
        if not (self.recorder or injection or emulated):
            if self.scope is not None and config.scope.allow_perturb:
                self._intercept(device, None)
            return self.scope is not None
        observers = self._observers(device, emulated)
        self.observer = observers[0] if len(observers) == 1 else Observers(observers)
        mark = getattr(device, "position", device.mark)
        set_parts(self.recorder, self.observer, mark, self._identity.world_size)
        self._undo.callback(clear_parts)
        if self.scope is not None and config.scope.allow_perturb:
            from trimtab.scope.perturb.communication import arrivals

            set_arrived(arrivals(self.scope.job))
        self._intercept(device, emulated)
        if isinstance(device, CudaDevice):
            graphs = GraphSpans(self.observer, self.recorder)
            self._undo.callback(graphs.remove)
            graphs.install()
        self._start_live(isinstance(device, DeferredDevice))
        return True

    def _start_scope(self) -> None:
        """Look for whoever wants to see into the model."""
        if not self._config.scope.enabled:
            return
        writer = self.recorder.writer if self.recorder is not None else None
        directory = writer.path.parent if writer is not None else directory_of(self._config.record.dir)
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        told = writer is not None and self._config.live.enabled  # what goes wrong with the hub
        try:
            self.scope = ScopeSession(self._config, self._identity, directory, speaks=first and not told)
            self._undo.callback(self.scope.close)
            self.scope.start()
        except Exception as error:
            self.scope = None
            failed(f"nobody can look into the model ({type(error).__name__}: {error})")

    def _observers(self, device: Device, emulated: EmulatedDevice | None) -> list[Observer]:
        """In the order in which they are told: who changes the time of a call before who measures it."""
        observers: list[Observer] = [part for part in (self.injection, emulated) if part is not None]
        if self.recorder is not None:
            spans = StepSpans(self._identity.rank, self.recorder, device, emulated)
            observers.append(spans)
            self._undo.callback(spans.tell_oversubscribed)  # of the last step, before the recorder closes
            self._start_windows(self.recorder, spans)
        return observers

    def _start_recorder(self, device: Device) -> Recorder:
        record = self._config.record
        header = make_header(
            self._identity,
            device=device.kind,
            device_name=device.name,
            granularity=record.granularity,
            unix_offset_ns=unix_offset_ns(),
            clock_domain=clock_domain(),
        )
        recorder = Recorder(record, device, header, parts=self._native)
        self._undo.callback(self._end_live)  # after the last steps have been written
        self._undo.callback(recorder.close)
        self._undo.callback(set_recorder, None)
        set_recorder(recorder)
        self._start_counters(recorder, device)
        return recorder

    def _start_counters(self, recorder: Recorder, device: Device) -> None:
        """Counters of the host, and of the GPU if there is one."""
        seconds = self._config.record.counter_seconds
        if seconds <= 0 or not recorder.open:
            return
        gpu = CudaReadings(torch.cuda, lambda: device.index) if isinstance(device, CudaDevice) else None
        try:
            sampler = start_sampler(recorder, seconds, gpu)
        except Exception as error:
            failed(f"counters are not sampled ({error})")
            return
        self._undo.callback(sampler.stop)
        self._sampler = sampler

    def _start_windows(self, recorder: Recorder, spans: StepSpans) -> None:
        """Windows of torch.profiler, at step boundaries."""
        try:
            self.windows = spans.windows = start_windows(self._config.record, self._identity, recorder, spans)
        except Exception as error:
            failed(f"there will be no profiler windows ({error})")
        if self.windows is not None:
            self._undo.callback(self.windows.close)

    def _intercept(self, device: Device, emulated: EmulatedDevice | None) -> None:
        """Communication of torch.distributed, and pauses of the collector."""
        injection = self.injection
        interception = Interception(
            device,
            self.recorder,
            injection.link_delay if injection is not None else None,
            _all_of(part.blocked for part in (injection, emulated) if part is not None),
            # What disturbs a communication is in Python.
            native=None if self._config.scope.allow_perturb else self._native,
        )
        try:
            interception.install()
            self._undo.callback(interception.remove)
            self._interception = interception
            if self.scope is not None:
                self.scope.job.interception = interception
            if self.windows is not None:
                self.windows.annotations.interception = interception
        except Exception as error:
            failed(f"communication is not recorded ({error})")
        watch = GcWatch(self.recorder, emulated.blocked if emulated is not None else None)
        watch.install()
        self._undo.callback(watch.remove)

    def _start_live(self, deferred: bool) -> None:
        """Tell a hub how the steps go, whenever there is one."""
        if self.recorder is None:
            return
        parts = (self._config, self._identity, self.recorder, self._interception)
        try:
            self.live = start_live(*parts, windows=self.windows, sampler=self._sampler, deferred=deferred)
        except Exception as error:
            failed(f"nobody is told of the steps while the job runs ({error})")

    def _end_live(self) -> None:
        if self.live is not None:
            self.live.close()

    def _compiled(self) -> Native | None:
        """Compiled kernels and parts of the recorder, if there are any; else they are compiled for the next run."""
        if not self._config.record.native:
            return None
        try:
            cache = cache_directory(os.environ)
            module = native.load(cache)
            if module is None and cache is not None and os.environ.get("LOCAL_RANK", "0") == "0":
                build = native.BackgroundBuild(cache)
                self._undo.callback(build.stop)
            return module
        except Exception as error:
            failed(f"communication is intercepted in Python, there are no compiled kernels ({error})")
            return None


def _injection(specs: tuple[str, ...], identity: Identity) -> Injection | None:
    """The faults asked for, if there are any that make sense."""
    faults: list[Fault] = []
    for spec in specs:
        try:
            fault = parse_fault(spec)
        except ValueError as error:
            tell(f"{error}; it is not injected")
            continue
        if fault is not None:
            faults.append(fault)
    for problem in Faults(faults).problems(identity.world_size):
        tell(problem)
    return Injection(Faults(faults), identity.rank) if faults else None


def _all_of(listeners: Iterable[Callable[[int, int], None]]) -> Callable[[int, int], None] | None:
    """One function that calls all; None if there are none."""
    every = tuple(listeners)
    if len(every) < 2:
        return every[0] if every else None

    def tell(start: int, end: int) -> None:
        for listener in every:
            listener(start, end)

    return tell


def _real_device(native: Native | None) -> Device:
    """CUDA where there is any (asked of NVML, so that nothing is initialised that a later fork could not bear)."""
    if torch.cuda.device_count() > 0:
        return current_gpu(native)
    return CpuDevice()


class StepSpans(SpanObserver):
    """Spans, and what is looked at once a step: is the rank still right, how is the emulated device getting on?"""

    def __init__(self, rank: int, recorder: Recorder, device: Device, emulated: EmulatedDevice | None) -> None:
        super().__init__(recorder, device)
        self._rank = rank
        self._emulated = emulated
        self._device = device
        self._named = bool(device.name)
        self._oversubscribed = 0
        self._checked = False
        self.windows: Windows | None = None

    def step_begin(self, step: int) -> None:
        """Compare and pass on."""
        if not self._checked and torch.distributed.is_initialized():
            self._checked = True
            actual = torch.distributed.get_rank()
            if actual != self._rank:
                tell(f"recording as rank {self._rank} what is rank {actual}; attach later, or set RANK and WORLD_SIZE")
        if not self._named:
            self._tell_name()
        self.tell_oversubscribed()
        windows = self.windows
        if windows is None:
            super().step_begin(step)
        else:  # what opening and closing cost belongs to the window's own steps
            windows.before_step(step)
            super().step_begin(step)
            windows.step_begun(step)

    def _tell_name(self) -> None:
        """A GPU's name is known once the job uses it, which may be after the file has begun."""
        name = self._device.name
        if name:
            self._named = True
            self._recorder.describe(device_name=name)

    def tell_oversubscribed(self) -> None:
        """Write into the rank's file how many targets were overrun so far, if that has changed."""
        if self._emulated is not None and self._emulated.oversubscribed != self._oversubscribed:
            self._oversubscribed = self._emulated.oversubscribed
            self._recorder.describe(oversubscribed=self._oversubscribed)
