"""A run over gloo equals a local run bit by bit, and eager, for every schedule.

Each process traces the model once; the first one then runs it in one process as well.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

import fxpipe
from tests import models
from tests.dist.test_gloo import processes
from tests.schedules import EVERY

SCHEDULES = ("nested/1f1b", "nested/zb-h1", "upfront/1f1b", "stage/gpipe")
Run = tuple[bool, str]  # whether microbatches are uneven, and the schedule
Results = dict[Run, tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]


def _run(
    pipe: fxpipe.Pipe, case: models.Case, backend: str, dtype: torch.dtype, runs: Sequence[Run]
) -> Results:
    """For each run the loss, the losses, and the gradients of this process's ranks."""
    found: Results = {}
    for uneven, schedule in runs:
        pipe = pipe.reschedule(schedule, pipe.backend.ranks, backend)
        pipe.model.zero_grad()
        result = pipe.step(case.batch(uneven, dtype))
        grads = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
        found[uneven, schedule] = result.loss, result.losses, grads
    return found


def _process(
    rank: int, ranks: int, name: str, dtype: torch.dtype, runs: Sequence[Run]
) -> list[Results]:
    case = models.CASES[name]
    pipe = fxpipe.compile(
        case.build(dtype),
        case.batch(False, dtype)[0],
        schedule=runs[0][1],
        backend="gloo",
        loss_fn=case.loss_fn,
    )
    found = [_run(pipe, case, "gloo", dtype, runs)]
    return found if rank else [*found, _run(pipe, case, "local", dtype, runs)]


def test_every_schedule_has_the_bits_of_local(tmp_path: Path) -> None:
    _check("three", 2, torch.float64, [(False, schedule) for schedule in EVERY], tmp_path)


@pytest.mark.parametrize(
    ("name", "ranks", "dtype"),
    [
        ("three", 2, torch.float64),
        ("three", 4, torch.float32),
        ("llava", 2, torch.float32),
        ("llava", 4, torch.float64),
        ("internvl", 2, torch.float64),
        ("internvl", 4, torch.float32),
    ],
)
def test_gloo_has_the_bits_of_local(
    name: str, ranks: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    _check(name, ranks, dtype, list(product((False, True), SCHEDULES)), tmp_path)


def _check(name: str, ranks: int, dtype: torch.dtype, runs: list[Run], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    case = models.CASES[name]
    found = processes(partial(_process, name=name, dtype=dtype, runs=runs), ranks, tmp_path)
    local = found[0].pop()
    reference = case.build(dtype)
    for (uneven, schedule), (loss, losses, grads) in local.items():
        seen = set()
        for (results,) in found:
            assert torch.equal(results[uneven, schedule][0], loss)
            assert torch.equal(results[uneven, schedule][1], losses)
            for parameter, grad in results[uneven, schedule][2].items():
                assert torch.equal(grad, grads[parameter]), (parameter, schedule)
                seen.add(parameter)
        assert seen == grads.keys()
        reference.zero_grad()
        eager = models.eager(case, reference, case.batch(uneven, dtype))
        tolerance = 1e-10 if dtype is torch.float64 else 1e-5
        assert torch.allclose(loss, eager, rtol=tolerance, atol=0)
        for parameter, tensor in reference.named_parameters():
            if parameter in grads and tensor.grad is not None:
                scale = max(float(tensor.grad.norm()), 1e-6)
                assert float((grads[parameter] - tensor.grad).norm()) <= tolerance * scale
