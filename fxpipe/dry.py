"""An opaque stage's code run dry: integers with their values, floats without numbers.

    dry_run(prefix, leaves) -> Dry | None

Every rank finds in this way what the code makes of a microbatch and which random numbers it draws,
without its work and without its generators.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.chance import Blank, Draw
from fxpipe.concrete import Concrete, NeedsValuesError
from fxpipe.dataflow import differentiable
from fxpipe.errors import BatchError
from fxpipe.inputs import contents, rebuild
from fxpipe.opaque import Prefix, kind_of_call, taken_apart
from fxpipe.packed import memory_order
from fxpipe.prefix import run_until
from fxpipe.python_chance import PYTHON, python_left_alone
from fxpipe.state import stand_ins
from fxpipe.torch_internals import hooks_at_rest
from fxpipe.torch_modes import DATA_ERRORS, fake_like, new_fake_mode
from fxpipe.undone import plain_attributes, put_back

# How many numbers these draw depends on the numbers.
_REJECTING = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


@dataclass(frozen=True)
class Dry:
    """What code does with one microbatch: the shapes of what crosses, and the operators that draw;
    None where one of them draws as much as its data says; and the kind of the boundary's call."""

    shapes: tuple[tuple[int, ...], ...]
    drawn: tuple[Draw, ...] | None
    call: object


_REMEMBERED = 256  # microbatches of a prefix


def dry_run(prefix: Prefix, leaves: Sequence[Tensor]) -> Dry | None:
    """What the code does, as every rank alike finds it: from integers' values and the shapes of all
    else. None where it reads floats."""
    known: dict[object, Dry | None] = prefix.dry
    key = tuple((t.shape, b"" if differentiable(t) else contents(t)) for t in leaves)
    if key not in known:
        if len(known) == _REMEMBERED:
            del known[next(iter(known))]
        try:
            with python_left_alone():
                known[key] = _without_floats(prefix, leaves)
        except (NeedsValuesError, *DATA_ERRORS):
            known[key] = None
    return known[key]


def shapes(prefix: Prefix, leaves: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
    """The shapes of what would cross; where code reads floats, by the sizes that were equal when it
    was traced. F compares them with what it makes."""
    dry = dry_run(prefix, leaves)
    if dry is not None:
        return dry.shapes
    return [tuple(size(leaves) for size in sizes) for sizes in prefix.sizes]


def call_of(prefix: Prefix, leaves: Sequence[Tensor]) -> object:
    """The kind of the boundary's call, where flags decide it and all ranks can know them; a graph
    behind the boundary is for one of them. None elsewhere."""
    dry = dry_run(prefix, leaves) if prefix.flags else None
    return None if dry is None else dry.call


def draw_as_python(prefix: Prefix, leaves: Sequence[Tensor]) -> None:
    """Draw from Python's generators what the code would draw."""
    try:
        _without_floats(prefix, leaves)
    except (NeedsValuesError, *DATA_ERRORS) as error:
        raise BatchError(
            f"before module {prefix.boundary} random or numpy.random is drawn from, and values "
            f"of floats are read ({error}), so that no other rank can tell how much is drawn. "
            "Draw with torch, or outside of the model"
        ) from error


def with_own(
    prefix: Prefix | None, draws: Sequence[Draw], leaves: Sequence[Tensor]
) -> Sequence[Draw]:
    """What a microbatch draws, in eager's order. draws: those of its graph, of which the first give
    the prefix its generators; behind each stand the operators that draw from it. Where these are
    not known, the prefix has generators of its own."""
    if prefix is None or not prefix.draws or PYTHON in prefix.draws:
        return draws  # what Python draws may decide what else is drawn
    dry, count = dry_run(prefix, leaves), len(prefix.draws)
    if dry is None or dry.drawn is None:
        return draws
    begin = [replace(draw, target=None, apart=False, followed=False) for draw in draws[:count]]
    return [*begin, *dry.drawn, *draws[count:]]


def _without_floats(prefix: Prefix, leaves: Sequence[Tensor]) -> Dry:
    mode = new_fake_mode()
    state = stand_ins(prefix.model, partial(fake_like, mode))
    fakes = [fake_like(mode, leaf) for leaf in leaves]
    real = {number: leaf for number, leaf in enumerate(leaves) if not differentiable(leaf)}
    concrete, drawing = Concrete(fakes, real, state.values()), _Drawing()
    given = concrete.leaves(fakes)
    args, kwargs = rebuild(given, *prefix.rebuilt)
    before = plain_attributes(prefix.model, prefix.attributes)
    try:
        with torch.no_grad(), hooks_at_rest(), mode, drawing, concrete:
            reached = run_until(prefix.model, prefix.boundary, args, kwargs, state)
    finally:
        put_back(prefix.model, before)
    form, sources, crossing = taken_apart(reached, given)
    made, call = tuple(tuple(value.shape) for value in crossing), kind_of_call(form, sources)
    return Dry(made, tuple(drawing.found) if drawing.known else None, call)


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that draw, with blanks for their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Draw] = []
        self.known = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        made = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            blank_args, blank_kwargs = fx.node.map_aggregate((args, kwargs), _blank)
            kind = next(t.device.type for t in _tensors((made, args)))
            self.found.append(Draw("", func, blank_args, blank_kwargs, kind))
            self.known &= func.overloadpacket.__name__ not in _REJECTING
        return made


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it draws with these arguments: attention may be without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0)) if "dropout_p" in names else True


def _blank(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape = tuple(map(sympy.Integer, value.shape))
    return Blank(shape, memory_order(value), value.dtype, value.device.type)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, Tensor) else []
