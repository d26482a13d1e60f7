"""A local run equals eager: the loss and every gradient, for every schedule."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxpipe
from tests import models
from tests.schedules import EVERY

SCHEDULES = ("nested/1f1b", "nested/zb-h1", "upfront/1f1b", "stage/gpipe")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


WIDE, NARROW = torch.float64, torch.float32
# Uneven microbatches add variants, so equal ones run first and are traced once.
RUNS = ((False, 1), (False, 4), (True, 2), (True, 4))  # whether microbatches are uneven, and ranks
# What tests/dist/test_parity_gloo.py runs in one process too, against eager, is slow here.
LARGE = {"llava": ((False, 1), (True, 2)), "internvl": ((False, 1), (True, 4))}
WHOLE = [(name, WIDE, RUNS) for name in LARGE] + [(name, NARROW, RUNS) for name in models.CASES]


@pytest.mark.parametrize(
    ("name", "dtype", "runs"),
    [
        ("three", WIDE, RUNS),
        *((name, WIDE, runs) for name, runs in LARGE.items()),
        *(pytest.param(*whole, marks=pytest.mark.slow) for whole in WHOLE),
    ],
)
def test_equals_eager(name: str, dtype: torch.dtype, runs: tuple[tuple[bool, int], ...]) -> None:
    case = models.CASES[name]
    model, reference = case.build(dtype), case.build(dtype)
    wide = dtype is torch.float64
    pipe: fxpipe.Pipe | None = None
    for uneven, ranks in runs:
        batch = case.batch(uneven, dtype)
        reference.zero_grad()
        loss = models.eager(case, reference, batch)
        for schedule in SCHEDULES if wide else ("nested/1f1b", "stage/1f1b"):
            if pipe is None:
                pipe = fxpipe.compile(
                    model, batch[0], schedule=schedule, ranks=ranks, loss_fn=case.loss_fn
                )
            pipe = pipe.reschedule(schedule, ranks)
            model.zero_grad()
            result = pipe.step(batch)
            tolerance = TOLERANCE[dtype]
            assert torch.allclose(result.loss, loss, rtol=tolerance, atol=0), (schedule, ranks)
            assert models.worst(model, reference) <= tolerance, (schedule, ranks, uneven)


@pytest.fixture(scope="module")
def regions() -> fxpipe.Pipe:
    """Two encoders and two generators, of which one each is frozen, and eight backbone blocks."""
    torch.manual_seed(0)
    model = models.AnyRegions([True, False], [False, True], layers=8).double()
    return fxpipe.compile(
        model, model.batch(1)[0], schedule="nested/1f1b", ranks=4, backend="local", microbatches=6
    )


@pytest.mark.parametrize("schedule", EVERY)
def test_every_schedule_equals_eager(regions: fxpipe.Pipe, schedule: str) -> None:
    model: Any = regions.model
    batch = model.batch(6)
    model.zero_grad()
    losses = torch.stack([model(**mb) for mb in batch])
    losses.mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    result = regions.reschedule(schedule, 4).step(batch)
    torch.testing.assert_close(result.losses, losses.detach(), rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-11, atol=1e-14)
