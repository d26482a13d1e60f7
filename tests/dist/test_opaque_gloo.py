"""A stage that runs the model's own code, over gloo: the bits of a local run."""

import pytest
from pathlib import Path

import torch
from torch import Tensor

import fxpipe
from tests.cpu.test_opaque import Chooses
from tests.dist.test_gloo import processes

pytestmark = pytest.mark.slow

Found = tuple[Tensor, dict[str, Tensor]]


def _step(pipe: fxpipe.Pipe, batch: list[dict[str, Tensor]]) -> Found:
    pipe.model.zero_grad()
    losses = pipe.step(batch).losses
    return losses, {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}


def _process(rank: int, ranks: int) -> list[list[Found]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = [{"x": torch.randn(3 + i, 4).abs()} for i in range(5)]
    pipe = fxpipe.compile(Chooses(), batch[0], schedule="upfront/1f1b", backend="gloo")
    found = []
    for schedule in ("upfront/1f1b", "stage/1f1b"):
        pipe = pipe.reschedule(schedule, ranks, "gloo")
        found.append([_step(pipe, batch)])
        if rank == 0:
            found[-1].append(_step(pipe.reschedule(schedule, ranks, "local"), batch))
    return found


def test_opaque_stages_have_the_bits_of_local(tmp_path: Path) -> None:
    ranks = processes(_process, 2, tmp_path)
    for number, (_, (losses, wanted)) in enumerate(ranks[0]):
        held: set[str] = set()
        for rank in ranks:
            own, grads = rank[number][0]
            assert torch.equal(own, losses)
            assert all(torch.equal(grad, wanted[name]) for name, grad in grads.items())
            held |= set(grads)
        assert held == set(wanted)
