"""Leaves of a microbatch whose values Python reads: held concrete while the model is traced.

A vision tower loops over `image_grid_thw.tolist()`. With that leaf concrete, whatever is computed
from it alone is computed for real, and stands in the graph as a constant; what mixes it with other
tensors is traced as ever. The graph then holds for these values only: they are its guards. Nothing
else has a value here, so that no constant can depend on a leaf that is not guarded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.dataflow import differentiable
from fxpipe.errors import CaptureError
from fxpipe.frames import calling_line
from fxpipe.torch_internals import (
    DataDependentError,
    constant_of,
    is_fake,
    is_mapped,
    map_leaves,
    storage_of,
    unbacked_symbols,
)
from fxpipe.torch_modes import untraced

UNKNOWN = -1  # the origin of what no leaf's value decides: parameters, buffers, chance
Origins = frozenset[int]
_NONE: Origins = frozenset()
# A fresh tensor that code may fill with traced values: it is traced, and has a value beside.
_BLANK = {
    torch.zeros,
    torch.ones,
    torch.empty,
    torch.full,
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
    torch.full_like,
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_empty,
    Tensor.new_full,
}
_NUMBERS = {torch.tensor, torch.as_tensor, torch.scalar_tensor}
_RANGES = {torch.arange, torch.linspace, torch.eye, torch.tril_indices, torch.triu_indices}
_FACTORIES = {*_BLANK, *_NUMBERS, *_RANGES}
_INDEXING = {Tensor.__getitem__, Tensor.__setitem__}
_SHAPING = {Tensor.reshape, Tensor.view, Tensor.expand, Tensor.repeat, Tensor.narrow}
_REPEATS = {torch.repeat_interleave, Tensor.repeat_interleave}
_CHANCE = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential")


class NeedsValuesError(Exception):
    """Python reads a value that tracing does not have. leaves: what it derives from."""

    def __init__(self, leaves: Origins, line: str) -> None:
        super().__init__(f"values of the input are read at {line}")
        self.leaves = leaves
        self.line = line


class Concrete(TorchFunctionMode):
    """Computes for real what derives from concrete leaves alone, and notes what derives from what.

    traced: what tracing made of the leaves; real: number of a leaf -> its values; state: the
    model's parameters and buffers. Raises NeedsValuesError where other values are read.
    """

    def __init__(
        self, traced: Sequence[Tensor], real: Mapping[int, Tensor], state: Iterable[Tensor]
    ) -> None:
        super().__init__()
        self._twins: Any = WeakTensorKeyDictionary()
        self._copies: Any = WeakTensorKeyDictionary()
        self._stale: set[object] = set()
        self._origins: dict[object, Origins] = {}
        self._symbols: dict[Any, Origins] = {}
        for number, tensor in enumerate(traced):
            self._origins[storage_of(tensor)] = frozenset({number})
        for tensor in state:
            self._origins[storage_of(tensor)] = frozenset({UNKNOWN})
        with untraced():
            self._leaves = {number: tensor.detach().clone() for number, tensor in real.items()}

    def leaves(self, traced: Sequence[Tensor]) -> list[Tensor]:
        """What the model is called with."""
        return [self._leaves.get(number, tensor) for number, tensor in enumerate(traced)]

    def check_unchanged(self, names: Sequence[str]) -> None:
        """Raises CaptureError if the model has written to a concrete leaf."""
        for number, tensor in self._leaves.items():
            if tensor._version:
                raise CaptureError(
                    f"argument {names[number]} is changed by forward, and its values are read: "
                    "write to a copy, x = x.clone()"
                )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one call of the model's code: for real, traced, or both."""
        kwargs = kwargs or {}
        values = _flat((*args, *kwargs.values()))
        tensors = [value for value in values if isinstance(value, Tensor)]
        numbers = any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in values)
        known = all(self._value(tensor) is not None for tensor in tensors)
        if (tensors or func in _FACTORIES) and known and not numbers and not _is_chance(func):
            return self._compute(func, args, kwargs, tensors)
        return self._trace(func, args, kwargs, values)

    def _value(self, tensor: Tensor) -> Tensor | None:
        """A tensor's real values, if it has some."""
        if is_mapped():
            return None
        if not is_fake(tensor):
            return None if tensor.requires_grad else tensor
        twin: Tensor | None = self._twins.get(tensor, constant_of(tensor))
        return None if twin is None or storage_of(twin) in self._stale else twin

    def _compute(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
    ) -> Any:
        """For real; also traced where others may see it through a traced tensor's memory."""
        twins = [twin for t in tensors if is_fake(t) and (twin := self._value(t)) is not None]
        before = [twin._version for twin in twins]
        with untraced():
            made = func(*map_leaves(self._real, args), **map_leaves(self._real, dict(kwargs)))
        known = {storage_of(twin) for twin in twins}
        fresh = [value for value in _flat([made]) if isinstance(value, Tensor)]
        shared = any(storage_of(value) in known for value in fresh)
        if not shared and before == [t._version for t in twins] and func not in _BLANK:
            return made
        traced = func(*map_leaves(self._frozen, args), **map_leaves(self._frozen, dict(kwargs)))
        for value, twin in zip(_flat([traced]), _flat([made]), strict=True):
            if isinstance(value, Tensor) and isinstance(twin, Tensor):
                self._twins[value] = twin
        return traced

    def _real(self, value: Any) -> Any:
        return self._value(value) if isinstance(value, Tensor) else value

    def _frozen(self, value: Any) -> Any:
        """What the graph takes of a real tensor: a copy, for code may write to the tensor later."""
        if not isinstance(value, Tensor) or is_fake(value) or self._value(value) is None:
            return value
        version, copy = self._copies.get(value, (None, None))
        if version != value._version:
            with untraced():
                copy = value.clone()
            self._copies[value] = value._version, copy
        return copy

    def _trace(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        values: Sequence[Any],
    ) -> Any:
        origins = frozenset().union(*map(self._origins_of, values))
        if _is_chance(func):
            origins |= {UNKNOWN}
        args, kwargs = self._sized(func, args, kwargs)
        if _writes(func, kwargs):
            self._note_write(kwargs.get("out", args[0] if args else None), func, origins)
        try:
            made = func(*map_leaves(self._frozen, args), **map_leaves(self._frozen, dict(kwargs)))
        except DataDependentError as error:
            read = self._read(error)
            raise NeedsValuesError(origins if read is None else read, calling_line()) from error
        deciding = self._deciding(args, kwargs) or origins
        for value in _flat([made]):
            self._note(value, origins, deciding)
        return made

    def _deciding(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Origins:
        """What decides the size of a result that depends on data: `x[mask]` has that of the mask,
        `x.repeat_interleave(n)` that of n; a function of one tensor has its own."""
        later = _flat((*args[1:], *kwargs.values()))
        return frozenset().union(*map(self._origins_of, later))

    def _sized(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The same call with what concrete values say of the size of its result."""
        if func in _INDEXING:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            found = tuple(
                place for each in map(self._bounds, places) for place in self._places(each)
            )
            return (args[0], found, *args[2:]), kwargs
        if func in _SHAPING:
            return (args[0], *map(self._number, args[1:])), kwargs
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
        if func in _REPEATS and isinstance(repeats, Tensor) and not is_fake(repeats):
            with untraced():
                return args, {"output_size": int(repeats.sum()), **kwargs}
        return args, kwargs

    def _bounds(self, index: Any) -> Any:
        """A slice with known numbers as its bounds."""
        given = _flat([index]) if isinstance(index, slice) else None
        return index if given is None else slice(*map(self._number, given))

    def _number(self, value: Any) -> Any:
        """A known integer that is a tensor, as a number."""
        known = self._value(value) if isinstance(value, Tensor) and not value.dim() else None
        if known is None or differentiable(known):
            return value
        with untraced():
            return int(known)

    def _places(self, index: Any) -> tuple[Any, ...]:
        """A mask with known values as the indices of what it selects."""
        if not isinstance(index, Tensor) or index.dtype is not torch.bool or not index.dim():
            return (index,)
        value = self._value(index)
        if value is None:
            return (index,)
        with untraced():
            return value.nonzero(as_tuple=True)

    def _note_write(self, target: Any, func: Callable[..., Any], origins: Origins) -> None:
        if not isinstance(target, Tensor):
            return
        value = self._value(target)
        if value is not None and not is_fake(target):
            raise CaptureError(
                f"{calling_line()}: {func.__name__} writes a traced value into a tensor of "
                "constants: build that tensor with torch.where or torch.cat instead"
            )
        if value is not None:
            self._stale.add(storage_of(value))
        self._note(target, origins, origins)

    def _note(self, value: Any, origins: Origins, deciding: Origins) -> None:
        """Remember what a traced result derives from, and what decides the numbers born in it."""
        if isinstance(value, Tensor):
            if not is_fake(value):
                return
            key = storage_of(value)
            self._origins[key] = self._origins.get(key, _NONE) | origins
        for symbol in unbacked_symbols(value):
            self._symbols.setdefault(symbol, deciding)

    def _origins_of(self, value: Any) -> Origins:
        if isinstance(value, Tensor) and is_fake(value):
            return self._origins.get(storage_of(value), _NONE)
        found = (self._symbols.get(symbol, _NONE) for symbol in unbacked_symbols(value))
        return _NONE.union(*found)

    def _read(self, error: DataDependentError) -> Origins | None:
        """What the condition that tracing cannot decide derives from; None if not known."""
        symbols = error.cond.free_symbols
        found = [self._symbols[symbol] for symbol in symbols if symbol in self._symbols]
        return _NONE.union(*found) if found else None

    def needs(self, error: DataDependentError) -> NeedsValuesError:
        """The same for a number that was read before, and decides something only now."""
        return NeedsValuesError(self._read(error) or _NONE, calling_line(error))


def _flat(values: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts."""
    if isinstance(values, (list, tuple)):
        return [leaf for value in values for leaf in _flat(value)]
    if isinstance(values, dict):
        return [leaf for value in values.values() for leaf in _flat(value)]
    if isinstance(values, slice):
        return [values.start, values.stop, values.step]
    return [values]


def _is_chance(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return any(word in name for word in _CHANCE)


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return name == "__setitem__" or name.startswith("__i") or in_place or "out" in kwargs
