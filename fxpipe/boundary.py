"""Where a model may be cut in two: the calls of its modules after the last value that Python reads.

A recording run, for real and without a trace of it, lists the calls of modules and the reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from fxpipe.advice import explained
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.frames import calling_line
from fxpipe.libraries import as_exported
from fxpipe.python_chance import python_has_drawn, python_words
from fxpipe.undone import untouched

_READS = (
    Tensor.tolist,
    Tensor.item,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
)
_LARGEST = 3  # how many calls are tried


@dataclass
class Visit:
    """A call of a module: its name, when it began, and the calls inside it."""

    name: str
    start: int
    inner: list["Visit"] = field(default_factory=list)

    @property
    def parent(self) -> str:
        """The name of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def size(self) -> int:
        """How many calls it holds."""
        return 1 + sum(visit.size for visit in self.inner)


@dataclass(frozen=True)
class Recording:
    """The calls of a run, and when and where Python read values."""

    root: Visit
    reads: tuple[tuple[int, str], ...]


def boundaries(recording: Recording) -> list[str]:
    """Modules at whose call the model may be cut, outermost first: of the calls after the last
    read the one that holds most, then what it calls, down to the first of a chain of blocks. After
    these the same of the next largest: what makes an input of the blocks may have blocks as well.
    """
    last = max((time for time, _ in recording.reads), default=-1)
    after = _outermost(recording.root, last)
    largest = sorted(after, key=lambda v: -_weight(v, after))[:_LARGEST]
    again = _names_before(recording.root, last)
    found = dict.fromkeys(name for visit in largest for name in _inwards(visit))
    return [name for name in found if name not in again]


def _inwards(visit: Visit | None) -> Iterator[str]:
    """A call, and what it calls, down to the first of a chain of blocks."""
    while visit is not None:
        yield visit.name
        visit = None if _is_block(visit) else _next(visit)


def _weight(visit: Visit, beside: Sequence[Visit]) -> int:
    """How many calls it holds; the first of a chain of blocks counts for all of them, and the
    others for nothing."""
    if not _is_block(visit):
        return visit.size
    chain = [v for v in beside if _is_block(v) and v.parent == visit.parent]
    return sum(v.size for v in chain) + 1 if chain[0] is visit else 0


def _outermost(visit: Visit, last: int) -> list[Visit]:
    if visit.start > last and visit.name:
        return [visit]
    return [found for inner in visit.inner for found in _outermost(inner, last)]


def _names_before(visit: Visit, last: int) -> set[str]:
    """Modules that are called before the last read: their first call is no boundary."""
    own = {visit.name} if visit.start <= last else set()
    return own.union(*(_names_before(inner, last) for inner in visit.inner))


def _is_block(visit: Visit) -> bool:
    return visit.name.rpartition(".")[2].isdigit()


def _next(visit: Visit) -> Visit | None:
    blocks = [inner for inner in visit.inner if _is_block(inner)]
    return blocks[0] if blocks else max(visit.inner, key=lambda v: v.size, default=None)


def record(model: nn.Module, args: Any, kwargs: Any, train: bool = False) -> Recording:
    """Run a model once, as if it were exported, and note what it calls and reads. Raises
    CaptureError where its own code fails."""
    names = {module: name for name, module in model.named_modules()}
    clock = iter(range(1 << 62))
    root = Visit("", next(clock))
    open_calls = [root]

    def enter(module: nn.Module, args: Any) -> None:
        reading.look_for_draws(names.get(module, ""))
        if module in names:
            visit = Visit(names[module], next(clock))
            open_calls[-1].inner.append(visit)
            open_calls.append(visit)

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        reading.look_for_draws(names.get(module, ""))
        if module in names:
            open_calls.pop()

    reading = _Reading(clock)
    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        with untouched(model), torch.set_grad_enabled(train), as_exported(), reading:
            model(*args, **kwargs)
    except FxpipeError:
        raise
    except Exception as error:
        raise CaptureError(explained(model, error)) from error
    finally:
        for hook in hooks:
            hook.remove()
    return Recording(root.inner[0] if len(root.inner) == 1 else root, tuple(reading.found))


class _Reading(TorchFunctionMode):
    """Notes when Python takes a value out of a tensor."""

    def __init__(self, clock: Iterator[int]) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []
        self._clock = clock
        self._chance = python_words()

    def look_for_draws(self, where: str) -> None:
        """Code that has drawn from Python's or NumPy's generator has read a value, too."""
        if python_has_drawn(self._chance):
            self._chance = python_words()
            self.found.append((next(self._clock), f"random or numpy.random in module {where}"))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _READS:
            self.found.append((next(self._clock), calling_line()))
        return func(*args, **(kwargs or {}))
