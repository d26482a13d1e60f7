"""Thirty-one public multimodal architectures, tiny and random, with microbatches to train them.

ALL: name -> Architecture. They need transformers and diffusers; nothing is downloaded.
"""

from benchmarks.zoo import audio, generators, llava, qwen, sizes, tokens
from benchmarks.zoo.architecture import Architecture

ALL: dict[str, Architecture] = {
    **llava.ALL,
    **sizes.ALL,
    **qwen.ALL,
    **tokens.ALL,
    **audio.ALL,
    **generators.ALL,
}
