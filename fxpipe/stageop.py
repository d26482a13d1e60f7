"""The modules that a program calls: one per stage and kind, and two for its gradients.

Signatures, as printed in a program (`rank` is the running rank, `mb` a bound microbatch):

    stage_F(rank, mb, received)                  -> (*sent, losses, kept)
    stage_B(rank, mb, kept, wanted)              -> (*returned, kept_w)
    stage_W(rank, mb, grads, kept, wanted)       -> grads, with this microbatch's added
    group_R(rank, grads)                         -> gradients summed over the ranks of the group
    gradients(rank, grads, reduced)              -> this rank's gradients, by name of parameter
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fxpipe.cut import Cut, Kind
from fxpipe.errors import BackendError

if TYPE_CHECKING:
    from fxpipe.bind import Bound
    from fxpipe.joint import StageGraphs

Grads = dict[str, Tensor]
Graphs = Callable[..., Any]
Variants = Sequence[Mapping[str, "StageGraphs"]]

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


def engine(graph: Graphs, name: str) -> Graphs:
    """What runs a graph of a stage: the graph itself, or what inductor compiles it to."""
    if name == "aten":
        return getattr(graph, "forward", graph)
    return partial(_unboxed, torch.compile(graph, dynamic=True))


def _unboxed(compiled: Graphs, state: object, feed: object, kept: Any, *rest: object) -> Any:
    """Call with a plain copy of a kept list, and empty the list: the compiler specialises on a
    subclass and writes no `.clear()` back before its end."""
    if not isinstance(kept, list):
        return compiled(state, feed, kept, *rest)
    plain = list(kept)
    kept.clear()
    return compiled(state, feed, plain, *rest)


class StageOp(nn.Module):
    """F, B or W of a stage, for every variant of it."""

    def __init__(
        self, stage: str, kind: Kind, variants: Variants, state: Mapping[str, Tensor], engine: str
    ) -> None:
        super().__init__()
        self.stage = stage
        self.kind = kind
        self._variants = variants
        self._state = state
        self._engine = engine
        self._calls: dict[int, Graphs] = {}
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
        graphs = self._variants[mb.variant][self.stage]
        state = tuple([self._state[name] for name in graphs.state])
        result = self._run(rank, mb, graphs, state, *args)
        rank.times[token] = (start, perf_counter())
        return result

    def _call(self, mb: "Bound", graphs: "StageGraphs") -> Graphs:
        call = self._calls.get(mb.variant)
        if call is None:
            call = self._calls[mb.variant] = engine(getattr(graphs, self.kind), self._engine)
        return call

    def _forward(
        self,
        rank: Running,
        mb: "Bound",
        graphs: "StageGraphs",
        state: tuple[Any, ...],
        received: Any,
    ) -> Any:
        feed = mb.feed(graphs)
        sent, losses, kept = self._call(mb, graphs)(state, feed, received)
        if graphs.others:
            first = len(losses) - len(graphs.others)
            values = zip(graphs.others, losses[first:], strict=True)
            rank.outputs.update(((mb.index, other), value.detach()) for other, value in values)
            losses = losses[:first]
        return (*sent, losses, rank.keep(self.stage, mb.index, kept, state, feed))

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
        returned, later = self._call(mb, graphs)(state, feed, kept, wanted, mb.weight)
        return (*returned, rank.keep(self.stage, mb.index, later, state, feed))

    def _weights(
        self,
        rank: Running,
        mb: "Bound",
        graphs: "StageGraphs",
        state: tuple[Any, ...],
        grads: Grads | None,
        kept: list[Any],
        wanted: Any,
    ) -> Grads:
        found = self._call(mb, graphs)(state, mb.feed(graphs), kept, wanted, mb.weight)
        return accumulate(grads or {}, dict(zip(graphs.trained, found, strict=True)))


def accumulate(grads: Grads, new: Grads) -> Grads:
    """`grads` with `new` added in place, as autograd accumulates.

    The first gradient of a parameter is copied: it may be a view of a value that others still read.
    """
    for name, grad in new.items():
        if name in grads:
            grads[name].add_(grad)
        else:
            grads[name] = grad.clone(memory_format=torch.contiguous_format)
    return grads


class GroupOp(nn.Module):
    """R of a group: its parameters' gradients, summed over its ranks in rank order.

    Which parameters take part is decided from the variants of the step, which every rank knows: one
    that had no microbatch contributes zeros, and one that no variant trains is in no rank's sum.
    """

    def __init__(
        self, group: str, cut: Cut, variants: Variants, state: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.stages = cut.groups[group]
        self.ranks = cut.ranks_of(self.stages)
        self._token = f"{group}.R"
        self._cut = cut
        self._variants = variants
        self._state = state

    def forward(self, rank: Running, grads: Sequence[Grads]) -> Grads:
        """Pack what there is by dtype, sum it, unpack it."""
        rank.now = self._token
        start = perf_counter()
        local = {name: self._local(name, grads) for name in self._names(rank.variants)}
        summed: Grads = {}
        for dtype in sorted({grad.dtype for grad in local.values()}, key=str):
            names = [name for name, grad in local.items() if grad.dtype is dtype]
            flat = torch.cat([local.pop(name).reshape(-1) for name in names])
            total = rank.reduce(self._token, flat, self.ranks)
            start_at = 0
            for name in names:
                like = self._state[name]
                summed[name] = total[start_at : start_at + like.numel()].view(like.shape)
                start_at += like.numel()
        rank.times[self._token] = (start, perf_counter())
        return summed

    def _names(self, variants: frozenset[int]) -> list[str]:
        owners = holders(self._cut, self._variants)
        trained: dict[str, None] = {}
        for stage in self.stages:
            for variant in sorted(variants):
                trained.update(dict.fromkeys(self._variants[variant][stage].trained))
        return [name for name in trained if owners[name] == self.stages]

    def _local(self, name: str, grads: Sequence[Grads]) -> Tensor:
        found = [stage[name] for stage in grads if name in stage]
        return total(found) if found else torch.zeros_like(self._state[name])


class GradientsOp(nn.Module):
    """The gradients of a rank: those of its groups, and the sums over its own stages."""

    def forward(self, rank: Running, grads: Sequence[Grads], reduced: Sequence[Grads]) -> Grads:
        """A parameter of a group comes from the group's sum alone."""
        result = {name: grad for group in reduced for name, grad in group.items()}
        own: dict[str, list[Tensor]] = {}
        for stage in grads:
            for name, grad in stage.items():
                if name not in result:
                    own.setdefault(name, []).append(grad)
        return {**{name: total(found) for name, found in own.items()}, **result}


def total(found: Sequence[Tensor]) -> Tensor:
    """The gradients of one parameter in several stages, summed into the first, in their order."""
    for grad in found[1:]:
        found[0].add_(grad)
    return found[0]


def holders(cut: Cut, variants: Variants) -> dict[str, tuple[str, ...]]:
    """Name of a trained parameter -> the stages that hold it in any variant, in their order.

    A stage that only reads it holds it too: its copy follows the others.
    """
    trained = {name for graphs in variants for stage in graphs.values() for name in stage.trained}
    found: dict[str, dict[str, None]] = {}
    for stage in cut.stage:
        for graphs in variants:
            for name in graphs[stage].state:
                if name in trained:
                    found.setdefault(name, {})[stage] = None
    return {name: tuple(stages) for name, stages in found.items()}
