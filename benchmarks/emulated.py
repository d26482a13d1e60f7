"""An emulated device: ops that take a fixed time and no CPU, and a chain of blocks made of them.

    work(x, fwd, bwd)  -> x      takes `fwd` units; its backward, `input_grad`, takes `bwd` units
    weight(w, x, bwd)  -> w * x  takes nothing;     its backward, `weight_grad`, takes `bwd` units

The two backward ops are separate nodes, so that whoever splits the backward puts one in B and
the other in W. `weight` returns no gradient for x: the block computes work(x) + w * x.detach().
"""

import ctypes
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

_PR_SET_TIMERSLACK = 29


@dataclass
class Device:
    """The emulated device of this process: seconds per unit of work; how many units were asked for;
    start and end of its ops."""

    unit: float = 0.0
    asked: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)

    def run(self, units: float) -> None:
        """Sleep until the end of an op that starts now."""
        self.asked += units
        start = time.perf_counter()
        deadline = start + units * self.unit
        while (now := time.perf_counter()) < deadline:
            time.sleep(deadline - now)
        self.spans.append((start, now))


DEVICE = Device()


def precise_sleep() -> None:
    """Ask Linux to wake the sleeps of this thread, and of those it starts, within 1 ns of slack."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@torch.library.custom_op("emulated::work", mutates_args=())
def work(x: Tensor, fwd: float, bwd: float) -> Tensor:
    """The forward of a block: takes `fwd` units, returns its input."""
    DEVICE.run(fwd)
    return x.clone()


@torch.library.custom_op("emulated::input_grad", mutates_args=())
def input_grad(grad: Tensor, bwd: float) -> Tensor:
    """The gradient of a block's input: takes `bwd` units."""
    DEVICE.run(bwd)
    return grad.clone()


@torch.library.custom_op("emulated::weight", mutates_args=())
def weight(w: Tensor, x: Tensor, bwd: float) -> Tensor:
    """The weight's part of a block's output: no time."""
    return w * x


@torch.library.custom_op("emulated::weight_grad", mutates_args=())
def weight_grad(grad: Tensor, x: Tensor, bwd: float) -> Tensor:
    """The gradient of a block's weight: takes `bwd` units."""
    DEVICE.run(bwd)
    return (grad * x).sum(0)


work.register_fake(lambda x, fwd, bwd: torch.empty_like(x))
input_grad.register_fake(lambda grad, bwd: torch.empty_like(grad))
weight.register_fake(lambda w, x, bwd: torch.empty_like(x))
weight_grad.register_fake(lambda grad, x, bwd: grad.new_empty(grad.shape[1:]))
work.register_autograd(
    lambda ctx, grad: (input_grad(grad, ctx.bwd), None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "bwd", inputs[2]),
)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.bwd = inputs[2]


weight.register_autograd(
    lambda ctx, grad: (weight_grad(grad, *ctx.saved_tensors, ctx.bwd), None, None),
    setup_context=_keep,
)


@register_flop_formula([torch.ops.emulated.work])
def _flops(x_shape: torch.Size, fwd: float, bwd: float, *_: object, **__: object) -> int:
    """Equal work for equal blocks, for those who balance stages by floating-point operations."""
    return int(fwd * 1_000_000)


class Block(nn.Module):
    """One unit of forward, one of input gradient, one of weight gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = work(x, 1.0, 1.0) + weight(self.w, x.detach(), 1.0)
        return y


class Chain(nn.Module):
    """Equal blocks, and the mean of what comes out as loss."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = x.mean()
        return loss
