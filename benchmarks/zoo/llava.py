"""Image towers whose features replace image tokens, one square size each.

LLaVA, InternVL, Aya Vision, Gemma 3, PaliGemma: microbatches differ in how many images a row has.
"""

from collections.abc import Sequence

import torch
import transformers as t
from torch import nn

from benchmarks.zoo.architecture import (
    HEADS,
    IMAGE,
    IMAGE_BEGIN,
    IMAGE_END,
    PATCHED,
    TOWER,
    VOCABULARY,
    WIDTH,
    Architecture,
    Microbatch,
    floats,
    prompt,
    text,
)

SLIDING = {
    "sliding_window": 16,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
}
_DRAWN = {
    "model.vision_tower": "encoder",
    "model.multi_modal_projector": "encoder",
    "model.language_model": "backbone",
    "lm_head": "backbone",
}
# Images of each row, for each microbatch.
COUNTS = ((1, 1), (2, 1), (1, 3, 1), (1,))


def images(each: int, g: torch.Generator) -> list[Microbatch]:
    """Microbatches with `each` tokens per image; no two of them have the same shapes."""
    return [_images(counts, each, more, g) for more, counts in enumerate(COUNTS)]


def _images(counts: Sequence[int], each: int, more: int, g: torch.Generator) -> Microbatch:
    rows = [[2, *[(IMAGE, each)] * count, 6 + 3 * more] for count in counts]
    return {**prompt(rows, g), "pixel_values": floats(sum(counts), 3, 16, 16, g=g)}


def llava() -> nn.Module:
    """CLIP tower without its last layer and its class token, two-layer projector, Llama."""
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(**PATCHED, projection_dim=WIDTH),
        text_config=t.LlamaConfig(**text()),
        image_token_index=IMAGE,
        vision_feature_layer=-2,
    )
    return t.LlavaForConditionalGeneration(config)


def internvl() -> nn.Module:
    """A tower of InternVL's own, pixel shuffle, Qwen2."""
    config = t.InternVLConfig(
        vision_config={**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        text_config=t.Qwen2Config(**text()),
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    return t.InternVLForConditionalGeneration(config)


def aya_vision() -> nn.Module:
    """SigLIP, pixel shuffle and a gated projector, Cohere 2 with sliding windows."""
    config = t.AyaVisionConfig(
        vision_config=t.SiglipVisionConfig(**PATCHED, vision_use_head=False),
        text_config=t.Cohere2Config(**text(**SLIDING)),
        image_token_index=IMAGE,
        downsample_factor=2,
    )
    return t.AyaVisionForConditionalGeneration(config)


def gemma3() -> nn.Module:
    """SigLIP, pooled to four tokens; image tokens see each other in both directions."""
    config = t.Gemma3Config(
        vision_config={**PATCHED, "vision_use_head": False},
        text_config=text(head_dim=8, **SLIDING),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=IMAGE_BEGIN,
        eoi_token_index=IMAGE_END,
    )
    return t.Gemma3ForConditionalGeneration(config)


def _gemma3_batch(g: torch.Generator) -> list[Microbatch]:
    return [{**mb, "token_type_ids": (mb["input_ids"] == IMAGE).long()} for mb in images(4, g)]


def paligemma() -> nn.Module:
    """SigLIP with a linear projector, Gemma; the prefix is seen in both directions."""
    config = t.PaliGemmaConfig(
        vision_config=t.SiglipVisionConfig(**PATCHED, vision_use_head=False, projection_dim=WIDTH),
        text_config=t.GemmaConfig(**text(head_dim=8)),
        image_token_index=IMAGE,
        projection_dim=WIDTH,
        hidden_size=WIDTH,
        vocab_size=VOCABULARY,
    )
    return t.PaliGemmaForConditionalGeneration(config)


def _paligemma_batch(g: torch.Generator) -> list[Microbatch]:
    """The suffix, which is what is learnt, begins four words after the last image."""
    made = []
    for mb in images(16, g):
        last = torch.where(mb["input_ids"] == IMAGE, torch.arange(mb["input_ids"].shape[1]), 0)
        suffix = torch.arange(mb["input_ids"].shape[1]) > last.amax(1, keepdim=True) + 4
        made.append({**mb, "token_type_ids": suffix.long()})
    return made


def blip2() -> nn.Module:
    """A tower, a Q-Former with learnt queries that attend to it, OPT."""
    former = {**TOWER, "vocab_size": VOCABULARY, "encoder_hidden_size": WIDTH}
    language = t.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=64,
        num_hidden_layers=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **HEADS,
    )
    config = t.Blip2Config(
        vision_config={**PATCHED, "qkv_bias": True},
        qformer_config={**former, "cross_attention_frequency": 2},
        text_config=language,
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    return t.Blip2ForConditionalGeneration(config)


ALL = {
    "llava": Architecture(llava, lambda g: images(16, g), _DRAWN),
    "internvl": Architecture(internvl, lambda g: images(4, g), _DRAWN),
    "aya_vision": Architecture(aya_vision, lambda g: images(4, g), _DRAWN),
    "gemma3": Architecture(gemma3, _gemma3_batch, _DRAWN),
    "paligemma": Architecture(paligemma, _paligemma_batch, _DRAWN),
    "blip2": Architecture(
        blip2,
        lambda g: images(4, g),
        {
            "vision_model": "encoder",
            "qformer": "encoder",
            "language_projection": "encoder",
            "language_model": "backbone",
        },
    ),
}
