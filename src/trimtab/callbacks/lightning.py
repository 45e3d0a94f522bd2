"""Lightning: ``Trainer(callbacks=[TrimtabCallback("trimtab.toml")])``.

For ``lightning.pytorch`` and ``pytorch_lightning``, whichever the job has imported; import it before this module.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from trimtab.callbacks.held import HeldSession, careful
from trimtab.config import Config
from trimtab.events import Kind

_LIBRARIES: Final = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[type, ...]:
    """The class ``Callback`` of each library that is there: to one of them, the other's is no callback."""
    found = tuple(sys.modules[name].Callback for name in _LIBRARIES if name in sys.modules)
    if not found:
        raise ImportError("import lightning.pytorch (or pytorch_lightning) before trimtab.callbacks.lightning")
    return found


class TrimtabCallback(*_bases()):
    """Records the training of a ``Trainer.fit``: steps, layers, communication, validation, checkpoints."""

    def __init__(self, config: str | os.PathLike[str] | Config | None = None, **overrides: Any) -> None:
        """The arguments of :func:`trimtab.attach`. Where trimtab is attached already they are ignored, and the callback
        tells that session what it hears and leaves it attached."""
        self.held = HeldSession(config, overrides)
        self._optimizer_steps = -1
        self._restore: Callable[[], None] | None = None

    @careful
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Attach: the process has its rank by now, and the model is not wrapped yet."""
        del pl_module
        if stage != "fit":
            return
        self._optimizer_steps = -1
        self.held.attach()
        self._watch_checkpoints(trainer)

    @careful
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The model is as the strategy has made it."""
        del trainer
        if self.held.session is not None:
            self.held.session.watch(pl_module)

    @careful
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins with the first batch after an optimizer has made one; with accumulation it takes several."""
        del pl_module, batch, batch_idx
        if self.held.session is not None and trainer.global_step != self._optimizer_steps:
            self._optimizer_steps = trainer.global_step
            self.held.session.step()

    @careful
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluation begins."""
        del trainer, pl_module
        self.held.begin(Kind.EVALUATION)

    @careful
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Evaluation ends."""
        del trainer, pl_module
        self.held.end(Kind.EVALUATION, "validation")

    @careful
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning does not call :meth:`teardown` then."""
        del trainer, pl_module, exception
        self._let_go()

    @careful
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach."""
        del trainer, pl_module
        if stage == "fit":
            self._let_go()

    def _let_go(self) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
        self.held.detach()

    def _watch_checkpoints(self, trainer: Any) -> None:
        """There is a hook at the begin of a save and none at its end, so this trainer's method is wrapped."""
        held, save = self.held, trainer.save_checkpoint

        @functools.wraps(save)
        def timed(*args: Any, **keywords: Any) -> Any:
            held.begin(Kind.CHECKPOINT)
            try:
                return save(*args, **keywords)
            finally:
                held.end(Kind.CHECKPOINT, "save")

        def restore() -> None:
            if vars(trainer).get("save_checkpoint") is timed:
                del trainer.save_checkpoint

        trainer.save_checkpoint = timed
        self._restore = restore
