"""Kinds of code that models contain: each gives the values of eager, or is refused by name."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError
from tests.eager import step_alike
from tests.models import worst

Body = Callable[["Layer", Tensor], Tensor]
Loss = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("ema", torch.zeros(6))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Model(nn.Module):
    def __init__(self, body: Body, loss: Loss | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.layers = nn.ModuleList(Layer(body) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.loss = loss

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * ids.double().mean()
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return self.loss(self, x, loss, ids) if self.loss else loss


def plain(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.down(layer.up(x).tanh())


def written_alias(layer: Layer, x: Tensor) -> Tensor:
    y = layer.up(x) * 1
    first = y[0]
    y.unsqueeze_(0)
    F.dropout(y, 0.0).add_(1)
    y.to(y.device)[..., 1].mul_(2)
    return x + layer.down(y)[0] * first


def written_under_no_grad(layer: Layer, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    with torch.no_grad():
        y[:, 0] = layer.up(x)[:, 0]
        y.mul_(2)
    return x + layer.down(y)


def branches(layer: Layer, x: Tensor) -> Tensor:
    return plain(layer, x * 2 if x.shape[1] > 4 else x)


def backward_writes_in_place(layer: Layer, x: Tensor) -> Tensor:
    return plain(layer, x + torch.fft.irfft(torch.fft.rfft(x, dim=-1) * 2, n=6, dim=-1))


def under_vmap(layer: Layer, x: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[1]), torch.arange(x.shape[1])
    seen = torch.vmap(lambda i: torch.vmap(lambda j: (i >= j) | (j < 1))(columns))(rows)
    return x + layer.down(torch.einsum("ij,bjd->bid", seen.to(x.dtype), layer.up(x)))


def averaged(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.ema.mul_(0.9).add_(x.mean((0, 1)))
    return plain(layer, x)


def assigned(layer: Layer, x: Tensor) -> Tensor:
    layer.ema = layer.ema * 0.9 + x.mean((0, 1)).detach()
    return plain(layer, x)


def check(model: Model) -> None:
    """On two ranks the losses and gradients of eager."""
    generator = torch.Generator().manual_seed(1)
    batch = [
        {"ids": torch.randint(0, 9, shape, generator=generator)}
        for shape in [(2, 3), (3, 4), (2, 6)]
    ]
    reference = copy.deepcopy(model)
    step_alike(fxpipe.compile(model, ranks=2, backend="local"), batch, reference, 1e-10)
    for buffer, wanted in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.allclose(buffer, wanted, rtol=1e-10)


@pytest.mark.parametrize(
    "body",
    [
        written_alias,
        written_under_no_grad,
        branches,
        backward_writes_in_place,
        under_vmap,
        averaged,
        assigned,
    ],
)
def test_bodies(body: Body) -> None:
    torch.manual_seed(0)
    check(Model(body).double())


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, loss, ids: loss * torch.exp(-m.scale) + m.scale,
        lambda m, x, loss, ids: loss + ids.double().mean(),
        lambda m, x, loss, ids: loss + loss + x.square().mean() * loss,
    ],
)
def test_losses(loss: Loss) -> None:
    torch.manual_seed(0)
    check(Model(plain, loss).double())


def scaled_in_place(layer: Layer, x: Tensor) -> Tensor:
    y = layer.up(x)
    with torch.no_grad():
        y.mul_(2)
    return x + layer.down(y)


def hooked(layer: Layer, x: Tensor) -> Tensor:
    y = plain(layer, x)
    y.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    return y


def energy(layer: Layer, y: Tensor) -> Tensor:
    return layer.up(y).tanh().square().sum()


def derived(layer: Layer, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda y: energy(layer, y))(x)


def derived_in_rows(layer: Layer, x: Tensor) -> Tensor:
    return x + torch.func.vmap(torch.func.grad(lambda y: energy(layer, y)))(x)


def derived_by_autograd(layer: Layer, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        (found,) = torch.autograd.grad(energy(layer, y), y, create_graph=True)
    return x + found


def chosen(layer: Layer, x: Tensor) -> Tensor:
    made: Tensor = torch.cond(x.sum() > 0, layer.up, layer.down, (x,))
    return made


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (derived, "torch.func.grad"),
        (derived_in_rows, "torch.func.grad"),
        (derived_by_autograd, "torch.autograd.grad"),
        (chosen, "choose with torch.where"),
        (scaled_in_place, "under no_grad it changes"),
        (hooked, "register_hook"),
    ],
)
def test_refused(body: Body, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        fxpipe.compile(Model(body), {"ids": torch.zeros(2, 3, dtype=torch.long)}, ranks=2)


def test_hook_on_a_parameter_is_refused() -> None:
    model = Model(plain)
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(CaptureError, match=r"head\.weight has a hook"):
        fxpipe.compile(model, {"ids": torch.zeros(2, 3, dtype=torch.long)}, ranks=2)


class Weighted(nn.Module):
    """Its loss is scaled by what two plain attributes hold; forward counts its calls in a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.alpha, self.t, self.calls = 1.0, torch.ones(6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 1
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.t.to(x.dtype)).mean() * self.alpha


def test_follows_attributes_that_change() -> None:
    model, reference = Weighted().double(), Weighted().double()
    reference.load_state_dict(model.state_dict())
    batch = [(torch.randn(3, 6).double(),) for _ in range(2)]
    pipe = fxpipe.compile(model, batch[0], ranks=2)
    traced = len(pipe._variants._memory.lowered)
    pipe.step(batch)
    assert len(pipe._variants._memory.lowered) == traced
    for step in range(3):
        for part in (model, reference):
            part.zero_grad()
            part.alpha = 2.0 + (step > 0)
            part.t = part.t.mul_(3.0) if step == 2 else part.t
        loss = sum(reference(x) / 2 for (x,) in batch)
        loss.backward()
        assert torch.allclose(pipe.step(batch).loss, loss)
        assert worst(model, reference) < 1e-12
        model.zero_grad()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 6), nn.Linear(6, 1))
    with pytest.raises(CaptureError, match="sparse=True"):
        fxpipe.compile(model, (torch.tensor([1, 2]),), loss_fn=lambda out: out.mean(), ranks=2)
