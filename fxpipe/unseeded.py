"""What code gets from outside that differs each time, and that nobody can set: chance, clocks.

with noting_unseeded() as lines: ...   where code asks the system for random numbers
with at_another_time(): ...            clocks are elsewhere than a moment ago
"""

import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fxpipe.frames import is_model_code, is_torch_code
from fxpipe.surroundings import Slot

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time")
_FUNCTIONS = {getattr(time, clock + unit) for clock in _CLOCKS for unit in ("", "_ns")}
CLOCKS = frozenset((*(clock.__name__ for clock in _FUNCTIONS), "now", "utcnow", "today"))
_SECONDS = 40 * 86400 + 7 * 3600 + 11 * 60 + 23  # another day, weekday, hour, minute and second


@contextmanager
def noting_unseeded() -> Iterator[list[str]]:
    """Gives a list that gets a line of code for each time that it draws from the system, or makes
    a generator without a seed. (Whatever is drawn comes from there: `secrets`, `uuid4`, and the
    seed of a `default_rng()`.)"""
    lines: list[str] = []
    mine = threading.get_ident()

    def note() -> None:
        line = _asking() if threading.get_ident() == mine else None
        if line:
            lines.append(line)

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(size: int) -> Any:
            note()
            return original(size)

        return draw

    seed = random.Random.seed

    def seeding(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None and not isinstance(self, random.SystemRandom):
            note()
        seed(self, a, version)

    places = (os, "urandom"), (random, "_urandom")
    new: list[tuple[Any, str, Any]] = [(o, n, noted(getattr(o, n))) for o, n in places]
    with _instead([*new, (random.Random, "seed", seeding)]):
        yield lines


def is_clock(value: object) -> bool:
    """Whether a value is a function that tells the time."""
    return any(value is function for function in _FUNCTIONS)


@contextmanager
def at_another_time(slots: Iterable[Slot]) -> Iterator[None]:
    """Inside, clocks that this thread asks by their module, or finds in one of these places, are
    another day, hour and second."""
    mine = threading.get_ident()

    def shifted(original: Callable[[], Any], by: int) -> Callable[[], Any]:
        return lambda: original() + (by if threading.get_ident() == mine else 0)

    units = [(name, _SECONDS) for name in _CLOCKS]
    units += [(f"{name}_ns", _SECONDS * 10**9) for name in _CLOCKS]
    others = {getattr(time, name): shifted(getattr(time, name), by) for name, by in units}
    held = [(slot, slot.get()) for slot in slots if is_clock(slot.get())]
    with _instead([(time, name, others[getattr(time, name)]) for name, _ in units]):
        for slot, clock in held:
            slot.put(others[clock])
        try:
            yield
        finally:
            for slot, clock in held:
                slot.put(clock)


def _asking() -> str | None:
    """The line of the model's code that runs, if it is no code of torch's that asks."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        if is_torch_code(frame.f_code):
            return None
        if is_model_code(frame.f_code):
            return f"{frame.f_code.co_filename}:{line}"
    return None


@contextmanager
def _instead(new: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, these attributes of these objects are others."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in new]
    for owner, name, value in new:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
