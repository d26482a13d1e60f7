"""A prefix, run once: what it reads and changes, what crosses, and what it costs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.errors import CaptureError
from fxpipe.faithful import nothing_put_away
from fxpipe.history import Kept, behind
from fxpipe.inputs import rebuild
from fxpipe.opaque import Prefix, Rebuilt, Size, taken_apart
from fxpipe.outsiders import UNOWNED
from fxpipe.prefix import run_until
from fxpipe.prefix_chance import generators
from fxpipe.python_chance import python_left_alone
from fxpipe.remembered import Places, Scouted, check_forgetful, differing
from fxpipe.replaced import check_replaced, same_parameters
from fxpipe.state import named_state
from fxpipe.torch_patches import no_seeding
from fxpipe.trees import take_apart
from fxpipe.undone import Changed, untouched


def measured(
    model: nn.Module,
    boundary: str,
    rebuilt: Rebuilt,
    leaves: Sequence[Tensor],
    lines: Sequence[str],
    train: bool,
) -> tuple[Prefix, list[Tensor]]:
    """A prefix, run once without a trace of it, and what crossed."""
    names = {id(tensor): name for name, tensor in named_state(model, ties=False)}
    uses, flops, kept = _Uses(names), FlopCounterMode(display=False), Kept()
    run = forgetting(model, lambda: _check_forgetful(model, boundary, rebuilt, leaves))
    with run as changed, torch.set_grad_enabled(train), flops, uses, kept.hooks():
        states = generators(model)
        with no_seeding(), same_parameters(model):
            reached = run_until(model, boundary, *rebuild(leaves, *rebuilt))
        draws = tuple(k for k, s in generators(model).items() if not torch.equal(states[k], s))
    _check(model, boundary, changed)
    form, sources, crossing = taken_apart(reached, leaves)
    reach = tuple(_reach(value, names, boundary) for value in crossing)
    state = [*uses.found, *sorted(frozenset().union(*reach)), *changed.buffers]
    prefix = Prefix(
        model=model,
        boundary=boundary,
        rebuilt=rebuilt,
        form=form,
        sources=sources,
        state=tuple(dict.fromkeys(state)),
        reach=reach,
        sizes=tuple(tuple(_size(size, leaves) for size in value.shape) for value in crossing),
        attributes=tuple(changed.attributes),
        lines=tuple(dict.fromkeys(lines)),
        flops=flops.get_total_flops(),
        bytes=kept.bytes,
        draws=draws,
        buffers=tuple(changed.buffers),
        flags=reached.flags,
        train=train,
    )
    return prefix, crossing


@contextmanager
def forgetting(model: nn.Module, again: Callable[[], None]) -> Iterator[Changed]:
    """A run that leaves nothing of what it keeps. again: called where it has kept anything."""
    places = Places(model)
    with places.put_back(), nothing_put_away(model), untouched(model) as changed:
        before = places.taken()
        yield changed
        kept = differing(before, places.taken())
    if kept:
        again()


def _check_forgetful(
    model: nn.Module, boundary: str, rebuilt: Rebuilt, leaves: Sequence[Tensor]
) -> None:
    """Raises RememberedError where code keeps something for the next microbatch."""

    def run(tensors: tuple[Tensor, ...]) -> object:
        with python_left_alone(), torch.random.fork_rng(devices=[]), no_seeding():
            return run_until(model, boundary, *rebuild(tensors, *rebuilt)).call

    def make() -> tuple[Tensor, ...]:
        return tuple(leaf.detach().clone() for leaf in leaves)

    with forgetting(model, lambda: None):
        check_forgetful(Scouted(model, dict(named_state(model)), make, run))


def _check(model: nn.Module, boundary: str, changed: Changed) -> None:
    """Raises CaptureError where code changes what ranks cannot hand on."""
    if changed.parameters:
        raise CaptureError(
            f"parameter {changed.parameters[0]} is changed by forward before module {boundary}, in "
            "code that is run as it is. Make it a buffer (register_buffer), which the ranks hand "
            "on, or change it after the step"
        )
    own = dict(model.named_buffers())
    for name, new in changed.buffers.items():
        check_replaced(name, own.get(name), new)


def _reach(value: Tensor, names: Mapping[int, str], boundary: str) -> frozenset[str]:
    """The trained parameters behind a value."""
    found = behind([value])
    if found - set(names):
        raise CaptureError(f"before module {boundary}, code {UNOWNED}")
    return frozenset(names[i] for i in found)


def _size(number: int, leaves: Sequence[Tensor]) -> Size:
    """What a size may follow from: the first dimension of a leaf as large, if it can vary."""
    found = (
        Size(number, leaf, dim)
        for leaf, tensor in enumerate(leaves)
        for dim, size in enumerate(tensor.shape)
        if size == number > 1
    )
    return next(found, Size(number))


class _Uses(TorchFunctionMode):
    """Notes which tensors of the model's state are read."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        values, _ = take_apart((args, kwargs))
        self.found.update((self._names[id(v)], None) for v in values if id(v) in self._names)
        return func(*args, **(kwargs or {}))
