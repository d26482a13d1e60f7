"""What a trace would leave out or bake in without a word: done so that it is recorded, or refused.

A graph repeats what one run of the model's code has done. What that run has drawn from a generator
outside torch, or counted in an attribute, differs in the next, and no guard could say so.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from fxpipe.errors import CaptureError, ReadError
from fxpipe.libraries import libraries_as_untraced
from fxpipe.python_chance import python_has_drawn, python_left_alone, python_words
from fxpipe.surroundings import Surroundings, content, slots, surroundings
from fxpipe.torch_internals import is_fake
from fxpipe.torch_patches import no_state_set, recorded
from fxpipe.unseeded import noting_unseeded

T = TypeVar("T")
DRAWN = (
    "forward draws from random or numpy.random: a graph would repeat the first microbatch's number "
    "in every other. Draw it with torch, or outside of the model and pass it as an argument"
)
_UNSEEDED = (
    "forward draws random numbers that nobody has seeded (os.urandom, secrets, uuid4, "
    "SystemRandom, a new default_rng() or Random()) at {}: a graph would repeat the first "
    "microbatch's in every other. Draw them with torch, or outside of the model and pass them as "
    "an argument"
)
_NO_PLACES = (Tensor, nn.Module, type, FunctionType, MethodType, str, int, float)
_DEPTH = 4  # how far below a module values are looked at: an object, its dict, a list in it


class Moved(dict[str, int | float]):
    """Attributes that hold another number after a run of forward, and the number. No plain dict:
    export puts the dicts that a module holds back to what they were."""


@contextmanager
def faithful(model: nn.Module, moved: Moved) -> Iterator[None]:
    """Run a model's code inside, once, to trace it.

    moved: gets the attributes that hold another number after it. Raises ReadError where it draws
    from Python's or NumPy's generator, which are left as they were, or from the system.
    """
    before = python_words()
    numbers = _numbers(model)
    with python_left_alone(), libraries_as_untraced():
        with recorded(), no_state_set(), noting_unseeded() as unseeded:
            yield
        drawn = python_has_drawn(before)
    moved.clear()
    moved.update((k, v) for k, v in _numbers(model).items() if numbers.get(k) != v)
    if drawn:
        raise ReadError(DRAWN)
    refuse_unseeded(unseeded)


def refuse_unseeded(lines: list[str]) -> None:
    """Raises ReadError if code has drawn anything that no seed decides."""
    if lines:
        raise ReadError(_UNSEEDED.format(lines[0]))


def no_trace_left(model: nn.Module) -> AbstractContextManager[None]:
    """Whatever code puts away inside that has no values (a cache filled by the first call) is taken
    out again: the model must run as before, and the next trace must fill its cache anew."""
    return _taking_out(model, _restore)


def nothing_put_away(model: nn.Module) -> AbstractContextManager[None]:
    """Whatever code puts away inside is taken out again, also what has values."""
    return _taking_out(model, _restore_all)


@contextmanager
def _taking_out(model: nn.Module, restore: Callable[[Any, Any], None]) -> Iterator[None]:
    """restore: brings a dict or a list to what it was before, given as a copy."""
    around = surroundings((), dict.fromkeys(map(type, model.modules())))
    outside = _outside(around)
    held = [(place, place.copy()) for place in _places(model, outside)]
    slotted = [(slot, slot.get()) for slot in slots(around)]
    try:
        with _caches_emptied(outside):
            yield
    finally:
        for place, before in held:
            restore(place, before)
        for slot, value in slotted:
            if _is_traced(slot.get()) and not _is_traced(value):
                slot.put(value)


def _restore_all(place: Any, before: Any) -> None:
    """Take out whatever is new in a dict or a list, and put in what it had."""
    if isinstance(place, list):
        place[:] = before
        return
    for key in [key for key, value in place.items() if before.get(key, before) is not value]:
        del place[key]
    place.update({key: value for key, value in before.items() if key not in place})


def _restore(place: Any, before: Any) -> None:
    """Take the traced values out of a dict or a list, which stays the same object."""
    if not _is_traced(place):
        return
    if isinstance(place, list):
        place[:] = before
        return
    for key in [key for key, value in place.items() if _is_traced(value)]:
        if key in before:
            place[key] = before[key]
        else:
            del place[key]


def _outside(found: Surroundings) -> list[Any]:
    """What code reads beside modules: values of globals, of closures and of defaults."""
    named = [space[name] for space, names in found.named() for name in names if name in space]
    defaults = [list(d) if isinstance(d, tuple) else d for d in found.defaults]
    return [*named, *map(content, found.cells.values()), *defaults]


@contextmanager
def _caches_emptied(values: Iterable[Any]) -> Iterator[None]:
    """A function with a cache (`functools.cache`) that has computed anything inside forgets all."""
    caches = {id(v): v for v in values if hasattr(v, "cache_info") and hasattr(v, "cache_clear")}
    before = [cache.cache_info().misses for cache in caches.values()]
    try:
        yield
    finally:
        for cache, misses in zip(caches.values(), before, strict=True):
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _places(model: nn.Module, outside: Iterable[object]) -> list[Any]:
    """The attributes of every module and of the plain objects that it holds; dicts and lists, also
    of what is outside."""
    found: dict[int, Any] = {}
    stack: list[tuple[object, int]] = [(vars(module), 0) for module in model.modules()]
    stack += [(value, 1) for value in outside if type(value) in (dict, list)]
    while stack:
        value, depth = stack.pop()
        if not isinstance(value, (dict, list)):
            value = getattr(value, "__dict__", None)
        if not isinstance(value, (dict, list)) or id(value) in found or depth > _DEPTH:
            continue
        found[id(value)] = value
        items = value.values() if isinstance(value, dict) else value
        stack += [(item, depth + 1) for item in items if not isinstance(item, _NO_PLACES)]
    return list(found.values())


def _is_traced(value: object, depth: int = 0) -> bool:
    """Whether a value is, or holds, a tensor without values."""
    if isinstance(value, Tensor):
        return is_fake(value)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or depth > _DEPTH:
        return False
    return any(_is_traced(item, depth + 1) for item in value)


def settled(model: nn.Module, moved: Moved, trace: Callable[[], T]) -> T:
    """What `trace` gives. Where it sets a number that a module holds (a cached length), it runs
    again with what that has become; raises CaptureError if each run of forward changes it."""
    made = trace()
    if not moved:
        return made
    for name, value in moved.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, value)
    made = trace()
    if moved:
        raise CaptureError(
            f"attribute {next(iter(moved))} changes with every forward: a graph would hold its "
            "value for one microbatch. Count outside of the model, or pass it as an argument"
        )
    return made


def _numbers(model: nn.Module) -> dict[str, int | float]:
    """The numbers that modules hold as plain attributes: `layers.0.calls`."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
