"""Models to train in tests, with microbatches: equal ones, and uneven ones.

Every model is written the way a user writes it; nothing in it knows of a pipeline.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Microbatch = dict[str, Any]
IMAGE_TOKEN = 150


class Block(nn.Module):
    """A pre-norm transformer block; `bias` is added to the attention scores."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        score = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if bias is not None:
            score = score + bias
        x = x + self.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class ThreeRegions(nn.Module):
    """Vision encoder -> backbone -> image generator, with a text loss and an image loss.

    `bridge` is used by the encoder and by the generator, embedding and head are tied, the first
    encoder feature is read by the last backbone block too.
    """

    def __init__(self, width: int = 16, vocabulary: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.bridge = nn.Linear(12, width)
        self.vision = nn.ModuleList(Block(width) for _ in range(2))
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.condition = nn.Linear(width, width)
        self.generator = nn.ModuleList(Block(width) for _ in range(2))
        self.pixels = nn.Linear(width, 12)

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor, target: Tensor, noise: Tensor
    ) -> dict[str, Tensor]:
        features = self.bridge(pixel_values)
        for block in self.vision:
            features = block(features)
        x = torch.cat([features, self.embed(input_ids)], 1)
        length = x.shape[1]
        causal = torch.full((length, length), float("-inf"), device=x.device).triu(1).to(x.dtype)
        for index, block in enumerate(self.blocks):
            if index == len(self.blocks) - 1:
                x = x + features.mean(1, keepdim=True)
            x = block(x, causal)
        logits = self.head(self.norm(x[:, features.shape[1] :]))
        text = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        y = self.bridge(noise) + self.condition(x.mean(1, keepdim=True))
        for block in self.generator:
            y = block(y)
        return {"text": text, "image": F.mse_loss(self.pixels(y), target - noise)}


def both_losses(outputs: dict[str, Tensor]) -> Tensor:
    """The loss of ThreeRegions."""
    return outputs["text"] + 0.5 * outputs["image"]


def three_regions(uneven: bool = False, count: int = 5) -> list[Microbatch]:
    """Microbatches of ThreeRegions: samples, text length, patches and target patches may differ."""
    g = torch.Generator().manual_seed(1)
    shapes = [(2, 9, 4, 3), (3, 7, 6, 5), (2, 12, 3, 2), (4, 5, 5, 3), (2, 8, 2, 6)]
    sizes = [shapes[i % 5] if uneven else shapes[0] for i in range(count)]
    return [
        {
            "input_ids": torch.randint(0, 32, (b, text), generator=g),
            "pixel_values": torch.randn(b, patches, 12, generator=g),
            "labels": torch.randint(0, 32, (b, text), generator=g),
            "target": torch.randn(b, made, 12, generator=g),
            "noise": torch.randn(b, made, 12, generator=g),
        }
        for b, text, patches, made in sizes
    ]


class Small(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class AnyRegions(nn.Module):
    """Encoders -> backbone -> generators, each trained or not, of the smallest blocks."""

    WIDTH = 4

    def __init__(
        self,
        encoders: Sequence[bool] = (),
        generators: Sequence[bool] = (),
        backbone: bool = True,
        layers: int = 4,
    ) -> None:
        super().__init__()
        self.counts = len(encoders), len(generators)
        parts = {f"enc{i}": trained for i, trained in enumerate(encoders)}
        parts |= {f"gen{i}": trained for i, trained in enumerate(generators)}
        for name in parts:
            self.add_module(name, self._blocks(2))
        self.embed = nn.Embedding(9, self.WIDTH)
        self.blocks = self._blocks(layers)
        self.head = nn.Linear(self.WIDTH, 9)
        for name, module in self.named_children():
            module.requires_grad_(parts.get(name, backbone))

    def _blocks(self, count: int) -> nn.ModuleList:
        return nn.ModuleList(Small(self.WIDTH) for _ in range(count))

    def _run(self, name: str, x: Tensor) -> Tensor:
        for block in self.get_submodule(name).children():
            x = block(x)
        return x

    def forward(self, ids: Tensor, **floats: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in range(self.counts[0]):
            x = x + self._run(f"enc{i}", floats[f"pixels{i}"]).mean(1, keepdim=True)
        x = self._run("blocks", x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        for i in range(self.counts[1]):
            y = self._run(f"gen{i}", x.mean(1) + floats[f"noise{i}"])
            loss = loss + F.mse_loss(y, floats[f"noise{i}"])
        return loss

    def batch(self, count: int) -> list[Microbatch]:
        """Microbatches of different lengths."""
        g = torch.Generator().manual_seed(3)
        made = []
        for i in range(count):
            samples, length = 2 + i % 2, 3 + i % 3
            mb = {"ids": torch.randint(0, 9, (samples, length), generator=g)}
            shapes = {f"pixels{j}": (samples, 2 + i % 4, self.WIDTH) for j in range(self.counts[0])}
            shapes |= {f"noise{j}": (samples, self.WIDTH) for j in range(self.counts[1])}
            mb |= {
                name: torch.randn(shape, generator=g, dtype=torch.float64)
                for name, shape in shapes.items()
            }
            made.append(mb)
        return made


def _text(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200}
    return {**sizes, **heads, "pad_token_id": 0, "max_position_embeddings": 128, **more}


def _vision() -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 4}


def llava() -> nn.Module:
    """A LLaVA of transformers: CLIP tower, two-layer projector, Llama."""
    import transformers as t

    vision = t.CLIPVisionConfig(image_size=16, patch_size=8, projection_dim=32, **_vision())
    text = t.LlamaConfig(**_text())
    config = t.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    return t.LlavaForConditionalGeneration(config)


def internvl() -> nn.Module:
    """An InternVL of transformers: another tower, pixel shuffle as connector, Qwen2."""
    import transformers as t

    config = t.InternVLConfig(
        vision_config={"image_size": [16, 16], "patch_size": [4, 4], **_vision()},
        text_config=t.Qwen2Config(**_text()),
        image_token_id=IMAGE_TOKEN,
        image_seq_length=4,
    )
    return t.InternVLForConditionalGeneration(config)


def image_text(uneven: bool = False, count: int = 5) -> list[Microbatch]:
    """Microbatches of llava and internvl: four tokens per image, padding, unequal image counts."""
    g = torch.Generator().manual_seed(2)
    shapes = [(14, (1, 1)), (21, (2, 1)), (16, (1, 1)), (19, (1, 2)), (24, (2, 1))]
    sizes = [shapes[i % 5] if uneven else shapes[0] for i in range(count)]
    return [_image_text(length, images, g) for length, images in sizes]


def _image_text(length: int, images: Sequence[int], g: torch.Generator) -> Microbatch:
    ids = torch.randint(3, 100, (len(images), length), generator=g)
    for row, number in enumerate(images):
        ids[row, 1 : 1 + 4 * number] = IMAGE_TOKEN
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    labels = ids.masked_fill((ids == IMAGE_TOKEN) | (mask == 0), -100)
    pixels = torch.randn(sum(images), 3, 16, 16, generator=g)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": pixels}


@dataclass(frozen=True)
class Case:
    """A model, its microbatches, and how to get its loss."""

    make: Callable[[], nn.Module]
    microbatches: Callable[[bool], list[Microbatch]]
    loss_fn: Callable[[Any], Tensor] | None = None

    def build(self, dtype: torch.dtype) -> nn.Module:
        """The model with the same weights every time."""
        torch.manual_seed(0)
        return self.make().to(dtype).train()

    def batch(self, uneven: bool, dtype: torch.dtype) -> list[Microbatch]:
        """Its microbatches in a dtype."""
        return [
            {k: v.to(dtype) if v.is_floating_point() else v for k, v in mb.items()}
            for mb in self.microbatches(uneven)
        ]


CASES = {
    "three": Case(ThreeRegions, three_regions, both_losses),
    "llava": Case(llava, image_text),
    "internvl": Case(internvl, image_text),
}


def eager(
    case: Case,
    model: nn.Module,
    batch: Sequence[Microbatch],
    weights: Sequence[float] | None = None,
) -> Tensor:
    """What a step must equal: its loss; gradients are added to the model's."""
    total = torch.zeros(())
    for mb, weight in zip(batch, weights or [1 / len(batch)] * len(batch), strict=True):
        outputs = model(**mb)
        loss = case.loss_fn(outputs) if case.loss_fn else outputs.loss
        (weight * loss).backward()
        total = total.to(loss.dtype) + weight * loss.detach()
    return total


def worst(model: nn.Module, reference: nn.Module) -> float:
    """The largest relative difference of a gradient; None must meet None."""
    differences = [0.0]
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            scale = max(float(q.grad.norm()), 1e-6)
            differences.append(float((p.grad - q.grad).norm()) / scale)
    return max(differences)
