"""Models that read other values in every microbatch: one stage runs their own code."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, RankError
from fxpipe.inputs import Microbatch
from tests.eager import step_alike
from tests.grids import GridModel, grids

SIZES = [[(2, 4), (4, 2)], [(4, 4), (2, 2)], [(2, 2)] * 3, [(2, 2)] * 5 + [(4, 2)], [(8, 8)]]


def step(pipe: fxpipe.Pipe, batch: Sequence[Microbatch]) -> None:
    """A step has the loss and the gradients of eager."""
    step_alike(pipe, batch, copy.deepcopy(pipe.model), 1e-5)


@pytest.fixture(scope="module")
def deep() -> fxpipe.Pipe:
    """A pipe that has met five grids; features of two blocks cross to two places."""
    torch.manual_seed(0)
    batch = grids(SIZES, text=[5, 7, 9, 2, 11])
    how = {"schedule": "nested/1f1b", "ranks": 2, "backend": "local"}
    pipe = fxpipe.compile(GridModel(deep=True), batch[0], **how)
    step(pipe, batch)
    return pipe


def test_three_traces_serve_all_values(deep: fxpipe.Pipe) -> None:
    again = grids(
        [[(2, 2 + 2 * (i % 4))] * (1 + i % 5) for i in range(12)], text=range(3, 15), seed=1
    )
    step(deep, again)
    assert deep.captures == 3
    assert deep.captured.prefix is not None
    assert "opaque: values are read at" in deep.explain()
    assert deep.timeline.peaks


@pytest.mark.parametrize("schedule", ["stage/gpipe", "upfront/1f1b", "nested/zb-h1"])
def test_any_placement(deep: fxpipe.Pipe, schedule: str) -> None:
    step(deep.reschedule(schedule), grids(SIZES, text=6, seed=2))


def test_recompute(deep: fxpipe.Pipe) -> None:
    region = next(name for name in deep.regions.roles if name != "llm")
    step(deep.reschedule("upfront/1f1b", recompute=[region]), grids(SIZES[:3], text=6, seed=2))


@pytest.mark.slow
def test_reschedule_goes_on(deep: fxpipe.Pipe) -> None:
    """What was read before counts for a pipe of another schedule, and values for its evaluation."""
    batch = grids(SIZES[:3], text=6, seed=3)
    pipe = deep.reschedule("nested/gpipe")
    step(pipe, batch)
    assert pipe.captures == 3
    with torch.no_grad():
        wanted = [float(pipe.model(**mb)) for mb in batch]
    assert pipe.evaluate(batch).losses.tolist() == pytest.approx(wanted, rel=1e-5)


class Branch(nn.Module):
    """One of two layers, by a value of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.sum() > 0 else self.second(x)


class Chooses(nn.Module):
    """A branch, then blocks, and a loss that may depend on what was read before them."""

    def __init__(self, leak: str = "") -> None:
        super().__init__()
        self.branch, self.embed = Branch(), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        count, large = x.shape[0], self.leak == "flag" and bool(x.max() > 9)
        x = self.embed(self.branch(x))
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().sum() / (count if self.leak == "number" else 10) * (2 if large else 1)


def test_branches_on_floats() -> None:
    """The branch that runs is differentiated; one whose parameters no gradient is made of, never
    silently."""
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    batch = [{"x": x.abs()}, {"x": x[:3].abs()}]
    pipe = fxpipe.compile(Chooses(), batch[0], ranks=2, backend="local", schedule="stage/1f1b")
    step(pipe, batch)
    assert pipe.model.get_parameter("branch.second.weight").grad is None
    with pytest.raises(RankError, match=r"parameter branch.second.* is used"):
        pipe.step([batch[0], {"x": -x.abs()}])


def test_numbers_that_would_get_past_the_boundary() -> None:
    """A number that is read before and used behind would be wrong in all others."""
    with pytest.raises(CaptureError, match="the number 5, which was read before the boundary"):
        fxpipe.compile(Chooses("number"), {"x": torch.ones(5, 4)}, ranks=1, backend="local")


def test_flags_that_would_get_past_the_boundary() -> None:
    batch = [{"x": torch.ones(5, 4)}, {"x": torch.full((5, 4), 10.0)}]
    pipe = fxpipe.compile(Chooses("flag"), batch[0], ranks=1, backend="local")
    step(pipe, batch[:1])
    with pytest.raises(RankError, match="after True was read"):
        pipe.step(batch)
