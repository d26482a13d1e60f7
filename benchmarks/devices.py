"""Chips and transformers, and the roofline of one forward: seconds, bytes kept, bytes of weights.

An operator takes max(flops / peak, bytes / bandwidth) seconds (Mpipe, arXiv 2607.03229, section
4.3): no operator reaches more, real ones reach less, and a mixture of experts less than a dense
layer. Everything is bfloat16; attention is fused, so its scores are never written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_BF16 = 2  # bytes
_FUSED_BACKWARD = 2.5  # of the flops of a fused attention's forward: it computes the scores again


@dataclass(frozen=True)
class Chip:
    """Flops per second in bfloat16; bytes per second of its memory and of its link to the next
    pipeline rank; seconds of a transfer beside its bytes. source: where the numbers are from."""

    name: str
    flops: float
    bandwidth: float
    link: float
    latency: float
    source: str

    def seconds(self, flops: float, bytes: float) -> float:
        """Of one operator."""
        return max(flops / self.flops, bytes / self.bandwidth)


@dataclass(frozen=True)
class Transformer:
    """A stack of layers. width: of the stream; queries: heads x dimension, keys: of keys (and of
    values); hidden: of the feed-forward network that a token passes, gated: three matrices, not
    two. experts: how many there are, active: how many a token passes, each `hidden` wide.
    vocabulary: of a head, 0 for none. tokens: of a microbatch, span: how many of them a token
    attends, on the average. source: where the sizes are from, and which are assumed."""

    name: str
    layers: int
    width: int
    queries: int
    keys: int
    hidden: int
    gated: bool
    tokens: int
    span: float
    source: str
    experts: int = 1
    active: int = 1
    vocabulary: int = 0

    @property
    def linears(self) -> Iterator[tuple[float, int, int, int]]:
        """Rows, inputs and outputs of the matrix products of a layer, and how often each runs."""
        rows, width = float(self.tokens), self.width
        yield rows, width, self.queries + 2 * self.keys, 1
        yield rows, self.queries, width, 1
        routed = rows * self.active / self.experts
        yield routed, width, self.hidden * (2 if self.gated else 1), self.experts
        yield routed, self.hidden, width, self.experts

    @property
    def parameters(self) -> float:
        """Of all layers and the head."""
        layer = sum(count * inputs * outputs for _, inputs, outputs, count in self.linears)
        return self.layers * layer + self.width * self.vocabulary

    @property
    def kept(self) -> float:
        """Bytes between the forward and the backward of one microbatch: the inputs of every
        product, and what the fused attention reads again."""
        hidden = self.active * self.hidden * (3 if self.gated else 2)
        floats = 4 * self.width + 2 * self.queries + 2 * self.keys + hidden
        return float(_BF16 * self.tokens * self.layers * floats)

    @property
    def sent(self) -> float:
        """Bytes of the stream between two stages."""
        return float(_BF16 * self.tokens * self.width)


class Effort(NamedTuple):
    """Seconds of a forward, of its input gradients and of its weight gradients; flops of all."""

    forward: float
    inputs: float
    weights: float
    flops: float

    @property
    def backward(self) -> float:
        """Seconds of the whole backward."""
        return self.inputs + self.weights


def effort(model: Transformer, chip: Chip) -> Effort:
    """What one microbatch takes of a transformer on a chip."""
    products = [(model.layers, product) for product in model.linears]
    if model.vocabulary:
        products.append((1, (float(model.tokens), model.width, model.vocabulary, 1)))
    linear = sum(layers * _product(product, chip) for layers, product in products)
    flops = sum(layers * 2 * n * i * o * c for layers, (n, i, o, c) in products)
    scores = 4.0 * model.tokens * model.span * model.queries * model.layers
    moved = model.layers * _moved(model)
    forward = linear + scores / chip.flops + moved / chip.bandwidth
    back = linear + _FUSED_BACKWARD * scores / chip.flops + 2 * moved / chip.bandwidth
    return Effort(forward, back, linear, 3 * flops + (1 + _FUSED_BACKWARD) * scores)


def _product(product: tuple[float, int, int, int], chip: Chip) -> float:
    rows, inputs, outputs, count = product
    moved = _BF16 * (rows * (inputs + outputs) + inputs * outputs)
    return count * chip.seconds(2 * rows * inputs * outputs, moved)


def _moved(model: Transformer) -> float:
    """Bytes that a layer's norms, sums, rotations and activations read and write in a forward."""
    hidden = model.active * model.hidden * (3 if model.gated else 2)
    floats = 10 * model.width + 3 * (model.queries + model.keys) + hidden
    return float(_BF16 * model.tokens * floats)
