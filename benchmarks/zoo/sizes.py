"""Image towers for pictures of any size: tiles, padded pictures, or patches in rows.

LLaVA-Next and OneVision cut a picture into tiles and put the features together again without what
was padding; Pixtral, Idefics and SmolVLM take pictures padded to the largest; Llama 3.2 Vision has
tiles that decoder layers attend to. Microbatches differ in numbers and sizes of pictures.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from benchmarks.zoo.architecture import (
    IMAGE,
    PATCHED,
    TOWER,
    WIDTH,
    Architecture,
    Microbatch,
    Span,
    ahead,
    floats,
    prompt,
    text,
)

Size = tuple[int, int]  # pixels down, pixels across
Rows = tuple[tuple[Size, ...], ...]  # the pictures of each row
_TILE, _PATCH = 16, 4
_SHEETS = ((16, 32), (32, 16), (32, 32))  # what tiles can be laid out to
_DRAWN = {
    "model.vision_tower": "encoder",
    "model.multi_modal_projector": "encoder",
    "model.language_model": "backbone",
    "lm_head": "backbone",
}
_IDEFICS = {
    "model.vision_model": "encoder",
    "model.connector": "encoder",
    "model.text_model": "backbone",
    "lm_head": "backbone",
}
TILED: tuple[Rows, ...] = (
    (((16, 32),), ((16, 32),)),
    (((32, 16), (32, 32)), ((16, 32),)),
    (((24, 32),), ((32, 32), (16, 32), (20, 32)), ((32, 16),)),
)
PADDED: tuple[Rows, ...] = (
    (((16, 16),), ((16, 16),)),
    (((16, 16), (16, 8)), ((8, 16),)),
    (((24, 24), (16, 8), (8, 8)), ((12, 24),), ((16, 16),)),
)


def _flat(rows: Rows) -> list[Size]:
    return [size for row in rows for size in row]


def _words(rows: Rows, each: Sequence[int], more: int, g: torch.Generator) -> dict[str, Tensor]:
    counts = iter(each)
    spans: list[list[Span]] = [[2, *[(IMAGE, next(counts)) for _ in row], 6 + more] for row in rows]
    return prompt(spans, g)


def _sheet(size: Size) -> Size:
    """The sheet that shows most of a picture, then the one that leaves least of itself empty."""

    def fit(sheet: Size) -> tuple[int, int]:
        scale = min(sheet[0] / size[0], sheet[1] / size[1])
        shown = min(int(size[0] * scale) * int(size[1] * scale), size[0] * size[1])
        return shown, shown - sheet[0] * sheet[1]

    return max(_SHEETS, key=fit)


def _tiled_tokens(size: Size) -> int:
    """One tile of the whole; the sheet without its empty borders, each row with a line break."""
    down, across = (side // _PATCH for side in _sheet(size))
    if size[1] / size[0] > across / down:
        down -= 2 * ((down - int(round(size[0] * across / size[1], 7))) // 2)
    else:
        across -= 2 * ((across - int(round(size[1] * down / size[0], 7))) // 2)
    return (_TILE // _PATCH) ** 2 + down * (across + 1)


def tiled(g: torch.Generator) -> list[Microbatch]:
    """Pictures as tiles, those with fewer tiles filled up."""
    made: list[Microbatch] = []
    for more, rows in enumerate(TILED):
        sizes = _flat(rows)
        counts = [1 + down * across // _TILE**2 for down, across in map(_sheet, sizes)]
        tiles = floats(len(sizes), max(counts), 3, _TILE, _TILE, g=g)
        pixels = tiles * ahead(*counts)[:, :, None, None, None]
        words = _words(rows, [_tiled_tokens(size) for size in sizes], more, g)
        made.append({**words, "pixel_values": pixels, "image_sizes": torch.tensor(sizes)})
    return made


def llava_next() -> nn.Module:
    """LLaVA-NeXT: CLIP on tiles."""
    config = t.LlavaNextConfig(
        vision_config=t.CLIPVisionConfig(**PATCHED, projection_dim=WIDTH),
        text_config=t.LlamaConfig(**text()),
        image_token_index=IMAGE,
        image_grid_pinpoints=[list(sheet) for sheet in _SHEETS],
    )
    return t.LlavaNextForConditionalGeneration(config)


def llava_onevision() -> nn.Module:
    """LLaVA-OneVision: SigLIP on tiles."""
    config = t.LlavaOnevisionConfig(
        vision_config=t.SiglipVisionConfig(**PATCHED, vision_use_head=False),
        text_config=t.Qwen2Config(**text()),
        image_token_index=IMAGE,
        image_grid_pinpoints=[list(sheet) for sheet in _SHEETS],
    )
    return t.LlavaOnevisionForConditionalGeneration(config)


def pixtral_llava() -> nn.Module:
    """The tower of Pixtral: the patches of all pictures are one row, positions in two axes."""
    config = t.LlavaConfig(
        vision_config=t.PixtralVisionConfig(**{**PATCHED, "image_size": 32}),
        text_config=t.MistralConfig(**text()),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return t.LlavaForConditionalGeneration(config)


def _canvas(sizes: Sequence[Size], g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures in the upper left of canvases of one size, and where they are."""
    down, across = (max(side) for side in zip(*sizes, strict=True))
    masks = torch.zeros(len(sizes), down, across, dtype=torch.bool)
    for mask, (height, width) in zip(masks, sizes, strict=True):
        mask[:height, :width] = True
    return floats(len(sizes), 3, down, across, g=g) * masks[:, None], masks


def _pixtral_batch(g: torch.Generator) -> list[Microbatch]:
    made: list[Microbatch] = []
    for more, rows in enumerate(PADDED):
        sizes = _flat(rows)
        words = _words(rows, [down * across // _PATCH**2 for down, across in sizes], more, g)
        pixels, _ = _canvas(sizes, g)
        made.append({**words, "pixel_values": pixels, "image_sizes": torch.tensor(sizes)})
    return made


def _idefics(rows: Rows, each: int, more: int, g: torch.Generator) -> Microbatch:
    """Every row has as many pictures as the one with most; those that are all zero are none."""
    most, sizes = max(map(len, rows)), _flat(rows)
    pixels, masks = _canvas(sizes, g)
    slots = torch.tensor([i * most + j for i, row in enumerate(rows) for j in range(len(row))])
    all_pixels = pixels.new_zeros(len(rows) * most, *pixels.shape[1:])
    all_masks = masks.new_zeros(len(rows) * most, *masks.shape[1:])
    all_pixels[slots], all_masks[slots] = pixels, masks
    return {
        **_words(rows, [each] * len(sizes), more, g),
        "pixel_values": all_pixels.unflatten(0, (len(rows), most)),
        "pixel_attention_mask": all_masks.unflatten(0, (len(rows), most)),
    }


def _idefics2_batch(g: torch.Generator) -> list[Microbatch]:
    return [_idefics(rows, 4, more, g) for more, rows in enumerate(PADDED)]


def _idefics3_batch(g: torch.Generator) -> list[Microbatch]:
    """Canvases are square: two by two patches become one token."""
    squares = [_flat(rows) for rows in PADDED]
    each = [max(max(size) for size in sizes) ** 2 // _PATCH**2 // 4 for sizes in squares]
    return [_idefics(rows, each[more], more, g) for more, rows in enumerate(PADDED)]


def idefics2() -> nn.Module:
    """Idefics2: a SigLIP that takes padding, a Perceiver that makes four tokens of a picture."""
    resampler = {
        "hidden_size": WIDTH,
        "resampler_n_latents": 4,
        "resampler_depth": 2,
        "resampler_n_heads": 4,
        "num_key_value_heads": 2,
        "resampler_head_dim": 8,
    }
    config = t.Idefics2Config(
        vision_config=PATCHED,
        perceiver_config=resampler,
        text_config=t.MistralConfig(**text()),
        image_token_id=IMAGE,
    )
    return t.Idefics2ForConditionalGeneration(config)


def _shuffled(config: Any, model: Any) -> nn.Module:
    made: nn.Module = model(
        config(
            vision_config=PATCHED,
            text_config=t.LlamaConfig(**text()),
            scale_factor=2,
            image_token_id=IMAGE,
        )
    )
    return made


def idefics3() -> nn.Module:
    """Idefics3: pixel shuffle in place of the Perceiver."""
    return _shuffled(t.Idefics3Config, t.Idefics3ForConditionalGeneration)


def smolvlm() -> nn.Module:
    """SmolVLM."""
    return _shuffled(t.SmolVLMConfig, t.SmolVLMForConditionalGeneration)


def mllama() -> nn.Module:
    """Llama 3.2 Vision: a local and a global tower; two of four layers attend to what they make."""
    vision = {
        **TOWER,
        "attention_heads": 4,
        "num_global_layers": 1,
        "vision_output_dim": 2 * WIDTH,
        "image_size": _TILE,
        "patch_size": _PATCH,
        "max_num_tiles": 4,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [2, 2]],
    }
    del vision["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = t.MllamaConfig(
        vision_config=vision,
        text_config=text(cross_attention_layers=[1, 3], rope_parameters=rope),
        image_token_index=IMAGE,
    )
    return t.MllamaForConditionalGeneration(config)


# Tiles of the pictures of each row: 1, 2 across, 2 down as -2, or 4.
_MLLAMA = (((4,), (4,)), ((4, 1), (2,)), ((-2,), (1,), (2,)))
_RATIOS = {1: 1, 2: 2, -2: 3, 4: 4}


def _mllama_batch(g: torch.Generator) -> list[Microbatch]:
    return [_crossed(rows, more, g) for more, rows in enumerate(_MLLAMA)]


def _crossed(rows: Sequence[Sequence[int]], more: int, g: torch.Generator) -> Microbatch:
    words = prompt([[2, *[(IMAGE, 1)] * len(row), 9 + more] for row in rows], g)
    most = max(map(len, rows))
    ratios = torch.zeros(len(rows), most, dtype=torch.long)
    tiles = torch.zeros(len(rows), most, 4, dtype=torch.long)
    for i, row in enumerate(rows):
        for j, kind in enumerate(row):
            ratios[i, j], tiles[i, j, : abs(kind)] = _RATIOS[kind], 1
    seen = (words["input_ids"] == IMAGE).cumsum(1)[:, :, None] > torch.arange(most)
    pixels = floats(len(rows), most, 4, 3, _TILE, _TILE, g=g) * tiles[..., None, None, None]
    return {
        **words,
        "pixel_values": pixels,
        "aspect_ratio_ids": ratios,
        "aspect_ratio_mask": tiles,
        "cross_attention_mask": seen[..., None].long() * tiles[:, None],
    }


ALL = {
    "llava_next": Architecture(llava_next, tiled, _DRAWN),
    "llava_onevision": Architecture(llava_onevision, tiled, _DRAWN),
    "pixtral_llava": Architecture(pixtral_llava, _pixtral_batch, _DRAWN),
    "idefics2": Architecture(idefics2, _idefics2_batch, _IDEFICS),
    "idefics3": Architecture(idefics3, _idefics3_batch, _IDEFICS),
    "smolvlm": Architecture(smolvlm, _idefics3_batch, _IDEFICS),
    "mllama": Architecture(
        mllama,
        _mllama_batch,
        {
            "model.vision_model": "encoder",
            "model.multi_modal_projector": "encoder",
            "model.language_model": "backbone",
            "lm_head": "backbone",
        },
    ),
}
