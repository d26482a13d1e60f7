"""Pictures that become tokens of the decoder with little or no tower of their own, and CLIP.

Fuyu projects patches; Chameleon looks its tokens up in a code book (no gradient); Janus has a tower
for reading and a code book for making; CLIP has two towers and no decoder.
"""

import torch
import transformers as t
from torch import nn

from benchmarks.zoo.architecture import (
    HEADS,
    IMAGE,
    PAD,
    PATCHED,
    TOWER,
    VOCABULARY,
    WIDTH,
    Architecture,
    Microbatch,
    Span,
    floats,
    prompt,
    text,
)
from benchmarks.zoo.llava import images

_CODES = {"latent_channels": 16, "base_channels": 32, "channel_multiplier": [1, 1]}
_LAST = VOCABULARY - 1  # the token that Chameleon replaces by those of a picture


def fuyu() -> nn.Module:
    """A linear layer on patches, Persimmon."""
    config = t.FuyuConfig(
        **text(),
        patch_size=4,
        num_channels=3,
        image_size=16,
        image_token_id=IMAGE,
        text_config={"model_type": "persimmon", **text()},
    )
    return t.FuyuForCausalLM(config)


def _fuyu_batch(g: torch.Generator) -> list[Microbatch]:
    """All rows of a microbatch have equally many patches, of one picture or of two."""
    made: list[Microbatch] = []
    for more, patches in enumerate(([6, 6], [4, 9, 4], [12])):
        rows: list[list[Span]] = [
            [2 + more, (IMAGE, patches[0]), 3, (IMAGE, sum(patches[1:])), 9 - i] for i in (0, 3)
        ]
        made.append({**prompt(rows, g), "image_patches": floats(2, sum(patches), 48, g=g)})
    return made


def chameleon() -> nn.Module:
    """A picture is 64 entries of a code book, which are tokens among others."""
    letters = [f"{a}{b}" for a in "ABCDEF" for b in "ABCD"]
    words = {f"IMGIMG{code}Z": IMAGE + i for i, code in enumerate(letters)}
    config = t.ChameleonConfig(
        **text(num_key_value_heads=4),
        vq_config={
            **_CODES,
            "embed_dim": 16,
            "num_embeddings": len(letters),
            "resolution": 16,
            "num_res_blocks": 1,
        },
        vocabulary_map={"<image>": _LAST, **words},
    )
    model: nn.Module = t.ChameleonForConditionalGeneration(config)
    return model


def _chameleon_batch(g: torch.Generator) -> list[Microbatch]:
    made: list[Microbatch] = []
    for more, counts in enumerate(((1, 1), (2, 1), (1,))):
        rows: list[list[Span]] = [[3, *[(_LAST, 64)] * count, 8 + more] for count in counts]
        made.append({**prompt(rows, g), "pixel_values": floats(sum(counts), 3, 16, 16, g=g)})
    return made


def janus() -> nn.Module:
    """Janus as it reads pictures; what makes them is there and has no gradient."""
    vision = {**PATCHED, "projection_dim": WIDTH, "num_image_tokens": 16, "mlp_ratio": 2.0}
    del vision["intermediate_size"]
    codes = {
        "embed_dim": 8,
        "num_embeddings": 32,
        "num_res_blocks": 1,
        "num_patches": 4,
        "projection_dim": WIDTH,
        "image_token_embed_dim": WIDTH,
    }
    config = t.JanusConfig(
        text_config=t.LlamaConfig(**text()),
        vision_config=vision,
        vq_config={**_CODES, **codes},
        image_token_id=IMAGE,
    )
    model: nn.Module = t.JanusForConditionalGeneration(config)
    return model


def clip() -> nn.Module:
    """Two towers; the loss compares every picture with every sentence of the microbatch."""
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "projection_dim": WIDTH}
    marks = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": PAD}
    config = t.CLIPConfig(
        text_config={**TOWER, "num_hidden_layers": 4, **HEADS, **words, **marks},
        vision_config={**PATCHED, "projection_dim": WIDTH},
        projection_dim=WIDTH,
    )
    return t.CLIPModel(config)


def _clip_batch(g: torch.Generator) -> list[Microbatch]:
    made: list[Microbatch] = []
    for lengths in ((9, 9), (12, 5, 7), (6, 10)):
        words = prompt([[n, (2, 1)] for n in lengths], g)
        del words["labels"]
        pixels = floats(len(lengths), 3, 16, 16, g=g)
        made.append({**words, "pixel_values": pixels, "return_loss": True})
    return made


_READS = {"model.language_model": "backbone", "lm_head": "backbone"}
ALL = {
    "fuyu": Architecture(fuyu, _fuyu_batch, {"model.vision_embed_tokens": "encoder", **_READS}),
    "chameleon": Architecture(
        chameleon,
        _chameleon_batch,
        {"model.vqmodel": "encoder", "model.layers": "backbone", "lm_head": "backbone"},
    ),
    "janus": Architecture(
        janus,
        lambda g: images(16, g),
        {"model.vision_model": "encoder", "model.aligner": "encoder", **_READS},
    ),
    "clip": Architecture(
        clip,
        _clip_batch,
        {"vision_model": "encoder", "visual_projection": "encoder", "text_model": "backbone"},
    ),
}
