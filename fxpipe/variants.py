"""The variants of a model: one captured graph for each way in which its sizes specialise.

Most models are one symbolic graph. Where a model's code unrolls over a size (a Python loop over
images), each value of that size is a graph of its own, traced when the first microbatch with it
comes. All of them share one cut, so that one table and one program run any mixture.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.bind import Sizes, mismatch, unfit
from fxpipe.capture import Captured, capture
from fxpipe.costs import Costs
from fxpipe.device import Device
from fxpipe.errors import BatchError, CaptureError
from fxpipe.inputs import Microbatch, contents, flatten
from fxpipe.joint import StageGraphs
from fxpipe.lower import Lowered, lower, moved, same_holders, same_shape
from fxpipe.mode import Mode, mode_of, refuse_autocast
from fxpipe.roofline import costs_of
from fxpipe.scheduler import Scheduler
from fxpipe.torch_internals import has_hooks, watching_hooks
from fxpipe.wanted import LossFn, Outputs

LIMIT = 16
REMEMBERED = 4096  # sets of shapes and values


class Fit(NamedTuple):
    """A microbatch's variant, the sizes that follow from its shapes, and its tensors."""

    number: int
    sizes: Sizes
    tensors: list[Tensor]


class ForwardOnly(NamedTuple):
    """Variants of a forward without a backward: what it returns, and whose stages it has."""

    outputs: Outputs
    like: Sequence[Lowered]


class Variants:
    """Lowered graphs of one model, made as microbatches ask for them."""

    def __init__(
        self,
        model: nn.Module,
        scheduler: Scheduler,
        ranks: int,
        given: Mapping[str, Sequence[str]] | None,
        loss_fn: LossFn | None,
        known: list[tuple[Mode, Lowered]] | None = None,
        forward: ForwardOnly | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self.generation = 0
        self.all: list[Lowered] = []
        self.graphs: list[Mapping[str, StageGraphs]] = []
        self.state: dict[str, Tensor] = {}
        self._model = model
        self._given = given
        self._forward = forward
        self._loss_fn = loss_fn
        # Everything lowered so far, with the mode that it was traced in: also by other schedules.
        self._known: list[tuple[Mode, Lowered]] = [] if known is None else known
        self._mode: Mode = ()
        self._fits: dict[object, tuple[int, Sizes]] = {}

    def rescheduled(self, scheduler: Scheduler, ranks: int) -> "Variants":
        """The same model for another schedule; what is traced already is not traced again."""
        return Variants(self._model, scheduler, ranks, self._given, self._loss_fn, self._known)

    def forward_only(self, scheduler: Scheduler, forward: ForwardOnly) -> "Variants":
        """The same model for evaluation."""
        given, loss_fn = self._given, self._loss_fn
        return Variants(self._model, scheduler, self.ranks, given, loss_fn, None, forward)

    def __getitem__(self, number: int) -> Lowered:
        return self.all[number]

    @property
    def first(self) -> Lowered:
        """The variant of the example. Raises BatchError if there was none yet."""
        if not self.all:
            raise BatchError(
                "nothing is traced yet: pass example= to fxpipe.compile, or call step() first"
            )
        return self.all[0]

    @property
    def captures(self) -> int:
        """How many graphs were traced, also for other schedules and other modes."""
        return len({id(lowered.captured) for _, lowered in self._known})

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the model's loss."""
        return self.first.captured.loss_dtype

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((tensor.device for _, tensor in self._tensors()), torch.device("cpu"))

    @property
    def canonical(self) -> dict[str, str]:
        """Every name of a parameter or buffer -> the first name of the same tensor."""
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor), name) for name, tensor in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters(remove_duplicate=False)
        yield from self._model.named_buffers(remove_duplicate=False)

    def held(self, ranks: Collection[int]) -> set[str]:
        """Names of the tensors of these ranks; what no stage reads stays on the first rank."""
        stages = self.first.cut.stages
        read = {
            stage.name: {name for graphs in self.graphs for name in graphs[stage.name].state}
            for stage in stages
        }
        here = [read[stage.name] for stage in stages if stage.rank is None or stage.rank in ranks]
        if 0 in ranks:
            here.append(set(self.canonical.values()).difference(*read.values()))
        return set().union(*here)

    def refresh(self) -> None:
        """Look up the model's tensors again: they may have been replaced since the last step."""
        self.state.update(self._tensors())

    def fit(self, microbatch: Microbatch, what: str) -> Fit:
        """The variant that runs a microbatch; traced now if there is none.

        Raises BatchError, which begins with `what`, when it cannot be run beside the others.
        """
        tensors, fixed, structure = flatten(microbatch)
        plain = [tensor for _, tensor in tensors]
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in plain)
        held = {name for known in self.all for name in known.captured.values}
        values = tuple((name, contents(tensor)) for name, tensor in tensors if name in held)
        key = structure, shapes, tuple((name, repr(value)) for name, value in fixed), values
        if key not in self._fits:
            if len(self._fits) == REMEMBERED:
                self._fits.clear()
            number = self._number(microbatch, what)
            self._fits[key] = number, Sizes(self.all[number].captured, plain)
        return Fit(*self._fits[key], plain)

    def _number(self, microbatch: Microbatch, what: str) -> int:
        if not self.all:
            return self._add(microbatch, what)
        problem = mismatch(self.first.captured, microbatch)
        if problem:
            raise BatchError(f"{what} does not fit the example: {problem}")
        fits = (i for i, v in enumerate(self.all) if _fits(v, microbatch))
        number = next(fits, None)
        return self._add(microbatch, what) if number is None else number

    def reckon(self, device: Device) -> Costs:
        """What ops take and keep on a device, for the largest of the microbatches known so far."""
        steps = [(self.all[number], sizes.symbols) for number, sizes in self._fits.values()]
        return costs_of(steps, device).largest()

    def follow_mode(self) -> None:
        """Start anew if what graphs were traced with has changed: train(), requires_grad, dtype,
        plain attributes of modules."""
        refuse_autocast()
        mode = mode_of(self._model)
        if mode != self._mode:
            self._mode = mode
            self.generation += 1
            self.all, self.graphs, self.state = [], [], {}
            self._fits.clear()
            self.refresh()

    def _settle_mode(self) -> None:
        """Tracing may set attributes (a cached length): the mode is what it leaves behind."""
        before, self._mode = self._mode, mode_of(self._model)
        self._known[:] = [(self._mode if m == before else m, known) for m, known in self._known]

    def _add(self, microbatch: Microbatch, what: str) -> int:
        if len(self.all) == LIMIT:
            reason = unfit(self.all[-1].captured, microbatch, self.all[-1].parts.guards)
            raise BatchError(
                f"{what} would be variant {LIMIT + 1} of this model: {reason}. The model's code "
                "unrolls over that value; pad it to a few sizes"
            )
        lowered = self._lowered(microbatch)
        if self.all:
            difference = same_shape(self.first.cut, lowered.cut)
            difference = difference or same_holders(self.first, lowered)
            if difference:
                raise BatchError(f"{what} takes another path through the model: {difference}")
        self.all.append(lowered)
        self.graphs.append(lowered.graphs)
        constants = lowered.captured.constants
        self.state.update((name, tensor.to(self.device)) for name, tensor in constants.items())
        return len(self.all) - 1

    def _lowered(self, microbatch: Microbatch) -> Lowered:
        """A graph that is known already and fits, or one that is made now."""
        captured = None
        spans = self.all[0].staging.spans if self.all else {}
        for mode, known in self._known:
            if mode != self._mode or mismatch(known.captured, microbatch):
                continue
            if _fits(known, microbatch):
                captured = known.captured
                same = not spans or known.staging.spans == spans
                found = moved(known, self.scheduler, self.ranks) if same else None
                if found is not None:
                    return found
        made = lower(
            captured or self._captured(microbatch),
            microbatch,
            scheduler=self.scheduler,
            ranks=self.ranks,
            given=self._given,
            spans=spans,
            like=() if self._forward is None else self._forward.like,
        )
        self._known.append((self._mode, made))
        return made

    def _captured(self, microbatch: Microbatch) -> Captured:
        if self._forward is not None:
            outputs = self._forward.outputs
            found = capture(self._model, microbatch, self._loss_fn, outputs=outputs, train=False)
            self._settle_mode()
            return found
        seen = [name for name, tensor in self._tensors() if has_hooks(tensor)]
        with watching_hooks(seen):
            captured = capture(self._model, microbatch, self._loss_fn)
        self._settle_mode()
        if seen:
            raise CaptureError(
                f"{seen[0]} has a hook on its gradient, which would never run. Scale or clip "
                "gradients after step(), or write the change of a gradient as an operator with "
                "torch.library.custom_op and register_autograd"
            )
        return captured


def _fits(lowered: Lowered, microbatch: Microbatch) -> bool:
    return unfit(lowered.captured, microbatch, lowered.parts.guards) is None
