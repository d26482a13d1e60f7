"""Custom autograd functions as operators of the captured graph.

    with recording_functions():
        exported = torch.export.export(model, ...)

Tracing would record what such a function's forward does, and lose its backward. So each one that
is applied becomes an operator, one for each function and its arguments that are no tensors; under
autograd it applies the function itself. A stage that is differentiated runs it so, and then the
function's own forward and backward are traced like all else, whatever its context holds.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.dataflow import differentiable
from fxpipe.errors import CaptureError
from fxpipe.torch_functions import plain_apply, replacing_apply
from fxpipe.trees import Tree, take_apart

_LIBRARY: Any = torch.library.Library("fxpipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_COUNT = itertools.count()
_KNOWN: dict[object, "_Function"] = {}
# What makes a tensor out of a Python value: its operand was not there before.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


@contextmanager
def recording_functions() -> Iterator[None]:
    """Record every custom autograd function that is applied here as an operator of its own.

    One whose result needs no gradient is traced as it is. Raises CaptureError for one that cannot
    be an operator.
    """
    with replacing_apply(_record, _refuse_transformed):
        yield


def _record(cls: type, args: tuple[Any, ...], where: str) -> Any:
    leaves, tree = take_apart(args)
    if not where or not _wants_gradient(leaves):
        return plain_apply(cls, args)
    moving = tuple(isinstance(leaf, (Tensor, torch.SymInt)) for leaf in leaves)
    fixed = [leaf for leaf, moves in zip(leaves, moving, strict=True) if not moves]
    kinds = tuple(isinstance(leaf, Tensor) for leaf, m in zip(leaves, moving, strict=True) if m)
    key = cls, tree, moving, kinds, tuple(map(_identity, fixed))
    if key not in _KNOWN:
        _KNOWN[key] = _Function(cls, tree, moving, kinds, fixed, where)
    return _KNOWN[key](*(leaf for leaf, moves in zip(leaves, moving, strict=True) if moves))


def _wants_gradient(leaves: list[Any]) -> bool:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _refuse_transformed(cls: type, args: tuple[Any, ...], where: str) -> None:
    # Inside vmap a tensor does not say whether it needs a gradient; integers need none.
    tensors = [leaf for leaf in take_apart(args)[0] if isinstance(leaf, Tensor)]
    real = any(map(differentiable, tensors))
    if where and real and torch.is_grad_enabled():
        raise CaptureError(
            f"custom autograd function {cls.__qualname__} ({where}) is applied inside a transform "
            "such as vmap: tracing loses its backward, and gradients would be wrong. Apply it "
            "outside, or write it with torch.library.custom_op and register_autograd"
        )


def _identity(value: object) -> object:
    """Equal values are one constant; objects that may change are themselves."""
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    return (type(value), repr(value)) if plain else (type(value), id(value))


class _Function:
    """One function with its constant arguments; called with the others."""

    def __init__(
        self,
        cls: type,
        tree: Tree,
        moving: tuple[bool, ...],
        kinds: tuple[bool, ...],
        fixed: list[Any],
        where: str,
    ) -> None:
        self.cls, self.tree, self.moving, self.fixed = cls, tree, moving, fixed
        self.what = f"custom autograd function {cls.__qualname__} ({where})"
        self.checked = False
        self.result: tuple[list[Any], Tree] = ([], Tree())
        name = f"{re.sub(r'[^0-9a-zA-Z]', '_', cls.__name__)}_{next(_COUNT)}"
        operands = (f"{'Tensor' if k else 'SymInt'} x{i}" for i, k in enumerate(kinds))
        # What a function does is its own affair: it may draw, so it is never run twice.
        tags = (torch.Tag.nondeterministic_seeded,)
        _LIBRARY.define(f"{name}({', '.join(operands)}) -> Tensor[]", tags=tags)
        _LIBRARY.impl(name, self._run, "Autograd")
        self.op: Callable[..., list[Tensor]] = getattr(torch.ops.fxpipe, name).default

    def __call__(self, *operands: Any) -> Any:
        """Run the operator, and give its results the form that the function gives them."""
        tensors = iter(self.op(*operands))
        leaves, tree = self.result
        return tree.together([next(tensors) if isinstance(x, Tensor) else x for x in leaves])

    def _run(self, *operands: Any) -> list[Tensor]:
        made = self._apply(operands) if self.checked else self._check(operands)
        self.result = leaves, _ = take_apart(made)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _apply(self, operands: tuple[Any, ...]) -> Any:
        given, constant = iter(operands), iter(self.fixed)
        leaves = [next(given if moves else constant) for moves in self.moving]
        return plain_apply(self.cls, self.tree.together(leaves))

    def _check(self, operands: tuple[Any, ...]) -> Any:
        """The first run: it may change no tensor, and read none but its arguments."""
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        versions = [tensor._version for tensor in tensors]
        with _Reads(tensors) as reads:
            made = self._apply(operands)
        if [tensor._version for tensor in tensors] != versions:
            raise CaptureError(
                f"{self.what} changes its argument in place, which cannot be a value of a graph; "
                "let it return a new tensor"
            )
        if reads.foreign:
            raise CaptureError(
                f"{self.what} reads a tensor of shape {reads.foreign[0]} that is not among its "
                "arguments, and its gradient would be lost; pass every tensor to apply()"
            )
        if any(isinstance(x, (torch.SymInt, torch.SymFloat)) for x in take_apart(made)[0]):
            raise CaptureError(f"{self.what} returns a size; compute it outside of the function")
        self.checked = True
        return made


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operands of operators that are neither given nor made inside."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = list(given)
        self.known = set(map(id, given))
        self.foreign: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _LIFTS:
            for leaf in take_apart((args, kwargs))[0]:
                if isinstance(leaf, Tensor) and id(leaf) not in self.known:
                    self.foreign.append(tuple(leaf.shape))
        made = func(*args, **(kwargs or {}))
        new = [leaf for leaf in take_apart(made)[0] if isinstance(leaf, Tensor)]
        self.alive += new
        self.known.update(map(id, new))
        return made
