"""Forwards that leave something behind for the next: what a graph can do, and what is refused."""

import random
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError
from tests.eager import trained_alike

COUNT = 0


class Model(nn.Module):
    """Two blocks, between which `body` does something with what is kept."""

    def __init__(self, body: "Body") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.kept: Tensor | None = None
        self.aside: list[Tensor] = []
        self.last = 1
        self.first = True
        self.mine = random.Random(3)
        self.turns = deque([1.0, 2.0, 3.0])
        self.register_buffer("mean", torch.zeros(3))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self, self.blocks[0](x).tanh())
        return self.blocks[1](x).square().mean()


Body = Callable[[Model, Tensor], Tensor]
ONE = {"ranks": 2, "schedule": "stage/1f1b"}


def looked_at(model: Model, x: Tensor) -> Tensor:
    """Kept for whoever wants to see it, and read in the same run."""
    model.kept = x.square().mean()
    model.aside = [x, x * 2]
    return x + model.kept + model.aside[1]


def table(model: Model, x: Tensor) -> Tensor:
    """A cache of what depends on sizes alone, and a flag that says so."""
    if model.first:
        model.kept = torch.arange(x.shape[1]).to(x)
        model.first = False
    assert model.kept is not None
    return x * model.kept


@pytest.mark.parametrize("body", [looked_at, table])
def test_equals_eager(body: Body) -> None:
    torch.manual_seed(0)
    batch = [{"x": torch.randn(n, 3, dtype=torch.float64)} for n in (2, 4)]
    trained_alike(Model(body).double(), batch, 1e-12, **ONE)


def recurrent(model: Model, x: Tensor) -> Tensor:
    before, model.kept = model.kept, x.detach().mean()
    return x if before is None else x + before


def noise(model: Model, x: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.randn(3).to(x)
    return x + model.kept


def number(model: Model, x: Tensor) -> Tensor:
    before, model.last = model.last, x.shape[0]
    return x * before


def initialised(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.mean.mul_(0 if model.first else 0.9).add_(x.mean(0))
    model.first = False
    return x - model.mean


def drawn(model: Model, x: Tensor) -> Tensor:
    return x * model.mine.random()


def turned(model: Model, x: Tensor) -> Tensor:
    model.turns.rotate()
    return x * model.turns[0]


def counted(model: Model, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x * COUNT


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (recurrent, "reads a tensor that forward has made and kept"),
        (noise, "reads a tensor that forward has made and kept"),
        (number, "attribute last is set by forward"),
        (initialised, "attribute first is set by forward"),
        (drawn, "attribute mine changes with every forward"),
        (turned, r"attribute turns\[0\] changes with every forward"),
        (counted, "COUNT changes with every forward"),
    ],
)
def test_refused(body: Body, found: str) -> None:
    model = Model(body)
    before = model.mine.getstate(), list(model.turns), COUNT, model.last, model.first
    with pytest.raises(CaptureError, match=found):
        fxpipe.compile(model, {"x": torch.randn(2, 3)}, backend="local", **ONE)
    after = model.mine.getstate(), list(model.turns), COUNT, model.last, model.first
    assert before == after


def opaque(model: Model, x: Tensor) -> Tensor:
    before, model.kept = model.kept, x.detach().mean()
    return x * random.uniform(2, 2) + (0 if before is None else before)


def test_refused_before_a_boundary() -> None:
    with pytest.raises(CaptureError, match="reads a tensor that forward has made and kept"):
        fxpipe.compile(Model(opaque), {"x": torch.randn(2, 3)}, backend="local", **ONE)


def hooked(model: Model, x: Tensor) -> Tensor:
    x = x * random.uniform(2, 2)
    x.register_hook(lambda gradient: gradient * 3)
    return x


def test_a_hook_before_a_boundary_runs() -> None:
    batch = [{"x": torch.randn(2, 3, dtype=torch.float64)} for _ in range(2)]
    trained_alike(Model(hooked).double(), batch, 1e-12, **ONE)
