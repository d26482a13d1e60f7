"""A plain multimodal model: image encoder, projector, causal language model with its loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        grown: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + grown


class Plain(nn.Module):
    """Image patches and a caption in, the caption's loss out."""

    def __init__(
        self, *, width: int = 32, encoder: int = 2, backbone: int = 8, vocabulary: int = 64
    ) -> None:
        super().__init__()
        self.patch = nn.Linear(12, width)
        self.vision = nn.ModuleList(Block(width, 4, causal=False) for _ in range(encoder))
        self.projector = nn.Linear(width, width)
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, 4, causal=True) for _ in range(backbone))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, patches: Tensor, tokens: Tensor) -> Tensor:
        seen = self.patch(patches)
        for block in self.vision:
            seen = block(seen)
        x = torch.cat([self.projector(seen), self.embed(tokens)], 1)
        for layer in self.layers:
            x = layer(x)
        said = self.head(self.norm(x))[:, patches.shape[1] :]
        return functional.cross_entropy(said[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def microbatches(
    count: int, *, images: int = 2, patches: int = 9, tokens: int = 7
) -> list[dict[str, Tensor]]:
    """Random microbatches for `Plain`, the same on every call."""
    torch.manual_seed(1)
    return [
        {
            "patches": torch.rand(images, patches, 12),
            "tokens": torch.randint(64, (images, tokens)),
        }
        for _ in range(count)
    ]
