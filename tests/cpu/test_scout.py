"""What a trace needs is found ahead of it, and the run that finds it leaves nothing behind."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import ReadError


class Reads(nn.Module):
    """Python looks at two inputs, one after the other, and keeps what the last call was like."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, counts: Tensor, flags: Tensor, bar: Tensor) -> Tensor:
        h = self.stem(x)
        self.seen += 1
        self.kept = h
        parts = [part * count for part, count in zip(h, counts.tolist(), strict=False) if count > 1]
        h = self.head(torch.stack(parts)) if flags.any() else h
        if bar.is_floating_point() and bar > 0:
            h = h * 2
        return F.mse_loss(h, x[: len(h)])


def example(bar: Tensor) -> dict[str, Tensor]:
    return {
        "x": torch.randn(3, 4),
        "counts": torch.tensor([2, 1, 3]),
        "flags": torch.tensor([True, False]),
        "bar": bar,
    }


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each trace."""
    export, seen = torch.export.export, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return seen


def test_one_trace(exports: list[int]) -> None:
    model, microbatch = Reads(), example(torch.tensor(1))
    before = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    found = capture(model, microbatch)
    assert len(exports) == 1
    assert set(found.values) == {"counts", "flags"}
    assert len(found.reads) == 2
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(model.seen, before[0]["seen"])
    assert model.kept is None


def test_no_trace_where_none_can_be(exports: list[int]) -> None:
    with pytest.raises(ReadError, match=r"module \(the model itself\).*reading a value"):
        capture(Reads(), example(torch.tensor(1.0)))
    assert not exports


class Twice(nn.Module):
    """A block under two names, one weight in two modules, and code that numbers decide in front."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        block, other = nn.GRU(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)
        other.bias_ih_l0 = block.bias_ih_l0
        self.blocks = nn.ModuleList([block, other, block, nn.Linear(4, 4)])
        self.encoders = nn.ModuleList([self.encoder, self.encoder])
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        for encoder in self.encoders:
            x = encoder(x).tanh()
        if self.reads:
            x = x * 2 if bool(x.sum() > 1e3) else x
        for block in self.blocks:
            made = block(x)
            x = x + (made[0] if isinstance(made, tuple) else made)
        return x.square().mean()


@pytest.mark.parametrize("reads", [False, True])
def test_modules_with_two_names_and_tied_weights_stay_what_they_are(reads: bool) -> None:
    torch.manual_seed(0)
    model = Twice(reads).double()
    before = dict(model.named_parameters(remove_duplicate=False))
    mbs = [{"x": torch.randn(n, 3, 4).double()} for n in (2, 3)]
    pipe = fxpipe.compile(model, mbs[0], schedule="nested/1f1b", ranks=2, backend="local")
    losses = pipe.step(mbs).losses
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for mb, loss in zip(mbs, losses, strict=True):
        expected = model(**mb)
        (expected / 2).backward()
        assert torch.allclose(loss, expected, rtol=1e-12)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is p for name, p in before.items())
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-9, atol=1e-12), name
