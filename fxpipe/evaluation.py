"""`pipe.evaluate`: a forward without a backward, on the stages on which the pipeline trains.

Its graphs are traced under no_grad, with the model's outputs as outputs of the graph. Each stage
runs on the ranks that hold its parameters in training, so that nothing has to be moved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fxpipe.backends import Backend
from fxpipe.bind import Bound
from fxpipe.cut import Cut
from fxpipe.errors import BackendError, BatchError, FxpipeError
from fxpipe.inputs import split_batch
from fxpipe.lower import Like
from fxpipe.scheduler import Forward
from fxpipe.steps import Steps, returned, weighted
from fxpipe.variants import ForwardOnly, Variants
from fxpipe.wanted import Outputs

_KEPT = 4  # how many choices of outputs stay traced


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` returns.

    losses: [microbatches], on every rank; None where the microbatches have none, and no_loss says
    why. weights: [microbatches]. outputs: of each microbatch what was asked for, in the structure
    in which the model returns it; None on a rank that gets nothing.
    """

    losses: Tensor | None
    weights: Tensor
    outputs: tuple[Any, ...] | None
    no_loss: str | None = None

    @property
    def loss(self) -> Tensor:
        """The sum of weight times loss, 0-dim. Raises FxpipeError if there is no loss."""
        if self.losses is None:
            raise FxpipeError(f"there is no loss: {self.no_loss}")
        return weighted(self.losses, self.weights)


class Evaluations:
    """Runs evaluations, and keeps what is traced for them, by what is returned."""

    def __init__(self, training: Variants, backend: Backend, engine: str) -> None:
        self._training = training
        self._backend = backend
        self._engine = engine
        self._kept: dict[Outputs, tuple[Cut | None, Variants, Steps]] = {}

    def run(
        self,
        batch: Any,
        microbatches: int | None,
        outputs: bool | str | Sequence[str] | Callable[[Any], Any],
        to: int | None,
        weights: Sequence[float] | Tensor | None,
    ) -> Evaluation:
        """One evaluation, as `Pipe.evaluate` describes it."""
        ranks = self._backend.ranks
        if self._backend.costs is not None:
            raise BackendError(
                "backend 'emulated' computes nothing, so there is nothing to evaluate; evaluate "
                "with pipe.reschedule(..., backend='local')"
            )
        if to is not None and not 0 <= to < ranks:
            raise BatchError(f"to={to} is none of the {ranks} ranks, 0 to {ranks - 1}")
        wanted = _wanted(outputs)
        parts = split_batch(batch, microbatches)
        step, bound, factors = self._steps(wanted).advance(parts, weights, to=to)
        no_loss = _no_loss(bound)
        losses = None if no_loss else step.losses
        here = to is None or to in self._backend.mine
        made = tuple(returned(step, bound)) if wanted and here else None
        return Evaluation(losses, factors.cpu(), made, no_loss)

    def _steps(self, outputs: Outputs) -> Steps:
        """What runs a choice of outputs; made anew where the pipeline trains on other stages."""
        training = self._training
        cut = training.union.cut if training.all else None
        found = self._kept.pop(outputs, None)
        if found is None or found[0] != cut:
            like = Like(tuple(training.all.values()), cut) if cut is not None else None
            forward = Forward(training.scheduler)
            variants = training.forward_only(forward, ForwardOnly(outputs, like))
            found = cut, variants, Steps(variants, self._backend, None, self._engine)
        self._kept[outputs] = found
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return found[2]


def _wanted(outputs: bool | str | Sequence[str] | Callable[[Any], Any]) -> Outputs:
    if isinstance(outputs, bool) or callable(outputs):
        return outputs
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if not all(isinstance(name, str) for name in names):
        raise BatchError(
            f"outputs={outputs!r}; pass True, names of the model's outputs, or a function of its "
            "output"
        )
    return names


def _no_loss(bound: Sequence[Bound]) -> str | None:
    """Why there is no loss, if no microbatch has one. Raises BatchError if only some have."""
    reasons = {mb.index: mb.captured.returned.no_loss for mb in bound}
    missing = [index for index, reason in reasons.items() if reason]
    if missing and len(missing) < len(bound):
        raise BatchError(
            f"microbatch {missing[0]} has no loss, others have one ({reasons[missing[0]]}); "
            "evaluate them apart"
        )
    return reasons[missing[0]] if missing else None
