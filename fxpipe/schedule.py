"""Schedules: a cut and a number of microbatches to the order of compute ops on every rank.

A schedule is `PLACEMENT/BASE`. The base orders the pipeline of sharded stages; the placement says
where encoders and generators live and how their ops join the base rows (Mpipe, arXiv 2607.03229;
BigMac, arXiv 2605.25451). The result has compute ops only: `passes` add transfers and reductions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Layout, Role, Stage
from fxpipe.errors import ScheduleError
from fxpipe.nest import nest
from fxpipe.skeletons import BASES, Phase, gpipe
from fxpipe.table import Op, Table
from fxpipe.units import backward, forward, replicated

PLACEMENTS = ("stage", "upfront", "nested")
AUTO = "nested/1f1b"


class Schedule(NamedTuple):
    """A placement and a base, both known."""

    placement: str
    base: str

    @staticmethod
    def parse(text: str) -> "Schedule":
        """`nested/1f1b`, in any case; `auto` is the default. Raises ScheduleError."""
        name = text.strip().lower()
        placement, _, base = (AUTO if name == "auto" else name).partition("/")
        if placement not in PLACEMENTS or base not in BASES:
            raise ScheduleError(
                f"schedule {text!r} is unknown; write PLACEMENT/BASE with a placement of "
                f"{', '.join(PLACEMENTS)} and a base of {', '.join(BASES)}, or auto"
            )
        return Schedule(placement, base)


@dataclass(frozen=True)
class Plan:
    """What a schedule asks of the cut, before there are stages.

    home: the rank of the one stage of each encoder and generator region; None if replicated.
    backbone: the rank of each backbone stage, in order.
    """

    layout: Layout
    home: dict[str, int | None]
    backbone: tuple[int, ...]


def layout(
    schedule: str, ranks: int, encoders: Sequence[str] = (), generators: Sequence[str] = ()
) -> Plan:
    """Where regions and backbone stages live: `layout("stage/1f1b", 3, ["vision"])` has vision on
    rank 0 and a backbone of two stages on ranks 1 and 2. Raises ScheduleError."""
    placement = Schedule.parse(schedule).placement
    if ranks < 1:
        raise ScheduleError(f"a schedule for {ranks} ranks; expected at least one")
    everyone = tuple(range(ranks))
    if placement != "stage":
        return Plan(Layout.REPLICATED, dict.fromkeys([*encoders, *generators]), everyone)
    first, last = (1 if encoders else 0), ranks - (1 if generators else 0)
    home: dict[str, int | None] = dict.fromkeys(encoders, 0)
    home |= dict.fromkeys(generators, ranks - 1)
    return Plan(Layout.SHARDED, home, everyone[first:last] or everyone)


def derive(
    cut: Cut, microbatches: int, schedule: str = AUTO, *, costs: Costs | None = None
) -> Table:
    """The table of a schedule, with compute ops only. Raises ScheduleError.

    upfront: microbatch m is owned by rank m mod P; encoder forwards stand before the base row and
    encoder backwards after it. A generator runs after all backbone forwards of the row; if its
    gradient feeds the backbone, no backward can start earlier, so the base is all forwards, then
    all backwards, whatever was asked for.
    nested: see `nest`. costs: durations that the nested walk reckons with; uniform by default.
    """
    placement, _ = Schedule.parse(schedule)
    base = Table(cut, base_rows(cut, microbatches, schedule))
    match placement:
        case "upfront":
            return _upfront(base)
        case "nested":
            return nest(base, costs or Costs.uniform(cut))
        case _:
            return base


def base_rows(cut: Cut, microbatches: int, schedule: str = AUTO) -> tuple[tuple[Op, ...], ...]:
    """The rows of the sharded stages alone, which `upfront` and `nested` leave undisturbed.

    A rank is one station of the pipeline: a phase runs all its stages, in order or in reverse.
    Where a generator sends a gradient into the pipeline, P - 1 more microbatches are in flight, so
    that a group of P generator units is ready at once.
    """
    placement, name = Schedule.parse(schedule)
    _check(cut, microbatches, placement)
    base, lead = BASES[name], 0
    if _generators_return(cut):
        base, lead = (gpipe, 0) if placement == "upfront" else (base, cut.ranks - 1)
    stations = list(dict.fromkeys(s.rank for s in cut.stages if s.rank is not None))
    return tuple(
        _expand(
            base(stations.index(rank), len(stations), microbatches, lead),
            [stage for stage in cut.stages if stage.rank == rank],
        )
        if rank in stations
        else ()
        for rank in range(cut.ranks)
    )


def _check(cut: Cut, microbatches: int, placement: str) -> None:
    if microbatches < 1:
        raise ScheduleError(f"{microbatches} microbatches; a step needs at least one")
    replicated = [stage.name for stage in cut.stages if stage.rank is None]
    if placement == "stage" and replicated:
        raise ScheduleError(
            f"placement stage needs a rank for every stage, and {', '.join(replicated)} has none; "
            "lay the cut out with layout('stage/...', ...)"
        )
    misplaced = [name for name in replicated if cut.role(name) is Role.BACKBONE]
    if misplaced:
        raise ScheduleError(f"backbone stage {misplaced[0]} has no rank; only shard the backbone")


def _generators_return(cut: Cut) -> bool:
    """Whether a replicated generator sends a gradient to a sharded stage."""
    return any(
        seam.grads
        and cut.stage[seam.target].rank is None
        and cut.role(seam.target) is Role.GENERATOR
        and cut.stage[seam.source].rank is not None
        for seam in cut.seams
    )


def _expand(phases: Iterable[Phase], stages: Sequence[Stage]) -> tuple[Op, ...]:
    """Phases of a station to ops of its stages."""
    return tuple(
        op
        for kind, mb in phases
        for op in (forward(stages, mb) if kind is Kind.F else backward(stages, mb))
    )


def _upfront(base: Table) -> Table:
    cut, ranks, total = base.cut, base.cut.ranks, base.microbatches
    encoders, generators = (replicated(cut, role) for role in (Role.ENCODER, Role.GENERATOR))
    rows = []
    for rank, row in enumerate(base.rows):
        owned = range(rank, total, ranks)
        turn = _turn(row) if _generators_return(cut) else len(row)
        rows.append(
            (
                *(op for mb in owned for op in forward(encoders, mb)),
                *row[:turn],
                *(
                    op
                    for mb in owned
                    for unit in (forward, backward)
                    for op in unit(generators, mb)
                ),
                *row[turn:],
                *(op for mb in owned for op in backward(encoders, mb)),
            )
        )
    return Table(cut, tuple(rows))


def _turn(row: Sequence[Op]) -> int:
    """Where the forwards of a row have ended."""
    return max((at + 1 for at, op in enumerate(row) if op.kind is Kind.F), default=0)
