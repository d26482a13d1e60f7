"""Custom autograd functions have eager's gradients, or are refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError
from tests.eager import trained_alike


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reverse(torch.autograd.Function):
    """The identity, with gradients turned around by a number and by the size of a dimension."""

    @staticmethod
    def forward(x: Tensor, factor: float, size: int) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.factor, ctx.size = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * -ctx.factor / ctx.size, None, None


class Top(torch.autograd.Function):
    """The largest value of each row and its place; the backward scatters by the place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(-1, keepdim=True)
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        ctx.shape = x.shape
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter(-1, places, 3 * gradient)


class Product(torch.autograd.Function):
    """A linear map that makes only the gradients that are asked of it, and warps one of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        first = gradient @ weight if ctx.needs_input_grad[0] else None
        second = (gradient.flatten(0, 1).t() @ x.flatten(0, 1)).clamp(-0.01, 0.01)
        return first, second if ctx.needs_input_grad[1] else None


def straight(x: Tensor, weight: Tensor) -> Tensor:
    return x + Straight.apply(x * 4) @ weight


def reverse(x: Tensor, weight: Tensor) -> Tensor:
    return x + Reverse.apply(x @ weight, 0.3, x.shape[1])


def top(x: Tensor, weight: Tensor) -> Tensor:
    values, places = Top.apply(x @ weight)
    return x + values * places


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x + Product.apply(x, weight).tanh() + Product.apply(x, weight.detach())


Body = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.body = body

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.body(layer(x), layer.weight)
        return x.square().mean()


@pytest.mark.parametrize("body", [straight, reverse, top, product])
def test_gradients(body: Body) -> None:
    torch.manual_seed(0)
    model = Model(body).double()
    batch = [(torch.randint(0, 9, shape),) for shape in [(2, 3), (3, 5)]]
    trained_alike(model, batch, 1e-12, ranks=2)


class Writes(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


SCALE = torch.full((6,), 2.0, dtype=torch.float64)


class Global(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * SCALE


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (lambda x, w: Writes.apply(x * 1), "Writes .* in place"),
        (lambda x, w: Global.apply(x), "Global .* not among its arguments"),
        (lambda x, w: torch.vmap(Reverse.apply, (0, None, None))(x, 0.3, 2), "inside a transform"),
    ],
)
def test_refused(body: Body, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        fxpipe.compile(Model(body).double(), (torch.zeros(2, 3, dtype=torch.long),), ranks=2)
