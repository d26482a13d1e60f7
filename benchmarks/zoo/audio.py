"""Audio towers: Qwen2-Audio, Granite Speech, Phi-4 with pictures as well, Whisper."""

from collections.abc import Sequence

import torch
import transformers as t
from torch import nn

from benchmarks.zoo.architecture import (
    AUDIO,
    HEADS,
    IMAGE,
    PATCHED,
    TOWER,
    VOCABULARY,
    WIDTH,
    Architecture,
    Microbatch,
    Span,
    ahead,
    floats,
    prompt,
    text,
)

_HEARD = {
    "model.audio_tower": "encoder",
    "model.multi_modal_projector": "encoder",
    "model.language_model": "backbone",
    "lm_head": "backbone",
}


def qwen2_audio() -> nn.Module:
    """A tower after Whisper, a linear projector, Qwen2."""
    audio = t.Qwen2AudioEncoderConfig(
        num_mel_bins=8,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        d_model=WIDTH,
        max_source_positions=20,
    )
    config = t.Qwen2AudioConfig(
        audio_config=audio, text_config=t.Qwen2Config(**text()), audio_token_index=AUDIO
    )
    return t.Qwen2AudioForConditionalGeneration(config)


def _qwen2_audio_batch(g: torch.Generator) -> list[Microbatch]:
    """Spectrograms are padded to 40 frames; two convolutions leave a quarter of the frames."""
    made: list[Microbatch] = []
    for more, frames in enumerate(((40, 40), (40, 24, 30), (17, 36))):
        tokens = [((n - 1) // 2 + 1 - 2) // 2 + 1 for n in frames]
        rows = [[3, (AUDIO, n), 7 + more] for n in tokens]
        mask = torch.zeros(len(frames), 40, dtype=torch.long)
        mask[:, : max(frames)] = ahead(*frames)
        sound = floats(len(frames), 8, 40, g=g)
        made.append({**prompt(rows, g), "input_features": sound, "feature_attention_mask": mask})
    return made


def granite_speech() -> nn.Module:
    """A Conformer with batch normalisation, a Q-Former on windows of four frames, Granite."""
    conformer = {
        "input_dim": 16,
        "num_layers": 2,
        "hidden_dim": WIDTH,
        "feedforward_mult": 2,
        "num_heads": 4,
        "dim_head": 8,
        "output_dim": 8,
        "context_size": 8,
        "max_pos_emb": 16,
        "conv_kernel_size": 3,
    }
    former = t.Blip2QFormerConfig(
        **TOWER, vocab_size=VOCABULARY, encoder_hidden_size=WIDTH, cross_attention_frequency=1
    )
    config = t.GraniteSpeechConfig(
        encoder_config=conformer,
        projector_config=former,
        text_config=t.GraniteConfig(**text()),
        audio_token_index=AUDIO,
        downsample_rate=2,
        window_size=4,
        has_lora_adapter=False,
    )
    return t.GraniteSpeechForConditionalGeneration(config)


def _granite_batch(g: torch.Generator) -> list[Microbatch]:
    """Two tokens for each window that a clip begins."""
    made: list[Microbatch] = []
    for more, frames in enumerate(((20, 20), (26, 11, 17), (34, 8))):
        tokens = [2 * -(-n // 4) for n in frames]
        rows = [[3, (AUDIO, n), 7 + more] for n in tokens]
        sound = floats(len(frames), max(frames), 16, g=g) * ahead(*frames)[..., None]
        mask = ahead(*tokens).bool()
        made.append({**prompt(rows, g), "input_features": sound, "input_features_mask": mask})
    return made


def phi4_multimodal() -> nn.Module:
    """Phi-4: SigLIP on crops, a Conformer, both written over the tokens' embeddings."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    audio = {
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_blocks": 2,
        **HEADS,
        "ext_pw_out_channel": WIDTH,
        "depthwise_separable_out_channel": WIDTH,
        "nemo_conv_channels": WIDTH,
        "input_size": 16,
        "time_reduction": 4,
        "bias_max_distance": 64,
        "audio_token_id": AUDIO,
    }
    config = t.Phi4MultimodalConfig(
        **text(original_max_position_embeddings=256, rope_parameters=rope),
        vision_config={**PATCHED, "crop_size": 16, "image_token_id": IMAGE},
        audio_config=audio,
    )
    return t.Phi4MultimodalForCausalLM(config)


# Crops (down, across) of the picture of each row and frames of its clip, for each microbatch.
_PHI4 = (
    (((1, 1), 32), ((1, 1), 32)),
    (((1, 2), 32), ((2, 1), 24)),
    (((2, 2), 28), ((1, 1), 40), ((1, 2), 16)),
)


def _phi4_batch(g: torch.Generator) -> list[Microbatch]:
    return [_phi4(rows, more, g) for more, rows in enumerate(_PHI4)]


def _phi4(rows: Sequence[tuple[tuple[int, int], int]], more: int, g: torch.Generator) -> Microbatch:
    """A crop is 2 x 2 tokens; rows of tokens end in a mark; the whole picture comes last."""
    crops, frames = zip(*rows, strict=True)
    seen = [2 * a * (2 * b + 1) + 1 + 2 * 3 for a, b in crops]
    heard = [n // 4 for n in frames]
    spans: list[list[Span]] = [
        [2, (IMAGE, n), 3, (AUDIO, m), 8 + more] for n, m in zip(seen, heard, strict=True)
    ]
    some = ahead(*(1 + a * b for a, b in crops))
    sound = ahead(*frames)
    return {
        **prompt(spans, g),
        "image_pixel_values": floats(*some.shape, 3, 16, 16, g=g) * some[..., None, None, None],
        "image_sizes": torch.tensor([[16 * a, 16 * b] for a, b in crops]),
        "image_attention_mask": some[..., None, None].expand(*some.shape, 4, 4).bool(),
        "audio_input_features": floats(*sound.shape, 16, g=g) * sound[..., None],
        "audio_embed_sizes": torch.tensor(heard),
        "audio_attention_mask": sound.bool(),
    }


def whisper() -> nn.Module:
    """An encoder to which every decoder layer attends."""
    config = t.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=4,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
        max_source_positions=20,
        max_target_positions=32,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dropout=0.0,
    )
    return t.WhisperForConditionalGeneration(config)


def _whisper_batch(g: torch.Generator) -> list[Microbatch]:
    made: list[Microbatch] = []
    for lengths in ((12, 12), (15, 6, 9), (8,)):
        labels = prompt([[n] for n in lengths], g)["labels"]
        made.append({"input_features": floats(len(lengths), 8, 40, g=g), "labels": labels})
    return made


ALL = {
    "qwen2_audio": Architecture(qwen2_audio, _qwen2_audio_batch, _HEARD),
    "granite_speech": Architecture(
        granite_speech,
        _granite_batch,
        {
            "model.encoder": "encoder",
            "model.projector": "encoder",
            "model.language_model": "backbone",
            "lm_head": "backbone",
        },
    ),
    "phi4_multimodal": Architecture(
        phi4_multimodal,
        _phi4_batch,
        {
            "model.embed_tokens_extend.image_embed": "encoder",
            "model.embed_tokens_extend.audio_embed": "encoder",
            "model.layers": "backbone",
            "lm_head": "backbone",
        },
    ),
    "whisper": Architecture(
        whisper,
        _whisper_batch,
        {"model.encoder": "encoder", "model.decoder": "backbone", "proj_out": "backbone"},
    ),
}
