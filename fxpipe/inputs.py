"""Microbatches: what a model is called with, taken apart into tensors and other values."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from fxpipe.errors import BatchError
from fxpipe.packed import lie
from fxpipe.trees import PLAIN, Tree, map_leaves, take_apart

Microbatch = Mapping[str, Any] | tuple[Any, ...]

# What a dict may hold to be taken apart without a look inside its values.
_LEAVES = (Tensor, bool, int, float, str)


@dataclass(frozen=True)
class Leaf:
    """A tensor of the microbatch: its name for people, its placeholder, its symbolic shape; order:
    that of its dimensions in memory."""

    name: str
    placeholder: str
    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    order: tuple[int, ...]


def flatten(
    microbatch: Microbatch,
) -> tuple[list[tuple[str, Tensor]], tuple[tuple[str, object], ...], Any]:
    """(named tensors, named other values, structure) of a dict of arguments or a tuple.

    The order of a dict's keys does not matter.
    """
    if isinstance(microbatch, Mapping):
        if not all(isinstance(name, str) for name in microbatch):
            raise BatchError(f"a microbatch has the keys {list(microbatch)}; use argument names")
        arguments = dict(sorted(microbatch.items()))
        if all(value is None or isinstance(value, _LEAVES) for value in arguments.values()):
            return _parted(tuple(arguments), list(arguments.values()), None)
        call: tuple[Any, Any] = ((), arguments)
    elif isinstance(microbatch, tuple):
        call = (microbatch, {})
    else:
        raise BatchError(
            f"a microbatch is a dict of keyword arguments or a tuple, not "
            f"{type(microbatch).__name__}; wrap it, for example {{'x': x}}"
        )
    leaves, tree = take_apart(call)
    return _parted(tuple(map(_name, tree.paths())), leaves, tree)


def _parted(
    names: tuple[str, ...], leaves: list[Any], tree: Tree | None
) -> tuple[list[tuple[str, Tensor]], tuple[tuple[str, object], ...], Any]:
    named = list(zip(names, leaves, strict=True))
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    fixed = tuple((name, value) for name, value in named if not isinstance(value, Tensor))
    for name, value in fixed:
        if not isinstance(value, PLAIN):
            raise BatchError(_strange(name, value))
    return tensors, fixed, (tree, names, tuple(isinstance(value, Tensor) for value in leaves))


def _strange(name: str, value: object) -> str:
    """Why a value cannot be part of a microbatch, and what to do."""
    advice = "pass tensors, numbers and strings, in dicts, lists, tuples or dataclasses"
    if isinstance(value, torch.Generator):
        advice = "draw the noise outside and pass the tensor, or let forward use the default one"
    elif hasattr(value, "__array__"):
        advice = f"pass torch.as_tensor({name})"
    elif callable(value):
        advice = "make it an attribute of the model"
    return (
        f"{name} is a {type(value).__name__}, and whether its contents repeat in other "
        f"microbatches cannot be checked: {advice}"
    )


def apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, each an object of its own: what is given twice in one microbatch may be two
    things in the next, and a trace would make them one."""
    known: set[int] = set()
    found = []
    for tensor in tensors:
        found.append(tensor.detach().clone() if id(tensor) in known else tensor)
        known.add(id(tensor))
    return found


def contents(tensor: Tensor) -> bytes:
    """What is in a tensor, to be compared with what is in others of its shape and dtype."""
    packed = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    data: bytes = packed.flatten().view(torch.uint8).numpy().tobytes()
    return data


class Ask(NamedTuple):
    """A microbatch, taken apart, and what its variant and its sizes depend on."""

    microbatch: Microbatch
    tensors: list[Tensor]
    key: object

    @staticmethod
    def of(microbatch: Microbatch, held: Collection[str]) -> "Ask":
        """A microbatch, as it is looked up. held: the tensors whose values decide as well."""
        tensors, fixed, structure = flatten(microbatch)
        plain = [tensor for _, tensor in tensors]
        shapes = tuple((tensor.shape, tensor.dtype, lie(tensor)) for tensor in plain)
        values = tuple((name, contents(tensor)) for name, tensor in tensors if name in held)
        others = tuple((name, repr(value)) for name, value in fixed)
        return Ask(microbatch, plain, (structure, shapes, others, values))


def refuse_gradients(asks: Sequence[Ask], what: Sequence[str]) -> None:
    """Raises BatchError if a tensor wants a gradient, which only parameters get."""
    for ask, which in zip(asks, what, strict=True):
        if any(tensor.requires_grad for tensor in ask.tensors):
            name = next(name for name, t in flatten(ask.microbatch)[0] if t.requires_grad)
            raise BatchError(
                f"{which}: {name} requires a gradient, and a step gives one to parameters alone: "
                "pass it as x.detach(), or let the model compute it"
            )


def rebuild(
    tensors: Sequence[Tensor], structure: Any, fixed: tuple[tuple[str, object], ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that `flatten` took apart."""
    tree, names, is_tensor = structure
    moving, constant = iter(tensors), iter(value for _, value in fixed)
    leaves = [next(moving) if tensor else next(constant) for tensor in is_tensor]
    if tree is None:
        return (), dict(zip(names, leaves, strict=True))
    args, kwargs = tree.together(leaves)
    return args, kwargs


def _name(path: str) -> str:
    """`input_ids`, `images[0]`, `argument 0`; of a path in (args, kwargs)."""
    inside = path.partition("]")[2]
    head, _, rest = inside[1:].partition("]")
    return f"argument {head}{rest}" if path.startswith("[0]") else f"{head[1:-1]}{rest}"


def split_batch(batch: Any, microbatches: int | None) -> list[Microbatch]:
    """A list of microbatches as it is, or one dict cut along dim 0.

    Only a dict in which every tensor has the same size along dim 0 is cut, and only into equal
    parts: a patch stream, whose first dimension is not the batch, is never sliced silently.
    """
    if isinstance(batch, list) and batch:
        return batch
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"step() takes a list of microbatches or one dict; found {type(batch).__name__}"
            f"{' with no microbatch in it' if isinstance(batch, list) else ''}"
        )
    if microbatches is None:
        raise BatchError(
            "step() got one dict and does not know how many microbatches to cut it into: pass a "
            "list of microbatches, or microbatches=N to fxpipe.compile"
        )
    return _cut(dict(batch), microbatches)


def _cut(batch: dict[str, Any], count: int) -> list[Microbatch]:
    tensors, _, _ = flatten(batch)
    sizes = {name: tensor.shape[0] if tensor.dim() else None for name, tensor in tensors}
    distinct = set(sizes.values())
    if len(distinct) != 1 or None in distinct:
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise BatchError(
            f"the batch cannot be cut along dim 0: the sizes there differ ({found}), so a tensor's "
            "first dimension is not the batch. Pass a list of microbatches instead"
        )
    (size,) = distinct
    assert size is not None
    if size % count:
        raise BatchError(
            f"{size} samples cannot be cut into {count} equal microbatches; pass a list instead"
        )
    step = size // count

    def part(index: int) -> Microbatch:
        window = slice(index * step, (index + 1) * step)
        cut: Microbatch = map_leaves(
            lambda value: value[window] if isinstance(value, Tensor) else value, batch
        )
        return cut

    return [part(index) for index in range(count)]
