"""What a random model is: a value that prints, so that a failure is a line to be pasted.

    Spec -> build() in tests.fuzz.model -> nn.Module;    Spec.microbatches -> its batch

A block is a tuple of names of instructions (tests.fuzz.ops); the simplest of each choice is the
default, and `smaller` gives everything that is one step simpler.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

Block = tuple[str, ...]
Blocks = tuple[Block, ...]


@dataclass(frozen=True)
class Encoder:
    """join: how its features reach the backbone; shares: it runs the first encoder's blocks."""

    blocks: Blocks = (("linear",),)
    join: str = "add"
    shares: bool = False


@dataclass(frozen=True)
class Generator:
    """condition: what it takes of the backbone; tied: its stem is the first encoder's."""

    blocks: Blocks = (("linear",),)
    condition: str = "mean"
    tied: bool = False


@dataclass(frozen=True)
class Microbatch:
    """Sizes and Python values of one microbatch; patches: of each encoder, and of each target;
    text: it has no images at all."""

    samples: int = 2
    length: int = 3
    patches: int = 2
    flag: bool = True
    number: float = 0.5
    text: bool = False


@dataclass(frozen=True)
class Run:
    """A schedule, and how a step is called; recompute: bits, one for each region."""

    schedule: str = "nested/1f1b"
    ranks: int = 2
    recompute: int = 0
    weighted: bool = False
    reverse: bool = False


@dataclass(frozen=True)
class Spec:
    """A model, its microbatches, and the schedules under which it must equal eager."""

    blocks: Blocks = (("linear",), ("linear",))
    encoders: tuple[Encoder, ...] = ()
    generators: tuple[Generator, ...] = ()
    before: Block = ()
    after: Block = ()
    losses: Block = ("ce",)
    combine: str = "sum"
    output: str = "tensor"
    tied: bool = False
    reuse: int = 0
    frozen: tuple[str, ...] = ()
    names: int = 0
    inputs: str = "flat"
    regions: bool = False
    microbatches: tuple[Microbatch, ...] = (Microbatch(), Microbatch())
    runs: tuple[Run, ...] = (Run(),)


def smaller(spec: Any) -> Iterator[Any]:
    """Values that are one step simpler: an element less, or a field nearer to its default."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        for other in _simpler(value, field.default):
            yield replace(spec, **{field.name: other})


def _simpler(value: object, default: object) -> Iterator[object]:
    if isinstance(value, tuple):
        yield from _shorter(value, 1 if default else 0)
    elif value != default:
        yield default


def _shorter(value: tuple[Any, ...], least: int, block: bool = False) -> Iterator[tuple[Any, ...]]:
    """Without one of its items, or with one of them simpler; in a block that is `linear`."""
    if len(value) > least:
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
    for i, item in enumerate(value):
        inner = _shorter(item, 1, block=True) if isinstance(item, tuple) else ()
        inner = smaller(item) if is_dataclass(item) else inner
        yield from ((*value[:i], other, *value[i + 1 :]) for other in inner)
        if block and item != "linear":
            yield (*value[:i], "linear", *value[i + 1 :])
