"""The variants of a model: one captured graph for each path that microbatches take through it.

Most models are one symbolic graph. Where a model's code unrolls over a size (a Python loop over
images), each value of that size is a graph of its own; so is a microbatch without images, or with
other arguments. Each is traced when the first microbatch of its kind comes. All of them share one
cut (`fxpipe.union`), so that one table and one program run any mixture.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.bind import Fit, Sizes, mismatch, other_float, with_data
from fxpipe.capture import Captured
from fxpipe.copies import copies_of
from fxpipe.costs import Costs
from fxpipe.device import Device
from fxpipe.errors import BatchError, CaptureError, FxpipeError
from fxpipe.holding import Holding
from fxpipe.inputs import Microbatch, refuse_gradients
from fxpipe.joint import StageGraphs
from fxpipe.lower import Like, Lowered, Seen, lower, moved, restaged
from fxpipe.memory import Memory, asked, fits, replaces
from fxpipe.mode import Mode, Watch, refuse_autocast
from fxpipe.roofline import costs_of
from fxpipe.scheduler import Scheduler
from fxpipe.state import canonical_names, named_state
from fxpipe.tracer import Tracer
from fxpipe.union import Union, union
from fxpipe.wanted import LossFn, Outputs

LIMIT = 32  # variants that are kept; a step that needs more has them all until it ends
_SHAPES = 1024  # sets of shapes whose variant is known


class ForwardOnly(NamedTuple):
    """Variants of a forward without a backward: what it returns, and whose stages it has."""

    outputs: Outputs
    like: Like | None


class Variants:
    """Lowered graphs of one model, made as microbatches ask for them.

    all: by number; graphs: those of each number, none where it was let go; generation: changes with
    what programs are made of; dropped: how many were let go; holding: what each rank holds
    """

    def __init__(
        self,
        model: nn.Module,
        scheduler: Scheduler,
        ranks: int,
        given: Mapping[str, Sequence[str]] | None,
        loss_fn: LossFn | None,
        memory: Memory | None = None,
        forward: ForwardOnly | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        self.generation = 0
        self.dropped = 0
        self.all: dict[int, Lowered] = {}
        self.graphs: list[Mapping[str, StageGraphs]] = []
        self.state: dict[str, Tensor] = {}
        self._model = model
        self._watch = Watch(model, loss_fn)
        self._given = given
        self._forward = forward
        self._loss_fn = loss_fn
        self._memory = memory or Memory()
        outputs = None if forward is None else forward.outputs
        self._tracer = self._memory.tracer or Tracer(model, loss_fn, outputs)
        self._memory.tracer = self._tracer
        self._seen = Seen()
        self._union: Union | None = None
        self._names: frozenset[str] = frozenset()
        self.holding = Holding(copies_of(model), ranks, lambda: set(self.canonical.values()))
        self._mode: Mode = ()
        self._fits: dict[object, tuple[int, Sizes]] = {}

    def rescheduled(self, scheduler: Scheduler, ranks: int) -> "Variants":
        """The same model for another schedule; what is traced already is not traced again."""
        return Variants(self._model, scheduler, ranks, self._given, self._loss_fn, self._memory)

    def forward_only(self, scheduler: Scheduler, forward: ForwardOnly) -> "Variants":
        """The same model for evaluation."""
        how = scheduler, self.ranks, self._given, self._loss_fn
        return Variants(self._model, *how, forward=forward)

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
        return self._memory.captures

    @property
    def union(self) -> Union:
        """What all variants are together. Raises BatchError if there was none yet."""
        return self.holding.whole(self._bare)

    @property
    def _bare(self) -> Union:
        return self._union or union(None, self.first)

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the model's loss."""
        return self.first.captured.loss_dtype

    @property
    def purpose(self) -> tuple[object, ...]:
        """What microbatches are for: gradients, or these outputs; and the model's mode."""
        return "gradients" if self._forward is None else self._forward.outputs, self._model.training

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((tensor.device for _, tensor in named_state(self._model)), torch.device("cpu"))

    @property
    def canonical(self) -> dict[str, str]:
        """Every name of a parameter or buffer -> the first name of the same tensor."""
        return canonical_names(self._model)

    def held(self, ranks: Collection[int]) -> frozenset[str]:
        """Names of the tensors of these ranks; what no stage reads stays on the first rank."""
        return self.union.held(ranks, set(self.canonical.values()))

    def hand_out(self, ranks: Collection[int]) -> None:
        """Note which parameters each rank has from now on: its optimizer will have these."""
        self.generation += self.holding.hand_out(self._bare, ranks, self.state)

    def refresh(self) -> None:
        """Look up the model's tensors again: they may have been replaced since the last step."""
        self.state.update(named_state(self._model))

    def fit(self, microbatch: Microbatch, what: str) -> Fit:
        """The variant that runs a microbatch; traced now if there is none.

        Raises BatchError, which begins with `what`, when it cannot be run beside the others.
        """
        return self.fit_all([microbatch], [what])[0]

    def fit_all(self, microbatches: Sequence[Microbatch], what: Sequence[str]) -> list[Fit]:
        """The variant of each; of new ones, that with the most arguments is traced first, since it
        shows the most regions. Variants that were not used for long are let go."""
        asks = asked(microbatches, self.all.values())
        if self._forward is None:
            refuse_gradients(asks, what)
        while missing := [i for i, ask in enumerate(asks) if ask.key not in self._fits]:
            for i in sorted(missing, key=lambda i: -len(asks[i].tensors)):
                number = self._number(microbatches[i], what[i])
                (ask,) = asked([microbatches[i]], self.all.values())  # by all that is known now
                self._fits[ask.key] = number, Sizes(self.all[number].captured, ask.tensors)
            asks = asked(microbatches, self.all.values())
        for key in {ask.key for ask in asks}:
            self._fits[key] = self._fits.pop(key)  # the last one used is the last one dropped
        fits, where = [], (self.device, self.state)
        for ask, name in zip(asks, what, strict=True):
            number, sizes = self._fits[ask.key]
            sizes = with_data(self.all[number], sizes, ask.tensors, where, name)
            fits.append(Fit(number, sizes, ask.tensors))
        self._let_go({fit.number for fit in fits})
        return fits

    def _let_go(self, needed: Collection[int]) -> None:
        """Drop the variants, and the sets of shapes, that were not used for longest."""
        used = dict.fromkeys(number for number, _ in reversed(self._fits.values()))
        order = [*used, *(number for number in self.all if number not in used)]
        for number in order[:0:-1]:
            if len(self.all) > LIMIT and number not in needed and number:
                del self.all[number]
                self.graphs[number] = {}
                self.dropped += 1
        kept = [(key, fit) for key, fit in self._fits.items() if fit[0] in self.all]
        self._fits = dict(kept[-_SHAPES:])

    def _number(self, microbatch: Microbatch, what: str) -> int:
        """The variant of a microbatch that no shapes before had."""
        for number, variant in self.all.items():
            if fits(variant, microbatch):
                return number
        leaves = [leaf for known in self.all.values() for leaf in known.captured.leaves]
        problem = other_float(leaves, microbatch)
        if problem:
            raise BatchError(f"{what} does not fit the example: {problem}")
        try:
            return self._add(self._lowered(microbatch))
        except FxpipeError as error:
            if not self.all:
                raise
            problem = mismatch(self.first.captured, microbatch)
            if problem and isinstance(error, CaptureError):
                raise BatchError(
                    f"{what} does not fit the example: {problem}. As a path of its own through "
                    f"the model it fails: {error}"
                ) from error
            raise type(error)(f"{what}: {error}") from error

    def reckon(self, device: Device) -> Costs:
        """What ops take and keep on a device, for the largest of the microbatches known so far."""
        steps = [(self.all[number], sizes.symbols) for number, sizes in self._fits.values()]
        return costs_of(steps, device).largest()

    def follow_mode(self) -> None:
        """Start anew if what graphs were traced with has changed; see `mode.Watch`."""
        refuse_autocast()
        mode = self._watch.mode()
        if mode != self._mode:
            self._mode = mode
            self._tracer.follow(mode)
            names = frozenset(name for name, _ in named_state(self._model))
            self._memory.follow(names)
            self._restart(self._seen if names == self._names else Seen())
            self._names = names

    def _restart(self, seen: Seen) -> None:
        self.generation += 1
        self.all, self.graphs, self.state = {}, [], {}
        self._fits, self._union, self._seen = {}, None, seen
        self.refresh()

    def _settle_mode(self) -> None:
        """Tracing may set attributes (a cached length): the mode is what it leaves behind."""
        before, self._mode = self._mode, self._watch.mode()
        self._tracer.mode = self._mode
        self._memory.rename(before, self._mode)

    def _add(self, lowered: Lowered) -> int:
        """One more variant. Where it brings regions, the others may have to make room for them."""
        if replaces(lowered, self.all.values()):
            self._restart(Seen())  # it serves all values, from other stages than those had
        number, seen = len(self.graphs), self._seen.also(lowered)
        both = {number: lowered}
        found = self._union
        if self.all and seen.roles != self._seen.roles:
            for other, variant in self.all.items():
                how = variant, self.scheduler, self.ranks, seen
                both[other] = moved(*how) or restaged(*how)
                seen = seen.also(both[other])
            found = None
        for other in sorted(both):
            found = union(found, both[other])
        assert found is not None
        self._commit(both, seen, found)
        constants = lowered.captured.constants
        self.state.update((name, tensor.to(self.device)) for name, tensor in constants.items())
        return number

    def _commit(self, changed: Mapping[int, Lowered], seen: Seen, found: Union) -> None:
        """Take over what has been made without an error."""
        if len(changed) > 1:
            self._fits.clear()  # sizes of seams that may be others now
        self.graphs += [{}] * (max(changed) + 1 - len(self.graphs))
        self.all |= changed
        for number, lowered in changed.items():
            self.graphs[number] = lowered.graphs
        old = self._union
        self.generation += old is None or old.cut is not found.cut or old.owners != found.owners
        self._seen, self._union = seen, found

    def _lowered(self, microbatch: Microbatch) -> Lowered:
        """A graph that is known already and fits, or one that is made now."""
        seen = replace(self._seen, names=self._memory.regions)
        found = self._memory.recall(self._mode, microbatch, self.scheduler, self.ranks, seen)
        if found is None:
            self._memory.captures += 1
            self._tracer.in_order = self.ranks == 1 or self.scheduler.in_order
            found = self._tracer.lowered(microbatch, partial(self._lower, microbatch, seen))
        self._memory.add(self._mode, found, seen)
        return found

    def _lower(self, microbatch: Microbatch, seen: Seen, captured: Captured) -> Lowered:
        self._settle_mode()
        return lower(
            captured,
            microbatch,
            scheduler=self.scheduler,
            ranks=self.ranks,
            given=self._given,
            seen=seen,
            like=None if self._forward is None else self._forward.like,
        )
