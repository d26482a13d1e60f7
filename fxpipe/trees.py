"""Nested values taken apart into leaves, and put together again.

    leaves, names, tree = take_apart({"images": [a, b], "mode": "x"})
    names == ["images[0]", "images[1]", "mode"]; tree.together(leaves) is equal to the value

Dicts, lists, tuples, named tuples and whatever is registered with torch's pytree are taken apart as
torch does it; beside these, dataclasses that nobody has registered, and mappings such as UserDict.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from fxpipe.torch_internals import children_of, from_children

# Leaves that are no tensors, and mean the same if they are of one type and compare equal.
SIMPLE = (type(None), bool, int, float, complex, str, bytes)
PLAIN = (
    *(*SIMPLE, type, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, numpy.generic, enum.Enum),
)


@dataclass(frozen=True)
class Tree:
    """The structure of a value: how to build it from the values of `parts`. A leaf has no `kind`.

    kind: "torch" (spec is torch's), "dataclass" or "mapping"; names: of the parts, as text
    """

    kind: str = ""
    spec: Any = None
    names: tuple[str, ...] = ()
    parts: tuple["Tree", ...] = ()

    def together(self, leaves: Sequence[Any]) -> Any:
        """The value with these leaves."""
        return self._build(iter(leaves))

    def paths(self, head: str = "") -> Iterator[str]:
        """The names of the leaves, in order."""
        if not self.kind:
            yield head
        for name, part in zip(self.names, self.parts, strict=True):
            yield from part.paths(head + name)

    def _build(self, leaves: Iterator[Any]) -> Any:
        if not self.kind:
            return next(leaves)
        values = [part._build(leaves) for part in self.parts]
        if self.kind == "torch":
            return from_children(values, self.spec)
        cls, keys = self.spec
        if self.kind == "mapping":
            return cls(dict(zip(keys, values, strict=True)))
        made = object.__new__(cls)
        for key, value in zip(keys, values, strict=True):
            object.__setattr__(made, key, value)
        return made


_LEAF = Tree()


def take_apart(value: Any) -> tuple[list[Any], Tree]:
    """The leaves of a value, and its structure, which can be hashed and compared."""
    leaves: list[Any] = []
    return leaves, _tree(value, leaves)


def _tree(value: Any, leaves: list[Any]) -> Tree:
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        leaves.append(value)
        return _LEAF
    found = _inside(value)
    if found is None:
        leaves.append(value)
        return _LEAF
    kind, names, children, spec = found
    return Tree(kind, spec, names, tuple(_tree(child, leaves) for child in children))


def _inside(value: Any) -> tuple[str, tuple[str, ...], list[Any], Any] | None:
    """(kind, names, children, spec) of a container; None of a leaf."""
    found = children_of(value)
    if found is not None:
        return ("torch", *found)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        keys = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        names = tuple(f".{key}" for key in keys)
        return "dataclass", names, [getattr(value, key) for key in keys], (type(value), keys)
    if isinstance(value, Mapping):
        keys = tuple(value)
        names = tuple(f"[{key!r}]" for key in keys)
        return "mapping", names, [value[key] for key in keys], (type(value), keys)
    return None


def same_value(a: object, b: object) -> bool:
    """Whether code that reads one plain value would do the same with the other: True is not 1, and
    0.0 is not -0.0, but nan is nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        alike = a == b or (math.isnan(a) and math.isnan(b))
        return alike and math.copysign(1, a) == math.copysign(1, b)
    return bool(a == b)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to every leaf."""
    leaves, tree = take_apart(value)
    return tree.together([function(leaf) for leaf in leaves])
