"""How tensors lie in memory: what a model's code reads of it, and what the inputs of a graph must
then be.

A trace answers `x.stride()` for its example, and knows of it whether `x.reshape(-1)` is a view,
through which a write is seen. No size symbol says so of another microbatch; packed tensors, though,
all lie alike.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.frames import calling_line, is_torch_code
from fxpipe.torch_chance import hints

_STRIDES = {
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.as_strided,
    Tensor.as_strided_,
    torch.as_strided,
    torch.as_strided_,
    torch.as_strided_copy,
    torch.as_strided_scatter,
    Tensor.as_strided_scatter,
}
_STORAGES = {Tensor.storage_offset, Tensor.untyped_storage, Tensor.storage, Tensor.data_ptr}
# Their results are views of their operands, or not, by how these lie in memory.
_PERHAPS_VIEWS = {
    Tensor.contiguous,
    Tensor.reshape,
    Tensor.reshape_as,
    Tensor.flatten,
    Tensor.ravel,
    torch.reshape,
    torch.flatten,
    torch.ravel,
}
_WRITES = "gives a view of a tensor or a copy, by its strides, and what it gave is then written to"
_WRAPPERS = ("overrides.py", "_tensor.py")  # files of torch through which methods are called


class LayoutRead(NamedTuple):
    """Where code depends on how a tensor lies in memory, and how; alone: also in which storage."""

    line: str
    how: str
    alone: bool = False

    def refusal(self, name: str, tensor: Tensor) -> str | None:
        """Why a graph whose code does so cannot have this input; None if it can."""
        if tensor.layout is not torch.strided or (
            tensor.is_contiguous() and (not self.alone or _is_alone(tensor))
        ):
            return None
        wanted = "alone in its memory" if self.alone else "contiguous"
        copy = "clone(memory_format=torch.contiguous_format)" if self.alone else "contiguous()"
        return (
            f"{self.line} {self.how}, and a graph holds for one memory layout: {name}, with the "
            f"strides {tuple(tensor.stride())}, is not {wanted}. Pass {name}.{copy}"
        )


class LayoutReads(TorchFunctionMode):
    """Notes where code reads how tensors lie in memory, other than those of the state."""

    def __init__(self) -> None:
        super().__init__()
        self._state: dict[int, Tensor] = {}
        self._found: list[LayoutRead] = []
        self._perhaps: list[tuple[str, Tensor, int]] = []

    def begin(self, state: Iterable[Tensor]) -> None:
        """Forget what was read so far. state: the parameters and buffers, which never change so."""
        self._state = {id(tensor): tensor for tensor in state}
        self._found.clear()
        self._perhaps.clear()

    @property
    def found(self) -> LayoutRead | None:
        """The read that asks for most. What is written to after it was perhaps viewed counts."""
        writes = [LayoutRead(line, _WRITES) for line, t, was in self._perhaps if t._version != was]
        return max([*self._found, *writes], key=lambda read: read.alone, default=None)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        tensor = args[0] if args else None
        if not isinstance(tensor, Tensor) or id(tensor) in self._state:
            return made
        if func in _STRIDES and not _is_torch_calling():
            self._found.append(LayoutRead(calling_line(), "reads the strides of a tensor"))
        elif func in _STORAGES and not _is_torch_calling():
            self._found.append(LayoutRead(calling_line(), "reads the storage of a tensor", True))
        elif func in _PERHAPS_VIEWS:
            line = calling_line()
            writable = (each for each in (tensor, made) if not each.is_inference())
            self._perhaps += [(line, each, each._version) for each in writable]
        return made


def memory_order(value: Tensor) -> tuple[int, ...]:
    """The dimensions of a new tensor like this one, from the outermost in memory inwards."""
    plain = tuple(range(value.dim()))
    sizes, strides = hints(value.shape), hints(value.stride())
    if sizes is None or strides is None:
        return plain
    like = torch.empty_like(torch.empty_strided(sizes, strides, device="meta"))
    if like.is_contiguous():
        return plain
    steps = like.stride()
    return tuple(sorted(plain, key=lambda dim: -steps[dim]))


def lie(tensor: Tensor) -> object:
    """All about a tensor's place in memory on which it may depend which graph it fits."""
    if tensor.layout is not torch.strided:
        return tensor.layout
    return _is_alone(tensor) if tensor.is_contiguous() else memory_order(tensor)


def _is_alone(tensor: Tensor) -> bool:
    """Whether a packed tensor is all that is in its storage."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def layout_refusal(read: LayoutRead | None, named: Sequence[tuple[str, Tensor]]) -> str | None:
    """Why one of these cannot be an input where code reads this; None if all can."""
    reasons = (read.refusal(name, tensor) for name, tensor in named) if read else ()
    return next((reason for reason in reasons if reason), None)


def _is_torch_calling() -> bool:
    """Whether it is torch's own code that calls what a mode has intercepted."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.endswith(_WRAPPERS) and is_torch_code(frame.f_code):
        frame = frame.f_back
    return is_torch_code(frame.f_code)
