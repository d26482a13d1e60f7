"""Sizes that depend on a microbatch's data: known everywhere if they follow from the inputs."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import BatchError, StageError
from tests.eager import trained_alike

WIDTH, SLOT = 6, 8


class Packed(nn.Module):
    """Patches that are padding are dropped before the encoder; the rest is packed into the text."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, WIDTH)
        self.vision = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.embed, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        real = pixels.flatten(0, 1)
        real = real[(real != 0).any(-1)]
        seen = self.patch(real)
        for block in self.vision:
            seen = seen + block(seen).tanh()
        seen = seen * (torch.arange(seen.shape[0], dtype=seen.dtype) / seen.shape[0])[:, None]
        count = (ids == SLOT).sum().item()
        torch._check(count == seen.shape[0])
        text = self.embed(ids)
        text = text.masked_scatter((ids == SLOT)[..., None].expand_as(text), seen)
        for layer in self.layers:
            text = text + layer(text).tanh() * count
        logits, labels = self.head(text[:, :-1]), ids[:, 1:]
        wanted = labels != SLOT
        return F.cross_entropy(logits[wanted], labels[wanted])


def microbatch(*patches: int) -> dict[str, Tensor]:
    """Samples with these numbers of patches that are no padding."""
    generator = torch.Generator().manual_seed(sum(patches))
    ids = torch.randint(0, SLOT, (len(patches), 7), generator=generator)
    pixels = torch.zeros(len(patches), 5, 4, dtype=torch.float64)
    for i, count in enumerate(patches):
        ids[i, 1 : 1 + count] = SLOT
        pixels[i, :count] = torch.rand(count, 4, generator=generator, dtype=torch.float64) + 0.1
    return {"ids": ids, "pixels": pixels}


@pytest.mark.parametrize("schedule", ["nested/1f1b", "stage/1f1b"])
def test_packed_patches(schedule: str) -> None:
    torch.manual_seed(0)
    model = Packed().double()
    batch = [microbatch(3, 2), microbatch(1, 1), microbatch(5, 4)]
    ranks = 3 if schedule == "stage/1f1b" else 2
    pipe = trained_alike(model, batch, 1e-12, schedule=schedule, ranks=ranks)
    assert len(pipe._variants.all) == 1
    broken = microbatch(3, 2)
    broken["ids"][0, 1] = 0
    with pytest.raises(BatchError, match=r"microbatch 1 breaks what .* Eq\(u"):
        pipe.step([batch[0], broken, batch[1]])


class Picky(nn.Module):
    """An encoder that drops the features that it does not like."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        for block in self.vision:
            pixels = block(pixels).tanh()
        x = torch.cat([pixels[pixels.sum(-1) > 0], self.embed(ids)])
        for layer in self.layers:
            x = layer(x).tanh().cumsum(0)
        return x.square().mean()


def test_sizes_that_activations_decide_do_not_cross() -> None:
    example = {"ids": torch.arange(5), "pixels": torch.randn(6, 4)}
    with pytest.raises(StageError, match="weights or activations decide"):
        fxpipe.compile(Picky(), example, ranks=2)


class PutIn(nn.Module):
    """Puts the features of images, four of each, where a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.query = nn.Parameter(torch.randn(4, 1, 4))
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor, pixels: Tensor, mask: Tensor) -> Tensor:
        for layer in self.vision:
            pixels = layer(pixels).tanh()
        features = (self.query + pixels).transpose(0, 1)
        x = self.embed(ids)
        x[mask.bool()] = features.reshape(-1, 4)
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def test_a_mask_picks_a_multiple_of_the_images() -> None:
    batch = []
    for images, length in ((2, 6), (3, 7)):
        mask = torch.zeros(images, length, dtype=torch.long)
        mask[:, 1:5] = 1
        ids, pixels = torch.randint(0, 9, (images, length)), torch.randn(images, 4).double()
        batch.append({"ids": ids, "pixels": pixels, "mask": mask})
    pipe = trained_alike(PutIn().double(), batch, 1e-10, ranks=2)
    assert pipe.captures == 1
