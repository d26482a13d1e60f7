"""A local run equals eager: the loss and every gradient, for every schedule."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

import fxpipe
from tests import models

SCHEDULES = [f"{p}/{b}" for p, b in product(("nested", "upfront", "stage"), ("1f1b", "gpipe"))]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("name", models.CASES)
def test_equals_eager(name: str, dtype: torch.dtype) -> None:
    case = models.CASES[name]
    model, reference = case.build(dtype), case.build(dtype)
    wide = dtype is torch.float64
    pipe: fxpipe.Pipe | None = None
    # Uneven microbatches add variants, so equal ones run first and are traced once.
    for uneven, ranks in product((False, True), (1, 2, 4) if wide else (2, 4)):
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
