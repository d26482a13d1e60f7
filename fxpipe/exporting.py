"""The export ladder: how much of a microbatch's sizes a trace leaves open.

    export(whole, tensors) -> ExportedProgram

Each policy frees fewer dimensions than the one before; the first that traces is taken.
"""

import gc
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fxpipe.concrete import Concrete, NeedsValuesError
from fxpipe.dataflow import differentiable
from fxpipe.errors import BatchError, CaptureError, FxpipeError, ReadError
from fxpipe.faithful import Moved, faithful, no_trace_left
from fxpipe.frames import calling_line, is_torch_code
from fxpipe.inputs import rebuild
from fxpipe.outsiders import Outsiders
from fxpipe.packed import LayoutRead, LayoutReads
from fxpipe.replaced import write_back
from fxpipe.state import named_state
from fxpipe.torch_internals import DataDependentError, quiet_failure
from fxpipe.wanted import Reader

Policy = Callable[[Tensor], dict[int, Any]]
DERIVATIVES = (
    "A derivative that forward itself takes (torch.func.grad, torch.func.vjp, torch.autograd.grad) "
    "cannot be part of a graph: write it as operators, or put it into the forward of a custom "
    "autograd.Function; torch.func.jvp and vmap are followed"
)
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
        self.layout, self.outsiders = LayoutReads(), Outsiders()
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
        with faithful(self.model, self.moved), self.layout, self.outsiders:
            values = self.reader(self.model(*args, **kwargs))
        write_back(self.model, before)
        return values


# How torch fails where a transform hides a tensor from the trace.
_OF_DERIVATIVES = ("functorch tensor", "has no attribute 'constant'", "program constant's list")


def export(
    whole: WithLoss, tensors: Sequence[Tensor], hold: frozenset[int] = frozenset()
) -> Traced:
    """Export with as many symbolic dimensions, and as few concrete values, as the model allows.

    hold: leaves that are held concrete in any case
    """
    failure: Exception | None = None
    held: frozenset[int] | None = hold or None
    reads: tuple[str, ...] = (_SIZES,) if hold else ()
    for policy in _POLICIES:
        try:
            program, held, found = _with_values(whole, tensors, policy, held)
        except (FxpipeError, NeedsValuesError) as error:
            failure = error
            break
        except Exception as error:
            failure = error
            continue
        values = {number: tensors[number].detach().clone() for number in held or ()}
        return Traced(program, values, (*reads, *found), whole.layout.found)
    if isinstance(failure, FxpipeError):
        raise failure
    assert failure is not None
    kind = ReadError if isinstance(failure, NeedsValuesError) else CaptureError
    raise kind(_explain(whole.model, failure)) from failure


def _with_values(
    whole: WithLoss, tensors: Sequence[Tensor], policy: Policy, held: frozenset[int] | None
) -> tuple[ExportedProgram, frozenset[int] | None, tuple[str, ...]]:
    """The export, the leaves that it had to hold concrete beside those given, and who reads them.

    Raises NeedsValuesError where Python reads what does not come from integer leaves alone.
    """
    reads: tuple[str, ...] = ()
    while True:
        try:
            return _attempt(whole, tensors, policy, held), held, reads
        except DataDependentError as error:
            if held is not None:
                raise NeedsValuesError(frozenset(), calling_line(error)) from error
            held = frozenset()
        except NeedsValuesError as error:
            if held is None or not _can_hold(error.leaves - held, tensors):
                raise
            held, reads = held | error.leaves, (*reads, error.line)


def _attempt(
    whole: WithLoss, tensors: Sequence[Tensor], policy: Policy, held: frozenset[int] | None
) -> ExportedProgram:
    """held: the leaves whose values the trace may use; None for a trace that has no need of any."""
    numbers = range(len(tensors))
    shapes = tuple({} if held and i in held else policy(tensors[i]) for i in numbers)
    whole.real = None if held is None else {number: tensors[number] for number in held}
    with no_trace_left(whole.model):
        return _exported(whole, tensors, shapes)


def export_symbolic(module: nn.Module, tensors: Sequence[Tensor]) -> ExportedProgram:
    """Export with as many symbolic dimensions as a module allows, and without any values."""
    failures: list[Exception] = []
    for policy in _POLICIES:
        try:
            return _exported(module, tensors, tuple(map(policy, tensors)))
        except (FxpipeError, DataDependentError):
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


def _explain(model: nn.Module, error: Exception) -> str:
    """Where in the model tracing stopped, and what to change."""
    names = {id(module): name for name, module in model.named_modules()}
    where = "the model"
    for frame, line in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in names and (where == "the model" or not is_torch_code(frame.f_code)):
            module = names[id(owner)] or "(the model itself)"
            where = f"module {module} ({type(owner).__name__}), {frame.f_code.co_filename}:{line}"
    if isinstance(error, NeedsValuesError):
        where += f", reading a value at {error.line}"
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    cause = " ".join(str(error).split())[:300]
    return f"cannot trace {where}: {type(error).__name__}: {cause}. {_advice(model, error)}"


def _advice(model: nn.Module, error: Exception) -> str:
    """What to change, as far as the kind of the failure says it."""
    reads = (
        "Python control flow on tensor values (if x.sum() > 0, .item(), .tolist(), loops over "
        "tensors) can be part of a graph only where the values come from integer inputs alone: use "
        "torch.where or tensor operations there, or move it out of forward"
    )
    if isinstance(error, (DataDependentError, NeedsValuesError)):
        return reads
    found = str(error)
    if any(words in found for words in _OF_DERIVATIVES):
        return DERIVATIVES
    if "igher order operator" in found:
        return (
            "torch.cond, torch.while_loop and their like cannot be part of a graph here: compute "
            "both results and choose with torch.where, unroll the loop, or decide outside of "
            "forward and pass a plain argument"
        )
    kinds = sorted({str(p.dtype) for p in model.parameters()})
    if "dtype" in found:
        return (
            f"The model's parameters are of {' and '.join(kinds)}: give it float inputs of that "
            "dtype, or convert the model with model.to(dtype)"
        )
    return f"See first that the model alone runs on this microbatch. If it does: {reads}"


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
