"""Runs of a model's own code that leave no trace in it: attributes, parameters, buffers, states of
generators.

with untouched(model) as changed: ...         afterwards as before; changed says what was changed
with undone(model) as changed: ...            the same, where parameters are not written to
with own_buffers(model, values) as after: ... on copies; after says what these have become
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.python_chance import python_left_alone
from fxpipe.torch_internals import storage_of

_REAL = (Tensor, nn.Parameter)
_PLAIN = (bool, int, float, str, Tensor)
Attributes = dict[tuple[str, str], object]
Places = list[tuple[nn.Module, str, Tensor]]


@dataclass
class Changed:
    """What a run has changed. attributes: of modules, by the names of both; parameters: by name;
    buffers: what they have become, by the first name of each; None for one that is there no more.
    """

    attributes: list[tuple[str, str]] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    buffers: dict[str, Tensor | None] = field(default_factory=dict)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Changed]:
    """A run on the model's own parameters that leaves no trace, whatever it does to the model."""
    writes = _Writes(dict(model.named_parameters()))
    try:
        with undone(model) as changed, writes:
            yield changed
    finally:
        changed.parameters += writes.put_back()


@contextmanager
def undone(model: nn.Module) -> Iterator[Changed]:
    """A run that leaves no trace, and does not write to the model's own parameters: there may be
    others in their places."""
    changed = Changed()
    before = plain_attributes(model)
    places, copies = _places(model), {n: b.detach().clone() for n, b in model.named_buffers()}
    slots = _slots(model)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), python_left_alone():
        try:
            yield changed
        finally:
            changed.attributes += put_back(model, before)
            for name, copy in copies.items():
                _undo(name, copy, places[name], changed)
            changed.buffers.update(_taken_out(model, slots))


def _undo(name: str, copy: Tensor, places: Places, changed: Changed) -> None:
    """Put a buffer back: the tensor that it was, with what was in it. (Not by its version: some
    operators write and do not say so.)"""
    module, key, held = places[0]
    now = module._buffers.get(key)
    if now is not held:
        changed.buffers[name] = now
    elif not same(held, copy):
        changed.buffers[name] = held.detach().clone()
    put_in(places)
    if not same(held, copy):
        with torch.no_grad():
            held.copy_(copy)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike, also where a number is none."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return one.is_meta or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@contextmanager
def own_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Code that runs inside finds copies of these values in the places of buffers, and may write to
    them; the model has its own again afterwards. Gives what these buffers have become, and others
    that were replaced. Raises BatchError where that has another shape."""
    after: dict[str, Tensor] = {}
    places, slots = _places(model), _slots(model)
    for name, value in values.items():
        copy = value.detach().clone()
        put_in([(module, key, copy) for module, key, _ in places[name]])
    try:
        yield after
    finally:
        for name, held in places.items():
            module, key, own = held[0]
            made = module._buffers.get(key)
            if made is not own and made is not None:
                after[name] = made.detach()
            put_in(held)
        after.update(_taken_out(model, slots))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a tensor before an operator first writes to it: copies of all would be too much."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {storage_of(t): (name, t) for name, t in tensors.items() if not t.is_meta}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = {a.name: a.alias_info for a in schema.arguments}
            values = dict(zip(given, args, strict=False)) | kwargs
            for name, value in values.items():
                alias = given.get(name)
                if alias is not None and alias.is_write:
                    self._keep(value)
        return func(*args, **kwargs)

    def _keep(self, value: Any) -> None:
        for leaf in value if isinstance(value, (tuple, list)) else (value,):
            found = self._own.get(storage_of(leaf)) if type(leaf) in _REAL else None
            if found is not None and found[0] not in self._before:
                self._before[found[0]] = found[1], found[1].detach().clone()

    def put_back(self) -> list[str]:
        """Give what was written to its values again; the names of what has other ones."""
        changed = []
        for name, (tensor, copy) in self._before.items():
            if not same(tensor, copy):
                changed.append(name)
                with torch.no_grad():
                    tensor.copy_(copy)
        return changed


def put_in(places: Places) -> None:
    """Have modules hold these tensors as their buffers."""
    for module, key, tensor in places:
        if module._buffers.get(key) is not tensor:
            module._buffers[key] = tensor


def _places(model: nn.Module) -> dict[str, Places]:
    """Where each buffer is held, by its first name."""
    first = {id(buffer): name for name, buffer in reversed(list(model.named_buffers()))}
    found: dict[str, Places] = {name: [] for name in first.values()}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                found[first[id(buffer)]].append((module, key, buffer))
    return found


def _slots(model: nn.Module) -> dict[str, dict[str, Tensor | None]]:
    """The buffers of each module, and the names that are kept free for some."""
    return {path: dict(module._buffers) for path, module in model.named_modules()}


def _taken_out(
    model: nn.Module, before: Mapping[str, Mapping[str, Tensor | None]]
) -> dict[str, Tensor]:
    """Buffers that were not there before, which are gone again."""
    found = {}
    for path, module in model.named_modules():
        held = before.get(path, {})
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and held.get(key) is None:
                found[f"{path}.{key}".lstrip(".")] = buffer.detach()
                if key in held:
                    module._buffers[key] = None
                else:
                    del module._buffers[key]
    return found


def plain_attributes(
    model: nn.Module, names: Sequence[tuple[str, str]] | None = None
) -> Attributes:
    """Numbers, strings and tensors that modules hold as attributes; those named, or all."""
    if names is not None:
        return {(m, a): vars(model.get_submodule(m)).get(a) for m, a in names}
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if value is None or isinstance(value, _PLAIN)
    }


def put_back(model: nn.Module, before: Attributes) -> list[tuple[str, str]]:
    """Give attributes the values that they had; the names of those that had others."""
    changed = []
    for (name, attribute), value in before.items():
        module = model.get_submodule(name)
        if vars(module).get(attribute, before) is not value:
            setattr(module, attribute, value)
            changed.append((name, attribute))
    return changed
