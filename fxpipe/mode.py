"""What a graph is traced with beside its microbatch; when any of it changes, the graph is stale.

    watch = Watch(model); watch.mode() == watch.mode() as long as nothing of that has changed

It is asked before every step, so it is quick where nothing has changed: then every object that it
looks at is the one that it was, and that is compared in a few passes over flat lists.
"""

import enum
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxpipe.errors import CaptureError
from fxpipe.state import canonical_names
from fxpipe.surroundings import (
    CONTAINERS,
    LARGE,
    Space,
    Surroundings,
    content,
    is_library,
    surroundings,
)
from fxpipe.torch_internals import MODULE_TABLES, settings, tensor_kind, written

Mode = tuple[object, ...]

_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_DEPTH = 6  # of containers and configurations in one another


class Watch:
    """The mode of a model, looked up again only where something is not what it was."""

    def __init__(self, model: nn.Module, loss_fn: object = None) -> None:
        if not isinstance(model, nn.Module):
            raise CaptureError(f"compile takes an nn.Module first; found {type(model).__name__}")
        self._model, self._loss_fn = model, loss_fn
        self._seen: _Seen | None = None

    def mode(self) -> Mode:
        """The mode now: compare it with an earlier one."""
        if self._seen is None or not self._seen.unchanged():
            self._seen = _Seen(self._model, self._loss_fn)
        return self._seen.mode


class _Seen:
    """Everything that a mode depends on, and the mode.

    Plain attributes of every module (`training` is one), containers of such, and objects that hold
    nothing else, such as a configuration; the same of the function that makes the loss; what code
    reads beside (`surroundings`); which modules, hooks and shared tensors there are; and the kind
    of every parameter and buffer; what torch is set to. Other objects are not looked into.
    """

    def __init__(self, model: nn.Module, loss_fn: object) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._others: list[Iterable[Any]] = []
        self._empty: list[object] = []
        self._tensors: list[Tensor] = []
        self._cells: list[types.CellType] = []
        self._names: list[tuple[Space, Callable[[Any], tuple[object, ...]]]] = []
        self._classes: list[Space] = []
        self._met: list[object] = []
        self._known: dict[int, object] = {}
        _refuse_unready(model)
        self._state = [*model.parameters(), *model.buffers()]
        self._own = set(map(id, self._state))
        entries = [(name, *self._module(module)) for name, module in model.named_modules()]
        entries.append(("loss_fn", *self._loss(loss_fn)))
        classes = {type(module): None for module in (*model.modules(), *_modules(loss_fn))}
        entries.append(("code", *self._around(surroundings(self._met, classes))))
        self._known.clear()  # ids are good for as long as nothing has changed
        self._sizes = list(map(len, self._dicts))
        self._values = self._now()
        self._versions = list(map(written, self._tensors))
        self._kinds = list(map(tensor_kind, self._state))
        self._settings = settings()
        self.mode: Mode = (
            tuple(entries),
            tuple(canonical_names(model).items()),
            tuple(map(_by_value, self._kinds)),
            self._settings,
        )

    def unchanged(self) -> bool:
        """Whether every object is the one that it was, and no tensor was written to."""
        if any(self._empty) or list(map(len, self._dicts)) != self._sizes:
            return False
        if settings() != self._settings:
            return False
        try:
            now = self._now()
        except KeyError:  # what code has read is deleted
            return False
        if len(now) != len(self._values) or not all(map(is_, now, self._values)):
            return False
        versions, kinds = map(written, self._tensors), map(tensor_kind, self._state)
        return list(versions) == self._versions and list(kinds) == self._kinds

    def _now(self) -> list[object]:
        inside = chain.from_iterable(map(dict.values, self._dicts))
        cells = map(content, self._cells)
        named = [read(space) for space, read in self._names]
        classes = map(len, self._classes)
        return [*inside, *chain.from_iterable(self._others), *cells, *chain(*named), *classes]

    def _module(self, module: nn.Module) -> Iterable[object]:
        self._note(vars(module))
        yield type(module)
        for name, value in vars(module).items():
            if name in MODULE_TABLES:
                self._note(value)
            elif not isinstance(value, dict) or value:
                yield name, self._value(value, _DEPTH)
            else:
                self._note(value)  # no hooks, most of the time

    def _loss(self, loss_fn: object) -> Iterable[object]:
        """What the loss is made with; tensors of its own are constants of a graph."""
        if not isinstance(loss_fn, nn.Module):
            return [self._value(loss_fn, _DEPTH)]
        own = [self._value(t, 0) for t in (*loss_fn.parameters(), *loss_fn.buffers())]
        return [*own, *(tuple(self._module(module)) for module in loss_fn.modules())]

    def _function(self, function: Any, depth: int) -> object:
        """A function that is no module, with what it is bound to; what it reads comes later."""
        self._met.append(function)
        if isinstance(function, types.MethodType):
            return _Same(function.__func__), self._value(function.__self__, depth - 1)
        if isinstance(function, functools.partial):
            given = self._value([*function.args, function.keywords], depth)
            return self._value(function.func, depth - 1), given
        return _Same(function)

    def _around(self, found: Surroundings) -> Iterator[object]:
        """What code reads beside modules."""
        self._cells += found.cells.values()
        self._classes += map(vars, found.classes)
        for space, names in found.named():
            self._names.append((space, _reader(names)))
            yield names, *(self._outside(space[name]) for name in names)
        yield from (self._outside(content(cell)) for cell in self._cells)
        yield from map(self._outside, found.defaults)

    def _outside(self, value: Any) -> object:
        """Of what is no part of a module: plain values, tensors and small containers of such."""
        container = type(value) in CONTAINERS and len(value) <= LARGE
        own = isinstance(value, (*_PLAIN, Tensor, types.SimpleNamespace)) or container
        return self._value(value, _DEPTH) if own or not is_library(value) else _Same(value)

    def _note(self, container: Any) -> None:
        """Notice from now on when another object is in a container."""
        if isinstance(container, dict):
            (self._dicts if container else self._empty).append(container)
        elif not isinstance(container, (tuple, frozenset)):
            (self._others if container else self._empty).append(container)

    def _value(self, value: Any, depth: int) -> object:
        """What compares equal as long as a value means the same to a trace."""
        if value is None or isinstance(value, _PLAIN):
            return type(value), repr(value) if isinstance(value, float) else value
        if isinstance(value, Tensor) and id(value) in self._own:
            return _Same(value)
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return _Same(value), written(value)
        if isinstance(value, _CALLED) and depth > 0:
            return self._function(value, depth)
        if not isinstance(value, CONTAINERS):
            self._met.append(value)
        inside = _inside(value)
        if inside is None or not depth or not _is_looked_into(value, depth):
            return _Same(value)
        if id(value) not in self._known:
            self._known[id(value)] = None  # for what holds itself
            self._note(inside)
            keys = tuple(inside) if isinstance(inside, dict) else ()
            parts = [self._value(part, depth - 1) for part in _parts(inside)]
            self._known[id(value)] = (type(value), keys, *parts)
        return self._known[id(value)]


def _refuse_unready(model: nn.Module) -> None:
    """Raises CaptureError for modules that no trace can look into."""
    for name, module in model.named_modules():
        own = f"module {name or '(the model itself)'}"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{own} is made by torch.jit, and cannot be traced into a graph. Give the "
                "nn.Module that it was made from"
            )
        state = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(map(is_lazy, state)):
            raise CaptureError(
                f"{own} is lazy: its parameters have no shape yet. Run the model once on a "
                "microbatch before compile"
            )


class _Same:
    """Equal to another one of the very same object, which it keeps alive."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _modules(loss_fn: object) -> Iterator[nn.Module]:
    return loss_fn.modules() if isinstance(loss_fn, nn.Module) else iter(())


def _reader(names: Sequence[str]) -> Callable[[Any], tuple[object, ...]]:
    """What reads these names in a namespace."""
    get: Any = itemgetter(*names)
    return get if len(names) > 1 else lambda space: (get(space),)


def _inside(value: object) -> Any:
    """The container in which a value holds others; None if it holds none."""
    if isinstance(value, CONTAINERS):
        return value
    closed = isinstance(value, (nn.Module, *_CODE)) or type(value).__module__.startswith("torch")
    return None if closed else getattr(value, "__dict__", None)


def _parts(inside: Any) -> Iterable[Any]:
    return inside.values() if isinstance(inside, dict) else inside


def _is_looked_into(value: object, depth: int) -> bool:
    """Containers are; other objects if they hold plain values, tensors and code alone."""
    return isinstance(value, CONTAINERS) or _is_plain(value, depth)


def _is_plain(value: object, depth: int) -> bool:
    if value is None or isinstance(value, (*_PLAIN, *_CODE, Tensor)):
        return True
    inside = _inside(value)
    return inside is not None and depth > 0 and all(_is_plain(p, depth - 1) for p in _parts(inside))


def _by_value(kind: tuple[Any, ...]) -> tuple[object, ...]:
    """The kind of a tensor, with the functions that hook its gradient."""
    return tuple(tuple(part.values()) if isinstance(part, dict) else part for part in kind)


def refuse_autocast() -> None:
    """Raises CaptureError inside `torch.autocast`, whose casts would not be part of a graph."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise CaptureError(
            "autocast is on around the pipeline: its casts would not be part of the graph. "
            "Convert the model instead, for example model.to(torch.bfloat16)"
        )
