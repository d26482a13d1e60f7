"""Schedules: a cut and a number of microbatches to the order of compute ops on every rank.

A schedule is `PLACEMENT/BASE`. The base orders the pipeline of sharded stages; the placement says
where encoders and generators live and how their ops join the base rows (Mpipe, arXiv 2607.03229;
BigMac, arXiv 2605.25451). The result has compute ops only: `passes` add transfers and reductions.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Layout, Role
from fxpipe.ends import at_ends, owned
from fxpipe.errors import ScheduleError
from fxpipe.free import free
from fxpipe.nest import limits_of, nest
from fxpipe.owners import Given
from fxpipe.pipeline import pipeline_rows
from fxpipe.problem import Limits, Owners
from fxpipe.skeletons import PATTERNS, Base, base, homes
from fxpipe.table import Live, Rows, Table, live_units

PLACEMENTS = ("stage", "ends", "upfront", "transpose", "nested")
REPLICATED = ("upfront", "transpose", "nested")
AUTO = "auto"


class Schedule(NamedTuple):
    """A placement and a base, both known. The base `auto` is an order that is searched for."""

    placement: str
    base: str

    @staticmethod
    def parse(text: str) -> "Schedule":
        """`nested/zb-h1`, in any case; a base alone, also by torch's name, is nested; `auto` is
        nested/auto. Raises ScheduleError."""
        placement, slash, name = text.strip().lower().rpartition("/")
        placement = placement if slash else "nested"
        try:
            known = AUTO if name == AUTO and placement == "nested" else base(name).name
        except ScheduleError as error:
            raise ScheduleError(f"schedule {text!r} is unknown: {_EXPECTED}") from error
        if placement not in PLACEMENTS:
            raise ScheduleError(f"schedule {text!r} is unknown: {_EXPECTED}")
        return Schedule(placement, known)

    def __str__(self) -> str:
        return f"{self.placement}/{self.base}"


_EXPECTED = (
    f"write PLACEMENT/BASE with a placement of {', '.join(PLACEMENTS)} and a base of "
    f"{', '.join(PATTERNS)} (or torch's name of one, as 1F1B), or auto"
)


@dataclass(frozen=True)
class Plan:
    """What a schedule asks of the cut, before there are stages.

    home: for each encoder and generator region the rank of its one stage; None if replicated; the
    rank of each stage where it is a pipeline of its own. backbone: the rank of each backbone stage.
    """

    layout: Layout
    home: dict[str, int | tuple[int, ...] | None]
    backbone: tuple[int, ...]


def layout(
    schedule: str,
    ranks: int,
    encoders: Sequence[str] = (),
    generators: Sequence[str] = (),
    *,
    chunks: int | None = None,
    sharded: Sequence[str] = (),
) -> Plan:
    """Where regions and backbone stages live. Raises ScheduleError.

    `layout("stage/1f1b", 3, ["vision"])` has vision on rank 0 and a backbone of two stages on ranks
    1 and 2. chunks: backbone stages per rank; by default what the base needs. sharded: encoders and
    generators that are cut into one stage for each rank.
    """
    placement, name = Schedule.parse(schedule)
    if ranks < 1:
        raise ScheduleError(f"a schedule for {ranks} ranks; expected at least one")
    everyone = tuple(range(ranks))
    apart = [[name for name in names if name not in sharded] for names in (encoders, generators)]
    home: dict[str, int | tuple[int, ...] | None] = dict.fromkeys(sharded, everyone)
    if placement in REPLICATED:
        home |= dict.fromkeys([*apart[0], *apart[1]])
        order = _order(name, everyone, chunks)
        return Plan(Layout.REPLICATED, home, order)
    home |= dict.fromkeys(apart[0], 0) | dict.fromkeys(apart[1], ranks - 1)
    between = everyone[bool(apart[0]) : ranks - bool(apart[1])]
    inside = placement == "ends" or sharded or not between
    return Plan(Layout.SHARDED, home, _order(name, everyone if inside else between, chunks))


def _order(name: str, ranks: Sequence[int], chunks: int | None) -> tuple[int, ...]:
    if name == AUTO:
        return tuple(ranks) * (chunks or 1)
    return tuple(ranks[at] for at in homes(base(name), len(ranks), chunks))


def derive(
    cut: Cut,
    microbatches: int,
    schedule: str = AUTO,
    *,
    costs: Costs | None = None,
    owners: Given = None,
    live: Mapping[str, int] | None = None,
    memory: float = math.inf,
    effort: float = 1.0,
) -> Table:
    """The table of a schedule, with compute ops only. Raises ScheduleError.

    stage, ends: every stage has its rank; the base rows are all there is.
    upfront, transpose: see `ends`; owners are round robin, or, for transpose, by slack. Where a
    generator's gradient feeds the backbone, no backward can start earlier than the last forward,
    so the base is all forwards, then all backwards, whatever was asked for.
    nested: see `nest`, and, for the base `auto`, `free`; owners are free unless given.

    costs: what the placement reckons with; uniform by default. owners: the name of an owner map, a
    rank for each microbatch, or one of both for each region. live: the most units of "modality" (of
    each replicated region) and "llm" (microbatches of a rank's share) on a rank. memory: bytes.
    effort: how long a nested placement looks for its order; 1 is usual, about a second.
    """
    asked = Schedule.parse(schedule)
    _check(cut, microbatches, asked.placement)
    costs = costs or Costs.uniform(cut)
    match asked.placement:
        case "upfront" | "transpose":
            rule = owners or ("round_robin" if asked.placement == "upfront" else "slack")
            table = Table(cut, base_rows(cut, microbatches, schedule))
            rows = at_ends(table, microbatches, costs, rule, turn=generators_return(cut))
        case "nested":
            given = _owners(cut, microbatches, asked.base, costs, owners)
            limits = limits_of(live, chunks_of(cut), memory)
            rows = _nested(cut, microbatches, asked, costs, given, limits, effort)
        case _:
            rows = base_rows(cut, microbatches, schedule)
    return stated(Table(cut, rows, str(asked)))


def stated(table: Table) -> Table:
    """The table with the live units that it comes to, as its claim."""
    ranks = range(table.cut.ranks)
    live = tuple(
        Live(region.name, tuple(max(live_units(table, region.name, r), default=0) for r in ranks))
        for region in table.cut.regions
    )
    return Table(table.cut, table.rows, table.schedule, live)


def base_rows(cut: Cut, microbatches: int, schedule: str) -> Rows:
    """The rows of the sharded stages alone, which every other placement leaves undisturbed.

    Where a replicated generator sends gradients into the pipeline, P - 1 more microbatches are in
    flight, so that P of its units can run at once; in `upfront` and `transpose` all are. Raises
    ScheduleError, also for the base `auto`, whose order depends on the costs.
    """
    placement, name = Schedule.parse(schedule)
    _check(cut, microbatches, placement)
    if name == AUTO:
        raise ScheduleError("the base auto has no order of its own")
    found, lead = base(name), 0
    if generators_return(cut):
        ends = placement in ("upfront", "transpose")
        found, lead = (_breadth(found), 0) if ends else (found, cut.ranks - 1)
    return pipeline_rows(cut, microbatches, found, lead)


def generators_return(cut: Cut) -> bool:
    """Whether a replicated generator sends a gradient to a sharded stage."""
    return any(
        seam.grads
        and cut.stage[seam.target].rank is None
        and cut.role(seam.target) is Role.GENERATOR
        and cut.stage[seam.source].rank is not None
        for seam in cut.seams
    )


def chunks_of(cut: Cut) -> int:
    """The most stages of one sharded region on one rank."""
    counts = Counter((stage.region, stage.rank) for stage in cut.stages if stage.rank is not None)
    return max(counts.values(), default=1)


def _owners(cut: Cut, microbatches: int, name: str, costs: Costs, given: Given) -> Owners | None:
    """The owners that are given, by region; slack is that of the base, or of 1F1B."""
    if given is None:
        return None
    known = base("1f1b" if name == AUTO else name)
    return owned(Table(cut, pipeline_rows(cut, microbatches, known)), microbatches, costs, given)


def _breadth(asked: Base) -> Base:
    return base("gpipe" if asked.chunks == 1 else "looped-bfs")


def _nested(
    cut: Cut,
    microbatches: int,
    asked: Schedule,
    costs: Costs,
    owners: Owners | None,
    limits: Limits,
    effort: float,
) -> Rows:
    """The rows with everything in them. The base auto holds, unless limits say otherwise, as many
    microbatches as 1F1B would."""
    if asked.base != AUTO:

        def base(count: int) -> Rows:
            return base_rows(cut, count, str(asked))

        return nest(cut, microbatches, costs, base, owners=owners, limits=limits, effort=effort)
    if limits == Limits():
        ahead = 2 if generators_return(cut) else 1
        limits = Limits(sharded=ahead * cut.ranks * chunks_of(cut))
    rows = free(cut, microbatches, costs, owners=owners, limits=limits, effort=effort)
    if rows is None:
        raise ScheduleError(f"no order keeps to {limits}; allow more units, or more memory")
    return rows


def _check(cut: Cut, microbatches: int, placement: str) -> None:
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} microbatches; a step needs at least one")
    replicated = [stage.name for stage in cut.stages if stage.rank is None]
    if placement not in REPLICATED and replicated:
        raise ScheduleError(
            f"placement {placement} needs a rank for every stage, and {', '.join(replicated)} has "
            f"none; lay the cut out with layout('{placement}/...', ...)"
        )
    misplaced = [name for name in replicated if cut.role(name) is Role.BACKBONE]
    if misplaced:
        raise ScheduleError(f"backbone stage {misplaced[0]} has no rank; only shard the backbone")
