"""The opaque stage: what a model does before a boundary, as the model's own Python under autograd.

    forward: (state, leaves) -> (crossing values, Saved)       runs the model up to the boundary
    pull:    (Saved, gradients of crossing values) -> gradients of the parameters

It differs from a stage that is a graph only in what its nodes call. F keeps the autograd graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.errors import BatchError
from fxpipe.history import Kept, behind
from fxpipe.inputs import rebuild
from fxpipe.outsiders import UNOWNED
from fxpipe.packed import LayoutRead, layout_refusal
from fxpipe.prefix import Reached, run_until
from fxpipe.prefix_chance import drawing
from fxpipe.trees import take_apart
from fxpipe.undone import own_buffers, plain_attributes, put_back, same

# Structure of the boundary's arguments, plain values among them, choices made before.
Form = tuple[Any, tuple[object, ...], tuple[object, ...]]
_SMALL = 1 << 12  # bytes of a buffer of which a run gets a copy in any case
Rebuilt = tuple[Any, tuple[tuple[str, object], ...]]


class Size(NamedTuple):
    """A size of a crossing value: that of a leaf's dimension, or the number that it was."""

    number: int
    leaf: int | None = None
    dim: int = 0

    def __call__(self, leaves: Sequence[Tensor]) -> int:
        return self.number if self.leaf is None else leaves[self.leaf].shape[self.dim]


@dataclass(frozen=True)
class Prefix:
    """A model up to a boundary, and what it was seen to do with one microbatch.

    rebuilt: what makes arguments of the microbatch's tensors; form: structure and plain values of
    the boundary's arguments; sources: of each tensor among them, the leaf that it is, or None for
    one that crosses; state: what it reads; reach: for each crossing value, the trained parameters
    behind it; attributes: those of modules that it sets; lines: where it reads values; draws: the
    kinds of generators that it draws from; buffers: those that it changes; flags: whether it
    reads some; layout: where code behind the boundary reads how what crosses lies in memory; dry:
    what it was found to do with others (`fxpipe.dry`)
    """

    model: nn.Module
    boundary: str
    rebuilt: Rebuilt
    form: Form
    sources: tuple[int | None, ...]
    state: tuple[str, ...]
    reach: tuple[frozenset[str], ...]
    sizes: tuple[tuple[Size, ...], ...]
    attributes: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    flops: int
    bytes: int
    draws: tuple[str, ...]
    buffers: tuple[str, ...]
    flags: bool
    train: bool
    layout: LayoutRead | None = None
    dry: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def trained(self) -> frozenset[str]:
        """The trained parameters behind any crossing value."""
        return frozenset().union(*self.reach)

    def run(
        self, leaves: Sequence[Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The values that cross, and what the buffers have become that it changes. buffers: what
        they are before; those of the model, which keeps them. Raises BatchError if anything is not
        what the trace was made for."""
        held = dict(self.model.named_buffers())
        values = {name: buffer for name, buffer in held.items() if buffer.nbytes <= _SMALL}
        values |= buffers or {name: held[name] for name in self.buffers}
        own = held | dict(self.model.named_parameters())
        versions = [tensor._version for tensor in own.values()]
        before = plain_attributes(self.model, self.attributes)
        try:
            with own_buffers(self.model, values) as after:
                reached = run_until(self.model, self.boundary, *rebuild(leaves, *self.rebuilt))
        finally:
            put_back(self.model, before)
        changed = [n for (n, t), v in zip(own.items(), versions, strict=True) if t._version != v]
        others = (n for n in after if n not in self.buffers)
        changed += [n for n in others if n not in held or not same(after[n], held[n])]
        _check_buffers({name: values[name] for name in self.buffers}, after, changed)
        form, sources, crossing = taken_apart(reached, leaves)
        if (form, sources) != (self.form, self.sources):
            raise BatchError(
                f"module {self.boundary} is called with {_shown(form)}; for the microbatch that "
                f"was traced, it was called with {_shown(self.form)}. Give microbatches whose code "
                "paths differ different arguments, so that each gets a graph of its own"
            )
        return crossing, [after[name] for name in self.buffers]


def _check_buffers(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], others: Sequence[str]
) -> None:
    """Raises BatchError if other tensors were changed than when this was traced, or one of these to
    one of another kind."""
    if others:
        raise BatchError(
            f"{others[0]} is changed by forward for this microbatch, and was not for the one that "
            "was traced: give fxpipe.compile an example that changes it. (A parameter keeps what "
            "was written: load it again before the next step)"
        )
    for name, old in before.items():
        new = after.get(name)
        if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            raise BatchError(
                f"buffer {name} is replaced by {'nothing' if new is None else tuple(new.shape)}; "
                f"it was of shape {tuple(old.shape)} and {old.dtype}, and must stay so"
            )


@dataclass(frozen=True)
class Saved:
    """What F keeps of an opaque stage: its results with their history, and what that has saved."""

    results: Sequence[Tensor]
    tensors: Sequence[Tensor]


def taken_apart(
    reached: Reached, leaves: Sequence[Tensor]
) -> tuple[Form, tuple[int | None, ...], list[Tensor]]:
    """(structure, plain values and choices; where each tensor comes from; those that cross)."""
    values, spec = take_apart(reached.call)
    own = {id(leaf): number for number, leaf in enumerate(leaves)}
    tensors = [value for value in values if isinstance(value, Tensor)]
    plain = tuple(_comparable(value) for value in values)
    sources = tuple(own.get(id(tensor)) for tensor in tensors)
    crossing = [t for t, source in zip(tensors, sources, strict=True) if source is None]
    return (spec, plain, reached.choices), sources, crossing


def kind_of_call(form: Form, sources: tuple[int | None, ...]) -> object:
    """What a graph behind the boundary cannot do without: its call, whatever numbers are in it, and
    the flags that may decide later."""
    spec, plain, choices = form
    numbers = (int, float, str)
    kinds = tuple(value[0] if value[0] in numbers else value for value in map(_pair, plain))
    return spec, kinds, tuple(c for c in choices if isinstance(c, bool)), sources


def _pair(value: object) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _comparable(value: object) -> object:
    """Plain values as they are; of a tensor its kind; of another object its class."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    simple = (bool, int, float, str, torch.dtype, torch.device)
    return (type(value), value) if value is None or isinstance(value, simple) else type(value)


def _shown(form: Form) -> str:
    read = f", after {', '.join(map(str, form[2]))} was read" if form[2] else ""
    return f"({', '.join(str(value) for value in form[1])}){read}"


def forward(prefix: Prefix, places: Sequence[int] = ()) -> Callable[..., Any]:
    """What F calls: (state, fields, sizes) -> (*crossing, *buffers, saved). state: what it reads of
    the model, of which only the buffers that it changes are looked at, at these places; fields: the
    microbatch's tensors, then states of generators; sizes: what all ranks expect of each crossing
    value; buffers: what those that it changes have become."""
    own = {id(p): name for name, p in prefix.model.named_parameters()}

    def opaque_forward(
        state: Sequence[Tensor], fields: Sequence[Tensor], sizes: Sequence[Sequence[int]]
    ) -> tuple[Any, ...]:
        moving = {name: state[at] for name, at in zip(prefix.buffers, places, strict=True)}
        kept, count = Kept(), len(fields) - len(prefix.draws)
        leaves, states = fields[:count], dict(zip(prefix.draws, fields[count:], strict=True))
        with torch.set_grad_enabled(prefix.train), kept.hooks(), drawing(states, prefix.model):
            crossing, buffers = prefix.run(leaves, moving)
        found = [tuple(value.shape) for value in crossing]
        if found != [tuple(size) for size in sizes]:
            raise BatchError(
                f"the arguments of module {prefix.boundary} have the shapes {found}; every other "
                f"rank expects {list(map(tuple, sizes))}"
            )
        _check(prefix, crossing, own)
        results = [value.detach().contiguous() for value in crossing]
        return (*results, *buffers, Saved(crossing, kept.tensors))

    return opaque_forward


def _check(prefix: Prefix, crossing: Sequence[Tensor], own: Mapping[int, str]) -> None:
    """Raises BatchError if what crosses owes gradients to others than it did when it was traced, or
    lies in memory as its graph cannot have it. own: names of the parameters."""
    named = [(f"argument {i} of {prefix.boundary}", v) for i, v in enumerate(crossing)]
    reason = layout_refusal(prefix.layout, named)
    if reason:
        raise BatchError(reason)
    reached = behind(crossing)
    if reached - set(own):
        raise BatchError(f"before module {prefix.boundary}, code {UNOWNED}")
    more = {own[i] for i in reached} - prefix.trained
    if more:
        raise BatchError(
            f"parameter {min(more)} is used for this microbatch, and was not for the one that "
            f"was traced: give fxpipe.compile an example that uses it"
        )


def pull(wanted: Sequence[int]) -> Callable[..., Any]:
    """What W calls: (saved, gradients of the crossing values numbered here, parameters) ->
    gradients of the parameters."""

    def opaque_backward(
        saved: Saved, gradients: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        ends = [saved.results[number] for number in wanted]
        return torch.autograd.grad(ends, parameters, gradients, allow_unused=True)

    return opaque_backward
