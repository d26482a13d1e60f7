"""Microbatches that take other paths beside, or after, a stage that runs the model's own code."""

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe
from fxpipe.inputs import Microbatch
from tests.eager import step_alike, trained_alike


class Decoder(nn.Module):
    """Blocks over tokens, some of which a mask leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.blocks:
            scores = x @ x.transpose(1, 2)
            if mask is not None:
                scores = scores.masked_fill(~mask.bool()[:, None], -1e9)
            x = x + block(scores.softmax(-1) @ x).tanh()
        return x


class Model(nn.Module):
    """Draws in Python where there is an image (always the same number), and drops a mask that masks
    nothing, as models do that have a quicker kernel without one."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.embed, self.decoder = nn.Linear(3, 4), nn.Embedding(9, 4), Decoder()

    def forward(self, ids: Tensor, mask: Tensor, image: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if image is not None:
            x = x + self.tower(image).mean(0) * random.uniform(2, 2)
        needed = mask if image is None else self.needed(mask)
        return self.decoder(x, needed).square().mean()

    def needed(self, mask: Tensor) -> Tensor | None:
        return None if mask.all() else mask


class Recorded(nn.Module):
    """Draws in Python, then does what a trace has to be told of: code that is checkpointed, and a
    factor made under inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids) * random.uniform(2, 2))
        with torch.inference_mode():
            factor = self.scale(x).abs().mean()
        x = x * factor.clone()
        for block in self.blocks[1:]:
            y: Tensor = checkpoint(block, x, use_reentrant=True)
            x = x + y + checkpoint(block, x.detach(), use_reentrant=True)
        return x.square().mean()


def microbatch(length: int, padding: int = 0, image: int = 0) -> Microbatch:
    g = torch.Generator().manual_seed(length)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length - padding :] = 0
    more = {"image": torch.randn(image, 3, generator=g).double()} if image else {}
    return {"ids": torch.randint(0, 9, (2, length), generator=g), "mask": mask, **more}


BATCH = [microbatch(5, 0, 3), microbatch(5, 2, 3), microbatch(6, 1), microbatch(4, 1, 2)]


@pytest.fixture(scope="module")
def pipe() -> fxpipe.Pipe:
    torch.manual_seed(0)
    how = {"schedule": "nested/1f1b", "ranks": 2, "backend": "local"}
    return fxpipe.compile(Model().double(), BATCH[0], **how)


def alike(pipe: fxpipe.Pipe, batch: list[Microbatch]) -> None:
    step_alike(pipe, batch, copy.deepcopy(pipe.model), 1e-10)


def test_flags_that_every_rank_can_know_choose_a_variant(pipe: fxpipe.Pipe) -> None:
    """The mask decides what the decoder is called with."""
    alike(pipe, BATCH[:2])
    assert len(pipe.variants) == 2
    alike(pipe, [BATCH[3], BATCH[1], BATCH[0]])
    assert pipe.captures == 2


def test_text_alone_beside_an_opaque_stage(pipe: fxpipe.Pipe) -> None:
    alike(pipe, BATCH)
    assert [captured.prefix is None for captured in pipe.variants].count(True) == 1


def test_what_follows_is_recorded_as_in_any_graph() -> None:
    torch.manual_seed(0)
    batch = [{"ids": torch.randint(0, 9, (2, length))} for length in (3, 4)]
    pipe = trained_alike(Recorded().double(), batch, 1e-10, ranks=1)
    assert pipe.captured.prefix is not None
