"""A forecast: the table of a schedule, with its transfers, and what it takes before it has run.

forecast(ask)              for a sketch
forecast(ask, cut)         for a cut that is there already
checked(ask, text)         of a table that someone else has made, if it keeps every rule
replayed(ask, text)        of torch's CSV of actions, for a sketch
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from fxpipe import passes
from fxpipe.actions import read_actions
from fxpipe.choices import Option
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Role
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.figures import Figures, figures
from fxpipe.front import Point
from fxpipe.passes.communicate import communicate
from fxpipe.passes.reduce import reduce
from fxpipe.planner import plan
from fxpipe.rates import Rates, rate
from fxpipe.schedule import AUTO, chunks_of, derive, layout
from fxpipe.simulate import simulate
from fxpipe.sketch import Homes, Sketch, sketch
from fxpipe.table import Table
from fxpipe.timeline import Timeline
from fxpipe.verify import verify

Owners = str | tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """What is to be forecast.

    ranks: needed for a sketch. chunks: backbone stages per rank, by default what the base wants.
    sharded: encoders and generators that are cut into one stage per rank. owners: the name of an
    owner map, or the rank of each microbatch. live: the most units of "modality" and "llm" that a
    rank may hold. memory: bytes that `auto` may use. recompute: regions that compute their forward
    again in the backward; `auto` may choose more. effort: how long a schedule is looked for.
    """

    sketches: tuple[Sketch, ...] = ()
    ranks: int | None = None
    microbatches: int = 8
    schedule: str = "auto"
    chunks: int | None = None
    sharded: tuple[str, ...] = ()
    rates: Rates = field(default_factory=Rates)
    owners: Owners | None = None
    live: dict[str, int] = field(default_factory=dict)
    memory: float | None = None
    recompute: tuple[str, ...] = ()
    effort: float = 1.0


@dataclass(frozen=True)
class Forecast:
    """A table, what it takes, and what `auto` chose it from, if it did."""

    table: Table
    costs: Costs
    timeline: Timeline
    schedule: str
    front: tuple[Point, ...] = ()

    @property
    def figures(self) -> Figures:
        """The figures of the table."""
        return figures(self.table, self.costs, self.timeline)


class _Choice(NamedTuple):
    table: Table
    costs: Costs
    schedule: str
    front: tuple[Point, ...] = ()


def forecast(ask: Ask, cut: Cut | None = None) -> Forecast:
    """The forecast of a schedule for a cut, or for the sketch. Raises FxpipeError."""
    choice = _chosen(ask, cut)
    _check_placed(choice, ask.microbatches)
    table, costs = _finished(choice.table, choice.costs), choice.costs
    return Forecast(table, costs, simulate(table, costs), choice.schedule, choice.front)


def checked(ask: Ask, text: str) -> Forecast:
    """The forecast of a table's text. Raises TableError with the rules that it breaks.

    Without a sketch an op takes as long as its stage's cost says.
    """
    table = Table.parse(text)
    verify(table)
    asked = replace(ask, microbatches=table.microbatches)
    by_cost = _linked(ask, Costs.from_flops(table.cut, 1.0))
    costs = costs_of(asked, table.cut) if ask.sketches else by_cost
    return Forecast(table, costs, simulate(table, costs), table.schedule)


def replayed(ask: Ask, text: str) -> Forecast:
    """The forecast of the order of ops in torch's CSV of actions. Raises FxpipeError."""
    if not ask.sketches:
        raise OptionError(
            "the file is no cut and no table: it does not start with `ranks 2`; if it is a CSV of "
            "actions, say with --region and --ranks of which model"
        )
    cut = sketched(ask)
    rows = read_actions(text, cut)
    table = Table(cut, rows)
    costs = costs_of(replace(ask, microbatches=table.microbatches), cut)
    table = _finished(table, costs)
    return Forecast(table, costs, simulate(table, costs), table.schedule)


def sketched(ask: Ask) -> Cut:
    """The cut of the sketch, laid out as the schedule wants it."""
    if not ask.sketches:
        raise OptionError("nothing to plan; give a FILE, or regions as in --region llm=backbone:1")
    if ask.ranks is None:
        raise OptionError("--ranks is missing; say how many ranks the regions are laid out for")
    encoders, generators = (
        [x.name for x in ask.sketches if x.role is role] for role in (Role.ENCODER, Role.GENERATOR)
    )
    for name in ask.sharded:
        _check_sharded(name, ask.sketches)
    for name in ask.recompute:
        _check_recompute(name, ask.sketches)
    where = layout(
        ask.schedule, ask.ranks, encoders, generators, chunks=ask.chunks, sharded=ask.sharded
    )
    placed = {
        name: home if isinstance(home, tuple) else (home,)
        for name, home in where.home.items()
        if home is not None
    }
    placed |= {x.name: where.backbone for x in ask.sketches if x.role is Role.BACKBONE}
    cut = sketch(ask.sketches, Homes(ask.ranks, placed))
    regions = [replace(region, recompute=region.name in ask.recompute) for region in cut.regions]
    return replace(cut, regions=tuple(regions))


def costs_of(ask: Ask, cut: Cut) -> Costs:
    """The sketch's costs of a cut; without one every op takes a second, and W two without B."""
    if not ask.sketches:
        return _linked(ask, Costs.uniform(cut))
    return rate(cut, ask.sketches, ask.rates, ask.microbatches).recomputed(cut)


def _linked(ask: Ask, costs: Costs) -> Costs:
    return replace(costs, latency=ask.rates.latency, bandwidth=ask.rates.bandwidth)


def _chosen(ask: Ask, cut: Cut | None) -> _Choice:
    """The compute ops of the schedule asked for; `auto` looks for it."""
    if ask.schedule.strip().lower() == AUTO:
        return _planned(ask, cut)
    if ask.memory is not None:
        raise OptionError(
            f"--memory is for --schedule auto; {ask.schedule} takes what it takes: see its bytes"
        )
    cut = sketched(ask) if cut is None else cut
    _check_owners(ask, cut.ranks)
    costs = costs_of(ask, cut)
    table = derive(
        cut,
        ask.microbatches,
        ask.schedule,
        costs=costs,
        owners=ask.owners,
        live=ask.live,
        effort=ask.effort,
    )
    return _Choice(table, costs, ask.schedule)


def _planned(ask: Ask, given: Cut | None) -> _Choice:
    """The planner's choice among what the regions, or a given cut, can be laid out for."""
    _check_owners(ask, (ask.ranks or 0) if given is None else given.ranks)
    if ask.memory is not None and not ask.rates.kept:
        raise OptionError("--memory needs to know what is kept; say it with --keep, as in llm=2e9")
    chunks: tuple[int, ...] = (1, 2)
    if given is not None:
        chunks = (chunks_of(given),)
    elif ask.chunks is not None or ask.live:
        chunks = (ask.chunks or 1,)

    def lay(schedule: str, count: int) -> Option:
        asked = replace(ask, schedule=schedule, chunks=count)
        cut = sketched(asked) if given is None else given
        return Option(cut, costs_of(ask, cut))

    planned = plan(
        lay,
        ask.microbatches,
        chunks=chunks,
        owners=ask.owners,
        live=ask.live,
        memory=math.inf if ask.memory is None else ask.memory,
        effort=ask.effort,
    )
    return _Choice(planned.table, planned.costs, planned.chosen.schedule, planned.front)


def _finished(table: Table, costs: Costs) -> Table:
    """With transfers and reductions."""
    return passes.run(table, (partial(communicate, costs=costs), reduce))


def _check_placed(choice: _Choice, microbatches: int) -> None:
    """No rule can see that a table lacks its last microbatches altogether."""
    if choice.table.microbatches != microbatches:
        raise ScheduleError(
            f"{choice.schedule} has ops of {choice.table.microbatches} of {microbatches} "
            "microbatches; try another placement"
        )


def _check_sharded(name: str, sketches: Sequence[Sketch]) -> None:
    roles = {x.name: x.role for x in sketches}
    if roles.get(name) not in (Role.ENCODER, Role.GENERATOR):
        can = ", ".join(x for x, role in roles.items() if role is not Role.BACKBONE) or "none"
        why = "is the backbone, which always is" if name in roles else "names no region"
        raise OptionError(f"--shard {name} {why}; regions that can be sharded: {can}")


def _check_recompute(name: str, sketches: Sequence[Sketch]) -> None:
    trained = [x.name for x in sketches if x.trained]
    if name not in trained:
        known = any(x.name == name for x in sketches)
        why = "is frozen, and has no backward" if known else "names no region"
        can = ", ".join(trained) or "none"
        raise OptionError(f"--recompute {name} {why}; regions that can recompute: {can}")


def _check_owners(ask: Ask, ranks: int) -> None:
    if not isinstance(ask.owners, tuple):
        return
    if len(ask.owners) != ask.microbatches:
        raise OptionError(
            f"--owners names {len(ask.owners)} ranks for {ask.microbatches} microbatches; name the "
            "owner of each"
        )
    wrong = [owner for owner in ask.owners if not 0 <= owner < ranks]
    if wrong:
        raise OptionError(f"--owners names rank {wrong[0]}; expected ranks of 0..{ranks - 1}")
