"""A model chunk of plain PyTorch: any module, and at the last position a loss function."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.torch_version import TorchVersion

from trimtab.pipeline.execute.randomness import Randomness
from trimtab.pipeline.execute.wgrad import Later, Splitter

Tensors = tuple[Tensor, ...]
LossFunction = Callable[[Any, Any], Tensor]
"""Of the last chunk's output and a microbatch's target; a scalar."""


Root = GradientEdge | Tensor
_EDGES: Final[bool] = TorchVersion(torch.__version__) >= "2.7"
"""A backward pass may begin at an edge of the graph, without the tensor there."""


class _Kept(NamedTuple):
    """Between the forward and the backward of a microbatch."""

    leaves: Tensors
    """Inputs that get a gradient."""
    roots: tuple[Root | None, ...]
    """Of the outputs that get one; the outputs themselves are free to go when they have been sent."""
    later: Later


class PlainChunk:
    """Runs a module for one position of the model.

    A module takes the tensors of the position before as arguments (at position 0 a microbatch of the inputs), and
    returns a tensor or several. Those with a floating dtype get gradients.

    Args:
        module: The chunk. It is changed only between :meth:`begin` and :meth:`end`, where its backward is split.
        position: Of the chunk in the model.
        randomness: Random numbers for its forwards.
        loss_function: At the last position, and only there.
        tied: Entered around each backward (:class:`~trimtab.pipeline.execute.shared.Ties`).
        measures: Measure what a microbatch keeps.

    Attributes:
        losses: By microbatch, of the last position in the iteration, without history.
        measured: Bytes that the first microbatch kept for its backward, or from B to W if that is more; None: unknown.
    """

    def __init__(
        self,
        module: nn.Module,
        position: int,
        randomness: Randomness,
        loss_function: LossFunction | None = None,
        tied: Callable[[], AbstractContextManager[None]] = nullcontext,
        measures: bool = False,
    ) -> None:
        self.module = module
        self.position = position
        self.losses: list[Tensor] = []
        self.measured: int | None = None
        self._measures = measures
        self._randomness = randomness
        self._loss_function = loss_function
        self._tied = tied
        self._splitter = Splitter(module)
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._kept: dict[int, _Kept] = {}
        self._installed = ExitStack()
        self._iteration = -1
        self._microbatches = 1
        self._inputs: Sequence[Any] = ()
        self._targets: Sequence[Any] = ()
        self._trains = True
        self._splits = False

    @property
    def is_last(self) -> bool:
        """The last position: it has the losses."""
        return self._loss_function is not None

    # ------------------------------------------------------------- iteration

    def begin(
        self,
        iteration: int,
        microbatches: int,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        forward_only: bool = False,
        split: bool = True,
    ) -> None:
        """An iteration begins. ``split``: B and W may come apart.

        ``inputs`` are needed at position 0 (a tensor or a tuple of arguments for each microbatch) and ``targets`` at
        the last one; ValueError where they are missing or are not so many.
        """
        self._inputs = self._counted("inputs", inputs, microbatches) if self.position == 0 else ()
        self._targets = self._counted("targets", targets, microbatches) if self._loss_function is not None else ()
        self._iteration = iteration
        self._microbatches = microbatches
        self._trains = not forward_only
        self.losses = []
        self._kept.clear()
        self._splits = split and self._trains
        if self._splits:
            self._installed.enter_context(self._splitter.installed())

    def end(self) -> None:
        """It has ended, in whatever way: the module is as it was."""
        self._installed.close()
        self._kept.clear()
        self._inputs = self._targets = ()

    def _counted(self, name: str, given: Sequence[Any] | None, microbatches: int) -> Sequence[Any]:
        if given is None or len(given) != microbatches:
            count = "none" if given is None else len(given)
            where = f"the stage with position {self.position}"
            raise ValueError(f"{where} needs {name} for {microbatches} microbatches, and got {count}")
        return given

    # --------------------------------------------------------------- actions

    def forward(self, microbatch: int, inputs: Tensors) -> Tensors:
        """See :class:`~trimtab.pipeline.execute.chunk.Chunk`."""
        later = Later()
        arguments, leaves = self._arguments(microbatch, inputs)
        with (
            torch.set_grad_enabled(self._trains),
            self._randomness.at(self._iteration, self.position, microbatch),
            self._splitting(later),
            self._measuring(),
        ):
            output = self.module(*arguments)
            outputs = self._checked(output) if self._loss_function is None else (self._loss(output, microbatch),)
        if self._trains:
            roots = tuple(_root(t) if t.requires_grad else None for t in outputs if _has_gradient(t))
            self._kept[microbatch] = _Kept(leaves, roots, later)
        return () if self._loss_function is not None else tuple(output.detach() for output in outputs)

    def backward(self, microbatch: int, gradients: Tensors, whole: bool) -> Tensors:
        """See :class:`~trimtab.pipeline.execute.chunk.Chunk`."""
        leaves, roots, later = self._kept[microbatch]
        if self._loss_function is not None:
            pairs = [(root, None) for root in roots if root is not None]
        else:
            pairs = [(root, grad) for root, grad in zip(roots, gradients, strict=True) if root is not None]
        with self._randomness.held(), self._tied(), self._without_autocast(), self._splitting(later):
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])  # pyright: ignore[reportArgumentType]
            if whole:
                later.run()
        if whole:
            del self._kept[microbatch]
        else:
            self._kept[microbatch] = _Kept((), (), later)
            if self._measures:
                self._measures = False
                self.measured = max(self.measured or 0, later.nbytes)
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)

    def backward_weight(self, microbatch: int) -> None:
        """See :class:`~trimtab.pipeline.execute.chunk.Chunk`."""
        with self._tied(), self._without_autocast():
            self._kept.pop(microbatch).later.run()

    # ---------------------------------------------------------------- pieces

    def _arguments(self, microbatch: int, inputs: Tensors) -> tuple[tuple[Any, ...], Tensors]:
        """What the module is called with, and which of it gets a gradient."""
        if self.position == 0:
            given = self._inputs[microbatch]
            return _several(given), ()
        arguments = tuple(x.detach().requires_grad_(self._trains and _has_gradient(x)) for x in inputs)
        return arguments, tuple(x for x in arguments if x.requires_grad)

    def _loss(self, output: Any, microbatch: int) -> Tensor:
        """The microbatch's share of the loss."""
        assert self._loss_function is not None
        loss: Any = self._loss_function(output, self._targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("the loss function must return a tensor of one element for each microbatch")
        self.losses.append(loss.detach().reshape(()))
        return loss / self._microbatches

    def _checked(self, output: Any) -> Tensors:
        outputs = _several(output)
        if not outputs or not all(isinstance(tensor, Tensor) for tensor in outputs):
            kinds = ", ".join(type(tensor).__name__ for tensor in outputs) or "nothing"
            raise ValueError(f"position {self.position} of the model must return tensors, not {kinds}")
        return outputs

    @contextmanager
    def _splitting(self, later: Later) -> Generator[None]:
        """What linear layers do meanwhile, also in a forward that is recomputed, is kept in ``later``."""
        if not self._splits:
            yield
            return
        self._splitter.later = later
        try:
            yield
        finally:
            self._splitter.later = None

    @contextmanager
    def _without_autocast(self) -> Generator[None]:
        """A step within autocast: a backward pass has its dtypes from the forward."""
        kind = self._device.type
        if not torch.is_autocast_enabled(kind):
            yield
            return
        with torch.autocast(kind, enabled=False):
            yield

    @contextmanager
    def _measuring(self) -> Generator[None]:
        """Count what the first forward keeps, parameters apart."""
        if not self._measures or self.measured is not None or not self._trains:
            yield
            return
        kept: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in self.module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.measured = sum(kept.values())


def _root(output: Tensor) -> Root:
    return get_gradient_edge(output) if _EDGES else output


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else (value,)
