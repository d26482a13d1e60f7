"""What forward remembers from one microbatch to the next, outside of buffers.

    may_differ(scouted) -> whether check_forgetful(scouted) is needed

A graph has no memory. What one run of forward leaves in attributes, containers, objects, closures,
globals or a generator of its own, and the next one reads, would for good be what the trace has
found; and so would what it reads of a clock. So forward is run on tensors without numbers; where
that leaves anything, or code mentions a clock, it is run again. Caches are filled then: it must
come to its results as before, read nothing that depends on the first microbatch, and change nothing
more.
"""

import functools
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fxpipe.derivations import Derivations
from fxpipe.errors import ReadError, RememberedError
from fxpipe.frames import calling_line
from fxpipe.surroundings import LARGE, content, is_library, slots, surroundings, vars_of
from fxpipe.torch_internals import MODULE_TABLES
from fxpipe.trees import SIMPLE, take_apart
from fxpipe.unseeded import CLOCKS, at_another_time, is_clock

_DEPTH = 4  # how far below a module, a global or a cell values are looked at
_VALUES = (*SIMPLE, Tensor)
_CALLED = (FunctionType, MethodType, functools.partial)
_GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState)
INSTEAD = (
    "A graph would hold what the trace has found: keep it outside of the model and pass it as an "
    "argument, or keep it in a buffer (a counter, too); put what is for logs alone under `if not "
    "torch.compiler.is_exporting():`, and a pipeline leaves it out"
)
_UNLIKE = (
    "forward does other than in a run on the same input a moment before: it uses a clock, or what "
    "else differs each time. A graph would repeat what it was for the first microbatch: pass it as "
    "an argument"
)
Taken = dict[str, object]  # by place: a plain value, the state of a generator, or a tensor


class Scouted(NamedTuple):
    """A model's forward on tensors without numbers. state: what stands for parameters and buffers;
    make: the tensors of a microbatch, anew each time; run: forward."""

    model: nn.Module
    state: Mapping[str, Tensor]
    make: Callable[[], tuple[Tensor, ...]]
    run: Callable[[tuple[Tensor, ...]], object]


def may_differ(scouted: Scouted) -> bool:
    """Run forward once, and say whether anything is elsewhere than before, or may be read of a
    clock."""
    places = Places(scouted.model)
    with places.put_back():
        before = places.taken()
        scouted.run(scouted.make())
        return places.near_a_clock() or bool(differing(before, places.taken()))


def check_forgetful(scouted: Scouted) -> None:
    """Run forward twice. Raises RememberedError if one run differs from the next by what is kept,
    ReadError if it differs by what nothing keeps."""
    model, state, make, run = scouted
    places, derivations = Places(model), Derivations(state)
    with places.put_back():
        before = places.taken()
        first = derivations.of(run, make())
        left = places.taken()
        moved = differing(before, left)
        known = set(map(id, (*_tensors(before), *state.values())))
        kept = (t for t in _tensors(left) if derivations.depends(t) and id(t) not in known)
        again = first
        with Reading(kept), suppress(IndexError, KeyError, StopIteration), places.later():
            again = derivations.of(run, make())
        found = differing(left, places.taken(), tensors=False)
    if found:
        raise RememberedError(f"{found[0]} changes with every forward. {INSTEAD}")
    if again != first and moved:
        raise RememberedError(f"{moved[0]} is set by forward, which then differs. {INSTEAD}")
    if again != first:
        raise ReadError(f"at {derivations.parting or 'its end'}, {_UNLIKE}")


def _tensors(taken: Taken) -> Iterator[Tensor]:
    return (value for value in taken.values() if isinstance(value, Tensor))


def differing(before: Taken, after: Taken, *, tensors: bool = True) -> list[str]:
    """The places in which something else is now. tensors: also where that is another tensor."""
    names = dict.fromkeys([*before, *after])
    return [name for name in names if not _alike(before, after, name, tensors)]


def _alike(before: Taken, after: Taken, name: str, tensors: bool) -> bool:
    if name not in before or name not in after:
        return False
    one, two = before[name], after[name]
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one is two or not tensors
    return type(one) is type(two) and (isinstance(one, Tensor) or one == two)


class Places:
    """Where code may keep something: below modules, and what it reads beside them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        held = [v for m in model.modules() for v in vars(m).values() if isinstance(v, _CALLED)]
        self._around = surroundings(held, dict.fromkeys(map(type, model.modules())))

    def taken(self) -> Taken:
        """What is there now."""
        found, seen = Taken(), set[int]()
        for name, value, depth in self._roots():
            _take(name, value, depth, found, seen)
        return found

    def near_a_clock(self) -> bool:
        """Whether code mentions a clock, under whatever name."""
        mentioned = not CLOCKS.isdisjoint(self._around.mentioned)
        return mentioned or any(is_clock(slot.get()) for slot in slots(self._around))

    def later(self) -> AbstractContextManager[None]:
        """Inside, code reads other clocks."""
        return at_another_time(slots(self._around))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Afterwards generators, globals, cells and containers that are no dicts or lists are as
        before."""
        held = [(slot, slot.get()) for slot in slots(self._around)]
        inside: list[Any] = []
        for _, value, depth in self._roots():
            inside += _inside(value, depth)
        undo = [undoing for value in inside for undoing in _undoing(value)]
        try:
            yield
        finally:
            for undoing in undo:
                undoing()
            for slot, value in held:
                if isinstance(value, _VALUES) and slot.get() is not value:
                    slot.put(value)

    def _roots(self) -> Iterator[tuple[str, object, int]]:
        for path, module in self._model.named_modules():
            for key, value in vars(module).items():
                if key not in MODULE_TABLES and not key.startswith("_forward"):
                    yield f"attribute {path}.{key}".replace(" .", " "), value, 0
        for space, names in self._around.named():
            for name in names:
                if name in space and _is_open(space[name]):
                    owner = space.get("__name__", space.get("__qualname__", "a class"))
                    yield f"{owner}.{name}", space[name], 1
        for number, cell in enumerate(self._around.cells.values()):
            if _is_open(content(cell)):
                yield f"a variable that a function encloses ({number})", content(cell), 1


def _is_open(value: object) -> bool:
    if isinstance(value, (*SIMPLE, *_GENERATORS, Tensor, dict, list, tuple, set, deque)):
        return True
    return not is_library(value) or hasattr(value, "__next__")


def _take(name: str, value: object, depth: int, found: Taken, seen: set[int]) -> None:
    """Note what is in a place, and in the places inside it."""
    if isinstance(value, Tensor):
        found[name] = value
    elif isinstance(value, SIMPLE):
        found[name] = type(value), repr(value)
    elif isinstance(value, _GENERATORS) or hasattr(value, "__next__"):
        found[name] = _state(value)
    elif depth <= _DEPTH and id(value) not in seen:
        seen.add(id(value))
        parts = _parts(value)
        if parts is not None:
            found[name] = len(parts)
            for key, part in parts.items() if len(parts) <= LARGE else ():
                _take(f"{name}{key}", part, depth + 1, found, seen)


def _parts(value: object) -> Mapping[str, object] | None:
    """What a value holds, by what its name ends with."""
    if isinstance(value, dict):
        return {f"[{str(key)[:30]!r}]": part for key, part in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return {f"[{number}]": part for number, part in enumerate(value)}
    if isinstance(value, (set, frozenset)):
        return {}
    closed = isinstance(value, (nn.Module, type, *_CALLED)) or is_library(value)
    return None if closed else {f".{k}": part for k, part in vars_of(value).items()}


def _inside(value: object, depth: int) -> Iterator[object]:
    yield value
    if depth <= _DEPTH and not isinstance(value, (Tensor, *SIMPLE)):
        for part in (_parts(value) or {}).values():
            yield from _inside(part, depth + 1)


def _state(value: Any) -> object:
    """How far a generator or an iterator is."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, itertools.count):
        return repr(value)
    frame = getattr(value, "gi_frame", None)
    return operator.length_hint(value, -1), getattr(frame, "f_lasti", None)


def _undoing(value: Any) -> Iterator[Callable[[], object]]:
    """What brings a value to where it is now."""
    if isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif isinstance(value, numpy.random.Generator):
        yield functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, numpy.random.RandomState):
        yield functools.partial(value.set_state, value.get_state(legacy=False))
    elif isinstance(value, deque):
        yield functools.partial(_refill, value, list(value))


def _refill(container: Any, values: list[Any]) -> None:
    container.clear()
    container.extend(values)


class Reading(TorchFunctionMode):
    """Raises RememberedError where code reads one of these tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._left = {id(tensor): tensor for tensor in tensors}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(id(value) in self._left for value in take_apart((args, kwargs))[0]):
            raise RememberedError(
                f"{calling_line()} reads a tensor that forward has made and kept in the microbatch "
                f"before. {INSTEAD}"
            )
        return func(*args, **(kwargs or {}))
