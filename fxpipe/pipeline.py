"""The rows of the sharded stages of a cut under a base schedule, whatever the cut looks like.

Stages of different regions that follow one another on a rank are one station. Where the stations
lie as the base wants them (a loop round the ranks, or there and back), its own order is taken.
Where they do not (an encoder on a rank of its own, before a backbone of several stages per rank),
rows are listed by the base's idea: what goes first, and how many microbatches a station holds.
"""

from collections.abc import Iterator, Sequence

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Stage
from fxpipe.errors import ScheduleError
from fxpipe.listing import listing
from fxpipe.numbering import build
from fxpipe.problem import Limits
from fxpipe.skeletons import Base, pattern_rows
from fxpipe.table import Op, Rows
from fxpipe.units import backward, forward

_ALL_FORWARDS_FIRST = ("gpipe", "looped-bfs")


def pipeline_rows(cut: Cut, microbatches: int, base: Base, lead: int = 0) -> Rows:
    """One row for each rank of the cut. lead: more microbatches in flight than the base needs."""
    stations = stations_of(cut)
    if not stations:
        return ((),) * cut.ranks
    try:
        homes = [station[0].rank or 0 for station in stations]
        steps = pattern_rows(base, homes, microbatches, lead)
    except ScheduleError:
        return _listed(cut, microbatches, base, lead)
    rows = [
        tuple(op for step in row for op in _expand(step, stations, base.splits)) for row in steps
    ]
    return (*rows, *[()] * (cut.ranks - len(rows)))


def stations_of(cut: Cut) -> list[list[Stage]]:
    """Runs of sharded stages that follow one another on one rank, of each region one stage: where
    a pipeline turns back, in a v, its rank has two stations."""
    stations: list[list[Stage]] = []
    for stage in cut.stages:
        run = stations[-1] if stations else []
        regions = [other.region for other in run if other.rank == stage.rank]
        if stage.rank is not None and regions and stage.region not in regions:
            run.append(stage)
        elif stage.rank is not None:
            stations.append([stage])
    return stations


def _expand(
    step: tuple[Kind, int, int], stations: Sequence[Sequence[Stage]], splits: bool
) -> Iterator[Op]:
    """The ops of a station's step; one that does not split runs its W with its B."""
    kind, station, mb = step
    if kind is Kind.F:
        yield from forward(stations[station], mb)
    elif splits or kind is Kind.B:
        for op in backward(stations[station], mb):
            if op.kind is kind or not splits:
                yield op


def _listed(cut: Cut, microbatches: int, base: Base, lead: int) -> Rows:
    """Rows in the order in which ops of equal length would run."""
    stations = stations_of(cut)
    hold = {
        stage.name: len(stations) - at + lead for at, run in enumerate(stations) for stage in run
    }
    breadth = base.name in _ALL_FORWARDS_FIRST
    problem = build(
        cut,
        microbatches,
        Costs.uniform(cut),
        limits=Limits() if breadth else Limits(sharded=hold),
        stages=lambda stage: stage.rank is not None,
    )
    # Seconds; W waits for a gap where the base splits, and else follows its B at once.
    whole = microbatches * len(problem.ops)
    urgency = {Kind.F: -whole if breadth else 0.5, Kind.B: 0.0, Kind.W: 2.0 if base.splits else -1}
    listed = listing(problem, [float(urgency[op.kind]) for op in problem.ops])
    if not listed.complete:
        raise ScheduleError(f"{base.name} cannot order the stages {', '.join(cut.stage)}")
    return problem.rows(listed.ranks, listed.starts)
