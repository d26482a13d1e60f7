"""Qwen: one stream of patches for all images of a microbatch, cut by the grid of each image.

The tower reads the grids in Python, rotary positions have three axes, Qwen3-VL adds features of
inner tower layers to the first decoder layers. Every microbatch has other grids.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from benchmarks.zoo.architecture import (
    AUDIO,
    AUDIO_BEGIN,
    AUDIO_END,
    HEADS,
    IMAGE,
    IMAGE_BEGIN,
    IMAGE_END,
    VIDEO,
    WIDTH,
    Architecture,
    Microbatch,
    Span,
    ahead,
    floats,
    prompt,
    text,
)

Grid = tuple[int, int, int]  # frames, patches down, patches across
_PATCH = 3 * 2 * 4 * 4  # colours, frames of a patch, pixels
# Grids of the images of each row, for each microbatch.
GRIDS: tuple[tuple[tuple[Grid, ...], ...], ...] = (
    (((1, 4, 4),), ((1, 4, 4),)),
    (((1, 4, 6),), ((1, 8, 4), (1, 2, 2))),
    (((1, 6, 6), (1, 4, 4), (1, 2, 8)), ((1, 2, 4),), ((1, 4, 2),)),
    (((1, 10, 8),),),
)
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": IMAGE_BEGIN,
    "vision_end_token_id": IMAGE_END,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_INTERLEAVED = {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_WINDOWED: dict[str, Any] = {
    "depth": 2,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "out_hidden_size": WIDTH,
    "num_heads": 4,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
_THIRD: dict[str, Any] = {
    "depth": 3,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "out_hidden_size": WIDTH,
    "num_heads": 4,
    "patch_size": 4,
    "num_position_embeddings": 64,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
}
_DRAWN = {
    "model.visual": "encoder",
    "model.language_model": "backbone",
    "lm_head": "backbone",
}


def tokens(grid: Grid) -> int:
    """Tokens of an image: two by two patches are merged."""
    frames, down, across = grid
    return frames * down * across // 4


def _pictures(row: Sequence[Grid]) -> list[Span]:
    """Words, then each image between its marks."""
    spans: list[Span] = [3]
    for grid in row:
        spans += [(IMAGE_BEGIN, 1), (IMAGE, tokens(grid)), (IMAGE_END, 1)]
    return spans


def _stream(rows: Sequence[Sequence[Grid]], g: torch.Generator) -> dict[str, Tensor]:
    grids = [grid for row in rows for grid in row]
    patches = 4 * sum(map(tokens, grids))
    return {"pixel_values": floats(patches, _PATCH, g=g), "image_grid_thw": torch.tensor(grids)}


def _batch(g: torch.Generator) -> list[Microbatch]:
    made = []
    for more, rows in enumerate(GRIDS):
        words = prompt([[*_pictures(row), 7 + 2 * more] for row in rows], g)
        kinds = (words["input_ids"] == IMAGE).int()
        made.append({**words, **_stream(rows, g), "mm_token_type_ids": kinds})
    return made


def qwen2_vl() -> nn.Module:
    """Qwen2-VL."""
    vision = {"depth": 2, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 4, "mlp_ratio": 2}
    config = t.Qwen2VLConfig(
        text_config=text(rope_parameters=_ROPE),
        vision_config={**vision, "patch_size": 4},
        **_TOKENS,
    )
    return t.Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> nn.Module:
    """Qwen2.5-VL: attention in windows, whose layout follows from the grids, but for one layer."""
    config = t.Qwen2_5_VLConfig(
        text_config=text(rope_parameters=_ROPE), vision_config=_WINDOWED, **_TOKENS
    )
    return t.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> nn.Module:
    """Qwen3-VL: interpolated positions, and DeepStack."""
    config = t.Qwen3VLConfig(
        text_config=text(head_dim=8, rope_parameters=_INTERLEAVED),
        vision_config={**_THIRD, "deepstack_visual_indexes": [0, 1]},
        **_TOKENS,
    )
    return t.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe() -> nn.Module:
    """Qwen3-VL with two of four experts per token."""
    config = t.Qwen3VLMoeConfig(
        text_config=text(head_dim=8, rope_parameters=_INTERLEAVED, **_EXPERTS),
        vision_config={**_THIRD, "deepstack_visual_indexes": [0, 1]},
        **_TOKENS,
    )
    return t.Qwen3VLMoeForConditionalGeneration(config)


def qwen3_5() -> nn.Module:
    """Qwen3.5: three layers of gated delta rule for one of attention."""
    linear = {
        "linear_conv_kernel_dim": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    }
    rope = {**_INTERLEAVED, "partial_rotary_factor": 1.0}
    config = t.Qwen3_5Config(
        text_config=text(head_dim=8, rope_parameters=rope, **linear),
        vision_config=_THIRD,
        **_TOKENS,
    )
    return t.Qwen3_5ForConditionalGeneration(config)


def qwen2_5_omni() -> nn.Module:
    """The thinker of Qwen2.5-Omni: an audio tower in chunks beside the image tower."""
    audio = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": HEADS["num_attention_heads"],
        "encoder_ffn_dim": 64,
        "d_model": WIDTH,
        "max_source_positions": 64,
        "n_window": 10,
        "output_dim": WIDTH,
    }
    config = t.Qwen2_5OmniThinkerConfig(
        audio_config=audio,
        vision_config=_WINDOWED,
        text_config=text(rope_parameters=_ROPE),
        audio_token_index=AUDIO,
        audio_start_token_id=AUDIO_BEGIN,
        audio_end_token_id=AUDIO_END,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        vision_start_token_id=IMAGE_BEGIN,
        vision_end_token_id=IMAGE_END,
    )
    return t.Qwen2_5OmniThinkerForConditionalGeneration(config)


def _omni_batch(g: torch.Generator) -> list[Microbatch]:
    """Each row has a clip besides its images; four frames of a clip are one token."""
    made = []
    for more, rows in enumerate(GRIDS):
        frames = [40, *[24 + 4 * more] * (len(rows) - 1)]
        clips: list[list[Span]] = [
            [(AUDIO_BEGIN, 1), (AUDIO, n // 4), (AUDIO_END, 1)] for n in frames
        ]
        spans = [[*_pictures(r), *clip, 7 + more] for r, clip in zip(rows, clips, strict=True)]
        sound = floats(len(rows), 16, 40, g=g)
        heard = {"input_features": sound, "feature_attention_mask": ahead(*frames)}
        made.append({**prompt(spans, g), **_stream(rows, g), **heard})
    return made


ALL = {
    "qwen2_vl": Architecture(qwen2_vl, _batch, _DRAWN),
    "qwen2_5_vl": Architecture(qwen2_5_vl, _batch, _DRAWN),
    "qwen3_vl": Architecture(qwen3_vl, _batch, _DRAWN),
    "qwen3_vl_moe": Architecture(qwen3_vl_moe, _batch, _DRAWN),
    "qwen3_5": Architecture(qwen3_5, _batch, _DRAWN),
    "qwen2_5_omni": Architecture(
        qwen2_5_omni,
        _omni_batch,
        {
            "audio_tower": "encoder",
            "visual": "encoder",
            "model": "backbone",
            "lm_head": "backbone",
        },
    ),
}
