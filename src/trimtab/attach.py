"""Attaching to a job: builds the parts from the configuration, puts them together, and takes them away again.

This is the composition root: besides the commands, the only place that knows the engines.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from trimtab import config as configuration
from trimtab.config import Config
from trimtab.engines.when_imported import when_imported
from trimtab.record.clocks import CpuDevice, CudaDevice, Device, clock_domain, unix_offset_ns
from trimtab.record.collectives import Interception
from trimtab.record.faults import Fault, Faults, parse_fault
from trimtab.record.gc_pauses import GcWatch
from trimtab.record.injection import Injection
from trimtab.record.observe import Observer, Observers
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity, identify, make_header
from trimtab.record.spans import SpanObserver, set_recorder

if TYPE_CHECKING:
    from trimtab.engines.emulate import EmulatedDevice
    from trimtab.engines.plain import PlainEngine

_LOG = logging.getLogger("trimtab")


def attach(config: str | os.PathLike[str] | Config | None = None, **overrides: Any) -> Session:
    """Attach trimtab to this process, one rank of a job, and return the session.

    ``config`` is a TOML file or a :class:`Config`; the environment (``TRIMTAB_SECTION_KEY``) comes next, unless a
    Config is given, then ``overrides``: sections as mappings, ``attach(record={"dir": "out", "every_steps": 10})``.
    Call it before the model is built, best before the framework is imported. RANK and WORLD_SIZE are read from the
    environment, so torch.distributed need not be initialised.

    Nothing here fails the job: whatever is wrong is one line in the log (logger ``trimtab``), and the job goes on.
    Where trimtab is attached already, the existing session is returned and the arguments are ignored.
    """
    if _Current.session is not None:
        warn("already attached to this process; this call changes nothing")
        return _Current.session
    settled = _settle(config, overrides)
    session = _Current.session = Session(settled)
    return session


class _Current:
    """The one session of this process: hooks and patches reach the whole process, so it cannot have two."""

    session: Session | None = None


def warn(text: str) -> None:
    """Tell the user, in one line. Through logging: a filter that turns warnings into errors must not fail the job."""
    _LOG.warning("trimtab: %s", text.replace("\n", " "))


class Session:
    """trimtab in this process, from :func:`attach` until :meth:`detach`. Also a context manager that detaches."""

    def __init__(self, config: Config) -> None:
        """Use :func:`attach`."""
        self.config = config
        self.recorder: Recorder | None = None
        """None with ``record.enabled = false``."""
        self._undo = contextlib.ExitStack()
        self._observer: Observer = Observers(())
        self._injection: Injection | None = None
        self._megatron: Any = None
        self._plain: PlainEngine | None = None
        self._step = -1
        self._steps_told = False
        self._pid = os.getpid()
        try:
            self.identity = identify(os.environ, config.record.run_id)
        except ValueError as error:
            warn(f"{error}; not attached")
            self.identity = Identity(0, 1, "", 0)
            return
        try:
            self._compose()
        except Exception as error:
            warn(f"not attached ({type(error).__name__}: {error}); the job goes on without")
            self._undo.close()
        atexit.register(self.detach)

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.identity.world_size

    def step(self) -> None:
        """A training step begins here (and the one before ends): call it at the top of the loop.

        For plain PyTorch. Without it a step begins when the first optimizer has made one. Where Megatron-Core's
        schedule runs, it marks the steps, and this does nothing.
        """
        self._steps_told = True
        self._begin_step()

    def _begin_step(self) -> None:
        if self._megatron is None:
            self._step += 1
            self._observer.step_begin(self._step)
            if self._injection is not None:
                self._injection.forward_launch()

    def _optimizer_stepped(self) -> None:
        """The first optimizer of plain PyTorch has made a step."""
        if not self._steps_told:
            self._begin_step()

    def detach(self) -> None:
        """Finish the files and restore everything that was hooked or patched. May be called again."""
        if _Current.session is self:
            _Current.session = None
        atexit.unregister(self.detach)
        if os.getpid() != self._pid:  # a forked child, which must leave the parent's files alone
            self._undo.pop_all()
            return
        try:
            self._undo.close()
        except Exception as error:
            warn(f"detaching failed in part ({type(error).__name__}: {error})")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _compose(self) -> None:
        """Every part in its place; each says how it is taken out again."""
        config = self.config
        injection = self._injection = _injection(config.faults.inject, self.identity)
        emulated: EmulatedDevice | None = None
        if config.emulate.enabled:
            from trimtab.engines.emulate import EmulatedDevice

            emulated = EmulatedDevice(config.emulate, injection.factor if injection else None)
        device: Device = emulated or _real_device()
        if config.record.enabled:
            self.recorder = self._start_recorder(device)
        if injection is not None:
            injection.use(device)
            injection.announce(self.recorder)
        if not (self.recorder or injection or emulated):
            return
        observers = self._observers(device, emulated)
        self._observer = observers[0] if len(observers) == 1 else Observers(observers)
        self._intercept(device, emulated)
        self._hook_framework()

    def _observers(self, device: Device, emulated: EmulatedDevice | None) -> list[Observer]:
        """In the order in which they are told: who changes the time of a call before who measures it."""
        observers: list[Observer] = [part for part in (self._injection, emulated) if part is not None]
        if self.recorder is not None:
            spans = _SessionSpans(self.rank, self.recorder, device, emulated)
            observers.append(spans)
            self._undo.callback(spans.tell_oversubscribed)  # of the last step, before the recorder closes
        return observers

    def _start_recorder(self, device: Device) -> Recorder:
        record = self.config.record
        header = make_header(
            self.identity,
            device=device.kind,
            device_name=device.name,
            granularity=record.granularity,
            unix_offset_ns=unix_offset_ns(),
            clock_domain=clock_domain(),
        )
        recorder = Recorder(record, device, header)
        self._undo.callback(recorder.close)
        self._undo.callback(set_recorder, None)
        set_recorder(recorder)
        return recorder

    def _intercept(self, device: Device, emulated: EmulatedDevice | None) -> None:
        """Communication of torch.distributed, and pauses of the collector."""
        injection = self._injection
        interception = Interception(
            device,
            self.recorder,
            injection.link_delay if injection is not None else None,
            _all_of(part.blocked for part in (injection, emulated) if part is not None),
        )
        try:
            interception.install()
            self._undo.callback(interception.remove)
        except Exception as error:
            warn(f"communication is not recorded ({error})")
        watch = GcWatch(self.recorder, emulated.blocked if emulated is not None else None)
        watch.install()
        self._undo.callback(watch.remove)

    def _hook_framework(self) -> None:
        """Megatron-Core from its import on, or plain PyTorch."""
        name = self.config.engine.name
        if name != "torch":
            self._undo.callback(when_imported("megatron.core", self._hook_megatron))
            if name == "megatron":
                self._import_megatron()
        if self._megatron is None:
            self._hook_plain()

    def _import_megatron(self) -> None:
        try:
            importlib.import_module("megatron.core")
        except Exception as error:
            warn(f"engine.name is megatron, but Megatron-Core cannot be imported ({error})")

    def _hook_plain(self) -> None:
        from trimtab.engines.plain import PlainEngine

        engine = PlainEngine(self._observer, self.recorder, self._injection, self._optimizer_stepped)
        engine.install()
        self._plain = engine
        self._undo.callback(engine.remove)

    def _hook_megatron(self) -> None:
        """Megatron-Core has just been imported. Its optimizers are torch's, too, so the plain hooks go."""
        try:
            from trimtab.engines.megatron import MegatronEngine

            granularity = self.config.record.granularity
            if granularity == "step" and self.config.emulate.enabled:
                granularity = "layer"  # what is not hooked would not be padded
            engine = MegatronEngine(self._observer, self.recorder, granularity, self._injection)
            engine.install()
        except Exception as error:
            warn(f"Megatron-Core is not hooked ({error}); steps and layers are not recorded, communication is")
            return
        self._megatron = engine
        self._undo.callback(engine.remove)
        if self._plain is not None:
            self._plain.remove()


def _settle(config: str | os.PathLike[str] | Config | None, overrides: Mapping[str, Any]) -> Config:
    """The configuration from all its sources; what is wrong with them is told."""
    arguments = list(_as_arguments(overrides))
    if isinstance(config, Config):
        loaded = configuration.load(None, None, arguments, base=config)
    else:
        loaded = configuration.load(config, os.environ, arguments)
    for problem in loaded.problems:
        warn(problem)
    return loaded.config


def _as_arguments(overrides: Mapping[str, Any]) -> Iterator[str]:
    """``{"record": {"dir": "out"}}`` as ``record.dir=out``, so that mistakes are found and told in one place."""
    for section, values in overrides.items():
        if not isinstance(values, Mapping):
            yield f"{section}={values}"
            continue
        for key, value in values.items():
            for single in value if isinstance(value, (list, tuple)) else (value,):
                yield f"{section}.{key}={single}"


def _injection(specs: tuple[str, ...], identity: Identity) -> Injection | None:
    """The faults asked for, if there are any that make sense."""
    faults: list[Fault] = []
    for spec in specs:
        try:
            fault = parse_fault(spec)
        except ValueError as error:
            warn(f"{error}; it is not injected")
            continue
        if fault is not None:
            faults.append(fault)
    for problem in Faults(faults).problems(identity.world_size):
        warn(problem)
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


class _SessionSpans(SpanObserver):
    """Spans, and what is looked at once a step: is the rank still right, how is the emulated device getting on?"""

    def __init__(self, rank: int, recorder: Recorder, device: Device, emulated: EmulatedDevice | None) -> None:
        super().__init__(recorder, device)
        self._rank = rank
        self._emulated = emulated
        self._oversubscribed = 0
        self._checked = False

    def step_begin(self, step: int) -> None:
        """Compare and pass on."""
        if not self._checked and torch.distributed.is_initialized():
            self._checked = True
            actual = torch.distributed.get_rank()
            if actual != self._rank:
                warn(f"recording as rank {self._rank} what is rank {actual}; attach later, or set RANK and WORLD_SIZE")
        self.tell_oversubscribed()
        super().step_begin(step)

    def tell_oversubscribed(self) -> None:
        """Write into the rank's file how many targets were overrun so far, if that has changed."""
        if self._emulated is not None and self._emulated.oversubscribed != self._oversubscribed:
            self._oversubscribed = self._emulated.oversubscribed
            self._recorder.describe(oversubscribed=self._oversubscribed)


def _real_device() -> Device:
    """CUDA where there is any (asked of NVML, so that nothing is initialised that a later fork could not bear)."""
    if torch.cuda.device_count() > 0:
        return CudaDevice(torch.cuda)
    return CpuDevice()


class _CallableModule(ModuleType):
    """The package's function ``trimtab.attach`` and this module share a name, and importing the module rebinds it."""

    def __call__(self, config: str | os.PathLike[str] | Config | None = None, **overrides: Any) -> Session:
        return attach(config, **overrides)


sys.modules[__name__].__class__ = _CallableModule
