"""Forwards that use chance that nobody seeds, or a clock: refused, but where it is for logs."""

import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from time import time_ns as clock_of_another_name
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxpipe
import fxpipe.scout
from fxpipe.errors import CaptureError, ReadError
from tests.eager import trained_alike

Body = Callable[["Model", Tensor], Tensor]
TWO: dict[str, Any] = {"ranks": 2, "schedule": "stage/1f1b"}


class Model(nn.Module):
    """Two blocks, with `body` between them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.calls, self.kept = 0, torch.zeros(())
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self, self.blocks[0](x).tanh())
        loss: Tensor = self.blocks[1](x).square().mean()
        return loss


def batch() -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(n, 3, dtype=torch.float64)} for n in (2, 4)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: numpy.random.default_rng().random(),
        lambda: random.Random().random(),
        lambda: random.SystemRandom().random() < 0.01,
        lambda: os.urandom(1)[0] > 250,
        lambda: secrets.randbelow(2),
        lambda: uuid.uuid4().int % 2,
    ],
)
def test_chance_that_nobody_seeds(draw: Callable[[], float]) -> None:
    with pytest.raises(ReadError, match=r"that nobody has seeded .* at .*test_unseeded\.py"):
        fxpipe.compile(Model(lambda _, x: x * draw()), batch()[0], backend="local", **TWO)


@pytest.mark.parametrize(
    "clock",
    [
        lambda: time.time() // 3600 % 24,
        lambda: int(time.perf_counter()) % 2,
        lambda: clock_of_another_name() // 10**9 % 3600,
        lambda: datetime.now().microsecond,
    ],
)
def test_clocks(clock: Callable[[], float]) -> None:
    with pytest.raises(ReadError, match=r"at .*test_unseeded\.py:\d+, forward does other than"):
        fxpipe.compile(Model(lambda _, x: x * clock()), batch()[0], backend="local", **TWO)


def timed(model: Model, x: Tensor) -> Tensor:
    begin = time.perf_counter()
    y = x * numpy.random.default_rng(3).random()
    assert time.perf_counter() - begin >= 0 and random.Random(7).random() < 1
    return y


def logged(model: Model, x: Tensor) -> Tensor:
    if not torch.compiler.is_exporting():
        model.calls += 1
    return x * 2


@pytest.mark.parametrize("body", [timed, logged])
def test_what_is_for_logs_is_left_out(body: Body) -> None:
    torch.manual_seed(0)
    pipe = trained_alike(Model(body).double(), batch(), 1e-12, **TWO)
    assert pipe.model.calls == 0


def opaque(model: Model, x: Tensor) -> Tensor:
    return x * random.uniform(2, 2) * (1 + 0 * random.SystemRandom().random())


def test_before_a_boundary_it_is_drawn_anew() -> None:
    pipe = trained_alike(Model(opaque).double(), batch(), 1e-12, **TWO)
    assert pipe.captured.prefix is not None


def kept(model: Model, x: Tensor) -> Tensor:
    before, model.kept = model.kept, x.detach().mean()
    return x + before


def test_no_run_ahead_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would tell whether the next microbatch reads it has failed: it must not be there."""

    def fails(*_: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(fxpipe.scout, "may_differ", fails)
    with pytest.raises(CaptureError, match="attribute kept is set by forward, and whether"):
        fxpipe.compile(Model(kept), {"x": torch.randn(2, 3)}, backend="local", **TWO)
    trained_alike(Model(timed).double(), batch(), 1e-12, **TWO)
