"""One case of the sweep: a pipeline of some size under every schedule, and what no schedule beats.

measure(case, ...)      Case -> Measured

Regions are sketches: an encoder and a generator whose forward takes so many times that of one
backbone stage, their backward twice their own forward in one op; the backbone F = B = W = 1 second
for each rank's share, which bases with two chunks per rank halve. Transfers take no time.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from fxpipe.costmodel import lower_bound
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Role
from fxpipe.errors import ScheduleError
from fxpipe.forecast import Ask, costs_of, sketched
from fxpipe.passes.reorder import order_by
from fxpipe.pipeline import pipeline_rows
from fxpipe.rates import Rates
from fxpipe.schedule import base_rows, chunks_of, derive, generators_return
from fxpipe.simulate import simulate
from fxpipe.skeletons import base
from fxpipe.sketch import Sketch
from fxpipe.table import Op, Table, live_units

BASES = ("1f1b", "zb-h1", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v")
BASELINES = ("stage", "ends", "upfront", "transpose")
FREE_ORDERS = {"auto": "auto", "auto/loop": "nested/interleaved", "auto/v": "nested/zb-v"}
PUBLISHED = "published"  # upfront on 1F1B whose backward is one op, as its authors run it
WINDOW = 3  # units of an encoder, and of a generator, on a rank
_SPREAD = math.log(10) / (2 * 1.6449)  # of the logarithm: tenfold from the 5 % to the 95 % quantile
_NARROWED = 2  # bases whose window is tried again if it is over the cap


@dataclass(frozen=True, order=True)
class Case:
    """A pipeline of `ranks`, with `times` as many microbatches; seconds of a forward of each
    replicated region. seed: of encoder costs that are drawn for each microbatch."""

    ranks: int
    times: int
    encoder: float
    generator: float
    seed: int | None = None

    @property
    def microbatches(self) -> int:
        """How many microbatches a step has."""
        return self.ranks * self.times

    @property
    def cap(self) -> int:
        """The base's cap: microbatches whose backbone activations a rank may hold."""
        return self.ranks * (2 if self.generator else 1)

    def __str__(self) -> str:
        name = f"P={self.ranks} M={self.times}P e={self.encoder:g} g={self.generator:g}"
        return name if self.seed is None else f"{name} seed={self.seed}"


@dataclass(frozen=True)
class Run:
    """Seconds of a table, and the most units of each region that are live on a rank.

    excess: units beyond the base's caps. over: backbone units on a rank beyond those of
    the base alone and of a generator's group, at the rank where they are most.
    """

    seconds: float
    live: Mapping[str, int]
    excess: int
    over: int = 0

    @property
    def capped(self) -> bool:
        """Whether the units keep to the base's caps."""
        return self.excess <= 0


@dataclass(frozen=True)
class Measured:
    """The runs of a case by schedule, and the names of the fastest at the base's caps and without
    any; None where nothing was looked for."""

    case: Case
    bound: float
    runs: Mapping[str, Run]
    at_caps: str | None = None
    at_large: str | None = None

    def distance(self, name: str | None) -> float:
        """By which fraction a run is longer than the bound."""
        return math.inf if name is None else self.runs[name].seconds / self.bound - 1


@dataclass(frozen=True)
class Look:
    """How to look: bases, effort of each search, and the distance to the bound that is enough."""

    bases: tuple[str, ...] = BASES
    effort: float = 1.0
    enough: float = 0.005


def measure(case: Case, look: Look) -> Measured:
    """All runs of a case; free orders only where steps are long enough for their bars.

    Microbatches that differ are sorted, the cheap ones first; the baselines run in that order and
    in the one that was drawn, and the better counts.
    """
    setting, published = (_Setting(case, look.effort, whole=whole) for whole in (False, True))
    runs = {f"nested/{name}": setting.run(f"nested/{name}") for name in look.bases}
    orders = (setting, replace(setting, sort=False)) if case.seed is not None else (setting,)
    for schedule in (f"{placement}/{name}" for name in look.bases for placement in BASELINES):
        tried = (order.run(schedule) for order in orders)
        runs[schedule] = min(tried, key=lambda run: run.seconds)
    runs[PUBLISHED] = replace(published, sort=False).run("upfront/1f1b")
    measured = Measured(case, setting.bound, runs)
    if case.times < 4:
        return measured
    measured = _searched(measured, setting, look, capped=True)
    return _searched(measured, setting, look, capped=False)


def _searched(measured: Measured, setting: "_Setting", look: Look, *, capped: bool) -> Measured:
    """With the fastest run, looked for until it is near enough to the bound."""
    runs = dict(measured.runs)
    best = _fastest(runs, capped=capped)
    for name, run in setting.tries(look, runs, capped=capped):
        runs[name] = run
        best = _fastest(runs, capped=capped)
        if best and runs[best].seconds <= setting.bound * (1 + look.enough):
            break
    found = replace(measured, runs=runs)
    return replace(found, at_caps=best) if capped else replace(found, at_large=best)


def _fastest(runs: Mapping[str, Run], *, capped: bool) -> str | None:
    """Of nested tables and free orders; none of the baselines."""
    names = [
        name
        for name, run in runs.items()
        if name.startswith(("nested", "auto")) and (run.capped or not capped)
    ]
    return min(names, key=lambda name: runs[name].seconds, default=None)


@dataclass(frozen=True)
class _Setting:
    """The cuts and costs of a case. whole: the backward of the backbone is one op."""

    case: Case
    effort: float
    whole: bool = False
    sort: bool = True

    @cached_property
    def sketches(self) -> tuple[Sketch, ...]:
        """The regions."""
        return tuple(_sketches(self.case, (2.0,) if self.whole else (1.0, 1.0)))

    @cached_property
    def rates(self) -> Rates:
        """What each microbatch takes of the encoder."""
        if self.case.seed is None:
            return Rates()
        drawn = factors(self.case.microbatches, self.case.seed)
        order = order_by(drawn, "heavy-last") if self.sort else range(len(drawn))
        return Rates(scale={"vision": tuple(drawn[i] for i in order)})

    @cached_property
    def bound(self) -> float:
        """Seconds that no schedule can beat."""
        return lower_bound(*self.of("nested/1f1b"), self.case.microbatches)

    def of(self, schedule: str) -> tuple[Cut, Costs]:
        """The cut that is laid out for a schedule, and its costs."""
        case = self.case
        ask = Ask(self.sketches, case.ranks, case.microbatches, schedule, rates=self.rates)
        cut = sketched(ask)
        return cut, costs_of(ask, cut)

    def run(self, schedule: str, live: Mapping[str, int] | None = None) -> Run:
        """The run of a schedule that has a base."""
        cut, costs = self.of(schedule)
        count = self.case.microbatches
        table = derive(cut, count, schedule, costs=costs, live=live, effort=self.effort)
        over = _over(table, schedule) if schedule.startswith("nested") else 0
        return replace(self.ran(table, costs), over=over)

    def tries(
        self, look: Look, runs: Mapping[str, Run], *, capped: bool
    ) -> Iterator[tuple[str, Run]]:
        """More runs for the fastest: free orders, and, if capped, narrower windows of the bases
        that were the fastest with theirs."""
        count = self.case.microbatches
        wide, narrow = {"modality": count, "llm": count}, {"modality": WINDOW, "llm": self.case.cap}
        for name, layout in FREE_ORDERS.items():
            cut, costs = self.of(layout)
            live = narrow if capped else wide
            try:
                table = derive(cut, count, "auto", costs=costs, live=live, effort=self.effort)
            except ScheduleError:  # no order was found that keeps to the caps
                continue
            yield f"{name}, {'capped' if capped else 'large'}", self.ran(table, costs)
        nested = [f"nested/{name}" for name in look.bases if capped and self.fits(name)]
        for name in sorted(nested, key=lambda name: runs[name].seconds)[:_NARROWED]:
            if not runs[name].capped:
                yield f"{name}, window {WINDOW}", self.run(name, {"modality": WINDOW})

    def fits(self, name: str) -> bool:
        """Whether a base keeps to the cap by itself."""
        cut, _ = self.of(f"nested/{name}")
        alone = Table(cut, base_rows(cut, self.case.microbatches, f"nested/{name}"))
        room = self.case.cap * chunks_of(cut)
        return all(max(live_units(alone, "llm", rank)) <= room for rank in range(cut.ranks))

    def ran(self, table: Table, costs: Costs) -> Run:
        """The run of a table that does all the work there is."""
        cut, case = table.cut, self.case
        timeline = simulate(table, costs)
        ops = case.microbatches * sum(len(stage.kinds) for stage in cut.stages)
        seconds = sum(span.seconds for span in timeline.compute)
        if len(table.place) != ops or not math.isclose(seconds, self.work(cut, costs)):
            raise AssertionError(f"{case}, {table.schedule}: {len(table.place)} of {ops} ops ran")
        live = {claim.region: max(claim.units) for claim in table.live}
        rooms = {"llm": case.cap * chunks_of(cut)}
        excess = max(units - rooms.get(region, WINDOW) for region, units in live.items())
        return Run(timeline.makespan, live, excess)

    def work(self, cut: Cut, costs: Costs) -> float:
        """Seconds of all ops."""
        kinds = [(stage.name, kind) for stage in cut.stages for kind in stage.kinds]
        mbs = range(self.case.microbatches)
        return math.fsum(costs.compute(Op(*name, mb)) for name in kinds for mb in mbs)


def _sketches(case: Case, backward: tuple[float, ...]) -> Iterator[Sketch]:
    yield Sketch("vision", Role.ENCODER, case.encoder, (2 * case.encoder,))
    yield Sketch("llm", Role.BACKBONE, 1.0, backward)
    if case.generator:
        yield Sketch("image", Role.GENERATOR, case.generator, (2 * case.generator,))


def factors(microbatches: int, seed: int) -> tuple[float, ...]:
    """Log-normal factors of mean 1, tenfold apart between the 5 % and the 95 % quantile."""
    chance = Random(seed)
    drawn = (chance.gauss(0.0, _SPREAD) for _ in range(microbatches))
    return tuple(math.exp(x - _SPREAD**2 / 2) for x in drawn)


def _over(table: Table, schedule: str) -> int:
    """Backbone units beyond the base's and those of a generator's group of P microbatches."""
    cut = table.cut
    alone = Table(cut, pipeline_rows(cut, table.microbatches, base(schedule.partition("/")[2])))
    lead = (cut.ranks - 1) * chunks_of(cut) if generators_return(cut) else 0
    return max(
        max(live_units(table, "llm", rank)) - max(live_units(alone, "llm", rank)) - lead
        for rank in range(cut.ranks)
    )
