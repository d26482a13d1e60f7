"""Forwards that ask more of autograd than the gradient of their operators."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import fxpipe
from fxpipe.errors import CaptureError
from tests.eager import trained_alike


class Model(nn.Module):
    """Two blocks, between which `body` does something; `judge` may be frozen there."""

    def __init__(self, body: "Body") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.judge, self.old = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self, self.blocks[0](x).tanh())
        return self.blocks[1](x).square().mean()


Body = Callable[[Model, Tensor], Tensor]
ONE = {"ranks": 2, "schedule": "stage/1f1b"}


def frozen_once(model: Model, x: Tensor) -> Tensor:
    seen = model.judge(x.detach()).square().mean()
    model.judge.requires_grad_(False)
    x = x - model.judge(x)
    model.judge.weight.requires_grad = True
    model.judge.bias.requires_grad = True
    return x + seen


def followed(model: Model, x: Tensor) -> Tensor:
    """As in MoCo: the old weights follow the new ones."""
    with torch.no_grad():
        for old, new in zip(model.old.parameters(), model.judge.parameters(), strict=True):
            old.data = old.data * 0.5 + new.data * 0.5
        aim = model.old(x)
    return model.judge(x) - aim


@pytest.mark.parametrize("body", [frozen_once, followed])
def test_equals_eager(body: Body) -> None:
    torch.manual_seed(0)
    batch = [{"x": torch.randn(2, 3, dtype=torch.float64)} for _ in range(2)]
    trained_alike(Model(body).double(), batch, 1e-12, **ONE)


def left_frozen(model: Model, x: Tensor) -> Tensor:
    model.judge.requires_grad_(False)
    return x - model.judge(x)


def assigned(model: Model, x: Tensor) -> Tensor:
    model.judge.weight = nn.Parameter(model.judge.weight * 0.9)
    return model.judge(x)


def backward_inside(model: Model, x: Tensor) -> Tensor:
    model.judge(x.detach()).square().sum().backward()
    return x


def reads_gradient(model: Model, x: Tensor) -> Tensor:
    last = model.judge.weight.grad
    return x if last is None else x * last.norm()


def hooked(model: Model, x: Tensor) -> Tensor:
    x = x * 2
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda gradients: tuple(3 * g for g in gradients))
    return x


def rounded(model: Model, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda saved: saved.round(), lambda saved: saved):
        return x.exp()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (left_frozen, "leaves parameter judge.weight with requires_grad=False"),
        (assigned, "parameter judge.weight is assigned"),
        (backward_inside, "a backward of its own"),
        (reads_gradient, r"reads a tensor's .grad"),
        (hooked, "a hook on grad_fn"),
        (rounded, "saved_tensors_hooks"),
    ],
)
def test_refused(body: Body, found: str) -> None:
    model = Model(body)
    own = dict(model.named_parameters())
    with pytest.raises(CaptureError, match=found):
        fxpipe.compile(model, {"x": torch.randn(2, 3)}, backend="local", **ONE)
    assert all(own[name] is parameter for name, parameter in model.named_parameters())
    assert all(p.grad is None for p in own.values())
    assert model.judge.weight.requires_grad
