"""A random model as an ordinary module, and its microbatches.

encoders -> backbone -> generators; every region is a stem and blocks of instructions
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.fuzz import ops_modules, ops_state  # noqa: F401
from tests.fuzz.ops import OPS, VOCABULARY, WIDTH, square
from tests.fuzz.spec import Block, Blocks, Encoder, Generator, Spec
from tests.fuzz.spec import Microbatch as Sizes

NAMES = (
    {"encoder": "vision", "backbone": "layers", "generator": "image"},
    {"encoder": "class", "backbone": "0", "generator": "lambda"},
    {"encoder": "a-b c", "backbone": "forward_", "generator": "weight"},
)
MARK = VOCABULARY - 1  # the token in whose place features are put


@dataclass
class Shared:
    """What the layers of one forward share."""

    model: nn.Module
    ids: Tensor
    flag: bool
    number: float
    saved: list[Any] = field(default_factory=list)
    aux: list[Tensor] = field(default_factory=list)
    memory: Tensor | None = None
    deep: list[Tensor] = field(default_factory=list)
    bias: Tensor | None = None
    region: str = ""
    epoch: int = 0


class Own(nn.Module):
    """The weights of one instruction."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for part, make in OPS[name].parts.items():
            made = make()
            if isinstance(made, Tensor) and not isinstance(made, nn.Parameter):
                self.register_buffer(part, made)
            else:
                setattr(self, part, made)

    def forward(self, x: Tensor, c: Shared) -> Tensor:
        return OPS[self.name].run(self, x, c)


class Layer(nn.Module):
    """A block: its instructions one after another."""

    def __init__(self, names: Block) -> None:
        super().__init__()
        for i, name in enumerate(names):
            self.add_module(f"{name}_{i}", Own(name))

    def forward(self, x: Tensor, c: Shared) -> Tensor:
        for part in self.children():
            x = part(x, c)
        return x


class Part(nn.Module):
    """A stem and blocks."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.stem = square()
        self.blocks = nn.ModuleList(map(Layer, blocks))

    def forward(self, x: Tensor, c: Shared, deep: bool = False) -> Tensor:
        c.region, c.epoch = str(id(self)), 0
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, c)
            if deep:
                c.deep.append(x.sum(1, keepdim=True))
        return x


class Model(nn.Module):
    """The model of a spec."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec, names = spec, NAMES[spec.names]
        self.encoders = [f"{names['encoder']}{i}" for i in range(len(spec.encoders))]
        self.generators = [f"{names['generator']}{i}" for i in range(len(spec.generators))]
        self.backbone = names["backbone"]
        self.embed, self.shared = nn.Embedding(VOCABULARY, WIDTH), square()
        self.relative = nn.Embedding(WIDTH, WIDTH)
        for name, region in zip(
            [*self.encoders, *self.generators], [*spec.encoders, *spec.generators], strict=True
        ):
            self.add_module(name, Part(region.blocks))
        layers = [Layer(block) for block in spec.blocks]
        for i in range(spec.reuse):
            layers[-1 - i % len(layers)] = layers[0]
        self.before, self.after = Layer(spec.before), Layer(spec.after)
        self.add_module(self.backbone, nn.ModuleList(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self._tie(spec)
        for name in spec.frozen:
            self._part(name).requires_grad_(False)

    def _tie(self, spec: Spec) -> None:
        if spec.tied:
            self.head.weight = self.embed.weight
        for name, encoder in zip(self.encoders, spec.encoders, strict=True):
            if encoder.shares:
                self._part(name).blocks = self._part(self.encoders[0]).blocks
        for name, generator in zip(self.generators, spec.generators, strict=True):
            if generator.tied and self.encoders:
                self._part(name).stem.weight = self._part(self.encoders[0]).stem.weight

    def _part(self, name: str) -> Any:
        """A part by the name that a spec has for it: `encoder0`, `backbone`, `backbone.1`."""
        head, _, index = name.partition(".")
        own = {f"encoder{i}": n for i, n in enumerate(self.encoders)}
        own |= {f"generator{i}": n for i, n in enumerate(self.generators)}
        own["backbone"] = self.backbone
        found: Any = self._modules[own.get(head, head)]
        return found[int(index) % len(found)] if index else found

    def forward(self, ids: Tensor, labels: Tensor, **more: Any) -> Any:
        c = Shared(self, ids, more["flag"], more["number"])
        images, noises = _listed(more, "images"), _listed(more, "noises")
        encoders = self.spec.encoders[: len(images)]  # none where there is text alone
        features = [
            self._part(name)(image, c, encoder.join == "deep")
            for name, image, encoder in zip(self.encoders, images, encoders, strict=False)
        ]
        x = self.embed(ids)
        for made, encoder in zip(features, encoders, strict=True):
            x = _joined(x, made, encoder, c)
        c.region, c.epoch = "llm", 0
        x = self.before(x, c)
        for i, block in enumerate(self._modules[self.backbone]):
            x = block(x, c)
            if i < len(c.deep):
                x = x + c.deep[i]
        x = self.after(x, c)
        losses = [self._loss(name, x, ids, labels) for name in self.spec.losses]
        for name, noise, how in zip(self.generators, noises, self.spec.generators, strict=True):
            y = noise + _condition(x, noise, how)
            losses.append(F.mse_loss(self._part(name)(y, c), noise))
        return _returned(self.spec, [*losses, *c.aux])

    def _loss(self, name: str, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        match name:
            case "ce":
                last = logits[:, -1]
                return F.cross_entropy(last, labels[:, -1])
            case "ignore":
                short = logits[:, : labels.shape[1]].mean(1)
                return F.cross_entropy(short, labels[:, 0], ignore_index=0, reduction="sum") / 3
            case "counted":
                weight = (ids != 1).to(x.dtype)
                return (weight * x.mean((1, 2))[:, None]).sum() / weight.sum().clamp(min=1)
            case "squares":
                return x.square().mean() + 0.1 * logits.logsumexp(-1).square().mean()
            case "weights":
                return self.shared.weight.square().sum() * 0.01
            case _:
                return x.abs().sum() * 0.001


def _listed(more: dict[str, Any], name: str) -> list[Tensor]:
    """A list of tensors that is given as one, or as an argument for each, or not at all."""
    if name in more:
        given = more[name] or []
        return list(given.values() if isinstance(given, dict) else given)
    return [value for key, value in more.items() if key.startswith(name)]


def _joined(x: Tensor, made: Tensor, encoder: Encoder, c: Shared) -> Tensor:
    match encoder.join:
        case "cat":
            return torch.cat([made, x], 1)
        case "cross":
            c.memory = made
            return x
        case "scatter":
            return x.masked_scatter((c.ids == MARK).unsqueeze(-1), made)
        case "deep" | "none":
            return x
        case "detached":
            return x + made.detach().sum(1, keepdim=True)
        case _:
            return x + made.sum(1, keepdim=True) * 0.1


def _condition(x: Tensor, noise: Tensor, how: Generator) -> Tensor:
    match how.condition:
        case "last":
            return x[:, -1:]
        case "scores":
            return torch.softmax(noise @ x.mT, -1) @ x
        case "detached":
            return x.detach().mean(1, keepdim=True)
        case _:
            return x.mean(1, keepdim=True)


def _returned(spec: Spec, losses: list[Tensor]) -> Any:
    match spec.combine:
        case "product":
            total = losses[0]
            for loss in losses[1:]:
                total = total * (1 + loss)
        case "root":
            total = torch.stack(losses).square().sum().sqrt()
        case "weighted":
            total = losses[0] * 0.5
            for i, loss in enumerate(losses[1:]):
                total = total - loss / (i + 2)
        case "mean":
            total = torch.stack(losses).mean()
        case "largest":
            total = torch.stack(losses).max()
        case _:
            total = sum(losses[1:], start=losses[0])
    match spec.output:
        case "dict":
            return {"loss": total, "parts": losses}
        case "object":
            return Output(total, losses)
        case _:
            return total


@dataclass
class Output:
    """What models of transformers return."""

    loss: Tensor
    parts: list[Tensor]


def build(spec: Spec) -> Model:
    """The model, with the same weights every time."""
    torch.manual_seed(0)
    return Model(spec).double()


def batch(spec: Spec) -> list[dict[str, Any]]:
    """The microbatches of a spec."""
    g = torch.Generator().manual_seed(1)
    return [_microbatch(spec, sizes, g) for sizes in spec.microbatches]


def _microbatch(spec: Spec, sizes: Sizes, g: torch.Generator) -> dict[str, Any]:
    def floats(length: int) -> Tensor:
        return torch.randn(sizes.samples, length, WIDTH, generator=g, dtype=torch.float64)

    length = sizes.length + sizes.patches
    ids = torch.randint(0, MARK, (sizes.samples, length), generator=g)
    ids[:, : 0 if sizes.text else sizes.patches] = MARK
    labels = torch.randint(0, VOCABULARY, (sizes.samples, length), generator=g)
    made = {"ids": ids, "labels": labels, "flag": sizes.flag, "number": sizes.number}
    images = [] if sizes.text else [floats(sizes.patches) for _ in spec.encoders]
    noises = [floats(sizes.patches + 1) for _ in spec.generators]
    return made | _given(spec.inputs, "images", images) | _given(spec.inputs, "noises", noises)


def _given(how: str, name: str, values: Sequence[Tensor]) -> dict[str, Any]:
    match how:
        case "list":
            return {name: list(values)}
        case "dict":
            return {name: {f"{i}.x": value for i, value in enumerate(values)}}
        case "absent":
            return {name: list(values) or None, "other": None}
        case "strided":
            return {f"{name}{i}": v.mT.contiguous().mT for i, v in enumerate(values)}
        case _:
            return {f"{name}{i}": value for i, value in enumerate(values)}
