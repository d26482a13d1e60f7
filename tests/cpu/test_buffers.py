"""Buffers that forward changes end as in eager, or are refused; a failed step leaves them alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe import errors
from tests import models
from tests.eager import step_alike

WIDTH = 4


class Average(nn.Module):
    """Subtracts a moving average of its input, which it updates before or after it is read."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.average: Tensor
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean((0, 1))
        if self.first:
            self.average.lerp_(now, 0.1)
            return x - self.average
        y = x * (1 + self.average)
        self.average = 0.9 * self.average + 0.1 * now
        return y


class Flat(nn.BatchNorm1d):
    """Batch normalisation of hidden states."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Stateful(nn.Module):
    """Batch and instance norms in an encoder, and between the backbone's blocks what `inside` says.

    `calls` counts and scales the loss; `trend` follows the loss; `log` holds a row of features.
    """

    calls: Tensor
    trend: Tensor
    log: Tensor

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, WIDTH, 2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH)])
        self.norms.append(nn.InstanceNorm1d(WIDTH, track_running_stats=True))
        self.vision = nn.ModuleList(models.Small(WIDTH) for _ in range(2))
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(models.Small(WIDTH) for _ in range(4))
        self.inside = nn.ModuleList(inside)
        self.head = nn.Linear(WIDTH, 9)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("trend", torch.zeros(()))
        self.register_buffer("log", torch.zeros(2, WIDTH))

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        self.calls += 1
        features = self.norms[1](self.norms[0](self.stem(pixels)).relu()).transpose(1, 2)
        for block in self.vision:
            features = block(features)
        x = self.embed(ids) + features.mean(1, keepdim=True)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index < len(self.inside):
                x = self.inside[index](x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        with torch.no_grad():
            self.trend.lerp_(loss, 0.1)
            self.log[1] = x[:, -1].mean(0)
        return loss / (self.calls + 1)


def batch(count: int = 5) -> list[dict[str, Tensor]]:
    """Mean and scale grow with the number of the microbatch, so that the order shows."""
    g = torch.Generator().manual_seed(4)
    return [
        {
            "ids": torch.randint(0, 9, (2 + i % 2, 3 + i % 3), generator=g),
            "pixels": torch.randn(2 + i % 2, 3, 6, generator=g, dtype=torch.float64) * (1 + i) + i,
        }
        for i in range(count)
    ]


def build(kind: str) -> Stateful:
    torch.manual_seed(0)
    inside = [Flat(WIDTH)] if kind == "norm" else [Average(True), Average(False)]
    return Stateful(*inside).double()


def eager(reference: nn.Module) -> list[Tensor]:
    """Losses; gradients and buffers are left in the model."""
    reference.zero_grad()
    losses = []
    for mb in batch():
        loss = reference(**mb)
        (loss / 5).backward()
        losses.append(loss.detach())
    return losses


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(model: nn.Module, reference: nn.Module, result: Any, losses: list[Tensor]) -> None:
    torch.testing.assert_close(result.losses, torch.stack(losses), rtol=1e-11, atol=1e-13)
    assert models.worst(model, reference) < 1e-10
    for (name, buffer), expected in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("kind", ["norm", "average"])
def test_buffers_end_as_in_eager(kind: str) -> None:
    model, reference = build(kind), build(kind)
    pipe = fxpipe.compile(model, batch()[0], ranks=2, backend="local")
    objects = dict(model.named_buffers())
    runs: list[tuple[str, int, tuple[str, ...]]] = [
        ("nested/1f1b", 2, ()),
        ("upfront/gpipe", 4, ("llm", "vision")),
        ("stage/zb-h1", 3, ()),
    ]
    for step, (schedule, ranks, recompute) in enumerate(runs):
        pipe = pipe.reschedule(schedule, ranks, recompute=recompute)
        model.zero_grad()
        losses = eager(reference)
        check(model, reference, pipe.step(batch()), losses)
        assert int(model.calls) == 5 * (step + 1)
    assert all(objects[name] is buffer for name, buffer in model.named_buffers())
    _another_order(kind, pipe, reference)
    _a_failing_step(pipe)


def _another_order(kind: str, pipe: fxpipe.Pipe, reference: nn.Module) -> None:
    """The order of the table is not that of the updates; what is carried from F to F needs it."""
    pipe.model.zero_grad()
    order = (3, 1, 4, 0, 2)
    if kind == "average":
        with pytest.raises(errors.ScheduleError, match=r"inside.0.average .*stage or ends"):
            pipe.step(batch(), order=order)
        assert all(p.grad is None for p in pipe.model.parameters())
        return
    losses = eager(reference)
    check(pipe.model, reference, pipe.step(batch(), order=order), losses)


def _a_failing_step(pipe: fxpipe.Pipe) -> None:
    before = {name: buffer.clone() for name, buffer in pipe.model.named_buffers()}
    bad = batch()
    bad[3]["ids"][0, 0] = 99
    with pytest.raises(errors.RankError):
        pipe.step(bad)
    assert all(torch.equal(before[name], buffer) for name, buffer in pipe.model.named_buffers())


class Odd(nn.Module):
    """A linear layer, after which something odd is done to the model or its input."""

    def __init__(self, odd: Callable[["Odd", Tensor], Tensor], norm: nn.Module | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.odd = odd
        self.norm = norm or nn.Identity()
        self.plain = torch.zeros(WIDTH)
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + 0 * self.odd(self, x)
        return self.norm(y.unsqueeze(-1)).square().mean()


def assigned(model: Odd, x: Tensor) -> Tensor:
    model.cache = x.detach()
    return x


def selected(model: Odd, x: Tensor) -> Tensor:
    model.cache = x.detach()[x > 0].mean().reshape(1)
    return x


@pytest.mark.parametrize(
    ("odd", "norm", "words"),
    [
        (lambda model, x: x.mul_(2), None, "argument x is changed.*x.clone"),
        (lambda model, x: x + model.plain.add_(1), None, "plain is changed.*register_buffer"),
        (assigned, None, r"buffer cache is replaced.*\(1,\) becomes.*, 4\)"),
        (lambda model, x: x, nn.SyncBatchNorm(WIDTH), "norm is a SyncBatchNorm.*GroupNorm"),
        (lambda model, x: x, nn.BatchNorm1d(WIDTH, momentum=None), "norm.num_batches_tracked"),
    ],
    ids=["argument", "attribute", "replaced", "sync", "cumulative"],
)
def test_refused(odd: Any, norm: nn.Module | None, words: str) -> None:
    model = Odd(odd, norm)
    cache = model.cache
    with pytest.raises(errors.CaptureError, match=words):
        fxpipe.compile(model, {"x": torch.randn(3, WIDTH)})
    assert model.cache is cache


def test_a_size_that_depends_on_data_stays_inside() -> None:
    model = Odd(selected, None)
    x = torch.randn(3, WIDTH)
    fxpipe.compile(model, {"x": x}).step([{"x": x}])
    torch.testing.assert_close(model.cache, x[x > 0].mean().reshape(1))


class Counted(nn.Module):
    """A normalised layer whose output a buffer follows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.linear(x)))
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x


class Reused(nn.Module):
    """A layer that is run twice, with another one between: its buffers have two names."""

    def __init__(self) -> None:
        super().__init__()
        layers = [Counted(), Counted()]
        self.layers = nn.ModuleList(layers[i] for i in (0, 1, 0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_layer_that_is_run_twice_changes_its_buffers_twice() -> None:
    model, reference = Reused().double(), Reused().double()
    reference.load_state_dict(model.state_dict())
    batch = [{"x": torch.randn(3, WIDTH).double()} for _ in range(2)]
    pipe = fxpipe.compile(model, batch[0], ranks=2, schedule="1f1b", backend="local")
    step_alike(pipe, batch, reference, 1e-10)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)


class Cropping(nn.Module):
    """Normalises what is left of a sequence behind its first items, which may be nothing."""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead = ahead
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), Flat(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)[:, self.ahead :]).sum() + x.square().sum()


@pytest.mark.parametrize(("ahead", "lengths"), [(0, (0, 2, 0)), (2, (4, 2, 5)), (2, (2, 3, 2))])
def test_nothing_has_no_statistics(ahead: int, lengths: tuple[int, ...]) -> None:
    model, reference = Cropping(ahead).double(), Cropping(ahead).double()
    reference.load_state_dict(model.state_dict())
    batch = [{"x": torch.randn(2, length, WIDTH).double()} for length in lengths]
    pipe = fxpipe.compile(model, batch[0], ranks=1, backend="local")
    step_alike(pipe, batch, reference, 1e-9)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, msg=name)
