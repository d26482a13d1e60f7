"""One variant of a model, lowered: cut into regions and stages, differentiated.

    lower(captured, microbatch, scheduler=..., ranks=...) -> Lowered

Nothing is written back: each level is a record that reads only the records above it, and the last
of them, the Cut, is all that scheduling ever sees.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from fxpipe import cut as cuts
from fxpipe.capture import Captured
from fxpipe.cut import Cut, Layout, Role, Seam
from fxpipe.errors import CaptureError, FxpipeError, RegionError, UnknownSizeError
from fxpipe.forwarding import forward_alone
from fxpipe.inputs import Microbatch, flatten
from fxpipe.joint import Differentiated, StageGraphs, differentiate, repartition
from fxpipe.passes.anchors import Known, together
from fxpipe.passes.follow import follow, pattern_of
from fxpipe.passes.regions import Regions, find_regions
from fxpipe.passes.stages import Placed, Staging, assign_stages
from fxpipe.schedule import Plan
from fxpipe.scheduler import Scheduler
from fxpipe.solving import Symbols, solve
from fxpipe.split import Stages, split
from fxpipe.torch_internals import DataDependentError


@dataclass(frozen=True)
class Seen:
    """What all variants so far have found: their regions, and where these are cut.

    names: the regions of this model that other pipes know, too
    """

    regions: Known = field(default_factory=dict)
    placed: Mapping[str, Placed] = field(default_factory=dict)
    names: Known = field(default_factory=dict)

    @cached_property
    def roles(self) -> dict[str, Role]:
        """The roles of the regions, in topological order."""
        return {name: anchor.role for name, anchor in self.regions.items()}

    def also(self, lowered: "Lowered") -> "Seen":
        """This, and what one more has found. Where a region is cut, the first of them decides."""
        placed = dict(self.placed)
        for name, found in lowered.staging.placed.items():
            if len(placed.get(name, found).spans) != len(found.spans) or name not in placed:
                placed[name] = found
        regions, names = (together(x, lowered.regions.anchors) for x in (self.regions, self.names))
        return Seen(regions, placed, names)


@dataclass(frozen=True)
class Lowered:
    """Every level of one variant, from its graph down to the cut.

    symbols: the sizes by which work was weighed; plan: where all regions live, also those that only
    other variants have; recompute: the regions whose backward computes the forward again
    """

    captured: Captured
    symbols: Symbols
    regions: Regions
    staging: Staging
    stages: Stages
    parts: Differentiated
    plan: Plan
    ranks: int
    recompute: tuple[str, ...]

    @property
    def graphs(self) -> Mapping[str, StageGraphs]:
        """F, B and W of each stage."""
        return self.parts.graphs

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names of the parameters, buffers and constants that stages read."""
        return frozenset(name for graphs in self.graphs.values() for name in graphs.state)

    @cached_property
    def cut(self) -> Cut:
        """Regions, stages and seams: all that scheduling sees."""
        return _cut(self)

    @cached_property
    def seam(self) -> dict[tuple[str, str], Seam]:
        """Seams by their two stages."""
        return {(seam.source, seam.target): seam for seam in self.cut.seams}


class Like(NamedTuple):
    """Variants whose stages a graph must have, each where it is; and the cut of all of them."""

    lowered: Sequence[Lowered]
    cut: Cut


def lower(
    captured: Captured,
    microbatch: Microbatch,
    *,
    scheduler: Scheduler,
    ranks: int,
    given: Mapping[str, Sequence[str]] | None = None,
    seen: Seen | None = None,
    like: Like | None = None,
) -> Lowered:
    """Lower a captured graph for a schedule, weighing work by the sizes of one microbatch.

    seen: what the variants have found beside which it is to run; like: what it is to be laid out
    like, without a backward
    """
    symbols, _ = solve(captured.leaves, [tensor for _, tensor in flatten(microbatch)[0]])
    if like:
        return _like(captured, symbols, like, ranks)
    seen = seen or Seen()
    regions = find_regions(captured, symbols, given, seen.names)
    return _staged(captured, symbols, regions, scheduler, ranks, seen)


def _like(captured: Captured, symbols: Symbols, like: Like, ranks: int) -> Lowered:
    graphs = [(low.captured, low.regions, low.staging) for low in like.lowered]
    regions, staging = follow(captured, symbols, pattern_of(graphs, like.cut))
    stages = split(captured, staging)
    parts, plan = forward_alone(captured, stages), like.lowered[0].plan
    return Lowered(captured, symbols, regions, staging, stages, parts, plan, ranks, ())


def restaged(lowered: Lowered, scheduler: Scheduler, ranks: int, seen: Seen) -> Lowered:
    """The same regions, for a schedule or beside variants that want other stages."""
    captured, symbols, regions = lowered.captured, lowered.symbols, lowered.regions
    return _staged(captured, symbols, regions, scheduler, ranks, seen)


def _differentiated(captured: Captured, stages: Stages, recompute: Sequence[str]) -> Differentiated:
    try:
        return differentiate(captured, stages, recompute)
    except FxpipeError:
        raise
    except Exception as error:
        kind = UnknownSizeError if isinstance(error, DataDependentError) else CaptureError
        raise kind(
            f"the graph of this microbatch cannot be differentiated: {type(error).__name__}: "
            f"{error}. See first that eager runs its forward and backward"
        ) from error


def moved(lowered: Lowered, scheduler: Scheduler, ranks: int, seen: Seen) -> Lowered | None:
    """The same stages for another schedule, or beside other variants, without tracing; None if
    other stages are wanted."""
    regions = lowered.regions
    plan = _plan(regions, scheduler, ranks, seen)
    if not _same_stages(lowered, plan, seen):
        return None
    recompute, parts = _recomputing(scheduler.recompute, regions, seen), lowered.parts
    if recompute != lowered.recompute:
        parts = repartition(lowered.captured, parts, recompute)
    return replace(lowered, plan=plan, ranks=ranks, parts=parts, recompute=recompute)


def _staged(
    captured: Captured,
    symbols: Symbols,
    regions: Regions,
    scheduler: Scheduler,
    ranks: int,
    seen: Seen,
) -> Lowered:
    plan = _plan(regions, scheduler, ranks, seen)
    recompute = _recomputing(scheduler.recompute, regions, seen)
    names = stage_names(regions, plan)
    staging = assign_stages(captured, regions, symbols, names, seen.placed)
    stages = split(captured, staging)
    parts = _differentiated(captured, stages, recompute)
    return Lowered(captured, symbols, regions, staging, stages, parts, plan, ranks, recompute)


def _plan(regions: Regions, scheduler: Scheduler, ranks: int, seen: Seen) -> Plan:
    """Where the regions of all variants live."""
    known = together(seen.regions, regions.anchors)
    roles, others = (
        {name: anchor.role for name, anchor in found.items()} for found in (known, seen.names)
    )
    return scheduler.plan(ranks, roles, others)  # a pipe before this one may have met more paths


def _same_stages(lowered: Lowered, plan: Plan, seen: Seen) -> bool:
    """Whether a variant that is lowered already has the stages that it would get."""
    regions, placed = lowered.regions, lowered.staging.placed
    if stage_names(regions, plan) != stage_names(regions, lowered.plan):
        return False
    pairs = [(placed[name].spans, seen.placed.get(name, placed[name]).spans) for name in placed]
    as_many = [(mine, its) for mine, its in pairs if mine[-1][1] == its[-1][1]]
    return all(mine == its for mine, its in as_many if len(mine) == len(its))


def stage_names(regions: Regions, plan: Plan) -> dict[str, tuple[str, ...]]:
    """The stages of each region: `llm0`, `llm1`; one that is whole has its region's name."""
    homes = {**plan.home, regions.backbone: plan.backbone}
    return {
        name: tuple(f"{name}{i}" for i in range(len(home))) if isinstance(home, tuple) else (name,)
        for name, home in ((name, homes[name]) for name in regions.roles)
    }


def _recomputing(recompute: Sequence[str], regions: Regions, seen: Seen) -> tuple[str, ...]:
    roles = seen.roles | dict(regions.roles)
    known = {**roles, **seen.names}  # a pipe before this one may have met more paths
    unknown = [name for name in recompute if name not in known]
    if unknown:
        raise RegionError(
            f"recompute names {unknown[0]!r}; this model has the regions {', '.join(known)}. One "
            "that only some microbatches have is known from an example of these"
        )
    return tuple(name for name in regions.roles if name in recompute)


def _cut(lowered: Lowered) -> Cut:
    regions, staging = lowered.regions, lowered.staging
    grads, rank = lowered.parts.grads, _ranks(regions, lowered.plan)
    return Cut(
        ranks=lowered.ranks,
        regions=tuple(
            cuts.Region(name, role, _layout(name, lowered), name in lowered.recompute)
            for name, role in regions.roles.items()
        ),
        stages=tuple(
            cuts.Stage(name, region, lowered.graphs[name].kinds, rank[name], staging.cost[name])
            for name, region in staging.region.items()
        ),
        seams=tuple(
            Seam(source, target, values, grads.get((source, target), ()))
            for (source, target), values in lowered.stages.links.items()
        ),
        shared=shared(held_by(lowered.graphs), rank),
    )


def _ranks(regions: Regions, plan: Plan) -> dict[str, int | None]:
    """Where each stage lives; None in a replicated region."""
    homes = {**plan.home, regions.backbone: plan.backbone}
    found: dict[str, int | None] = {}
    for region, names in stage_names(regions, plan).items():
        home = homes[region]
        found.update(zip(names, home if isinstance(home, tuple) else (home,), strict=True))
    return found


def _layout(region: str, lowered: Lowered) -> Layout:
    whole = region != lowered.regions.backbone and lowered.plan.home[region] is None
    return Layout.REPLICATED if whole else Layout.SHARDED


def shared(
    owners: Mapping[str, tuple[str, ...]], rank: Mapping[str, int | None]
) -> tuple[tuple[str, ...], ...]:
    """The sets of stages that hold one trained parameter, where its gradient must be summed.

    A stage that only reads a parameter belongs to the set too: its copy must follow the others.
    """
    groups = dict.fromkeys(owners.values())
    return tuple(group for group in groups if len(group) > 1 or rank[group[0]] is None)


def holders(reads: Mapping[str, Sequence[str]], trained: Set[str]) -> dict[str, tuple[str, ...]]:
    """Name of a trained parameter -> the stages that hold it, in their order.

    reads: stage -> the tensors of the model that it reads
    """
    found: dict[str, dict[str, None]] = {}
    for stage, names in reads.items():
        for name in names:
            if name in trained:
                found.setdefault(name, {})[stage] = None
    return {name: tuple(stages) for name, stages in found.items()}


def held_by(graphs: Mapping[str, StageGraphs]) -> dict[str, tuple[str, ...]]:
    """`holders`, in one variant."""
    trained = {name for stage in graphs.values() for name in stage.trained}
    return holders({stage: held.state for stage, held in graphs.items()}, trained)
