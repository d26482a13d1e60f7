"""An architecture: a tiny random model of a public family, and microbatches to train it with.

Widths are the same in all of them, dropout is off, and nothing is downloaded. Microbatches differ
the way a loader makes them differ: in the number of images or clips, in their sizes where the
family takes several, in length, and in padding. The first one is the example to compile with.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn

Microbatch = dict[str, Any]
Span = int | tuple[int, int]  # so many random words, or (token, how often it is repeated)

WIDTH, LAYERS, VOCABULARY = 32, 4, 200
PAD, BEGIN, END = 0, 1, 2
FIRST_SPECIAL = 150  # words are 3 .. 99; what is at or above this is no word and has no label
IMAGE, VIDEO, AUDIO, IMAGE_BEGIN, IMAGE_END, AUDIO_BEGIN, AUDIO_END = range(150, 157)
IGNORED = -100

HEADS = {"num_attention_heads": 4}
TOWER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    **HEADS,
}
PATCHED = {**TOWER, "image_size": 16, "patch_size": 4}  # a tower of 4 x 4 patches
_DROPOUTS = ("attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "p")


@dataclass(frozen=True)
class Architecture:
    """A model, its microbatches, and how a person would draw it.

    make: the model in training mode; batch: its microbatches, the first of them the example
    parts: beginnings of module names -> the role of the region they should be in
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], list[Microbatch]]
    parts: Mapping[str, str]

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in training mode, with the same weights every time."""
        torch.manual_seed(0)
        return without_zeros(without_dropout(self.make())).to(dtype).train()

    def microbatches(self, dtype: torch.dtype = torch.float32) -> list[Microbatch]:
        """The same microbatches every time, floats in a dtype."""
        batch = self.batch(torch.Generator().manual_seed(0))
        return [{name: _cast(value, dtype) for name, value in mb.items()} for mb in batch]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floats = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floats else value


def without_dropout(model: nn.Module) -> nn.Module:
    """The same model; none of its modules drops anything, so that runs can be compared."""
    for module in model.modules():
        for name in _DROPOUTS:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


def without_zeros(model: nn.Module) -> nn.Module:
    """The same model; parameters that begin at zero (gates, queries) get small random values.

    Behind a gate that is zero, every gradient is zero, and would be whatever is wrong with it.
    """
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model


def text(**more: Any) -> dict[str, Any]:
    """Arguments of a small decoder's configuration."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": PAD,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        **HEADS,
        **more,
    }


def prompt(rows: Sequence[Sequence[Span]], g: torch.Generator) -> dict[str, Tensor]:
    """Token rows of unequal length, padded on the right, with their mask and labels."""
    made = [torch.cat([_span(span, g) for span in row]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(made, batch_first=True, padding_value=PAD)
    labels = ids.masked_fill((ids == PAD) | (ids >= FIRST_SPECIAL), IGNORED)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


def _span(span: Span, g: torch.Generator) -> Tensor:
    if isinstance(span, int):
        return torch.randint(3, 100, (span,), generator=g)
    token, count = span
    return torch.full((count,), token)


def floats(*shape: int, g: torch.Generator) -> Tensor:
    """Pixels, spectrograms, latents."""
    return torch.randn(*shape, generator=g)


def ahead(*counts: int) -> Tensor:
    """A mask with so many ones at the beginning of each row, as wide as the longest."""
    return (torch.arange(max(counts)) < torch.tensor(counts)[:, None]).long()
