"""A language model whose hidden states condition a diffusion transformer: two losses in one model.

Latents differ in size from microbatch to microbatch, pictures or (Wan) short films.
"""

from collections.abc import Sequence
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from benchmarks.zoo.architecture import WIDTH, Architecture, Microbatch, floats, prompt, text

_DRAWN = {"language": "backbone", "condition": "generator", "paint": "generator"}
_SIZES = ((8, 8), (8, 12), (4, 8))  # of latents, for each microbatch


def _of_diffusers(name: str) -> Any:
    """A class of diffusers, which is slow to import and not always there."""
    import diffusers

    return getattr(diffusers, name)


def _painted(
    blocks: Any, noisy: Tensor, context: Tensor, timestep: Tensor, **others: Any
) -> Tensor:
    """What a diffusion transformer makes of noise, text and time."""
    made: Tensor = blocks(
        hidden_states=noisy,
        encoder_hidden_states=context,
        timestep=timestep,
        return_dict=False,
        **others,
    )[0]
    return made


class Painter(nn.Module):
    """Words are learnt by cross-entropy, the picture by the velocity of a straight flow."""

    def __init__(self, paint: nn.Module) -> None:
        super().__init__()
        self.language = t.Qwen2ForCausalLM(t.Qwen2Config(**text()))
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.paint = paint

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        latents: Tensor,
        noise: Tensor,
        timestep: Tensor,
    ) -> Tensor:
        said = self.language(
            input_ids=input_ids,
            attention_mask=attention_mask,
            labels=labels,
            output_hidden_states=True,
        )
        context = self.condition(said.hidden_states[-1])
        level = (timestep.to(latents.dtype) / 1000).view(-1, *[1] * (latents.dim() - 1))
        noisy = torch.lerp(latents, noise, level)
        velocity = self.paint(noisy, context, attention_mask, timestep)
        loss: Tensor = said.loss + (velocity - (noise - latents)).square().mean()
        return loss


class _StableDiffusion3(nn.Module):
    """Text and picture in one attention; a pooled vector beside the time."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = _of_diffusers("SD3Transformer2DModel")(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            pos_embed_max_size=16,
        )

    def forward(self, noisy: Tensor, context: Tensor, mask: Tensor, timestep: Tensor) -> Tensor:
        weight = mask.unsqueeze(-1) / mask.sum(1)[:, None, None]
        pooled = self.pooled((context * weight).sum(1))
        return _painted(self.blocks, noisy, context, timestep, pooled_projections=pooled)


class _PixArt(nn.Module):
    """Cross-attention to the text, one time embedding for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = _of_diffusers("PixArtTransformer2DModel")(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            norm_num_groups=4,
            cross_attention_dim=WIDTH,
            sample_size=8,
            patch_size=2,
            caption_channels=WIDTH,
            use_additional_conditions=False,
        )

    def forward(self, noisy: Tensor, context: Tensor, mask: Tensor, timestep: Tensor) -> Tensor:
        sizes = {"resolution": None, "aspect_ratio": None}
        others = {"encoder_attention_mask": mask, "added_cond_kwargs": sizes}
        return _painted(self.blocks, noisy, context, timestep, **others)


class _QwenImage(nn.Module):
    """Two streams with rotary positions; the picture is a row of patches, of which sizes tell."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = _of_diffusers("QwenImageTransformer2DModel")(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
        )

    def forward(self, noisy: Tensor, context: Tensor, mask: Tensor, timestep: Tensor) -> Tensor:
        samples, _, down, across = noisy.shape
        shapes = [[(1, down // 2, across // 2)]] * samples
        patches = nn.functional.pixel_unshuffle(noisy, 2).flatten(2).transpose(1, 2)
        others = {"encoder_hidden_states_mask": mask.bool(), "img_shapes": shapes}
        made = _painted(self.blocks, patches, context, timestep / 1000, **others)
        rows = made.transpose(1, 2).reshape(samples, -1, down // 2, across // 2)
        return nn.functional.pixel_shuffle(rows, 2)


class _Wan(nn.Module):
    """Films: patches over time and space, cross-attention to the text."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = _of_diffusers("WanTransformer3DModel")(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            text_dim=WIDTH,
            freq_dim=32,
            ffn_dim=64,
            num_layers=3,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        )

    def forward(self, noisy: Tensor, context: Tensor, mask: Tensor, timestep: Tensor) -> Tensor:
        return _painted(self.blocks, noisy, context, timestep)


def _batch(frames: Sequence[int], g: torch.Generator) -> list[Microbatch]:
    made: list[Microbatch] = []
    for at, lengths in enumerate(((12, 12), (9, 14, 5), (11,))):
        shape = (len(lengths), 4, *frames[at : at + 1], *_SIZES[at])
        pair = {"latents": floats(*shape, g=g), "noise": floats(*shape, g=g)}
        times = torch.randint(1, 1000, (len(lengths),), generator=g)
        made.append({**prompt([[n] for n in lengths], g), **pair, "timestep": times})
    return made


def _pictures(g: torch.Generator) -> list[Microbatch]:
    return _batch((), g)


ALL = {
    "llm_sd3": Architecture(lambda: Painter(_StableDiffusion3()), _pictures, _DRAWN),
    "llm_pixart": Architecture(lambda: Painter(_PixArt()), _pictures, _DRAWN),
    "llm_qwenimage": Architecture(lambda: Painter(_QwenImage()), _pictures, _DRAWN),
    "llm_wan": Architecture(lambda: Painter(_Wan()), lambda g: _batch((2, 3, 1), g), _DRAWN),
}
