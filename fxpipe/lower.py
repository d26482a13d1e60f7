"""One variant of a model, lowered: cut into regions and stages, differentiated.

    lower(captured, microbatch, scheduler=..., ranks=...) -> Lowered

Nothing is written back: each level is a record that reads only the records above it, and the last
of them, the Cut, is all that scheduling ever sees.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from fxpipe import cut as cuts
from fxpipe.bind import solve
from fxpipe.capture import Captured
from fxpipe.cut import Cut, Layout, Seam
from fxpipe.errors import RegionError
from fxpipe.forwarding import forward_alone
from fxpipe.inputs import Microbatch, flatten
from fxpipe.joint import Differentiated, StageGraphs, differentiate, repartition
from fxpipe.passes.follow import follow, pattern_of
from fxpipe.passes.regions import Regions, find_regions
from fxpipe.passes.stages import Spans, Staging, assign_stages
from fxpipe.schedule import Plan
from fxpipe.scheduler import Scheduler
from fxpipe.split import Stages, split


@dataclass(frozen=True)
class Lowered:
    """Every level of one variant, from its graph down to the cut.

    recompute: the regions whose backward computes the forward again
    """

    captured: Captured
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
    def cut(self) -> Cut:
        """Regions, stages and seams: all that scheduling sees."""
        return _cut(self)

    @cached_property
    def seam(self) -> dict[tuple[str, str], Seam]:
        """Seams by their two stages."""
        return {(seam.source, seam.target): seam for seam in self.cut.seams}


def lower(
    captured: Captured,
    microbatch: Microbatch,
    *,
    scheduler: Scheduler,
    ranks: int,
    given: Mapping[str, Sequence[str]] | None = None,
    spans: Mapping[str, Spans] | None = None,
    like: Sequence[Lowered] = (),
) -> Lowered:
    """Lower a captured graph for a schedule, weighing work by the sizes of one microbatch.

    spans: where another variant cut its regions: one parameter must be in the same stage in all
    like: lowered graphs whose stages this one must have, each where it is
    """
    symbols, _ = solve(captured.leaves, [tensor for _, tensor in flatten(microbatch)[0]])
    if like:
        pattern = pattern_of([(low.captured, low.regions, low.staging) for low in like])
        regions, staging = follow(captured, symbols, pattern)
        stages = split(captured, staging)
        parts = forward_alone(captured, stages)
        return Lowered(captured, regions, staging, stages, parts, like[0].plan, ranks, ())
    regions = find_regions(captured, symbols, given)
    plan = scheduler.plan(ranks, regions.roles)
    recompute = _known(scheduler.recompute, regions)
    staging = assign_stages(captured, regions, symbols, stage_names(regions, plan), spans)
    stages = split(captured, staging)
    parts = differentiate(captured, stages, recompute)
    return Lowered(captured, regions, staging, stages, parts, plan, ranks, recompute)


def moved(lowered: Lowered, scheduler: Scheduler, ranks: int) -> Lowered | None:
    """The same stages for another schedule, without tracing; None if it wants other stages."""
    plan = scheduler.plan(ranks, lowered.regions.roles)
    if stage_names(lowered.regions, plan) != stage_names(lowered.regions, lowered.plan):
        return None
    recompute, parts = _known(scheduler.recompute, lowered.regions), lowered.parts
    if recompute != lowered.recompute:
        parts = repartition(lowered.captured, parts, recompute)
    return replace(lowered, plan=plan, ranks=ranks, parts=parts, recompute=recompute)


def stage_names(regions: Regions, plan: Plan) -> dict[str, tuple[str, ...]]:
    """The stages of each region: `llm0`, `llm1`; one that is whole has its region's name."""
    homes = {**plan.home, regions.backbone: plan.backbone}
    return {
        name: tuple(f"{name}{i}" for i in range(len(home))) if isinstance(home, tuple) else (name,)
        for name, home in ((name, homes[name]) for name in regions.roles)
    }


def _known(recompute: Sequence[str], regions: Regions) -> tuple[str, ...]:
    unknown = [name for name in recompute if name not in regions.roles]
    if unknown:
        raise RegionError(
            f"recompute names {unknown[0]!r}; this model has the regions {', '.join(regions.roles)}"
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
        shared=_shared(lowered.graphs, rank),
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


def _shared(
    graphs: Mapping[str, StageGraphs], rank: Mapping[str, int | None]
) -> tuple[tuple[str, ...], ...]:
    """The sets of stages that hold one trained parameter, where its gradient must be summed.

    A stage that only reads a parameter belongs to the set too: its copy must follow the others.
    """
    trained = {name for stage in graphs.values() for name in stage.trained}
    holders = _holders(graphs, trained)
    groups = dict.fromkeys(tuple(stages) for stages in holders.values())
    return tuple(group for group in groups if len(group) > 1 or rank[group[0]] is None)


def same_holders(first: Lowered, other: Lowered) -> str | None:
    """A parameter whose gradient two variants make in different stages; None if there is none."""
    one, two = (_holders(low.graphs, low.captured.trained) for low in (first, other))
    moved = [name for name in one if name in two and one[name] != two[name]]
    if not moved:
        return None
    return f"it uses {moved[0]} in {two[moved[0]]}, the example in {one[moved[0]]}"


def _holders(graphs: Mapping[str, StageGraphs], names: Set[str]) -> dict[str, list[str]]:
    """For each of these parameters that any stage holds, the stages that do, in their order."""
    found: dict[str, list[str]] = {}
    for stage, held in graphs.items():
        for name in dict.fromkeys(held.state):
            if name in names:
                found.setdefault(name, []).append(stage)
    return found


def same_shape(first: Cut, other: Cut) -> str | None:
    """How the cuts of two variants differ, for a table that is to run both; None if they agree."""
    kinds = [{s.name: "".join(s.kinds) for s in cut.stages} for cut in (first, other)]
    if kinds[0] != kinds[1]:
        return f"its stages run {kinds[1]}, the example's {kinds[0]}"
    seams = [{(s.source, s.target): bool(s.grads) for s in cut.seams} for cut in (first, other)]
    if seams[0] != seams[1]:
        changed = sorted(set(seams[0].items()) ^ set(seams[1].items()))
        return f"it has other seams than the example: {changed}"
    if first.shared != other.shared:
        return f"it shares parameters over {other.shared}, the example over {first.shared}"
    return None
