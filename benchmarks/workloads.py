"""The workloads of the two papers as regions with costs, by a roofline of their models and chips.

What the papers do not say is assumed, and said to be so in `assumed`: they give no microbatch
counts, and of some models no sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.devices import Chip, Effort, Transformer, effort
from fxpipe.cut import Role
from fxpipe.rates import Rates
from fxpipe.sketch import Sketch

ASCEND = Chip(
    "Ascend 910C",
    752e12,
    3.2e12,
    196e9,
    1e-5,
    "CloudMatrix384, arXiv 2506.12708; half a link's"
    " 392 GB/s, since both ways of a pipeline share it with other traffic",
)
HOPPER = Chip("H800", 989e12, 3.35e12, 50e9, 1e-5, "NVIDIA H800 data sheet; 400 Gb/s InfiniBand")

_TOKENS = 8192
_IMAGE = 4096  # patches of an image of 1024 x 1024 pixels with patches of 16

QWEN_8B = Transformer(
    "Qwen3-8B",
    36,
    4096,
    4096,
    1024,
    12288,
    True,
    _TOKENS,
    _TOKENS / 2,
    "config.json of Qwen/Qwen3-8B",
    vocabulary=151936,
)
QWEN_30B = Transformer(
    "Qwen3-30B-A3B",
    48,
    2048,
    4096,
    512,
    768,
    True,
    _TOKENS,
    _TOKENS / 2,
    "config.json of Qwen/Qwen3-30B-A3B",
    experts=128,
    active=8,
    vocabulary=151936,
)
DEEPSEEK = Transformer(
    "DeepSeek-V3",
    61,
    7168,
    20480,
    1536,
    2048,
    True,
    _TOKENS,
    _TOKENS / 2,
    "config.json of deepseek-ai/DeepSeek-V3; latent attention taken as 128 heads of 160, all "
    "layers as mixtures, the shared expert as one of 257",
    experts=257,
    active=9,
    vocabulary=129280,
)
VIT_QWEN = Transformer(
    "ViT of Qwen3-VL",
    27,
    1152,
    1152,
    1152,
    4304,
    False,
    4 * _TOKENS,
    _IMAGE,
    "vision_config of Qwen/Qwen3-VL-8B-Instruct",
)
VIT_1B = Transformer(
    "ViT 1.3B",
    46,
    1536,
    1536,
    1536,
    6144,
    False,
    2 * _TOKENS,
    _IMAGE,
    "1.3e9 parameters",
)
MMDIT = Transformer(
    "MMDiT 20B",
    60,
    3072,
    3072,
    3072,
    12288,
    False,
    5120,
    5120,
    "transformer/config.json of Qwen/Qwen-Image: of 20e9 parameters a token passes one of two "
    "streams of 6.8e9; the modulation has the rest",
)


@dataclass(frozen=True)
class Workload:
    """Regions of a model on chips, `ranks` of them in a pipeline.

    replicas: pipelines side by side, whose gradients are summed at the end of a step. published:
    the papers' ratios against baselines. assumed: what the papers do not say.
    """

    name: str
    chip: Chip
    ranks: int
    microbatches: int
    encoder: Transformer
    backbone: Transformer
    generator: Transformer | None = None
    replicas: int = 1
    published: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    assumed: str = ""
    weight: float = 1.0  # of the encoder's work and bytes: how many times as many patches
    drawing: float = 1.0  # the same of the generator's

    def effort(self, model: Transformer) -> Effort:
        """What a microbatch takes of one of the models."""
        factor = {id(self.encoder): self.weight, id(self.generator): self.drawing}
        found = effort(model, self.chip)
        return Effort(*(factor.get(id(model), 1.0) * amount for amount in found))

    @property
    def models(self) -> Mapping[str, Transformer]:
        """The models by region."""
        found = {"vision": self.encoder, "llm": self.backbone}
        return found | ({"image": self.generator} if self.generator else {})

    @property
    def efforts(self) -> Mapping[str, Effort]:
        """What a microbatch takes of each region."""
        return {name: self.effort(model) for name, model in self.models.items()}

    @property
    def share(self) -> Mapping[str, float]:
        """Each region's share of all seconds."""
        seconds = {name: x.forward + x.backward for name, x in self.efforts.items()}
        return {name: x / sum(seconds.values()) for name, x in seconds.items()}

    def sketches(self, *, split: bool) -> tuple[Sketch, ...]:
        """The regions; split: whether the backbone's backward is two ops, B and W."""
        of = self.efforts
        vision, llm = of["vision"], of["llm"]
        parts = (llm.inputs, llm.weights) if split else (llm.backward,)
        found = [
            Sketch("vision", Role.ENCODER, vision.forward, (vision.backward,)),
            Sketch(
                "llm",
                Role.BACKBONE,
                llm.forward / self.ranks,
                tuple(part / self.ranks for part in parts),
            ),
        ]
        if "image" in of:
            image = of["image"]
            found.append(Sketch("image", Role.GENERATOR, image.forward, (image.backward,)))
        return tuple(found)

    def rates(self, factors: Sequence[float] = ()) -> Rates:
        """Links, and bytes sent and kept. factors: of the encoder's seconds, by microbatch."""
        kept = {"vision": self.weight * self.encoder.kept, "llm": self.backbone.kept / self.ranks}
        if self.generator:
            kept["image"] = self.drawing * self.generator.kept
        merged = self.weight * self.encoder.tokens / 4 * self.backbone.width * 2
        return Rates(
            self.chip.latency,
            self.chip.link,
            {"vision": tuple(factors)} if factors else {},
            {"vision": min(merged, self.backbone.sent), "llm": self.backbone.sent},
            kept,
        )

    @property
    def flops(self) -> float:
        """Of one microbatch."""
        return sum(x.flops for x in self.efforts.values())

    @property
    def gradient_seconds(self) -> float:
        """Of the sum of a rank's gradients over all replicas, in a ring; experts are spread over
        the replicas, so that a card has its part of all weights."""
        count = self.replicas
        weights = self.backbone.parameters / (self.ranks * self.replicas) + self.encoder.parameters
        return 2 * (count - 1) / count * 2 * weights / self.chip.link

    def weighed(self, share: float, region: str = "vision") -> "Workload":
        """The same with more or less of a region's work, so that it has this share of all."""
        rest = sum(x for name, x in self.share.items() if name != region)
        factor = share / (1 - share) * rest / self.share[region]
        if region == "image":
            return replace(self, drawing=self.drawing * factor)
        return replace(self, weight=self.weight * factor)


MPIPE_B = Workload(
    "Mpipe B",
    ASCEND,
    8,
    32,
    VIT_QWEN,
    QWEN_8B,
    published={"stage": (2.70, 2.70)},
    assumed="the Qwen backbone is of 8B, the ViT that of Qwen3-VL; 8K tokens, 32K patches (the "
    "paper's visual length, 4 x 8K) in images of 4096; 32 microbatches",
)
MPIPE_A = Workload(
    "Mpipe A",
    ASCEND,
    16,
    64,
    VIT_QWEN,
    DEEPSEEK,
    replicas=32,
    published={"stage": (1.21, 1.21)},
    assumed="512 cards are 32 pipelines of 16 ranks; the backbone is DeepSeek-V3, the ViT that of "
    "Qwen3-VL; 8K tokens, 32K patches in images of 4096; 64 microbatches; exchanges between "
    "experts are not counted",
)
BIGMAC_U = Workload(
    "BigMac understanding",
    HOPPER,
    4,
    16,
    VIT_1B,
    QWEN_30B,
    published={"stage": (1.6, 1.9), "upfront": (1.08, 1.10)},
    assumed="4 ranks, as in the paper's example, of H800; the ViT has 46 layers of 1536, "
    "half of the 8K tokens are images of 4096 patches each, 4 to a token; 16 microbatches",
)
BIGMAC_G = replace(
    BIGMAC_U,
    name="BigMac generation",
    generator=MMDIT,
    published={"stage": (1.5, 1.9)},
    assumed=f"{BIGMAC_U.assumed}; the MMDiT is that of Qwen-Image and draws one image of 4096 "
    "latents beside 1024 tokens of text in each microbatch",
)
WORKLOADS = (MPIPE_B, MPIPE_A, BIGMAC_U, BIGMAC_G)
