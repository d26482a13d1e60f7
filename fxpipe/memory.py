"""What has been lowered of a model: the pipes of several schedules need not trace it again."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fxpipe.bind import mismatch, unfit
from fxpipe.dry import call_of
from fxpipe.inputs import Ask, Microbatch, flatten
from fxpipe.lower import Lowered, Seen, moved, restaged
from fxpipe.mode import Mode
from fxpipe.opaque import Prefix, kind_of_call
from fxpipe.passes.anchors import Known
from fxpipe.scheduler import Scheduler
from fxpipe.solving import read_by
from fxpipe.tracer import Tracer

SIZE = 64  # variants


@dataclass
class Memory:
    """What every pipe of a model knows.

    lowered: the last variants, with the mode that each was traced in, also for other schedules;
    regions: all that were found, so that they keep their names; tensors: the names of the model's;
    captures: how often it was traced; tracer: what traces it
    """

    lowered: list[tuple[Mode, Lowered]] = field(default_factory=list)
    regions: Known = field(default_factory=dict)
    tensors: frozenset[str] = frozenset()
    captures: int = 0
    tracer: Tracer | None = None

    def follow(self, tensors: frozenset[str]) -> None:
        """Forget everything if the model has other tensors than before."""
        if tensors != self.tensors:
            self.lowered, self.regions, self.tensors = [], {}, tensors

    def add(self, mode: Mode, lowered: Lowered, seen: Seen) -> None:
        """Remember a variant, and forget the one that was not used for longest."""
        others = [(m, known) for m, known in self.lowered if known is not lowered]
        self.lowered = [*others, (mode, lowered)][-SIZE:]
        self.regions = seen.also(lowered).names

    def rename(self, before: Mode, after: Mode) -> None:
        """One mode has turned out to be another."""
        self.lowered = [(after if mode == before else mode, low) for mode, low in self.lowered]

    def recall(
        self, mode: Mode, microbatch: Microbatch, scheduler: Scheduler, ranks: int, seen: Seen
    ) -> Lowered | None:
        """The variant that runs a microbatch, for a schedule; None if there is none."""
        same = [low for m, low in reversed(self.lowered) if m == mode]
        found = [low for low in same if fits(low, microbatch)]
        if any(low.captured.prefix for low in same) and not self._refused:  # it serves all values
            found = [low for low in found if not low.captured.values]
        found.sort(key=lambda low: bool(low.captured.values))
        for known in found:
            made = moved(known, scheduler, ranks, seen)
            if made is not None:
                self.lowered = [pair for pair in self.lowered if pair[1] is not known]
                return made
        return restaged(found[0], scheduler, ranks, seen) if found else None

    @property
    def _refused(self) -> bool:
        """Whether some microbatch can have a graph for its values, and no opaque stage."""
        return self.tracer is not None and self.tracer.refused


def fits(lowered: Lowered, microbatch: Microbatch) -> bool:
    """Whether a variant runs a microbatch."""
    captured = lowered.captured
    if mismatch(captured, microbatch) is not None:
        return False
    if unfit(captured, microbatch, lowered.parts.guards) is not None:
        return False
    return is_called_alike(captured.prefix, [tensor for _, tensor in flatten(microbatch)[0]])


def asked(microbatches: Sequence[Microbatch], known: Collection[Lowered]) -> list[Ask]:
    """Microbatches as they are looked up, by all that decides which of these variants fit."""
    held = {name for lowered in known for name in read_by(lowered.captured)}
    prefixes = [low.captured.prefix for low in known if low.captured.prefix is not None]
    asks = [Ask.of(microbatch, held) for microbatch in microbatches]
    if not any(prefix.flags for prefix in prefixes):
        return asks
    return [ask._replace(key=(ask.key, _calls(prefixes, ask))) for ask in asks]


def _calls(prefixes: Sequence[Prefix], ask: Ask) -> tuple[object, ...]:
    """What each prefix that takes a microbatch would call."""
    _, fixed, structure = flatten(ask.microbatch)
    return tuple(call_of(p, ask.tensors) for p in prefixes if p.rebuilt == (structure, fixed))


def is_called_alike(prefix: Prefix | None, leaves: Sequence[Tensor]) -> bool:
    """Whether flags that the model's own code reads lead to the call that was traced."""
    call = None if prefix is None else call_of(prefix, leaves)
    return call is None or prefix is None or call == kind_of_call(prefix.form, prefix.sources)


def replaces(new: Lowered, known: Iterable[Lowered]) -> bool:
    """Whether a variant is the first that serves all values, beside some that serve theirs. A later
    one stands beside those of microbatches that can have no opaque stage."""
    others = [lowered.captured for lowered in known]
    first = new.captured.prefix is not None and all(c.prefix is None for c in others)
    return first and any(c.values for c in others)
