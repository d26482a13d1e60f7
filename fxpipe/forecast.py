"""A forecast: the table of a schedule, with its transfers, and what it takes before it has run.

forecast(ask)              for a sketch
forecast(ask, cut)         for a cut that is there already
checked(ask, text)         of a table that someone else has made, if it keeps every rule
replayed(ask, text)        of torch's CSV of actions, for a sketch
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from fxpipe import passes
from fxpipe.actions import read_actions
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Role
from fxpipe.errors import OptionError, ScheduleError
from fxpipe.figures import Figures, figures
from fxpipe.passes.communicate import communicate
from fxpipe.passes.reduce import reduce
from fxpipe.rates import Rates, rate
from fxpipe.schedule import AUTO, derive, layout
from fxpipe.simulate import simulate
from fxpipe.sketch import Homes, Sketch, sketch
from fxpipe.table import Op, Table
from fxpipe.timeline import Timeline
from fxpipe.verify import verify

Owners = str | tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """What is to be forecast.

    ranks: needed for a sketch. chunks: backbone stages per rank, by default what the base wants.
    sharded: encoders and generators that are cut into one stage per rank. owners: the name of an
    owner map, or the rank of each microbatch. live: the most units of "modality" and "llm" that a
    rank may hold. memory: bytes that `auto` may use.
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


@dataclass(frozen=True)
class Forecast:
    """A table, what it takes, and what `auto` chose it from, if it did."""

    table: Table
    costs: Costs
    timeline: Timeline
    schedule: str
    front: tuple[dict[str, Any], ...] = ()

    @property
    def figures(self) -> Figures:
        """The figures of the table."""
        return figures(self.table, self.costs, self.timeline)


class _Choice(NamedTuple):
    table: Table
    schedule: str
    front: tuple[dict[str, Any], ...] = ()


def forecast(ask: Ask, cut: Cut | None = None) -> Forecast:
    """The forecast of a schedule for a cut, or for the sketch. Raises FxpipeError."""
    cut = sketched(ask) if cut is None else cut
    _check_owners(ask, cut.ranks)
    costs = costs_of(ask, cut)
    choice = _chosen(ask, cut, costs)
    _check_placed(choice, ask.microbatches)
    table = _finished(choice.table, costs)
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
    plan = layout(
        ask.schedule, ask.ranks, encoders, generators, chunks=ask.chunks, sharded=ask.sharded
    )
    placed = {
        name: home if isinstance(home, tuple) else (home,)
        for name, home in plan.home.items()
        if home is not None
    }
    placed |= {x.name: plan.backbone for x in ask.sketches if x.role is Role.BACKBONE}
    return sketch(ask.sketches, Homes(ask.ranks, placed))


def costs_of(ask: Ask, cut: Cut) -> Costs:
    """The sketch's costs of a cut; without one every op takes a second, and W two without B."""
    if not ask.sketches:
        return _linked(ask, Costs.uniform(cut))
    return rate(cut, ask.sketches, ask.rates, ask.microbatches)


def _linked(ask: Ask, costs: Costs) -> Costs:
    return replace(costs, latency=ask.rates.latency, bandwidth=ask.rates.bandwidth)


def _chosen(ask: Ask, cut: Cut, costs: Costs) -> _Choice:
    """The compute ops of the schedule asked for; `auto` looks for it."""
    if ask.schedule.strip().lower() == "auto":
        return _Choice(_derived(ask, cut, costs, AUTO), AUTO)
    return _Choice(_derived(ask, cut, costs, ask.schedule), ask.schedule)


def _derived(ask: Ask, cut: Cut, costs: Costs, schedule: str) -> Table:
    options: dict[str, Any] = {}
    if ask.owners is not None:
        options["owners"] = ask.owners
    if ask.live:
        options["live"] = ask.live
    return derive(cut, ask.microbatches, schedule, costs=costs, **options)


def _finished(table: Table, costs: Costs) -> Table:
    """With transfers and reductions; an op of no time is given some, so that ops have an order."""
    longest = max(map(costs.compute, table.place), default=0.0)
    least = longest * 1e-9 or 1.0
    seconds = {
        (stage.name, kind): tuple(
            max(least, costs.compute(Op(stage.name, kind, mb))) for mb in range(table.microbatches)
        )
        for stage in table.cut.stages
        for kind in stage.kinds
    }
    timed = replace(costs, seconds=seconds)
    return passes.run(table, (partial(communicate, costs=timed), reduce))


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
