"""What the variants of a model are together: one cut for all of them, so that one table runs any
mixture of microbatches.

    union(Union | None, Lowered) -> Union

A stage, a kind of op, a seam or a gradient is in the union if any variant has it; an op that the
variant of a microbatch has not does nothing (`fxpipe.stageop`). A parameter that two variants read
in different stages is shared by these.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from fxpipe.cut import Cut, Kind, Region, Role, Stage
from fxpipe.errors import BatchError
from fxpipe.lower import Lowered, holders, shared


@dataclass(frozen=True)
class Union:
    """cut: of all variants; reads: stage -> the tensors that it reads in any of them; trained: the
    parameters that get a gradient in any of them."""

    cut: Cut
    reads: Mapping[str, tuple[str, ...]]
    trained: frozenset[str]

    @cached_property
    def owners(self) -> dict[str, tuple[str, ...]]:
        """Name of a trained parameter -> the stages that hold it, in their order."""
        return holders({stage: self.reads[stage] for stage in self.cut.stage}, self.trained)

    def held(self, ranks: Collection[int], every: Set[str]) -> frozenset[str]:
        """Which of the model's tensors these ranks hold; what no stage reads is on the first."""
        stages = [s.name for s in self.cut.stages if s.rank is None or s.rank in ranks]
        here = frozenset[str]().union(*(self.reads[name] for name in stages))
        return here.union(set(every).difference(*self.reads.values()) if 0 in ranks else ())

    def keeping(self, handed: Sequence[Set[str]]) -> "Union":
        """With the parameters that ranks have given out: where others still train one, its
        gradient goes to every rank that has, or its copy would fall behind its optimizer's."""
        reads = dict(self.reads)
        for rank, names in enumerate(handed):
            own = next((stage.name for stage in self.cut.stages if stage.rank == rank), None)
            more = (names & self.trained) - self.held([rank], set())
            if more and own is not None:
                reads[own] = (*reads[own], *sorted(more))
        if reads == self.reads:
            return self
        found = Union(self.cut, reads, self.trained)
        return replace(found, cut=replace(self.cut, shared=shared(found.owners, found.places)))

    @property
    def places(self) -> dict[str, int | None]:
        """Stage -> its rank."""
        return {name: stage.rank for name, stage in self.cut.stage.items()}


def union(before: Union | None, lowered: Lowered) -> Union:
    """What it was before, and one more variant. The same cut where that adds nothing to it.

    Raises BatchError if the variants' stages stand in opposite orders.
    """
    reads = {name: tuple(dict.fromkeys(x.state)) for name, x in lowered.graphs.items()}
    trained = frozenset(name for graphs in lowered.graphs.values() for name in graphs.trained)
    if before is None:
        return Union(lowered.cut, reads, trained)
    for name, names in before.reads.items():
        reads[name] = tuple(dict.fromkeys((*names, *reads.get(name, ()))))
    trained |= before.trained
    cut = _united(before.cut, lowered.cut)
    found = Union(cut, reads, trained)
    cut = replace(cut, shared=shared(found.owners, found.places))
    if cut == before.cut:
        return Union(before.cut, reads, trained)
    return Union(_weighed(cut, lowered.cut), reads, trained)


def _united(one: Cut, two: Cut) -> Cut:
    """The regions, stages and seams of both; numbers and names as the first has them."""
    regions = {**two.region, **one.region}
    stages = {name: _stage(one.stage.get(name), two.stage.get(name)) for name in _names(one, two)}
    seams = {(seam.source, seam.target): seam for seam in one.seams}
    for seam in two.seams:
        pair = seam.source, seam.target
        if pair not in seams or (seam.grads and not seams[pair].grads):
            seams[pair] = seam
    order = {name: at for at, name in enumerate(_ordered(regions, stages, list(seams)))}
    return Cut(
        ranks=one.ranks,
        regions=tuple(sorted(regions.values(), key=lambda region: _first(region, stages, order))),
        stages=tuple(stages[name] for name in order),
        seams=tuple(sorted(seams.values(), key=lambda s: (order[s.source], order[s.target]))),
    )


def _names(one: Cut, two: Cut) -> Iterator[str]:
    yield from dict.fromkeys((*one.stage, *two.stage))


def _stage(one: Stage | None, two: Stage | None) -> Stage:
    first = one or two
    assert first is not None
    kinds = {kind for stage in (one, two) if stage is not None for kind in stage.kinds}
    return replace(first, kinds=tuple(kind for kind in Kind if kind in kinds))


def _ordered(
    regions: Mapping[str, Region], stages: Mapping[str, Stage], seams: Sequence[tuple[str, str]]
) -> list[str]:
    """Stages in topological order; where that leaves a choice, encoders before the backbone before
    generators, and then as they were."""
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(stages, ()))
    for source, target in seams:
        sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError as error:
        names = " -> ".join(error.args[1])
        raise BatchError(
            f"a microbatch runs stages in the opposite order of another one: {names}. Put the "
            "regions of these stages into one with regions=, or train with them in separate steps"
        ) from error
    place = {
        name: (list(Role).index(regions[stage.region].role), at)
        for at, (name, stage) in enumerate(stages.items())
    }
    order: list[str] = []
    ready: set[str] = set()
    while sorter.is_active():
        ready |= set(sorter.get_ready())
        name = min(ready, key=place.__getitem__)
        ready.remove(name)
        order.append(name)
        sorter.done(name)
    return order


def _first(
    region: Region, stages: Mapping[str, Stage], order: Mapping[str, int]
) -> tuple[int, int]:
    own = [order[name] for name, stage in stages.items() if stage.region == region.name]
    return list(Role).index(region.role), min(own, default=0)


def _weighed(cut: Cut, other: Cut) -> Cut:
    """The cut, with the work of the dearer variant of each stage."""
    return replace(
        cut,
        stages=tuple(
            replace(s, cost=max(s.cost, other.stage[s.name].cost if s.name in other.stage else 0))
            for s in cut.stages
        ),
    )
