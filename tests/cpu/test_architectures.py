"""Public architectures of two kinds, with microbatches that differ, train as in eager.

An encoder that every decoder layer attends to; a diffusion transformer on the hidden states of a
language model.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.training import Setting, train
from benchmarks.zoo import ALL
from benchmarks.zoo.architecture import WIDTH, Architecture
from benchmarks.zoo.generators import Painter

pytestmark = pytest.mark.slow

SETTINGS = (Setting("nested/1f1b", 2),)


class DiffusionBlock(nn.Module):
    """Attention of patches to text and patches; the time scales, shifts and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.time = nn.Linear(WIDTH, 3 * WIDTH)
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, text: Tensor, seen: Tensor, time: Tensor) -> Tensor:
        scale, shift, gate = self.time(F.silu(time)).unsqueeze(1).chunk(3, -1)
        y = self.norm(x) * (1 + scale) + shift
        key, value = self.both(torch.cat([text, y], 1)).chunk(2, -1)
        return x + gate * F.scaled_dot_product_attention(self.query(y), key, value, seen)


class Diffusion(nn.Module):
    """A small diffusion transformer on patches of two by two."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.pixels = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(DiffusionBlock() for _ in range(2))

    def forward(self, noisy: Tensor, context: Tensor, mask: Tensor, timestep: Tensor) -> Tensor:
        samples, _, down, across = noisy.shape
        x = self.patches(F.pixel_unshuffle(noisy, 2).flatten(2).transpose(1, 2))
        waves = timestep[:, None] * 2.0 ** -torch.arange(4, device=timestep.device)
        time = self.time(torch.cat([waves.sin(), waves.cos()], -1).to(x.dtype))
        seen = F.pad(mask.bool(), (0, x.shape[1]), value=True)[:, None]
        for block in self.blocks:
            x = block(x, context, seen, time)
        rows = self.pixels(x).transpose(1, 2).reshape(samples, 16, down // 2, across // 2)
        return F.pixel_shuffle(rows, 2)


PAINTER = Architecture(
    lambda: Painter(Diffusion()),
    ALL["llm_sd3"].batch,
    {"language": "backbone", "paint": "generator"},
)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("whisper", ALL["whisper"]), ("painter", PAINTER)],
)
def test_trains_as_in_eager(name: str, architecture: Architecture) -> None:
    torch.set_num_threads(1)
    few = replace(architecture, batch=lambda g: architecture.batch(g)[:2])
    found = train(name, few, "float64", SETTINGS)
    assert not found.equal
    assert not found.apart
    for run in found.runs:
        assert not run.error
        assert run.loss < 1e-12, run
        assert run.gradient < 1e-9, run
