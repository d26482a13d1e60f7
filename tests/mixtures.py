"""A model that microbatches take different paths through, and microbatches of every kind of it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.models import Microbatch, Small

WIDTH = 4
WORDS = 9


class Mixed(nn.Module):
    """Image and audio encoders, a backbone, and a generator, all but the backbone optional.

    `bridge` stands before the image encoder and in the generator; the image goes to the first and
    to a later block; what is generated needs no text loss, and the reverse.
    """

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.bridge = nn.Linear(WIDTH, WIDTH)
        self.image_tower = nn.ModuleList(Small(WIDTH) for _ in range(2))
        self.audio_tower = nn.ModuleList(Small(WIDTH) for _ in range(2))
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Small(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.generator = nn.ModuleList(Small(WIDTH) for _ in range(2))

    def forward(
        self,
        ids: Tensor,
        images: Tensor | None = None,
        audio: Tensor | None = None,
        labels: Tensor | None = None,
        target: Tensor | None = None,
    ) -> Tensor:
        x, late = self.embed(ids), None
        if images is not None:
            features = self.bridge(images)
            for block in self.image_tower:
                features = block(features)
            late = features.mean(1, keepdim=True)
            x = torch.cat([features, x], 1)
        if audio is not None:
            sound = audio
            for block in self.audio_tower:
                sound = block(sound)
            x = torch.cat([sound, x], 1)
        for index, block in enumerate(self.blocks):
            if late is not None and index == len(self.blocks) - 1:
                x = x + late
            x = block(x)
        loss = x.new_zeros(())
        if labels is not None:
            logits = self.head(x[:, -ids.shape[1] :])
            loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if target is not None:
            y = self.bridge(target) + self.condition(x.mean(1, keepdim=True))
            for block in self.generator:
                y = block(y)
            loss = loss + F.mse_loss(y, target)
        return loss


def microbatch(parts: Sequence[str], seed: int = 0) -> Microbatch:
    """A microbatch that has ids and these other arguments; sizes differ by seed."""
    g = torch.Generator().manual_seed(seed)
    samples, length = 2 + seed % 2, 3 + seed % 3

    def floats(count: int) -> Tensor:
        return torch.randn(samples, count, WIDTH, generator=g, dtype=torch.float64)

    def words() -> Tensor:
        return torch.randint(0, WORDS, (samples, length), generator=g)

    every = {
        "images": floats(2 + seed % 3),
        "audio": floats(4 - seed % 2),
        "labels": words(),
        "target": floats(3),
    }
    return {"ids": words(), **{name: every[name] for name in parts}}


def made() -> Mixed:
    """The model with the same weights every time."""
    torch.manual_seed(0)
    return Mixed().double()
