"""Forwards that draw from Python's or NumPy's generator: as in eager, on whatever rank they run."""

import copy
import random

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, RankError
from fxpipe.python_chance import python_left_alone, python_state, set_python_state
from tests.eager import step_alike


class Encoder(nn.Module):
    """As many draws as numbers in `counts`, each of which decides what is done; then blocks, more
    than there are after them, where the model cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        for count in counts.tolist():
            x = self.drop(self.layer(x))
            if numpy.random.rand() > 0.5:
                x = x.flip(-1)
            x = x * random.choice([1, 2, 3]) + count
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Model(nn.Module):
    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.vision, self.late = Encoder(), late
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, counts: Tensor, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.vision(x, counts).mean(0)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return hidden.square().mean() * (random.random() if self.late else 1)


def batch() -> list[dict[str, Tensor]]:
    return [
        {
            "x": torch.randn(rows, 4, dtype=torch.float64),
            "counts": torch.tensor(counts),
            "ids": torch.randint(0, 9, (2, 5)),
        }
        for rows, counts in [(2, [1]), (3, [2, 1]), (2, [1, 2, 1]), (4, [1, 1]), (2, [3])]
    ]


def test_draws_are_those_of_eager() -> None:
    torch.manual_seed(0)
    random.seed(1)
    numpy.random.seed(2)
    model = Model().double()
    model.vision.drop.p = 0.0
    reference, mbs = copy.deepcopy(model), batch()
    pipe = fxpipe.compile(model, mbs[0], ranks=2, backend="local", schedule="transpose/1f1b")
    for _ in range(3):
        before = python_state()
        with python_left_alone():
            for mb in mbs:
                reference(**mb)
            after = python_state()
        step_alike_from(pipe, mbs, reference, before)
        assert torch.equal(python_state(), after)
    assert pipe.captured.prefix is not None


def step_alike_from(
    pipe: fxpipe.Pipe, mbs: list[dict[str, Tensor]], reference: nn.Module, state: Tensor
) -> None:
    """The step begins where eager has begun."""
    step = pipe.step

    def again(given: list[dict[str, Tensor]]) -> object:
        set_python_state(state)
        return step(given)

    pipe.step = again  # type: ignore[method-assign,assignment]
    step_alike(pipe, mbs, reference, 1e-12)
    del pipe.step


class Shaken(nn.Module):
    """Scales what enters its blocks by numbers that Python's and NumPy's generators give."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * random.random()
        if ids.shape[1] > 5:
            x = x * numpy.random.randn()
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x).logsumexp(-1).mean()


@pytest.mark.parametrize(("schedule", "ranks"), [("nested/1f1b", 1), ("stage/1f1b", 2)])
def test_steps_go_on_where_eager_goes_on(schedule: str, ranks: int) -> None:
    torch.manual_seed(0)
    random.seed(1)
    model = Shaken().double()
    reference, sizes = copy.deepcopy(model), [(5, 6), (7, 5, 4), (6,)]
    batches = [[{"ids": torch.randint(0, 9, (2, n))} for n in step] for step in sizes]
    before = python_state()
    pipe = fxpipe.compile(model, batches[0][0], ranks=ranks, backend="local", schedule=schedule)
    assert torch.equal(python_state(), before)
    for mbs in batches:
        before = python_state()
        with python_left_alone():
            for mb in mbs:
                reference(**mb)
            after = python_state()
        step_alike_from(pipe, mbs, reference, before)
        assert torch.equal(python_state(), after)
        for trained in (model, reference):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()


@pytest.mark.slow
def test_dropout_depends_on_no_placement() -> None:
    found = []
    for schedule in ("nested/1f1b", "stage/1f1b", "transpose/1f1b"):
        torch.manual_seed(0)
        mbs, model = batch(), Model().double()
        pipe = fxpipe.compile(model, mbs[0], ranks=2, backend="local", schedule=schedule)
        torch.manual_seed(3)
        random.seed(1)
        numpy.random.seed(2)
        found.append(pipe.step(mbs).losses)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_draws_past_every_boundary_are_refused() -> None:
    with pytest.raises(CaptureError, match="forward draws from random"):
        fxpipe.compile(Model(late=True).double(), batch()[0], ranks=1, backend="local")


class Sometimes(Model):
    """Draws only where a value of floats is large."""

    def forward(self, x: Tensor, counts: Tensor, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.shaken(self.vision.layer(x)).mean(0)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return hidden.square().mean()

    def shaken(self, x: Tensor) -> Tensor:
        return x * random.random() if x.max() > 9 else x


def test_draws_that_the_example_lacks_are_refused() -> None:
    torch.manual_seed(0)
    mbs, model = batch(), Sometimes().double()
    pipe = fxpipe.compile(model, mbs[0], ranks=1, backend="local")
    pipe.step(mbs[:1])
    with pytest.raises(RankError, match=r"random numbers are drawn \(python\)"):
        pipe.step([{**mbs[0], "x": mbs[0]["x"] * 1000}])
