"""The export ladder: how much of a microbatch's sizes a trace leaves open.

    export(whole, tensors) -> ExportedProgram

Each policy frees fewer dimensions than the one before; the first that traces is taken.
"""

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fxpipe.advice import explained
from fxpipe.concrete import Concrete, NeedsValuesError
from fxpipe.dataflow import differentiable
from fxpipe.errors import BatchError, CaptureError, FxpipeError, ReadError
from fxpipe.faithful import Moved, faithful, no_trace_left
from fxpipe.frames import calling_line
from fxpipe.inputs import rebuild
from fxpipe.outsiders import Outsiders
from fxpipe.packed import LayoutRead, LayoutReads
from fxpipe.prefix import Suffix
from fxpipe.readings import LeakError
from fxpipe.replaced import same_parameters, write_back
from fxpipe.scout import scout, unscouted
from fxpipe.state import named_state
from fxpipe.torch_autograd import Toggles
from fxpipe.torch_internals import DataDependentError, quiet_failure
from fxpipe.wanted import Reader

T = TypeVar("T")
Policy = Callable[[Tensor], dict[int, Any]]
_SIZES = "the backward, whose operators depend on sizes that follow from them"


@dataclass(frozen=True)
class Traced:
    """An exported model. values: number of a leaf that is held concrete -> what the trace holds
    for; reads: the lines of code that read them; layout: where code reads how tensors lie in
    memory."""

    program: ExportedProgram
    values: Mapping[int, Tensor]
    reads: tuple[str, ...]
    layout: LayoutRead | None


class WithLoss(nn.Module):
    """The model's loss, and what else is wanted, as a function of the microbatch's tensors."""

    def __init__(
        self,
        model: nn.Module,
        structure: Any,
        fixed: tuple[tuple[str, object], ...],
        reader: Reader,
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.rebuild = (structure, fixed)
        _, names, is_tensor = structure
        self.names = [name for name, tensor in zip(names, is_tensor, strict=True) if tensor]
        self.reader = reader
        self.real: Mapping[int, Tensor] | None = None
        self.moved = Moved()
        self.unseen: Exception | None = None
        self.layout, self.outsiders, self.toggles = LayoutReads(), Outsiders(), Toggles()
        self.untraced = [tensor for _, tensor in named_state(model)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.real is None:
            return self._values(tensors)
        state = [*self.model.parameters(), *self.model.buffers()]
        concrete = Concrete(tensors, self.real, state)
        try:
            with concrete:
                values = self._values(concrete.leaves(tensors))
        except DataDependentError as error:
            raise concrete.needs(error) from error
        concrete.check_unchanged(self.names)
        return values

    def _values(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        args, kwargs = rebuild(tensors, *self.rebuild)
        before = dict(self.model.named_buffers())
        state = [tensor for _, tensor in named_state(self.model)]
        self.layout.begin(state)
        self.outsiders.begin(self.untraced, state)
        self.toggles.begin(self.model.parameters())
        modes = self.layout, self.outsiders, self.toggles
        with ExitStack() as stack:
            for context in (same_parameters(self.model), faithful(self.model, self.moved), *modes):
                stack.enter_context(context)
            stack.enter_context(unscouted(self.model, self.unseen))
            values = self.reader(self.model(*args, **kwargs))
        write_back(self.model, before)
        return values


def export(
    whole: WithLoss, tensors: Sequence[Tensor], hold: frozenset[int] = frozenset()
) -> Traced:
    """Export with as many symbolic dimensions, and as few concrete values, as the model allows.

    hold: leaves that are held concrete in any case
    """
    failure: Exception | None = None
    reads: tuple[str, ...] = (_SIZES,) if hold else ()
    ways = [partial(_attempt, whole, tensors, policy) for policy in _POLICIES]
    try:
        _, known, seen = _with_values(partial(_ahead, whole, tensors), tensors, hold)
    except (FxpipeError, NeedsValuesError) as error:
        failure, ways = error, []
    for attempt in ways:
        try:
            program, held, found = _with_values(attempt, tensors, known or None)
        except (FxpipeError, NeedsValuesError) as error:
            failure = error
            break
        except Exception as error:
            failure = error
            continue
        values = {number: tensors[number].detach().clone() for number in held or ()}
        return Traced(program, values, (*reads, *seen, *found), whole.layout.found)
    if isinstance(failure, FxpipeError):
        raise failure
    assert failure is not None
    kind = ReadError if isinstance(failure, NeedsValuesError) else CaptureError
    raise kind(explained(whole.model, failure)) from failure


Held = frozenset[int] | None  # the leaves whose values a trace may use; None: it needs none


def _with_values(
    attempt: Callable[[Held], T], tensors: Sequence[Tensor], held: Held
) -> tuple[T, Held, tuple[str, ...]]:
    """What is made, the leaves that had to be held concrete for it, and who reads more than those
    given.

    Raises NeedsValuesError where Python reads what does not come from integer leaves alone.
    """
    reads: tuple[str, ...] = ()
    while True:
        try:
            return attempt(held), held, reads
        except DataDependentError as error:
            if held is not None:
                raise NeedsValuesError(frozenset(), calling_line(error)) from error
            held = frozenset()
        except NeedsValuesError as error:
            if held is None or not _can_hold(error.leaves - held, tensors):
                raise
            held, reads = held | error.leaves, (*reads, error.line)


def _ahead(whole: WithLoss, tensors: Sequence[Tensor], held: Held) -> None:
    """Find most of what a trace will need at a fraction of its cost."""
    whole.unseen = None
    whole.real = {number: tensors[number] for number in held or ()}
    with no_trace_left(whole.model):
        whole.unseen = scout(whole, tensors)


def _attempt(
    whole: WithLoss, tensors: Sequence[Tensor], policy: Policy, held: Held
) -> ExportedProgram:
    numbers = range(len(tensors))
    shapes = tuple({} if held and i in held else policy(tensors[i]) for i in numbers)
    whole.real = None if held is None else {number: tensors[number] for number in held}
    with no_trace_left(whole.model):
        return _exported(whole, tensors, shapes)


def export_symbolic(module: Suffix, tensors: Sequence[Tensor]) -> ExportedProgram:
    """Export a module around a `model` with as many symbolic dimensions as it allows, and without
    any values."""
    module.unseen = None
    module.unseen = scout(module, tensors)
    failures: list[Exception] = []
    for policy in _POLICIES:
        try:
            return _exported(module, tensors, tuple(map(policy, tensors)))
        except (FxpipeError, DataDependentError, LeakError):
            raise
        except Exception as error:
            failures.append(error)
    raise failures[0]


def _exported(
    module: nn.Module, tensors: Sequence[Tensor], shapes: tuple[dict[int, Any], ...]
) -> ExportedProgram:
    with quiet_failure(), seldom_collected():
        return torch.export.export(module, tuple(tensors), dynamic_shapes=(shapes,), strict=False)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for unreachable cycles seldom: all nodes and symbols of a graph that grows are alive."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _can_hold(leaves: frozenset[int], tensors: Sequence[Tensor]) -> bool:
    """Whether these leaves may become concrete: integers and flags, which may repeat."""
    kinds = [
        number in range(len(tensors)) and not differentiable(tensors[number]) for number in leaves
    ]
    return bool(kinds) and all(kinds)


def _all_dims(tensor: Tensor) -> dict[int, Any]:
    return dict.fromkeys(range(tensor.dim()), Dim.AUTO)


def _integer_dims(tensor: Tensor) -> dict[int, Any]:
    return _first_dims(tensor) if tensor.is_floating_point() else _all_dims(tensor)


def _first_dims(tensor: Tensor) -> dict[int, Any]:
    return {0: Dim.AUTO} if tensor.dim() else {}


def _no_dims(tensor: Tensor) -> dict[int, Any]:
    return {}


_POLICIES: tuple[Policy, ...] = (_all_dims, _integer_dims, _first_dims, _no_dims)


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises BatchError if a model's forward does not take these arguments."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # a forward that says nothing of its arguments
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BatchError(
            f"the microbatch does not fit {type(model).__name__}.forward{signature}: {error}"
        ) from error
