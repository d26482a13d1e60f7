"""Random numbers are eager's, whatever the ranks, the schedule and recomputation."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe import errors
from tests import models

WIDTH = 4
RUNS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("nested/1f1b", 2, ()),
    ("upfront/zb-h1", 4, ("llm",)),
    ("stage/gpipe", 1, ()),
)


class Drops(nn.Module):
    """Every dropout, also of a transposed value and in place, and attention with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2) + F.alpha_dropout(x, 0.3, True)
        x = F.dropout(x.transpose(1, 2), 0.3).transpose(1, 2)
        x = x + F.dropout2d(x.unsqueeze(-1), 0.2).squeeze(-1)
        x = x + F.feature_alpha_dropout(x.unsqueeze(-1), 0.2, True).squeeze(-1)
        x = F.dropout(x + 0, 0.2, inplace=True)
        return x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True)


class Noise(nn.Module):
    """Noise of many kinds; how much `bernoulli` and `multinomial` draw depends on shapes alone."""

    def forward(self, x: Tensor) -> Tensor:
        like = x.transpose(1, 2)
        x = x + 0.1 * torch.randn_like(like).transpose(1, 2) * torch.rand(x.shape[1], 1)
        x = x * torch.empty_like(x).exponential_() + torch.bernoulli(x.sigmoid())
        x = x + torch.distributions.Normal(x.detach(), 0.1).sample()
        x = x + torch.empty_like(x).uniform_(-1, 1) + torch.empty_like(x).normal_(0, 0.1)
        x = x[:, torch.randperm(x.shape[1])] * F.gumbel_softmax(x, dim=-1)
        picked = torch.multinomial(x[:, 0].softmax(-1), 1).unsqueeze(-1)
        return x + 0.1 * picked + torch.randint(0, 5, (x.shape[1], 1)).to(x)


class Selected(nn.Module):
    """Dropout on as many values as are positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(x.detach()[x > 0], 0.5).sum() * 0.1


class Chancy(nn.Module):
    """An encoder and a backbone with a drawing module after the first and the last block."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.vision = nn.Sequential(*(models.Small(WIDTH) for _ in range(2)), nn.Dropout(0.2))
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(models.Small(WIDTH) for _ in range(4))
        self.inside = nn.ModuleList(inside)
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        x = self.embed(ids) + self.vision(pixels).mean(1, keepdim=True)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in (0, 3):
                x = self.inside[index // 3](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def build(*inside: nn.Module) -> Chancy:
    torch.manual_seed(0)
    return Chancy(*inside).double()


def batch() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(4)
    return [
        {
            "ids": torch.randint(0, 9, (2 + i % 2, 3 + i % 3), generator=g),
            "pixels": torch.randn(2 + i % 2, 3, WIDTH, generator=g, dtype=torch.float64),
        }
        for i in range(4)
    ]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def eager(reference: nn.Module, seeds: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    """Losses, and the generator's state after; gradients are left in the model."""
    reference.zero_grad()
    torch.manual_seed(7)
    losses = []
    for i, mb in enumerate(batch()):
        if seeds:
            torch.manual_seed(seeds[i])
        loss = reference(**mb)
        (loss / 4).backward()
        losses.append(loss.detach())
    return torch.stack(losses), torch.get_rng_state()


def test_as_eager() -> None:
    model, reference = build(Drops(), Noise()), build(Drops(), Noise())
    pipe = fxpipe.compile(model, batch()[0], ranks=2)
    for schedule, ranks, recompute in RUNS:
        seeds = (3, 1, 4, 1) if ranks == 1 else None
        losses, after = eager(reference, seeds)
        torch.manual_seed(7)
        pipe = pipe.reschedule(schedule, ranks, recompute=recompute)
        model.zero_grad()
        result = pipe.step(batch(), seeds=seeds)
        torch.testing.assert_close(result.losses, losses, rtol=1e-11, atol=0)
        assert models.worst(model, reference) < 1e-10
        assert torch.equal(torch.get_rng_state(), after)
    _failing_steps(pipe)


def _failing_steps(pipe: fxpipe.Pipe) -> None:
    before = torch.get_rng_state()
    with pytest.raises(errors.BatchError, match=r"seeds has 2 numbers.*4"):
        pipe.step(batch(), seeds=(1, 2))
    bad = batch()
    bad[2]["ids"][0, 0] = 99
    with pytest.raises(errors.RankError):
        pipe.step(bad)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_whose_number_depends_on_data_follow_the_seed() -> None:
    model = build(Selected(), nn.Dropout(0.1))
    pipe = fxpipe.compile(model, batch()[0], ranks=2)
    found = []
    for schedule, ranks, recompute in RUNS:
        torch.manual_seed(7)
        pipe = pipe.reschedule(schedule, ranks, recompute=recompute)
        found.append(pipe.step(batch(), order=(2, 0, 3, 1) if ranks == 1 else None).losses)
        found.append(torch.rand(3))
    for losses, numbers in zip(found[2::2], found[3::2], strict=True):
        torch.testing.assert_close(losses, found[0], rtol=1e-12, atol=0)
        assert torch.equal(numbers, found[1])


class Rrelu(nn.Module):
    """Draws as many numbers as are negative, inside of an operator with a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(x, training=True)


def test_draws_that_cannot_be_followed_are_refused() -> None:
    with pytest.raises(errors.CaptureError, match=r"inside.1: aten.rrelu.*nn.Dropout"):
        fxpipe.compile(build(nn.Identity(), Rrelu()), batch()[0])


def seeds_first(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x * torch.rand_like(x)


def seeds_apart(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return seeds_first(x)


def sets_the_state(x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(0)
    return x * torch.rand_like(x)


def has_a_generator(x: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(0)
    return x * torch.rand(x.shape, generator=own, dtype=x.dtype)


def seeds_and_reads(x: Tensor) -> Tensor:
    return seeds_first(x) if x.sum().item() < 1e9 else x


class Applied(nn.Module):
    """Calls a function, then layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Module()
        self.first.forward = function
        self.blocks = nn.ModuleList(models.Small(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(
    "function", [seeds_first, seeds_apart, sets_the_state, has_a_generator, seeds_and_reads]
)
def test_seeding_in_forward_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    model, example = Applied(function), {"x": torch.randn(2, 3, WIDTH)}
    before, same = torch.get_rng_state(), torch.manual_seed
    with pytest.raises(errors.CaptureError, match=r"default generator.*step\(seeds=...\)"):
        fxpipe.compile(model, example)
    assert torch.manual_seed is same
    assert torch.equal(torch.get_rng_state(), before)


def drawn_of_its_mean(x: Tensor) -> Tensor:
    return torch.bernoulli(x.sigmoid()) + torch.normal(x, 0.1)


def test_what_decides_about_a_draw_has_a_gradient_of_zeros() -> None:
    batch = [{"x": torch.randn(2, 3, WIDTH).double()}]
    model = nn.Module()
    model.stem, model.rest = nn.Linear(WIDTH, WIDTH), Applied(drawn_of_its_mean)
    model.forward = lambda x: model.rest(model.stem(x))
    model.double()
    torch.manual_seed(7)
    model(**batch[0]).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    pipe = fxpipe.compile(model, batch[0], ranks=1)
    torch.manual_seed(7)
    pipe.step(batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], msg=name)
    assert not wanted["stem.weight"].any()


def test_no_chance_costs_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Linear(3, 3))
    pipe = fxpipe.compile(model, (torch.randn(2, 3),), loss_fn=torch.mean)
    before = torch.get_rng_state()
    assert not pipe.captured.draws
    pipe.step([(torch.ones(2, 3),)])
    assert torch.equal(torch.get_rng_state(), before)
