"""Buffers of a model whose first stage runs its own code: they end as in eager, on one rank."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, RankError, ScheduleError
from fxpipe.inputs import Microbatch
from fxpipe.undone import own_buffers, undone, untouched
from tests.eager import step_alike


class Tower(nn.Module):
    """Reads values of floats; changes buffers in every way there is."""

    average: Tensor
    calls: Tensor
    rare: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rare", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.max() > 100):
            self.rare += 1
        x = self.norm(self.linear(x).T.unsqueeze(0))[0].T
        x = x - self.average
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.calls += 1
        return x


class Model(nn.Module):
    """The tower, blocks that are one graph, and a buffer that these assign."""

    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.embed = Tower(), nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("latest", torch.zeros(4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.tower(x).mean(0)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        self.latest = hidden.detach().mean((0, 1))
        return hidden.square().mean()


def batch(seed: int) -> list[Microbatch]:
    g = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(3 + i % 2, 4, generator=g, dtype=torch.float64) + i,
            "ids": torch.randint(0, 9, (2, 5), generator=g),
        }
        for i in range(4)
    ]


def step(pipe: fxpipe.Pipe, reference: nn.Module, mbs: Sequence[Microbatch]) -> None:
    held = dict(pipe.model.named_buffers())
    step_alike(pipe, mbs, reference, 1e-10)
    for (name, ours), eager in zip(pipe.model.named_buffers(), reference.buffers(), strict=True):
        assert ours is held[name]
        torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-14, msg=name)


def test_buffers_end_as_in_eager() -> None:
    torch.manual_seed(0)
    model = Model().double()
    reference = copy.deepcopy(model)
    pipe = fxpipe.compile(model, batch(0)[0], ranks=1, backend="local")
    for seed in (1, 2):
        step(pipe, reference, batch(seed))
    assert pipe.captured.prefix is not None
    region = next(name for name in pipe.regions.roles if name != "llm")
    apart = pipe.reschedule("stage/1f1b", 2, recompute=[region])
    step(apart, reference, batch(3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ScheduleError, match=r"tower\.\w+.* one after the other.*stage or ends"):
        pipe.reschedule("nested/1f1b", 2).step(batch(4))
    rare = [*batch(5)[:1], {**batch(5)[1], "x": torch.full((3, 4), 101.0).double()}]
    with pytest.raises(RankError, match=r"tower\.rare is changed by forward for this microbatch"):
        apart.step(rare)
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())


class Filled(nn.Module):
    """Reads floats; fills a buffer that was none, and goes on from there."""

    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.ones(4) if self.seen is None else self.seen * 2
        return x * self.seen if bool(x.max() < 100) else x


def test_a_buffer_that_was_none_leaves_no_trace() -> None:
    model = Filled()
    with undone(model) as changed:
        model(torch.ones(2, 4))
    assert model.seen is None and list(changed.buffers) == ["seen"]
    with own_buffers(model, {}) as after:
        model(torch.ones(2, 4))
    assert model.seen is None and torch.equal(after["seen"], torch.ones(4))


class Decaying(Tower):
    """Writes to a parameter that is not trained, where numbers are large enough."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.above, self.factor = above, nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.max() > self.above):
            with torch.no_grad():
                self.factor.mul_(0.9)
        return super().forward(x) * self.factor


@pytest.mark.parametrize("above", [-100.0, 100.0])
def test_a_parameter_that_is_written_to_is_refused_and_as_it_was(above: float) -> None:
    model = Model().double()
    model.tower = Decaying(above).double()
    mbs = batch(0)
    if above < 0:
        with pytest.raises(
            CaptureError, match=r"parameter tower\.factor is changed by forward before"
        ):
            fxpipe.compile(model, mbs[0], ranks=1)
        assert torch.equal(model.tower.factor, torch.ones(4).double())
        return
    pipe = fxpipe.compile(model, mbs[0], ranks=1)
    mbs[2]["x"][0] = 200
    with pytest.raises(RankError, match=r"tower\.factor is changed by forward for this microbatch"):
        pipe.step(mbs)


def test_what_code_writes_to_a_parameter_is_undone() -> None:
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    with untouched(model) as changed, torch.no_grad():
        model.weight[0].zero_()
        torch._foreach_add_([model.bias], 1.0)
        model.bias.data.mul_(2)
    assert changed.parameters == ["weight", "bias"]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
