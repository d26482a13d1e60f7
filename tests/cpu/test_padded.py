"""Padded and unpadded microbatches of a model that reads values: no rung takes a mask for all."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.eager import step_alike, trained_alike
from tests.grids import IMAGE, Tower, grids


class Masked(nn.Module):
    """Attends over tokens; code leaves a mask of ones out, unless it is traced."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            scores = q @ k.transpose(-1, -2)
            if mask is not None:
                scores = scores.masked_fill(mask[:, None] == 0, -1e9)
            x = x + scores.softmax(-1) @ v
        return x


class Padded(nn.Module):
    """A tower that reads grids, and a decoder with a mask."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tower, self.embed = Tower(width), nn.Embedding(20, width)
        self.decoder, self.head = Masked(width), nn.Linear(width, 20)

    def forward(
        self, ids: Tensor, labels: Tensor, mask: Tensor, patches: Tensor, grid: Tensor
    ) -> Tensor:
        features, _ = self.tower(patches, grid)
        x = self.embed(ids).masked_scatter((ids == IMAGE).unsqueeze(-1), features)
        traced = torch.compiler.is_exporting()
        x = self.decoder(x, mask if traced or not mask.all() else None)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-1)


def batch(sizes: list[list[tuple[int, int]]], pads: list[int], seed: int) -> list[dict]:
    """Two sequences in each microbatch, of which the second ends in padding."""
    found = []
    pairs = zip(grids(sizes, seed=seed), grids(sizes, seed=seed + 1), pads, strict=True)
    for one, two, pad in pairs:
        both = {name: torch.cat([one[name], two[name]]) for name in one}
        mask = torch.ones_like(both["ids"])
        if pad:
            mask[1, -pad:], both["labels"][1, -pad:] = 0, -1
        found.append({**both, "mask": mask})
    return found


def test_padding_on_the_rungs() -> None:
    """Graphs for the values of the grids, then an opaque stage: none has taken the first mask for
    all. The tower's own graph has sizes on which its backward cannot decide."""
    torch.manual_seed(0)
    first = [[(2, 4), (2, 2)]] * 2 + [[(2, 2), (2, 4)]]
    pipe = trained_alike(
        Padded(), batch(first, [0, 3, 2], 0), 1e-4, ranks=2, schedule="nested/1f1b"
    )
    assert [list(captured.values) for captured in pipe.variants] == [["grid"], ["grid"]]
    assert "the backward" in pipe.explain()
    others = [[(2, 4)], [(4, 4), (2, 2)], [(2, 2)] * 3]
    step_alike(pipe, batch(others, [0, 2, 1], 7), copy.deepcopy(pipe.model), 1e-4)
    assert pipe.captured.prefix is not None
