"""The planner: the time-memory front of schedules, as predicted, and a choice from it.

Each choice (`choices`) is derived with little effort and simulated. The best that keep to the
limits are derived again with more: an order that is searched for, and the base it has to beat.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fxpipe.choices import Choice, Space, again, choices
from fxpipe.costs import Costs
from fxpipe.cut import Cut, Region
from fxpipe.errors import ScheduleError
from fxpipe.front import Point, keeps_to, nothing_fits, takes, with_best
from fxpipe.nest import limits_of
from fxpipe.owners import Given
from fxpipe.schedule import AUTO, REPLICATED, base_rows, derive, generators_return
from fxpipe.skeletons import PATTERNS
from fxpipe.table import Table

_GLANCE = 0.02  # effort of a choice that is only looked at
_BASE = 0.3  # effort of the best base, where an order that is searched for is there
_CLOSE = 1.05  # a base that is so much slower at a glance is not looked at again
_LOOK = 100_000  # ops that all glances together may place; four times that where bytes are known
_FEWEST = 2
_PLACED, _NEST, _FREE = 4, 60_000, 350_000  # ops that a table takes, and a search of effort 1


@dataclass(frozen=True)
class Option:
    """A cut, as a schedule wants it laid out, and what its ops cost."""

    cut: Cut
    costs: Costs


Lay = Callable[[str, int], Option | None]  # by schedule and chunks; None if it cannot be had


@dataclass(frozen=True)
class Planned:
    """The table of compute ops that was chosen, its costs, and every point, the quickest first."""

    table: Table
    costs: Costs
    front: tuple[Point, ...]

    @property
    def chosen(self) -> Point:
        """The point of the table."""
        return next(point for point in self.front if point.chosen)


def plan(
    lay: Lay,
    microbatches: int,
    *,
    chunks: Sequence[int] = (1,),
    recompute: bool = True,
    owners: Given = None,
    live: Mapping[str, int] | None = None,
    memory: float = math.inf,
    effort: float = 1.0,
) -> Planned:
    """The quickest schedule within limits that is found. Raises ScheduleError if there is none.

    chunks: the numbers of backbone stages per rank to choose from. recompute: whether more regions
    may recompute than those of the cut that do. owners, live, effort: as `derive` takes them.
    memory: bytes of each rank. Nothing depends on the clock: all machines choose the same table.
    """
    limits_of(live, 1, memory)  # for its errors
    search = _Search(lay, microbatches, live or {}, memory, effort)
    first = search.laid("nested/1f1b" if chunks[0] == 1 else "nested/interleaved", chunks[0])
    if first is None:
        raise ScheduleError("the cut cannot be laid out for a nested placement; name a schedule")
    more = again(first.cut) if recompute and first.costs.kept else ((),)
    space = Space(chunks, owners, search.live.get("modality"), more)
    wanted = choices(first.cut, space)
    seen = search.glances(wanted)
    final = search.final(seen, wanted)
    if not final:
        raise ScheduleError(nothing_fits([x.point for x in seen], search.live, memory))
    chosen = min(final, key=_rank)
    others = [x for x in seen if x.order not in {tried.order for tried in final}]
    points = [
        tried.point._replace(chosen=tried is chosen)
        for tried in sorted((*final, *others), key=lambda tried: tried.order)
    ]
    return Planned(chosen.table, chosen.option.costs, with_best(points))


def recomputing(option: Option, names: Sequence[str]) -> Option:
    """The option with more regions that recompute, for costs of a model that keeps everything."""
    if not names:
        return option

    def cut(recompute: Callable[[Region], bool]) -> Cut:
        regions = [replace(region, recompute=recompute(region)) for region in option.cut.regions]
        return replace(option.cut, regions=tuple(regions))

    costs = option.costs.recomputed(cut(lambda region: region.name in names))
    return Option(cut(lambda region: region.recompute or region.name in names), costs)


class _Tried(NamedTuple):
    """A choice, the option and the table that it came to, and what that takes."""

    order: int
    choice: Choice
    option: Option
    table: Table
    point: Point


class _Search:
    """Choices tried within limits."""

    def __init__(
        self, lay: Lay, microbatches: int, live: Mapping[str, int], memory: float, effort: float
    ) -> None:
        self.lay, self.microbatches, self.effort = lay, microbatches, effort
        self.live, self.memory = live, memory
        self.options: dict[tuple[str, int], Option | None] = {}
        self.error: ScheduleError | None = None

    def laid(self, schedule: str, chunks: int) -> Option | None:
        """What the caller lays out, once."""
        key = schedule, chunks
        if key not in self.options:
            self.options[key] = self.lay(schedule, chunks)
        return self.options[key]

    def option(self, choice: Choice) -> Option | None:
        """The cut of a choice, laid out by the first schedule that has the same one."""
        placement = "nested" if choice.placement in REPLICATED else choice.placement
        base = "1f1b" if choice.chunks == 1 else "interleaved"
        if choice.base != AUTO and PATTERNS[choice.base].shape == "v":
            base = "zb-v"
        found = self.laid(f"{placement}/{base}", choice.chunks)
        return found and recomputing(found, choice.recompute)

    def glances(self, wanted: Sequence[Choice]) -> list[_Tried]:
        """What choices take at a glance, the first ones first, as many as it is worth."""
        tried: list[_Tried] = []
        seen: set[object] = set()
        spent = 0.0
        for order, choice in enumerate(wanted):
            option = self.option(choice)
            if option is None:
                continue
            look = _LOOK * max(_BASE, self.effort) * (4 if option.costs.kept else 1)
            if spent > look and len(tried) >= _FEWEST:
                break
            key = self.key(choice, option)
            if key is None or key in seen:
                continue
            seen.add(key)
            spent += self.ops(option, choice, _GLANCE)
            if found := self.attempt(order, choice, option, _GLANCE):
                tried.append(found)
        if not tried and self.error:
            raise self.error
        return tried

    def key(self, choice: Choice, option: Option) -> object:
        """Choices with the same key come to the same rows; None where there are none."""
        nested = choice.placement == "nested"
        rest: tuple[object, ...] = nested, choice.window, choice.owners, choice.recompute
        if all(stage.rank is not None for stage in option.cut.stages):
            rest = (choice.recompute,)
        if choice.base == AUTO:
            return choice.chunks, rest
        try:
            return base_rows(option.cut, self.microbatches, choice.schedule), rest
        except ScheduleError as error:
            self.error = error
            return None

    def ops(self, option: Option, choice: Choice, effort: float) -> float:
        """How many ops are placed, or as good as, for a choice."""
        ops = self.microbatches * sum(len(stage.kinds) for stage in option.cut.stages)
        search = _FREE if choice.base == AUTO else _NEST if choice.placement == "nested" else 0
        return _PLACED * ops + (max(ops, effort * search) if search else 0)

    def attempt(self, order: int, choice: Choice, option: Option, effort: float) -> _Tried | None:
        """The table of a choice, and what it takes; None if no order keeps to the limits."""
        live, memory = self.limits(choice, option)
        if memory <= 0:
            return None
        try:
            table = derive(
                option.cut,
                self.microbatches,
                choice.schedule,
                costs=option.costs,
                owners=choice.owners,
                live=live,
                memory=memory,
                effort=effort,
            )
        except ScheduleError as error:
            self.error = error
            return None
        seconds, held, units = takes(table, option.costs)
        point = Point(
            choice.schedule,
            _shown(choice),
            choice.window if any(stage.rank is None for stage in option.cut.stages) else None,
            tuple(region.name for region in option.cut.regions if region.recompute),
            choice.chunks,
            seconds,
            held,
            units,
            keeps_to(units, held, option.cut, self.live, self.memory),
        )
        return _Tried(order, choice, option, table, point)

    def limits(self, choice: Choice, option: Option) -> tuple[dict[str, int], float]:
        """What a search keeps to. A base says itself what the pipeline holds, so that the front of
        bases does not depend on the budget; an order that is searched for holds what 1F1B would,
        or, under a budget, as much as there is room for; no room at all is 0 bytes."""
        live = dict(self.live)
        if choice.window is not None:
            live.setdefault("modality", choice.window)
        if choice.base != AUTO:
            return live, math.inf
        if self.memory == math.inf:
            live.setdefault("llm", option.cut.ranks * (1 + generators_return(option.cut)))
            return live, math.inf
        return live, _room(option, self.memory)

    def final(self, seen: Sequence[_Tried], wanted: Sequence[Choice]) -> list[_Tried]:
        """The best order that is searched for and the best base, both with more effort."""
        fitting = sorted((tried for tried in seen if tried.point.fits), key=_rank)
        if not fitting:
            last = enumerate(wanted)
            found = (self.alone(at, choice) for at, choice in last if choice.base == AUTO)
            return [tried for tried in [next(found, None)] if tried and tried.point.fits]
        free = next((tried for tried in fitting if tried.choice.base == AUTO), None)
        based = next((tried for tried in fitting if tried.choice.base != AUTO), None)
        final = [self.again(free, self.effort)] if free else []
        if based and not free:
            final.append(self.again(based, self.effort))
        elif based and based.point.seconds <= _CLOSE * final[0].point.seconds:
            final.append(self.again(based, _BASE * self.effort))
        return final

    def alone(self, order: int, choice: Choice) -> _Tried | None:
        """A choice that no glance has found to fit, with all effort."""
        option = self.option(choice)
        return None if option is None else self.attempt(order, choice, option, self.effort)

    def again(self, tried: _Tried, effort: float) -> _Tried:
        """The same choice with more effort, if that finds a better table."""
        order, choice, option, *_ = tried
        glance, harder = (self.ops(option, choice, x) for x in (_GLANCE, effort))
        if harder <= glance:
            return tried
        found = self.attempt(order, choice, option, effort)
        return min(tried, found, key=_rank) if found and found.point.fits else tried


def _rank(tried: _Tried) -> tuple[tuple[float, float, int], int]:
    """Less is better."""
    return tried.point.rank, tried.order


def _room(option: Option, memory: float) -> float:
    """Bytes that are left for what ops keep, on the fullest rank; 0 if some op finds no room."""
    cut, costs = option.cut, option.costs
    resident = [0.0] * cut.ranks
    for stage in cut.stages:
        for rank in cut.ranks_of((stage.name,)):
            resident[rank] += costs.resident.get(stage.name, 0.0)
    sizes = (size if isinstance(size, Sequence) else (size,) for size in costs.kept.values())
    room = memory - max(resident)
    return room if room >= max(map(max, sizes), default=0.0) else 0.0


def _shown(choice: Choice) -> str:
    """How a point names owners."""
    match choice.owners:
        case None:
            return "free" if choice.placement == "nested" else ""
        case str(name):
            return name
    return "given"
