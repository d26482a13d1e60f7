"""Regions of architectures as a person would draw them."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fxpipe.capture import capture
from fxpipe.dataflow import path
from fxpipe.inputs import flatten
from fxpipe.passes.regions import find_regions
from fxpipe.solving import solve

WIDTH = 8


class Residual(nn.Module):
    """A block; with a condition it reads that beside its input, and before it."""

    def __init__(self, conditioned: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.condition = nn.Linear(WIDTH, WIDTH) if conditioned else None

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        x = x + self.down(self.up(x).tanh())
        if self.condition is not None and condition is not None:
            x = x + self.condition(condition).mean(1, keepdim=True)
        return x


def blocks(count: int, conditioned: bool = False) -> nn.ModuleList:
    return nn.ModuleList(Residual(conditioned) for _ in range(count))


class Tiled(nn.Module):
    """A vision tower in two parts with a table of tile layouts, of which early layers' features
    reach the text as well; text blocks read its projection; a generator reads the text, normed."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.tiles = nn.Linear(4, WIDTH), nn.Embedding(5, WIDTH)
        self.first, self.second = blocks(3), blocks(1)
        self.project = nn.Linear(2 * WIDTH, WIDTH)
        self.embed, self.head = nn.Embedding(19, WIDTH), nn.Linear(WIDTH, 19)
        self.layers = blocks(2, conditioned=True)
        self.norm, self.enter = nn.RMSNorm(WIDTH), nn.Linear(4, WIDTH)
        self.draw, self.leave = blocks(2, conditioned=True), nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor, pixels: Tensor, layout: Tensor, noise: Tensor) -> Tensor:
        seen = self.patch(pixels) + self.tiles(layout)
        for block in self.first:
            seen = block(seen)
        whole = seen
        for block in self.second:
            whole = block(whole)
        seen = self.project(torch.cat([whole, seen], -1))
        text = self.embed(ids)
        for layer in self.layers:
            text = layer(text, seen)
        context, drawn = self.norm(text), self.enter(noise)
        for block in self.draw:
            drawn = block(drawn, context)
        loss = F.cross_entropy(self.head(text).flatten(0, 1), ids.flatten())
        return loss + (self.leave(drawn) - noise).square().mean()


def test_tower_in_two_parts_text_and_generator() -> None:
    batch = {
        "ids": torch.randint(0, 19, (2, 5)),
        "pixels": torch.randn(2, 3, 4),
        "layout": torch.randint(0, 5, (2, 1)),
        "noise": torch.randn(2, 6, 4),
    }
    captured = capture(Tiled(), batch)
    symbols, _ = solve(captured.leaves, [tensor for _, tensor in flatten(batch)[0]])
    regions = find_regions(captured, symbols)
    assert {name: str(role) for name, role in regions.roles.items()} == {
        "vision": "encoder",
        "llm": "backbone",
        "generator": "generator",
    }
    home = {path(node).split(".")[0]: own for node, own in regions.of.items() if path(node)}
    wanted = {
        "vision": "patch tiles first second project",
        "llm": "embed layers head",
        "generator": "norm enter draw leave",
    }
    assert home == {m: (name,) for name, modules in wanted.items() for m in modules.split()}
    assert len(regions.blocks) == 2


class Marked(nn.Module):
    """A tower with more work than the text has, whose features go where a token is, if it is."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.layers = blocks(4), blocks(2)
        self.embed, self.head = nn.Embedding(19, WIDTH), nn.Linear(WIDTH, 19)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        for layer in self.vision:
            pixels = layer(pixels)
        x = self.embed(ids)
        if (ids == 18).any():
            x = torch.where((ids == 18).unsqueeze(-1), pixels.mean(1, keepdim=True), x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).mean()


def test_text_is_the_backbone_also_where_its_tokens_are_read() -> None:
    microbatch = {"ids": torch.tensor([[1, 18, 3]]), "pixels": torch.randn(1, 9, WIDTH)}
    captured = capture(Marked(), microbatch)
    assert captured.values
    symbols, _ = solve(captured.leaves, [tensor for _, tensor in flatten(microbatch)[0]])
    regions = find_regions(captured, symbols)
    of = {path(node).partition(".")[0]: region for node, region in regions.of.items()}
    assert (of["vision"], of["layers"]) == (("vision",), ("llm",))
