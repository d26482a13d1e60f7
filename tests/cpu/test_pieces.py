"""Blocks that are alike are differentiated once: the same graphs as from whole stages."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe import joint, pieces, tracing
from fxpipe.errors import BatchError
from fxpipe.roofline import roofline
from tests import models

pytestmark = pytest.mark.slow

WIDTH, WORDS = 8, 11


class Cross(nn.Module):
    """A block that reads an encoder's features; every other one has experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.ask, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.route = nn.Linear(WIDTH, experts) if experts else None
        self.experts = nn.ModuleList(models.Small(WIDTH) for _ in range(experts or 1))

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        score = self.ask(self.norm(x)) @ self.keys(features).mT
        x = x + score.softmax(-1) @ features
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (
            (made * self.route(x).softmax(-1)[..., None, :]).sum(-1) if self.route else made[..., 0]
        )


class Odd(nn.Module):
    """Blocks of two kinds, a skip over six of them, features that all read, two that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(models.Small(WIDTH) for _ in range(2))
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Cross(i % 2 * 2) for i in range(8))
        self.blocks[6].ask.weight = self.blocks[2].ask.weight
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        for block in self.vision:
            pixels = block(pixels)
        x = self.embed(ids)
        early = x
        for i, block in enumerate(self.blocks):
            early = x if i == 1 else early
            x = block(x + early.mT.contiguous().mT if i == 7 else x, pixels)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Adapted(nn.Module):
    """A linear layer that is frozen, with a trained one of low rank beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class Frozen(nn.Module):
    """Nothing is trained but adapters in two of eight blocks, one whole block, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(models.Small(WIDTH) for _ in range(8))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)
        self.requires_grad_(False)
        for i in (2, 5):
            self.blocks[i].up = Adapted(self.blocks[i].up)
            self.blocks[i].up.down.requires_grad_(True)
        self.blocks[4].requires_grad_(True)
        self.bias.requires_grad_(True)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block(x + self.bias) if i > 2 else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch(samples: int, length: int) -> models.Microbatch:
    """One microbatch in float64."""
    g = torch.Generator().manual_seed(length)
    pixels = torch.randn(samples, 3, WIDTH, generator=g, dtype=torch.float64)
    return {"ids": torch.randint(0, WORDS, (samples, length), generator=g), "pixels": pixels}


def test_a_model_without_memory_compiles_and_does_not_run() -> None:
    torch.set_num_threads(1)
    with torch.device("meta"):
        pipe = fxpipe.compile(Frozen(), {k: v.to("meta") for k, v in batch(2, 5).items()}, ranks=3)
    assert pipe.table.cut.ranks == 3
    assert "blocks.7" in pipe.explain()
    first = pipe._variants.first
    assert all(roofline(first).flops.values())
    assert all(graphs.trained for graphs in pipe.graphs.values())
    with pytest.raises(BatchError, match="meta"):
        pipe.step([batch(2, 5)] * 3)


def products(graph: torch.fx.GraphModule) -> int:
    """How many matrix products a graph runs."""
    return sum("mm" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize(("make", "most"), [(Odd, 10), (Frozen, 12)])
def test_the_same_graphs(
    make: Callable[[], nn.Module], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, reference = make().double(), make().double()
    reference.load_state_dict(model.state_dict())
    count = []
    trace = tracing._trace
    monkeypatch.setattr(tracing, "_trace", lambda *args: count.append(1) or trace(*args))
    pipe = fxpipe.compile(model, batch(2, 5), ranks=3, backend="local")
    mbs = [batch(2, 5), batch(3, 4), batch(2, 7)]
    pipe.step(mbs)
    for mb in mbs:
        (reference(**mb) / 3).backward()
    assert models.worst(model, reference) < 1e-12
    assert len(count) <= most
    monkeypatch.setattr(pieces, "_parted", lambda nodes, depth: [nodes])
    whole = joint.differentiate(pipe.captured, pipe.stages)
    assert len(count) <= most + len(pipe.stages)
    assert whole.grads == pipe._variants.first.parts.grads
    for name, graphs in pipe.graphs.items():
        other = whole.graphs[name]
        assert (graphs.kinds, graphs.trained) == (other.kinds, other.trained)
        assert (graphs.state, graphs.fields) == (other.state, other.fields)
        for kind in graphs.kinds:
            one, two = getattr(graphs, kind), getattr(other, kind)
            assert products(one) == products(two), f"{name}.{kind}"
    lowered = pipe._variants.first
    kept, before = (roofline(x).kept for x in (lowered, replace(lowered, parts=whole)))
    assert set(kept) == set(before)
    for op, size in kept.items():
        symbols = size.free_symbols | before[op].free_symbols
        assert size.xreplace(dict.fromkeys(symbols, 7)) == before[op].xreplace(
            dict.fromkeys(symbols, 7)
        ), op
