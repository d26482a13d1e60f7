"""A model of three regions to time: image encoder, causal backbone, image generator.

Images come as many as there are, each for one of the samples of a microbatch; what the backbone
sees of a sample is the mean of its images, so that the backbone's sizes are always the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.plain import Block

PATCH, VOCABULARY, QUERIES = 48, 256, 8
Microbatch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Blocks of each region and their width; samples of a microbatch; patches of an image seen,
    tokens of text, patches of an image made, of a sample."""

    encoder: int = 7
    backbone: int = 8
    generator: int = 2
    width: int = 128
    samples: int = 4
    patches: int = 32
    tokens: int = 32
    made: int = 32


class Omni(nn.Module):
    """Images and a caption in; out comes the loss of the next token and of a denoised image."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.samples = sizes.width, sizes.samples
        self.patch = nn.Linear(PATCH, width)
        self.vision = _blocks(sizes.encoder, width, causal=False)
        self.projector = nn.Linear(width, width)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = _blocks(sizes.backbone, width, causal=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.condition, self.noisy = nn.Linear(width, width), nn.Linear(PATCH, width)
        self.generator = _blocks(sizes.generator, width, causal=False)
        self.pixels = nn.Linear(width, PATCH)

    def see(self, images: Tensor, sample: Tensor) -> Tensor:
        """[images, patches, PATCH] -> [samples, patches, width]: the mean over a sample's."""
        x = self.patch(images)
        for block in self.vision:
            x = block(x)
        seen = x.new_zeros(self.samples, *x.shape[1:]).index_add(0, sample, self.projector(x))
        count = x.new_zeros(self.samples).index_add(0, sample, x.new_ones(sample.shape))
        mean: Tensor = seen / count[:, None, None]
        return mean

    def read(self, seen: Tensor, tokens: Tensor) -> Tensor:
        """What the first layer of the backbone reads."""
        return torch.cat([seen, self.embed(tokens)], 1)

    def say(self, x: Tensor, tokens: Tensor) -> Tensor:
        """The loss of the next token."""
        said = self.head(self.norm(x[:, -tokens.shape[1] : -1]))
        return functional.cross_entropy(said.flatten(0, 1), tokens[:, 1:].flatten())

    def make(self, x: Tensor, noise: Tensor, image: Tensor) -> Tensor:
        """The loss of an image that is made of noise, on what the last tokens say."""
        y = torch.cat([self.condition(x[:, -QUERIES:]), self.noisy(noise)], 1)
        for block in self.generator:
            y = block(y)
        return functional.mse_loss(self.pixels(y[:, QUERIES:]), image - noise)

    def forward(
        self, images: Tensor, sample: Tensor, tokens: Tensor, noise: Tensor, image: Tensor
    ) -> Tensor:
        x = self.read(self.see(images, sample), tokens)
        for layer in self.layers:
            x = layer(x)
        return self.say(x, tokens) + self.make(x, noise, image)


class Part(nn.Module):
    """Consecutive layers of an `Omni`, whose parameters it shares: before them the encoder in the
    first part, after them the losses and the generator in the last one."""

    def __init__(self, model: Omni, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.whole = [model]  # no submodule: its parameters are not all of this part
        self.layers = nn.ModuleList(model.layers[at] for at in layers)
        before = [model.patch, model.vision, model.projector, model.embed] if first else []
        after: list[nn.Module] = [model.norm, model.head, model.condition, model.noisy]
        after = [*after, model.generator, model.pixels] if last else []
        self.ends = nn.ModuleList([*before, *after])
        self.first, self.last = first, last

    def forward(self, *hidden: Tensor, **microbatch: Tensor) -> Tensor:
        """Hidden states, or the loss in the last part."""
        model = self.whole[0]
        if self.first:
            seen = model.see(microbatch["images"], microbatch["sample"])
            x = model.read(seen, microbatch["tokens"])
        else:
            x = hidden[0]
        for layer in self.layers:
            x = layer(x)
        if self.last:
            x = model.say(x, microbatch["tokens"]) + model.make(
                x, microbatch["noise"], microbatch["image"]
            )
        return x


def _blocks(count: int, width: int, *, causal: bool) -> nn.ModuleList:
    return nn.ModuleList(Block(width, width // 32, causal=causal) for _ in range(count))


def build(sizes: Sizes) -> Omni:
    """The same weights on every call."""
    torch.manual_seed(0)
    return Omni(sizes)


def microbatch(sizes: Sizes, images: int, draw: torch.Generator) -> Microbatch:
    """One with so many images, dealt out to its samples in turn."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw)

    return {
        "images": normal(images, sizes.patches, PATCH),
        "sample": torch.arange(images) % sizes.samples,
        "tokens": torch.randint(VOCABULARY, (sizes.samples, sizes.tokens), generator=draw),
        "noise": normal(sizes.samples, sizes.made, PATCH),
        "image": normal(sizes.samples, sizes.made, PATCH),
    }


def batch(sizes: Sizes, counts: Sequence[int]) -> list[Microbatch]:
    """Microbatches with these numbers of images, the same on every call."""
    draw = torch.Generator().manual_seed(1)
    return [microbatch(sizes, count, draw) for count in counts]


def eager(model: nn.Module, data: Sequence[Microbatch]) -> Tensor:
    """The mean loss; its gradients are in `.grad` afterwards."""
    losses = []
    for mb in data:
        loss: Tensor = model(**mb)
        torch.autograd.backward(loss / len(data))
        losses.append(loss.detach())
    return torch.stack(losses).mean()
