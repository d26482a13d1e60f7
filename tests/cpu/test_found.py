"""What random models have found: the smallest model of each kind equals eager."""

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.backends.wire import _message, pack, unpack
from fxpipe.errors import BatchError, CaptureError
from tests.eager import trained_alike

Body = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """An embedding, a body, two layers and a head."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.adapters = nn.ModuleList([nn.Linear(4, 4)])
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self, self.embed(ids))
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def reads_its_backbone(model: Model, x: Tensor) -> Tensor:
    """A chain of one block looks like an encoder, and is none: tokens enter it."""
    return x + model.adapters[0](x).tanh()


def laid_out_otherwise(model: Model, x: Tensor) -> Tensor:
    """The kernel gives its gradient other strides than its trace says."""
    y = F.batch_norm(x.transpose(1, 2), None, None, training=True)
    return x + y.transpose(1, 2)


def packed_for_a_kernel(model: Model, x: Tensor) -> Tensor:
    """A gradient that its trace takes for packed reaches a kernel that needs it to be."""
    y = F.group_norm(x.transpose(1, 2), 2).transpose(1, 2)
    return x + F.mse_loss(y * 2, x.detach())


def only_reads(model: Model, x: Tensor) -> Tensor:
    """The first stage reads a tied weight that only the last one trains."""
    for frozen in (model.embed, model.adapters, model.layers[0]):
        frozen.requires_grad_(False)
    return x + x @ model.head.weight[:4].detach()


def overwritten(model: Model, x: Tensor) -> Tensor:
    """What is written over gets a gradient of zeros in eager, not None."""
    y = model.adapters[0](x)
    y.copy_(x)
    z = model.head(x)
    z.zero_()
    return x + y + z.sum(-1, keepdim=True)


def under_inference_mode(model: Model, x: Tensor) -> Tensor:
    with torch.inference_mode():
        factor = model.adapters[0](x).abs().mean()
    return x * factor.clone()


def complex_under_no_grad(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.complex(model.adapters[0](x), x)
    return x * z.abs()


def without_autocast(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x + model.adapters[0](x)


def checkpoints(model: Model, x: Tensor) -> Tensor:
    y = checkpoint(model.adapters[0], x, use_reentrant=True)
    return x + y + checkpoint(model.adapters[0], x.detach(), use_reentrant=True)


def data_of_a_value(model: Model, x: Tensor) -> Tensor:
    return x + model.adapters[0](x).data * x


def written_down(model: Model, x: Tensor) -> Tensor:
    """The text of a size is that of its number, not of the symbol that stands for it."""
    return x * len(f"{10 ** x.shape[1]}") + float(f"{x.shape[1]}.5")


@pytest.mark.parametrize(
    "body",
    [
        reads_its_backbone,
        laid_out_otherwise,
        packed_for_a_kernel,
        only_reads,
        overwritten,
        under_inference_mode,
        complex_under_no_grad,
        without_autocast,
        checkpoints,
        data_of_a_value,
        written_down,
    ],
)
def test_equals_eager(body: Body) -> None:
    torch.manual_seed(0)
    model = Model(body).double()
    model.body(model, torch.zeros(2, 2, 4).double())
    lengths = (3, 4) if body is written_down else (3, 3)
    batch = [{"ids": torch.randint(0, 9, (2, length))} for length in lengths]
    trained_alike(model, batch, 1e-10, schedule="nested/1f1b", ranks=2)


class Scaling(nn.Module):
    """Numbers that one layer has computed from sizes are read by all."""

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        if not shared:
            shared |= {"scale": x.shape[1] ** -0.5, "half": math.ceil(x.shape[1] / 2)}
        return x * shared["scale"] + x[:, : shared["half"]].sum()


class Scalings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Scaling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Any] = {}
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, shared)
        return x.square().mean()


def test_ratios_of_sizes_are_computed_where_they_are_read() -> None:
    model = Scalings().double()
    batch = [{"x": torch.randn(2, 3 + i, 4).double()} for i in range(3)]
    expected = torch.stack([model(**mb) for mb in batch])
    pipe = fxpipe.compile(model, batch[0], schedule="nested/1f1b", ranks=3)
    torch.testing.assert_close(pipe.step(batch).losses, expected.detach())
    assert all(not seam.values[1:] for seam in pipe.cut.seams)


def autocasts(model: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.adapters[0](x)
    return x + y


def counts(model: Model, x: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return x * model.calls


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (autocasts, r"runs under torch\.autocast"),
        (counts, "attribute calls changes with every forward"),
    ],
)
def test_what_a_graph_would_repeat_is_refused(body: Body, found: str) -> None:
    with pytest.raises(CaptureError, match=found):
        fxpipe.compile(Model(body), {"ids": torch.zeros(2, 3, dtype=torch.long)}, ranks=2)


def test_a_conjugate_is_sent_as_its_numbers() -> None:
    z = torch.tensor([[1 + 2j], [3 - 4j]])
    for value in (z.conj(), z[:1].conj().imag):
        (found,) = unpack(pack([value], z.device), [(tuple(value.shape), value.dtype)])
        assert found.tolist() == value.tolist()
        assert torch.equal(_message(value).view(value.dtype).view(value.shape), value)


class Scaled(nn.Module):
    """Reads two tensors, and whatever else it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, other: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * y).mean()


def test_a_tensor_given_twice_may_be_two_in_the_next_microbatch() -> None:
    model = Scaled().double()
    x, y = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double()
    batch = [{"x": x, "y": x}, {"x": x, "y": y}]
    expected = torch.stack([model(**mb) for mb in batch])
    result = fxpipe.compile(model, batch[0], ranks=2).step(batch)
    torch.testing.assert_close(result.losses, expected.detach())


def test_what_cannot_be_compared_is_refused() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(BatchError, match="other is a ndarray"):
        fxpipe.compile(Scaled(), {"x": x, "y": x, "other": numpy.zeros(3)}, ranks=2)


class Cache:
    """Tables that are made when they are first asked for."""

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []
        self.by_size: dict[int, torch.Tensor] = {}

    @cached_property
    def offsets(self) -> torch.Tensor:
        return torch.tensor([0.5, 1.5, 2.5, 3.5])

    def __call__(self, size: int) -> torch.Tensor:
        if size not in self.by_size:
            self.by_size[size] = torch.arange(size).double()
            self.tables.append(self.by_size[size])
        return self.by_size[size] + self.offsets


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x + self.cache(x.shape[-1])).relu()
        return x.square().mean()


def test_a_capture_leaves_nothing_in_the_models_caches() -> None:
    torch.manual_seed(0)
    model = Cached().double()
    batch = [{"x": torch.randn(rows, 4).double()} for rows in (2, 3, 2)]
    pipe = fxpipe.compile(model, batch[0], schedule="1f1b", ranks=2, backend="local")
    assert not model.cache.tables
    assert "offsets" not in vars(model.cache)
    pipe.step(batch)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    for mb in batch:
        (model(**mb) / 3).backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
