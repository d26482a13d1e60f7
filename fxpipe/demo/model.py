"""The demo's model: a small LLaVA with random weights, built from its configuration alone."""

import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fxpipe.demo.data import END, IMAGE, PAD, TOKENIZER, Microbatch

SEED = 0
SIDE = 8
PATCH = 4
PATCHES = (SIDE // PATCH) ** 2
WIDTH = 128
LAYERS = 4
SPREAD = 0.1
"""Standard deviation of the first weights: one over the root of a width of about 100."""
RATE = 2e-3
WARMUP_STEPS = 5


def build() -> nn.Module:
    """The LLaVA, with the same weights in every process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlavaConfig, LlavaForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = LlavaConfig(
        vision_config=_vision(),
        text_config=_text(),
        image_token_index=IMAGE,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        initializer_range=SPREAD,
    )
    torch.manual_seed(SEED)
    model: nn.Module = LlavaForConditionalGeneration(config)
    return model


def _vision() -> object:
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        num_channels=1,
    )


def _text() -> object:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(TOKENIZER.words),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        use_cache=False,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as both trainings use it."""
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate of a step: rising over the first few, then constant."""
    for group in optimizer.param_groups:
        group["lr"] = RATE * min(1.0, (step + 1) / WARMUP_STEPS)


def eager_step(model: nn.Module, batch: list[Microbatch]) -> float:
    """Forward and backward of every microbatch in plain PyTorch; the mean loss."""
    total = 0.0
    for microbatch in batch:
        loss = model(**microbatch).loss / len(batch)
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def answers(model: nn.Module, pixels: Tensor, prompt: str, longest: int = 8) -> list[str]:
    """The captions that the model gives to images [count, 1, 8, 8], by greedy decoding."""
    asked = torch.tensor([IMAGE] * PATCHES + TOKENIZER.encode(prompt))
    tokens = asked.expand(len(pixels), -1)
    for _ in range(longest):
        logits = model(input_ids=tokens, pixel_values=pixels).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return [TOKENIZER.decode(row) for row in tokens[:, len(asked) :].tolist()]
