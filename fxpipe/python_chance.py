"""The generators of Python and NumPy, as one more device whose state is a tensor.

Code that draws from them decides in Python what it does, so that no graph can hold it: only an
opaque stage runs it, in the state in which eager would find them.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fxpipe.errors import CaptureError

PYTHON = "python"  # what stands for a kind of device
Words = NDArray[numpy.int64]
_WORDS = 625  # of Python's generator: 624 numbers and a position; NumPy's has as many


def python_state() -> Tensor:
    """The state of both, always as large."""
    return torch.from_numpy(python_words())


def set_python_state(state: Tensor) -> None:
    """Put both into a state."""
    _set_words(state.cpu().numpy())


def python_words() -> Words:
    """The state of both: words, then the normal numbers that they have ready. (No tensor: the code
    around may be traced.)"""
    _, words, ready = random.getstate()
    found: Any = numpy.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        raise CaptureError(
            f"numpy.random draws from a {found['bit_generator']}, whose state cannot be handed on: "
            "leave numpy.random its MT19937"
        )
    own = found["state"]
    numbers = numpy.array([*words, *own["key"], own["pos"], found["has_gauss"]], dtype=numpy.int64)
    rest = numpy.array([float("nan") if ready is None else ready, found["gauss"]])
    return numpy.concatenate([numbers, rest.view(numpy.int64)])


def _set_words(numbers: Words) -> None:
    ready = numbers[-2:].view(numpy.float64)
    words = tuple(map(int, numbers[:_WORDS]))
    random.setstate((3, words, None if numpy.isnan(ready[0]) else float(ready[0])))
    *key, position, has = numbers[_WORDS:-2]
    place = numpy.array(key, dtype=numpy.uint32), int(position), int(has), float(ready[1])
    numpy.random.set_state(("MT19937", *place))


@contextmanager
def python_left_alone(state: Tensor | None = None) -> Iterator[None]:
    """Both are afterwards as they were; inside, in the state given."""
    before = python_words()
    if state is not None:
        set_python_state(state)
    try:
        yield
    finally:
        _set_words(before)


def python_has_drawn(before: Words) -> bool:
    """Whether anything was drawn since they were in a state."""
    return not numpy.array_equal(before, python_words())
