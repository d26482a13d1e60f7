"""What a trace would leave out or bake in without a word: done so that it is recorded, or refused.

A graph repeats what one run of the model's code has done. What that run has drawn from a generator
outside torch, or counted in an attribute, differs in the next, and no guard could say so.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy
from torch import nn

from fxpipe.errors import CaptureError
from fxpipe.torch_patches import (
    checkpoints_as_calls,
    data_as_detach,
    inference_as_no_grad,
)

T = TypeVar("T")


@contextmanager
def faithful(model: nn.Module, moved: dict[str, int | float]) -> Iterator[None]:
    """Run a model's code inside, once, to trace it.

    moved: gets the attributes that hold another number after it. Raises CaptureError where it draws
    from Python's or NumPy's generator; these are left as they were.
    """
    before = random.getstate(), numpy.random.get_state(legacy=False)
    numbers = _numbers(model)
    with inference_as_no_grad(), data_as_detach(), checkpoints_as_calls():
        yield
    moved.clear()
    moved.update((k, v) for k, v in _numbers(model).items() if numbers.get(k) != v)
    drawn = "random" if random.getstate() != before[0] else ""
    if str(numpy.random.get_state(legacy=False)) != str(before[1]):
        drawn = "numpy.random"
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    if drawn:
        raise CaptureError(
            f"forward draws from {drawn}: a graph would repeat the first microbatch's number in "
            "every other. Draw it with torch, or outside of the model and pass it as an argument"
        )


def settled(model: nn.Module, moved: dict[str, int | float], trace: Callable[[], T]) -> T:
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
