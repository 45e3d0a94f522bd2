"""Attaching to a job: the session of a process, what a job may ask of it, and which framework it hooks.

This is the composition root: besides the commands, the only place that knows the engines.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from trimtab import config as configuration
from trimtab.assembly import Assembly
from trimtab.config import Config, EngineConfig, Granularity, RecordConfig, ScopeConfig
from trimtab.engines.when_imported import when_imported
from trimtab.record.complain import OneFailure, failed, tell
from trimtab.record.injection.injection import Injection
from trimtab.record.observe import Observer, Observers
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity, identify
from trimtab.scope.job.session import ScopeSession

if TYPE_CHECKING:
    from trimtab.engines.plain import PlainEngine

_LOG = logging.getLogger("trimtab")
_LAST_STEP = 2**31 - 1


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
    try:
        settled = _settle(config, overrides)
    except Exception as error:
        failed(f"the configuration cannot be read ({type(error).__name__}: {error}); not attached")
        nothing = RecordConfig(enabled=False), ScopeConfig(enabled=False)
        settled = Config(record=nothing[0], scope=nothing[1], engine=EngineConfig(name="torch"))
    session = _Current.session = Session(settled)
    return session


class _Current:
    """The one session of this process: hooks and patches reach the whole process, so it cannot have two."""

    session: Session | None = None


def current_session() -> Session | None:
    """The session in force in this process, None where trimtab is not attached."""
    return _Current.session


def warn(text: str) -> None:
    """Tell the user, in one line. Through logging: a filter that turns warnings into errors must not fail the job."""
    tell(text)


class Session:
    """trimtab in this process, from :func:`attach` until :meth:`detach`. Also a context manager that detaches."""

    def __init__(self, config: Config) -> None:
        """Use :func:`attach`."""
        self.config = config
        self.recorder: Recorder | None = None
        """None with ``record.enabled = false``."""
        self.scope: ScopeSession | None = None
        """None with ``scope.enabled = false``."""
        self._undo = contextlib.ExitStack()
        self._observer: Observer = Observers(())
        self._injection: Injection | None = None
        self._megatron: Any = None
        self._plain: PlainEngine | None = None
        self._step = -1
        self._steps_told = False
        self._over = False
        """Detached, or telling a step has failed: nothing more is told."""
        self._pid = os.getpid()
        self._one_failure = OneFailure()
        _LOG.addFilter(self._one_failure)
        self.identity = Identity(0, 1, "", 0)
        try:
            self.identity = identify(os.environ, config.record.run_id)
            self._assemble()
            atexit.register(self._at_exit)
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            failed(f"not attached ({reason}); the job goes on without")
            self._take_back()

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.identity.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.identity.world_size

    def step(self, number: int | None = None) -> None:
        """A training step begins here (and the one before ends): call it at the top of the loop.

        ``number`` is that of the step, the same on all ranks, for a job that goes on from a checkpoint; by default it
        is one more than the last, from 0 on.

        For plain PyTorch. Without it a step begins when the first optimizer has made one. Where Megatron-Core's
        schedule runs, it marks the steps, and this does nothing but set the ``number`` of the next.
        """
        if self._over:
            return
        self._steps_told = True
        try:
            if number is not None and not 0 <= number <= _LAST_STEP:
                reason = f"not a number from 0 to {_LAST_STEP}"
                failed(f"step {number} is {reason}; this step is not told apart from the last")
                return
            self._begin_step(number)
        except Exception as error:
            self._over = True
            failed(f"the begin of a step failed ({type(error).__name__}: {error}); the job goes on")

    def watch(self, model: torch.nn.Module) -> None:
        """Record the layers of ``model`` from now on; call it when it is wrapped, sharded and compiled as it will run.

        For plain PyTorch. Needed only for layers in the very first step, and for a model that no optimizer trains
        (a frozen teacher): others are found when their optimizer has made its first step.
        """
        if self._plain is not None and self._megatron is None:
            self._plain.watch(model)

    def step_function(self, function: Callable[[], Any]) -> None:
        """How scope can run a training step of this job aside, for a paired run (docs/scope-perturb.md).

        For plain PyTorch. ``function()`` is one whole step without the call of :meth:`step`: it reads its batch, runs
        forward and backward and the optimizer, clears the gradients, and returns the loss or None. Whatever else it
        changes (schedulers, counters, what it prints) is not put back, so better leave that outside.
        """
        if self.scope is not None:
            self.scope.job.step_function = function

    def _begin_step(self, number: int | None = None) -> None:
        if self._megatron is not None:
            if number is not None:
                self._megatron.count_from(int(number))
        else:
            self._step = self._step + 1 if number is None else int(number)
            if self._plain is not None:
                self._plain.step_begin(self._step)
            self._observer.step_begin(self._step)
            if self.scope is not None:
                self.scope.step_begin(self._step)
            if self._injection is not None:
                self._injection.forward_launch()

    def _optimizer_stepped(self) -> None:
        """The first optimizer of plain PyTorch has made a step."""
        aside = self.scope is not None and self.scope.aside  # a paired run's steps are not the job's
        if not (self._steps_told or aside):
            self._begin_step()

    def detach(self) -> None:
        """Finish the files and restore everything that was hooked or patched. May be called again."""
        if _Current.session is self:
            _Current.session = None
        self._take_back()

    def _at_exit(self) -> None:
        """The interpreter ends; an impatient Ctrl-C ends this, too, without a word."""
        with contextlib.suppress(KeyboardInterrupt):
            self.detach()

    def _take_back(self) -> None:
        try:
            if os.getpid() == self._pid:
                self._undo.close()
            else:  # a forked child, which must leave the parent's files alone
                self._undo.pop_all()
            atexit.unregister(self._at_exit)
        except Exception as error:
            failed(f"detaching failed in part ({type(error).__name__}: {error})")
        finally:
            self._over = True
            _LOG.removeFilter(self._one_failure)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _assemble(self) -> None:
        parts = Assembly(self.config, self.identity, self._undo)
        try:
            working = parts.build()
        finally:
            self.recorder, self._injection, self._observer = parts.recorder, parts.injection, parts.observer
            self.scope = parts.scope
        if working:
            self._hook_framework()
        elif self.config.pipeline.policy != "off" and self.config.engine.name != "torch":
            self._undo.callback(when_imported("megatron.core", self._hook_pipeline))

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

        engine = PlainEngine(
            self._observer,
            self.recorder,
            self._injection,
            self._optimizer_stepped,
            self._granularity(),
            self.scope,
        )
        self._undo.callback(engine.remove)
        engine.install()
        self._plain = engine

    def _granularity(self) -> Granularity:
        """What is hooked; the recorder takes no more than it was asked for."""
        granularity = self.config.record.granularity
        if self.recorder is None and self._injection is None and not self.config.emulate.enabled:
            return "step"  # for scope alone
        if granularity == "step" and (self.config.emulate.enabled or self._injection is not None):
            return "layer"  # what is not hooked would not be padded, and not slowed
        return granularity

    def _hook_megatron(self) -> None:
        """Megatron-Core has just been imported. Its optimizers are torch's, too, so the plain hooks go."""
        self._hook_pipeline()  # before the engine, which watches whatever schedule is in place
        try:
            from trimtab.engines.megatron import MegatronEngine

            engine = MegatronEngine(self._observer, self.recorder, self._granularity(), self._injection, self.scope)
            engine.install()
        except Exception as error:
            failed(f"Megatron-Core is not hooked ({error}); steps and layers are not recorded, communication is")
            return
        self._megatron = engine
        self._undo.callback(engine.remove)
        if self._plain is not None:
            self._plain.remove()

    def _hook_pipeline(self) -> None:
        """Megatron-Core has just been imported: its pipelines are to run by a policy of ours, if one is chosen."""
        if self.config.pipeline.policy == "off":
            return
        try:
            from trimtab.engines.megatron_pipeline import MegatronPipeline

            pipeline = MegatronPipeline(self.config)
            pipeline.install()
        except Exception as error:
            failed(f"Megatron-Core's schedules are left as they are ({error}); [pipeline] has no effect")
            return
        self._undo.callback(pipeline.remove)


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
            if isinstance(value, Mapping):
                yield from _as_arguments({f"{section}.{key}": value})
                continue
            for single in value if isinstance(value, (list, tuple)) else (value,):
                yield f"{section}.{key}={single}"


class _CallableModule(ModuleType):
    """The package's function ``trimtab.attach`` and this module share a name, and importing the module rebinds it."""

    def __call__(self, config: str | os.PathLike[str] | Config | None = None, **overrides: Any) -> Session:
        return attach(config, **overrides)


sys.modules[__name__].__class__ = _CallableModule
