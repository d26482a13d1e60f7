"""A model that reads its images' grids in Python, as vision towers with free resolutions do."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

IMAGE = 1
Sizes = Sequence[tuple[int, int]]


class Attention(nn.Module):
    """One head over each image of a flat stream of patches, cut by lengths that Python reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        lengths = (starts[1:] - starts[:-1]).tolist()
        parts = [part.chunk(3, -1) for part in torch.split(self.qkv(x), lengths)]
        mixed = [torch.softmax(q @ k.T, -1) @ v for q, k, v in parts]
        return x + self.out(torch.cat(mixed))


class Tower(nn.Module):
    """Patches [N, 6] of all images, one after another -> features [N / 2, width], and one of the
    first block's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.places = nn.Linear(6, width), nn.Parameter(torch.randn(8, 8, width))
        self.blocks = nn.ModuleList(Attention(width) for _ in range(2))
        self.merger, self.early = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, patches: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        places = []
        for height, width in grid.tolist():
            y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            padded = F.pad(torch.stack([y, x], -1).flatten(0, 1), (0, 0, 0, 1), value=-1)
            kept = padded[padded[:, 0] != -1]
            places.append(self.places[kept[:, 0], kept[:, 1]])
        x = self.stem(patches) + torch.cat(places)
        starts = F.pad(grid.prod(-1).cumsum(0), (1, 0))
        features = []
        for block in self.blocks:
            x = block(x, starts)
            features.append(x.unflatten(0, (-1, 2)).flatten(1))
        return self.merger(features[-1]), self.early(features[0])


class Decoder(nn.Module):
    """Blocks over tokens; the early features are added to images' places after the first."""

    def __init__(self, width: int, deep: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.deep = deep

    def forward(self, x: Tensor, places: Tensor, images: Tensor, early: Tensor | None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x + places.unsqueeze(-1)).tanh().cumsum(1)
            if number == 0 and early is not None:
                x = x.clone()
                x[images] = x[images] + early
        return x


class GridModel(nn.Module):
    """Vision tower, token embedding, decoder; positions are counted in Python, by the grids."""

    def __init__(self, deep: bool = False, width: int = 8) -> None:
        super().__init__()
        self.tower, self.embed = Tower(width), nn.Embedding(20, width)
        self.decoder, self.head = Decoder(width, deep), nn.Linear(width, 20)
        self.deep = deep

    def forward(
        self,
        ids: Tensor,
        labels: Tensor,
        patches: Tensor | None = None,
        grid: Tensor | None = None,
    ) -> Tensor:
        x, images, early = self.embed(ids), ids == IMAGE, None
        if patches is not None and grid is not None:
            features, early = self.tower(patches, grid)
            x = x.masked_scatter(images.unsqueeze(-1), features)
        places = self._places(ids, [] if grid is None else grid.tolist())
        x = self.decoder(x, places, images, early if self.deep else None)
        logits = self.head(x)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-1)

    def _places(self, ids: Tensor, grid: list[list[int]]) -> Tensor:
        """Positions that advance by an image's larger side over all of its tokens."""
        steps = torch.ones_like(ids, dtype=torch.float32)
        longest = max((max(sizes) for sizes in grid), default=1)
        return (steps.cumsum(-1) + longest) / 10


def grids(sizes: Sequence[Sizes], text: int | Sequence[int] = 5, seed: int = 0) -> list[dict]:
    """Microbatches of one sequence each, with images of these sizes before the text."""
    g = torch.Generator().manual_seed(seed)
    lengths = [text] * len(sizes) if isinstance(text, int) else text
    return [_microbatch(each, length, g) for each, length in zip(sizes, lengths, strict=True)]


def _microbatch(sizes: Sizes, text: int, g: torch.Generator) -> dict[str, Tensor]:
    patches = sum(height * width for height, width in sizes)
    tokens = torch.randint(2, 20, (1, text), generator=g)
    ids = torch.cat([torch.full((1, patches // 2), IMAGE), tokens], 1)
    labels = ids.masked_fill(ids == IMAGE, -1)
    images = {"patches": torch.randn(patches, 6, generator=g), "grid": torch.tensor(sizes)}
    return {"ids": ids, "labels": labels, **(images if sizes else {})}
