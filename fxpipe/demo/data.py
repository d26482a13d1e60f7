"""Handwritten digits with captions, as microbatches of token ids and pixels."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPTS = ("caption :", "what is this ?", "which digit do you see in this picture ?")
PAD, IMAGE, END = 0, 1, 2
IGNORED = -100
"""The label of a token that has no part in the loss."""
UNSEEN = 1500
"""Digits from here on are never trained on (the split by writers that scikit-learn describes)."""

Microbatch = dict[str, Tensor]


class Digits(NamedTuple):
    """Images [count, 1, 8, 8] in -1..1, and which digit each one is."""

    pixels: Tensor
    digits: tuple[int, ...]


def load() -> Digits:
    """The handwritten digits that scikit-learn ships."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return Digits(pixels, tuple(map(int, data.target)))


def caption(digit: int) -> str:
    """What the model learns to say: `a handwritten seven`."""
    return f"a handwritten {NAMES[digit]}"


@dataclass(frozen=True)
class Tokenizer:
    """Words to ids and back; the first three ids are padding, an image patch, and the end."""

    words: tuple[str, ...]

    @staticmethod
    def of(texts: Sequence[str]) -> "Tokenizer":
        """A tokenizer of the words of these texts."""
        return Tokenizer(
            ("<pad>", "<image>", "<end>", *sorted({w for t in texts for w in t.split()}))
        )

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        """The ids of the words of a text."""
        return [self._ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the end."""
        stop = ids.index(END) if END in ids else len(ids)
        return " ".join(self.words[number] for number in ids[:stop])


TOKENIZER = Tokenizer.of([*PROMPTS, *map(caption, range(10))])


def microbatch(
    digits: Digits, chosen: Sequence[int], prompts: Sequence[str], patches: int
) -> Microbatch:
    """The chosen digits, each asked for with its prompt; padded on the right to the longest.

    Only the words of the caption have labels. An image stands in the text as `patches` tokens.
    """
    asked = [[IMAGE] * patches + TOKENIZER.encode(prompt) for prompt in prompts]
    answers = [[*TOKENIZER.encode(caption(digits.digits[i])), END] for i in chosen]
    texts = [question + answer for question, answer in zip(asked, answers, strict=True)]
    labels = [[IGNORED] * len(q) + answer for q, answer in zip(asked, answers, strict=True)]
    return {
        "input_ids": _padded(texts, PAD),
        "attention_mask": _padded([[1] * len(text) for text in texts], 0),
        "pixel_values": digits.pixels[list(chosen)],
        "labels": _padded(labels, IGNORED),
    }


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


def step_of(
    digits: Digits, step: int, microbatches: int, size: int, patches: int
) -> list[Microbatch]:
    """The microbatches of one training step; the same in every process that asks for it.

    Prompts differ in length between samples, and the longest one between microbatches.
    """
    draw = random.Random(step)
    batch = []
    for _ in range(microbatches):
        allowed = PROMPTS[: draw.randint(1, len(PROMPTS))]
        chosen = [draw.randrange(UNSEEN) for _ in range(size)]
        batch.append(microbatch(digits, chosen, [draw.choice(allowed) for _ in chosen], patches))
    return batch


def even_step(digits: Digits, microbatches: int, size: int, patches: int) -> list[Microbatch]:
    """Microbatches of one and the same shape, as schedules that know one shape need them."""
    rows = (range(i * size, (i + 1) * size) for i in range(microbatches))
    return [microbatch(digits, row, [PROMPTS[-1]] * size, patches) for row in rows]


def drawn(pixels: Tensor) -> str:
    """An image [1, 8, 8] as eight lines of text."""
    shades = " .:-=+*#%@"
    levels = ((pixels[0] + 1) / 2 * (len(shades) - 1)).round().int().tolist()
    return "\n".join("".join(shades[level] * 2 for level in row) for row in levels)
