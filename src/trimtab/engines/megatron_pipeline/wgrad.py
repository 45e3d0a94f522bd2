"""The gradients of weights apart from those of inputs, in Megatron-Core's own linear layers.

Forward, the weight enters autograd without its history, so that the backward gives the gradient of the input alone and
leaves what the weight's needs (input and output gradient) with a :class:`Ledger`. Later the ledger has autograd compute
and accumulate it, so that whatever hangs on a parameter (``main_grad``, the buckets of DistributedDataParallel) is
called as ever, and the arithmetic is Megatron-Core's, bit for bit. The split of backward into B and W is that of
zero bubble schedules (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Layout(NamedTuple):
    """How a linear layer is spread over tensor parallel ranks."""

    group: Any
    reduces: bool
    """The gradient of the input is summed over the ranks."""
    gathers: bool
    """The input is a part of the sequence (dimension 0); its gradient is summed and cut."""

    def whole(self, input_: torch.Tensor) -> torch.Tensor:
        """The input of all ranks; in a buffer that the next call may write to."""
        if not self.gathers:
            return input_
        from megatron.core.parallel_state import get_global_memory_buffer

        shape = [input_.shape[0] * self.group.size(), *input_.shape[1:]]
        buffer = get_global_memory_buffer().get_tensor(shape, input_.dtype, "mpu")
        dist.all_gather_into_tensor(buffer, input_.contiguous(), group=self.group)
        return buffer


class Owed(NamedTuple):
    """What the gradient of a weight is computed from, for one use of it in one microbatch."""

    weight: torch.nn.Parameter
    input: torch.Tensor
    """(..., in), on ranks that share a sequence this rank's part of it."""
    gradient: torch.Tensor
    """Of the output, (..., out)."""
    layout: Layout

    def compute(self) -> torch.Tensor:
        """The gradient of the weight, (out, in)."""
        whole = self.layout.whole(self.input).contiguous()
        return self.gradient.contiguous().flatten(0, -2).t().matmul(whole.flatten(0, -2))


class Ledger:
    """What is still owed to the weights of one model chunk, by microbatch."""

    def __init__(self) -> None:
        self.splitting = False
        """Whether layers that run now leave the gradients of their weights to :meth:`pay`."""
        self._owed: dict[int, list[Owed]] = {}
        self._open: list[Owed] | None = None

    def open(self, microbatch: int) -> None:
        """The backward of ``microbatch`` begins; what comes up is owed to it."""
        self._open = self._owed.setdefault(microbatch, [])

    def close(self) -> None:
        """It has ended."""
        self._open = None

    def owe(self, owed: Owed) -> None:
        """A layer's backward has computed its input's gradient alone."""
        if self._open is None:  # a backward that nobody has announced, so nobody would pay
            _pay([owed])
        else:
            self._open.append(owed)

    def pay(self, microbatch: int) -> None:
        """Compute and accumulate what is owed to ``microbatch``, in the order in which it came up."""
        _pay(self._owed.pop(microbatch, []))

    def forget(self) -> None:
        """The iteration was given up: nothing is owed any more."""
        self._owed.clear()
        self._open = None
        self.splitting = False


def _pay(owed: list[Owed]) -> None:
    if not owed:
        return
    due: list[torch.Tensor] = []
    with torch.enable_grad():
        while owed:  # from the end: autograd runs first what was made last
            last = owed.pop()
            due.append(_Payment.apply(last.weight, last))
    torch.autograd.backward(due)


class _Payment(torch.autograd.Function):
    """The node of autograd that makes a weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, owed: Owed) -> torch.Tensor:
        ctx.owed = owed
        return weight.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        owed, ctx.owed = ctx.owed, None  # its tensors are given back as soon as they have been used
        return owed.compute(), None


class Site(NamedTuple):
    """Where a gradient is owed. Hides the weight from autograd, which would take an argument for part of the graph."""

    weight: torch.nn.Parameter
    layout: Layout
    ledger: Ledger


class SplitLinear(torch.autograd.Function):
    """``input @ weight.T + bias``; its backward owes the weight's gradient to a ledger."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: torch.Tensor,
        bias: torch.Tensor | None,
        site: Site,
    ) -> torch.Tensor:
        data = site.weight.detach()
        ctx.save_for_backward(input_, data)
        ctx.parts = (site, bias is not None)
        output = torch.matmul(site.layout.whole(input_), data.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        input_, data = ctx.saved_tensors
        site, with_bias = ctx.parts
        layout = site.layout
        result = gradient.matmul(data)
        work: Any = None
        if layout.gathers:
            summed, result = result, result.new_empty(input_.shape)
            work = dist.reduce_scatter_tensor(result, summed, group=layout.group, async_op=True)
        elif layout.reduces:
            work = dist.all_reduce(result, group=layout.group, async_op=True)
        site.ledger.owe(Owed(site.weight, input_, gradient, layout))
        of_bias = gradient.contiguous().flatten(0, -2).sum(dim=0) if with_bias else None
        if work is not None:
            work.wait()
        return result, of_bias, None
