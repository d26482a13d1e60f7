"""Weights that move to other ranks: with another schedule, in an evaluation, between pipes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import BatchError, RankError
from tests.cpu.test_union import Steps
from tests.dist.test_gloo import processes
from tests.models import Small

RATE = 0.1


class Tied(nn.Module):
    """One weight, in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.blocks = nn.ModuleList(Small(3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x @ self.weight)
        return x.square().mean()


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = Steps().double()
    model.blocks.extend(Steps().double().blocks)
    return model


def _batch(seed: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(2, 3, generator=g).double()} for _ in range(2)]


def _train(pipe: fxpipe.Pipe, seed: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(pipe.parameters(), RATE)
    losses = pipe.step(_batch(seed)).losses
    optimizer.step()
    optimizer.zero_grad()
    return losses


def _moves(rank: int, ranks: int) -> list[torch.Tensor]:
    model, x = _model(), _batch(0)[0]
    pipe = fxpipe.compile(model, x, schedule="stage/1f1b", ranks=ranks)
    where = {stage.name: stage.rank for stage in pipe.cut.stages}
    found = [_train(pipe, 0)]
    other = pipe.reschedule("stage/zb-v")
    assert where != {stage.name: stage.rank for stage in other.cut.stages}
    with pytest.raises(BatchError, match=r"rank \d now trains .* its optimizer would not train it"):
        other.step(_batch(1))
    found += [_train(other, 1), _train(other, 2)]
    with pytest.raises(BatchError, match="not the newest in this process"):
        pipe.state_dict()
    found.append(pipe.evaluate(_batch(3)).losses)
    assert pipe.state_dict().keys() != other.state_dict().keys()
    found.append(_train(pipe, 4))
    with pytest.raises(BatchError, match="not the newest in this process"):
        pipe.reschedule("stage/1f1b", backend="local")
    found.append(_train(fxpipe.compile(model, x, schedule="stage/zb-v"), 5))
    return found


def test_weights_follow_the_schedule(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    expected = []
    for seed in range(6):
        losses = torch.stack([model(**mb) for mb in _batch(seed)])
        if seed != 3:  # the evaluation
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected.append(losses.detach())
    for found in processes(_moves, 2, tmp_path):
        assert torch.allclose(torch.stack(found), torch.stack(expected), atol=1e-12, rtol=0)


def _apart(rank: int, ranks: int) -> None:
    torch.manual_seed(rank)
    x = _batch(0)[0]
    pipe = fxpipe.compile(Tied().double(), ranks=ranks)
    with pytest.raises(BatchError, match="ranks 0 and 1 both hold weight, with different values"):
        pipe.step([x])
    torch.manual_seed(0)
    pipe = fxpipe.compile(Tied().double(), ranks=ranks)
    with pytest.raises(BatchError, match="microbatch 1 on rank 1 is not that on rank 0"):
        pipe.step([x, _batch(rank)[0]])
    with pytest.raises(BatchError, match="rank 1 was given 2 microbatches and rank 0 1"):
        pipe.step([x] * (1 + rank))
    pipe.step([x])


def test_processes_that_differ_are_told(tmp_path: Path) -> None:
    processes(_apart, 2, tmp_path)


def _later(rank: int, ranks: int) -> list[torch.Tensor]:
    """Steps that are alike, and after them calls that are not: none hangs, none is lost."""
    torch.manual_seed(0)
    batch, other = _batch(0), _batch(1)
    model = Tied().double()
    rows = torch.tensor([[0, 1], [1, 0]][rank])  # the same samples in another order
    calls: dict[str, Callable[[fxpipe.Pipe], object]] = {
        r"rank 1 was given 2 microbatches and rank 0 1": lambda p: p.step(batch[: 1 + rank]),
        r"microbatch 1 on rank 1 is not that on rank 0": lambda p: p.step(
            [batch[0], (batch, other)[rank][1]]
        ),
        r"microbatch 0 on rank 1 is not": lambda p: p.step([{"x": mb["x"][rows]} for mb in batch]),
        r"microbatch 0 on rank 1 .* same samples": lambda p: p.evaluate(
            [{"x": mb["x"][: 1 + rank]} for mb in batch]
        ),
        r"another weights= than rank 0": lambda p: p.step(batch, weights=[0.5, 0.5 + rank]),
        r"another order= than rank 0": lambda p: p.step(batch, order=[[0, 1], [1, 0]][rank]),
        r"rank 1 does not do what rank 0": lambda p: p.step(batch) if rank else p.evaluate(batch),
    }
    pipe = fxpipe.compile(model, batch[0], ranks=ranks)
    found = []
    for message, call in calls.items():
        found = [pipe.step(batch).losses, pipe.step(batch[:1]).losses, pipe.evaluate(batch).losses]
        with pytest.raises(BatchError, match=message) as refused:
            call(pipe)
        if "Compile again" in str(refused.value):
            with pytest.raises(RankError, match="ranks were not called alike"):
                pipe.step(batch)
            pipe = pipe.reschedule("nested/1f1b", backend="gloo")
    return [*found, pipe.step(batch).losses]


def test_calls_that_differ_are_told_in_every_step(tmp_path: Path) -> None:
    for losses in processes(_later, 2, tmp_path):
        assert torch.equal(losses[-1], losses[0])
        assert torch.equal(losses[1], losses[0][:1])
