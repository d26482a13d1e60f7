"""The generators that the model's own code draws from, before a boundary."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from fxpipe.chance import drawing_from, state_of
from fxpipe.errors import BatchError
from fxpipe.python_chance import PYTHON, python_left_alone, python_state


def generators(model: nn.Module) -> dict[str, Tensor]:
    """The states of the generators that code may draw from, by the kind of their device."""
    devices = {p.device for p in model.parameters() if p.device.type != "meta"}
    devices.add(torch.device("cpu"))
    return {PYTHON: python_state(), **{d.type: state_of(d) for d in sorted(devices, key=str)}}


@contextmanager
def drawing(states: Mapping[str, Tensor], model: nn.Module) -> Iterator[None]:
    """Code that runs inside draws from generators in these states. Raises BatchError if it draws
    from another one, whose state no other rank knows."""
    devices = {p.device.type: p.device for p in model.parameters()}
    others = {kind: state for kind, state in generators(model).items() if kind not in states}
    with ExitStack() as stack:
        if PYTHON in states:
            stack.enter_context(python_left_alone(states[PYTHON]))
        for kind in states.keys() - {PYTHON}:
            device = devices.get(kind, torch.device("cpu"))
            stack.enter_context(drawing_from(states[kind], device))
        yield
    after = generators(model) if others else {}
    drawn = [kind for kind, state in others.items() if not torch.equal(state, after[kind])]
    if drawn:
        raise BatchError(
            f"random numbers are drawn ({drawn[0]}) for this microbatch, and none were for the one "
            "that was traced: give fxpipe.compile an example for which they are"
        )
