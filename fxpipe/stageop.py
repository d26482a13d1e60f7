"""The modules that a program calls for its stages, one for each stage and kind.

Signatures, as printed in a program (`rank` is the running rank, `mb` a bound microbatch):

    stage_F(rank, mb, received)                  -> (*sent, losses, kept)
    stage_B(rank, mb, kept, wanted)              -> (*returned, kept_w)
    stage_W(rank, mb, grads, kept, wanted)       -> grads, with this microbatch's added
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from fxpipe.accumulation import Grads, accumulate, owned
from fxpipe.copying import Ends
from fxpipe.cut import Cut, Kind
from fxpipe.errors import BackendError
from fxpipe.passes.bindings import bindings

if TYPE_CHECKING:
    from fxpipe.bind import Bound
    from fxpipe.joint import StageGraphs

Graphs = Callable[..., Any]
Variants = Sequence[Mapping[str, "StageGraphs"]]
Places = tuple[int | None, ...] | None

ENGINES = ("aten", "inductor")


def check_engine(name: str) -> None:
    """Raises BackendError on a name that is no engine."""
    if name not in ENGINES:
        raise BackendError(f"unknown engine {name!r}; there are {', '.join(map(repr, ENGINES))}")


class Running(Protocol):
    """What these modules ask of the rank that runs them."""

    now: str
    times: dict[str, tuple[float, float]]
    variants: frozenset[int]
    outputs: dict[tuple[int, int], Tensor]

    def keep(
        self, stage: str, mb: int, kept: list[Any], state: Sequence[Any], feed: Sequence[Any]
    ) -> list[Any]:
        """`kept` as a list that is counted while it lives; state and feed are not its own."""
        ...

    def reduce(self, name: str, flat: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The sum over ranks, in their order."""
        ...

    def buffer(self, mb: int, name: str) -> Tensor:
        """What a buffer that forward changes is when a microbatch's forward begins."""
        ...

    def note(self, stage: str, mb: "Bound", stats: Sequence[Tensor]) -> None:
        """Take what F has made for updates of buffers."""
        ...


def engine(graph: Graphs, name: str) -> Graphs:
    """What runs a graph of a stage: its operators, one by one, or what inductor compiles it to. An
    opaque stage is no graph."""
    if name == "inductor":
        return partial(_unboxed, torch.compile(graph, dynamic=True))
    if not isinstance(graph, fx.GraphModule):
        return getattr(graph, "forward", graph)
    if graph not in _BOUND:
        _BOUND[graph] = bindings(graph)
    return _BOUND[graph].forward


_BOUND: WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = WeakKeyDictionary()


def _unboxed(compiled: Graphs, state: object, feed: object, kept: Any, *rest: object) -> Any:
    """Call with a plain copy of a kept list, and empty the list: the compiler specialises on a
    subclass and writes no `.clear()` back before its end."""
    if not isinstance(kept, list):
        return compiled(state, feed, kept, *rest)
    plain = list(kept)
    kept.clear()
    return compiled(state, feed, plain, *rest)


class Prepared(NamedTuple):
    """What an op calls for a variant.

    taken: the bundles that the graph takes, among those of the table; given: those that the table
    wants, among what the graph gives; own: parameters whose gradients nobody else reads.
    """

    run: Graphs
    taken: Places
    given: Places
    own: frozenset[str]


class StageOp(nn.Module):
    """F, B or W of a stage, for every variant of it.

    The table is for all variants together. One that has not the stage, or not the kind, computes
    nothing here, and where it has no seam its bundle is empty. Without a B of its own, W does its
    whole backward, and B hands on what that reads.
    """

    def __init__(
        self,
        stage: str,
        kind: Kind,
        cut: Cut,
        variants: Variants,
        state: Mapping[str, Tensor],
        engine: str,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.kind = kind
        self.ends = ends_of(cut, stage)
        self._variants = variants
        self._state = state
        self._engine = engine
        self._prepared: dict[int, Prepared] = {}
        runs: dict[Kind, Callable[..., Any]] = {
            Kind.F: self._forward,
            Kind.B: self._inputs,
            Kind.W: self._weights,
        }
        self._run = runs[kind]

    def __call__(self, rank: Running, mb: "Bound", *args: Any) -> Any:
        """Run the graph of the microbatch's variant, and note when. (Not `forward`: a module's own
        call looks for hooks first, and that takes longer than all of this.)"""
        rank.now = token = f"{self.stage}.{self.kind}{mb.index}"
        start = perf_counter()
        graphs = self._variants[mb.variant].get(self.stage)
        if graphs is None or self.kind not in graphs.kinds:
            result = self._skip(graphs, *args)
        else:
            state = tuple([self._state[name] for name in graphs.state])
            result = self._run(rank, mb, graphs, state, *args)
        rank.times[token] = (start, perf_counter())
        return result

    def _skip(self, graphs: "StageGraphs | None", *args: Any) -> Any:
        """What an op gives that its variant has not."""
        match self.kind:
            case Kind.F:
                return (*[()] * len(self.ends.sent), (), [])
            case Kind.B:
                later = Later(*args) if graphs is not None and Kind.W in graphs.kinds else []
                return (*[()] * len(self.ends.returned), later)
            case _:
                return args[0] or {}

    def _ready(self, mb: "Bound", graphs: "StageGraphs") -> Prepared:
        """What this op calls for the microbatch's variant."""
        found = self._prepared.get(mb.variant)
        if found is None:
            for number in [n for n in self._prepared if not self._variants[n]]:
                del self._prepared[number]
            found = self._prepared[mb.variant] = self._prepare(graphs)
        return found

    def _prepare(self, graphs: "StageGraphs") -> Prepared:
        mine, its = self.ends, graphs.ends
        match self.kind:
            case Kind.F:
                taken = places(its.received, mine.received)
                given = places(mine.sent, its.sent)
            case Kind.B:
                taken = places(its.wanted, mine.wanted)
                given = places(mine.returned, its.returned)
            case _:
                taken = None if Kind.B in graphs.kinds else places(its.wanted, mine.wanted)
                given = None
        call = engine(getattr(graphs, self.kind), self._engine)
        return Prepared(call, taken, given, self._own(graphs))

    def _forward(
        self,
        rank: Running,
        mb: "Bound",
        graphs: "StageGraphs",
        state: tuple[Any, ...],
        received: Any,
    ) -> Any:
        feed = mb.feed(graphs)
        if graphs.moving:
            moving = {place: rank.buffer(mb.index, name) for place, name in graphs.moving}
            state = tuple([moving.get(place, value) for place, value in enumerate(state)])
        run, taken, given, _ = self._ready(mb, graphs)
        sent, losses, kept, *stats = run(state, feed, placed(received, taken))
        if stats:
            rank.note(self.stage, mb, stats[0])
        if graphs.others:
            first = len(losses) - len(graphs.others)
            values = zip(graphs.others, losses[first:], strict=True)
            rank.outputs.update(((mb.index, other), value.detach()) for other, value in values)
            losses = losses[:first]
        kept = rank.keep(self.stage, mb.index, kept, state, feed)
        return (*placed(sent, given), losses, kept)

    def _inputs(
        self,
        rank: Running,
        mb: "Bound",
        graphs: "StageGraphs",
        state: tuple[Any, ...],
        kept: list[Any],
        wanted: Any,
    ) -> Any:
        feed = mb.feed(graphs)
        run, taken, given, _ = self._ready(mb, graphs)
        wanted = placed(wanted, taken)
        returned, later = run(state, feed, kept, wanted, mb.weight)
        later = rank.keep(self.stage, mb.index, later, state, feed)
        return (*placed(returned, given), later)

    def _weights(
        self,
        rank: Running,
        mb: "Bound",
        graphs: "StageGraphs",
        state: tuple[Any, ...],
        grads: Grads | None,
        kept: "list[Any] | Later",
        wanted: Any,
    ) -> Grads:
        if isinstance(kept, Later):
            kept, wanted = kept
        run, taken, _, own = self._ready(mb, graphs)
        found = run(state, mb.feed(graphs), kept, placed(wanted, taken), mb.weight)
        new = dict(zip(graphs.trained, found, strict=True))
        return accumulate(grads or {}, new, self._state, own)

    def _own(self, graphs: "StageGraphs") -> frozenset[str]:
        """The parameters whose gradients W leaves in memory of their own. A compiler may give two
        equal results as one."""
        if self.kind is not Kind.W or self._engine != "aten":
            return frozenset()
        alone = owned(graphs.W)
        return frozenset(name for name, own in zip(graphs.trained, alone, strict=False) if own)


class Later(NamedTuple):
    """What a B that its variant has not hands on to W: all that it was called with."""

    kept: list[Any]
    wanted: tuple[tuple[Tensor, ...], ...]


def ends_of(cut: Cut, stage: str) -> Ends:
    """The far ends of a stage's seams, in the order in which a program bundles values."""
    into, out = cut.seams_into[stage], cut.seams_from[stage]
    return Ends(
        received=tuple(seam.source for seam in into),
        sent=tuple(seam.target for seam in out),
        returned=tuple(seam.source for seam in into if seam.grads),
        wanted=tuple(seam.target for seam in out if seam.grads),
    )


def read_by(stage: str, variants: Variants) -> list[str]:
    """The tensors of the model that a stage reads in any variant."""
    return [name for graphs in variants if stage in graphs for name in graphs[stage].state]


def places(wanted: tuple[str, ...], among: tuple[str, ...]) -> Places:
    """Where each is among others, None for one that is not there; just None if all are alike."""
    if wanted == among:
        return None
    return tuple(among.index(name) if name in among else None for name in wanted)


def placed(bundles: Sequence[Any], at: Places) -> Sequence[Any]:
    """The bundles at these places; where there is none, nothing crosses."""
    return bundles if at is None else [() if i is None else bundles[i] for i in at]
