"""Which rung of the ladder a microbatch gets: the policy of `capture` and `capture_opaque`.

One graph for all values, if there can be one; a graph for the values that Python reads, if they
come of integers; when a third graph would be wanted, or where floats are read, an opaque stage,
which serves all values.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from fxpipe.capture import Captured, capture
from fxpipe.errors import (
    CaptureError,
    FxpipeError,
    ReadError,
    UnknownCrossingError,
    UnknownSizeError,
)
from fxpipe.inputs import Leaf, Microbatch
from fxpipe.mode import Mode
from fxpipe.refusals import refuse_hooks
from fxpipe.rungs import capture_opaque
from fxpipe.state import named_state
from fxpipe.torch_internals import gradient_hooks, has_hooks, watching_hooks
from fxpipe.wanted import LossFn, Outputs, Reader

T = TypeVar("T")
REPEATS = 2  # how many graphs there are before one is wanted that serves all values


class Tracer:
    """Traces one model, and remembers for which values it has done so.

    outputs: what a forward alone returns; None where the model is trained
    in_order: whether an opaque stage that changes buffers could run as its table has it
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn | None, outputs: Outputs | None = None
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._outputs: Outputs = False if outputs is None else outputs
        self._train = outputs is None
        self._seen: list[Microbatch] = []
        self._reads = False
        self._hold: set[str] = set()
        self.mode: Mode = ()
        self.in_order = True
        self._refusal: CaptureError | None = None

    def follow(self, mode: Mode) -> None:
        """Forget what was traced, if that was in another mode of the model."""
        if mode != self.mode:
            self.mode = mode
            self._seen.clear()
            self._reads = False
            self._hold = set()
            self._refusal = None

    @property
    def refused(self) -> bool:
        """Whether an opaque stage was wanted for some microbatch, and there can be none."""
        return self._refusal is not None

    def trace(self, microbatch: Microbatch) -> Captured:
        """A graph for a microbatch that fits none so far. Raises CaptureError."""
        owners = [*named_state(self._model, ties=False), *self._model.named_modules()]
        owners = owners if self._train else []
        refuse_hooks([name or "the model" for name, owner in owners if has_hooks(owner)])
        refuse_hooks(["every module"] if self._train and gradient_hooks() else [])
        with torch.inference_mode(mode=False):  # writes to tensors made in it show nowhere
            return self._on_some_rung(microbatch)

    def lowered(self, microbatch: Microbatch, lower: Callable[[Captured], T]) -> T:
        """What is made of a graph for a microbatch. Where a size that depends on data decides about
        the backward, or about what crosses, the graph holds the values that it follows from."""
        captured = self.trace(microbatch)
        try:
            return lower(captured)
        except (UnknownSizeError, UnknownCrossingError):
            behind = {leaf.name for leaf in captured.leaves if _decides(leaf, captured)}
            if not behind - self._hold:
                raise
            held, self._hold = self._hold, self._hold | behind
            self._seen = [seen for seen in self._seen if seen is not microbatch]
        try:
            return self.lowered(microbatch, lower)
        except FxpipeError:
            self._hold = held  # another microbatch must not pay for this one
            raise

    def _on_some_rung(self, microbatch: Microbatch) -> Captured:
        if self._reads and len(self._seen) >= REPEATS and self._refusal is None:
            try:
                opaque = self._opaque(microbatch)
                self._check_order(opaque)
                return opaque
            except CaptureError as error:
                self._refusal = error
        try:
            found = self._graph(microbatch)
        except ReadError as error:
            try:
                return self._opaque(microbatch)
            except CaptureError as refusal:
                raise ReadError(f"{error}. No opaque stage is possible: {refusal}") from error
        self._seen.append(microbatch)
        self._reads |= bool(found.values)
        return found

    def _check_order(self, opaque: Captured) -> None:
        """Raises CaptureError where graphs do better, which can change buffers in any order."""
        buffers = opaque.prefix.buffers if opaque.prefix is not None else ()
        if buffers and not self.in_order:
            raise CaptureError(f"buffer {buffers[0]} is changed by it, in the order of the batch")

    def _graph(self, microbatch: Microbatch) -> Captured:
        outputs, train = self._outputs, self._train
        seen: list[str] = []
        with watching_hooks(seen):
            found = capture(
                self._model,
                microbatch,
                self._loss_fn,
                outputs=outputs,
                train=train,
                hold=self._hold,
            )
        refuse_hooks(seen if train else ())
        return found

    def _opaque(self, microbatch: Microbatch) -> Captured:
        reader = Reader(self._loss_fn, self._outputs)
        return capture_opaque(self._model, microbatch, reader, self._seen, train=self._train)


def _decides(leaf: Leaf, captured: Captured) -> bool:
    """Whether sizes of a graph follow from values of this tensor, which may repeat."""
    whole = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    return whole and leaf.placeholder in captured.data.inputs
