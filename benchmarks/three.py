"""A small three-region model: image encoder, causal backbone, image generator; uneven batches."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.plain import Block

VOCABULARY, PATCH = 32, 12
# Of each microbatch of a step: samples, patches of an image seen, tokens, patches of one to make.
SHAPES = ((2, 4, 9, 3), (3, 6, 7, 5), (1, 3, 12, 2), (4, 5, 5, 3))


class Three(nn.Module):
    """Patches and tokens in; the loss of the next token and that of a denoised image, summed."""

    def __init__(self, width: int = 16, encoder: int = 2, backbone: int = 8, made: int = 2) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH, width)
        self.vision = nn.ModuleList(Block(width, 2, causal=False) for _ in range(encoder))
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, 2, causal=True) for _ in range(backbone))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.noisy, self.condition = nn.Linear(PATCH, width), nn.Linear(width, width)
        self.generator = nn.ModuleList(Block(width, 2, causal=False) for _ in range(made))
        self.pixels = nn.Linear(width, PATCH)

    def forward(self, seen: Tensor, tokens: Tensor, noise: Tensor, image: Tensor) -> Tensor:
        x = self.patch(seen)
        for block in self.vision:
            x = block(x)
        x = torch.cat([x, self.embed(tokens)], 1)
        for layer in self.layers:
            x = layer(x)
        said = self.head(self.norm(x))[:, seen.shape[1] :]
        text = functional.cross_entropy(said[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        y = self.noisy(noise) + self.condition(x.mean(1, keepdim=True))
        for block in self.generator:
            y = block(y)
        return text + 0.5 * functional.mse_loss(self.pixels(y), image - noise)


def batches(count: int, dtype: torch.dtype, seed: int = 1) -> list[list[dict[str, Tensor]]]:
    """So many batches of four uneven microbatches each, the same on every call."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64).to(dtype)

    return [
        [
            {
                "seen": normal(samples, patches, PATCH),
                "tokens": torch.randint(VOCABULARY, (samples, length), generator=draw),
                "noise": normal(samples, made, PATCH),
                "image": normal(samples, made, PATCH),
            }
            for samples, patches, length, made in SHAPES
        ]
        for _ in range(count)
    ]
