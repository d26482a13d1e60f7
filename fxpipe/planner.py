"""The planner: the time-memory front of schedules, as predicted, and a choice from it.

Each choice (`choices`) is derived with little effort and simulated. The best that keep to the
limits are derived again with more: an order that is searched for, and the base it has to beat.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fxpipe.choices import Choice, Option, Space, again, check_owners, choices
from fxpipe.costs import Costs
from fxpipe.errors import ScheduleError
from fxpipe.front import Point, beaten, keeps_to, nothing_fits, takes, with_best
from fxpipe.nest import limits_of
from fxpipe.owners import Given
from fxpipe.schedule import AUTO, REPLICATED, base_rows, derive, generators_return
from fxpipe.skeletons import PATTERNS
from fxpipe.table import Table

_GLANCE = 0.02  # effort of a choice that is only looked at
_BASE = 0.3  # effort of the best base, where an order that is searched for is there
_CLOSE = 1.05  # a base that is so much slower at a glance is not looked at again
_FINALISTS = 4  # bases that are looked at again
_LOOK = 100_000  # ops that may be placed at a glance, for each number of chunks
_FEWEST = 2  # choices that are looked at, whatever it takes
_FURTHER = 2  # how much more is looked at where nothing fits
_BEST = 4  # bases that are tried with recompute, beside those of the front
_SMALL = 100  # ops below which a search comes to its end sooner
_LARGE = 20_000  # ops above which all effort is hardly more than a glance
_PLACED, _NEST, _FREE = 4, 60_000, 350_000  # ops that a table takes, and a search of effort 1

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
    check_owners(owners, first.cut, microbatches)
    wanted = choices(first.cut, Space(chunks, owners, search.live.get("modality")))
    look = _LOOK * len(chunks) * max(_BASE, effort)
    search.glance(wanted, look)
    free = [next(x for x in wanted if (x.base, x.chunks) == (AUTO, count)) for count in chunks]
    sets = again(first.cut) if recompute and first.costs.kept else ((),)
    for regions in sets[1:]:
        search.glance(x._replace(recompute=regions) for x in (*search.based, *free))
    if not any(tried.point.fits for tried in search.tried):
        search.glance((x._replace(recompute=sets[-1]) for x in wanted), _FURTHER * look)
    if not search.tried and search.error:
        raise search.error
    final = search.final() or search.last(x._replace(recompute=sets[-1]) for x in free)
    if not final:
        raise ScheduleError(nothing_fits([x.point for x in search.tried], search.live, memory))
    chosen = min(final, key=_rank)
    return Planned(chosen.table, chosen.option.costs, _front(search.tried, final, chosen))


class _Tried(NamedTuple):
    """A choice, the option and the table that it came to, and what that takes."""

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
        self.keys: set[object] = set()
        self.tried: list[_Tried] = []
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
        return found and found.recomputing(choice.recompute)

    def glance(self, wanted: Iterable[Choice], look: float = math.inf) -> None:
        """Try choices with little effort, the first ones first, until so many ops are placed."""
        spent = 0.0
        for choice in wanted:
            option = self.option(choice)
            key = option and self.key(choice, option)
            if option is None or key is None or key in self.keys:
                continue
            self.keys.add(key)
            spent += self.ops(option, choice, _GLANCE)
            if found := self.attempt(choice, option, _GLANCE):
                self.tried.append(found)
            if spent > look and len(self.tried) >= _FEWEST:
                break

    @property
    def based(self) -> list[Choice]:
        """The bases that are best where nothing recomputes, whether they fit or not."""
        plain = [x for x in self.tried if not x.choice.recompute and x.choice.base != AUTO]
        plain.sort(key=_rank)
        lost = beaten([tried.point for tried in plain])
        pairs = enumerate(zip(plain, lost, strict=True))
        return [tried.choice for at, (tried, worse) in pairs if at < _BEST or not worse]

    def key(self, choice: Choice, option: Option) -> object:
        """Choices with the same key come to the same rows; None where there are none."""
        nested = choice.placement == "nested"
        rest: tuple[object, ...] = choice.recompute, nested, choice.window, repr(choice.owners)
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

    def attempt(self, choice: Choice, option: Option, effort: float) -> _Tried | None:
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
        return _Tried(choice, option, table, point)

    def limits(self, choice: Choice, option: Option) -> tuple[dict[str, int], float]:
        """Units and bytes that a search keeps to. A base says itself what the pipeline holds, so
        that the front of bases does not depend on the budget; an order that is searched for holds
        what 1F1B would, or, under a budget, as much as there is room for."""
        live = dict(self.live)
        if choice.window is not None:
            live.setdefault("modality", choice.window)
        if choice.base != AUTO:
            return live, math.inf
        if self.memory == math.inf:
            live.setdefault("llm", option.cut.ranks * (1 + generators_return(option.cut)))
            return live, math.inf
        return live, option.room(self.memory)

    def final(self) -> list[_Tried]:
        """The best order that is searched for and the best base, both with more effort."""
        fitting = sorted((tried for tried in self.tried if tried.point.fits), key=_rank)
        free = next((tried for tried in fitting if tried.choice.base == AUTO), None)
        based = next((tried for tried in fitting if tried.choice.base != AUTO), None)
        if free is None or based is None:
            return [self.harder(tried, self.effort) for tried in fitting[:1]]
        final = []
        if not self.large(free) or free.point.seconds <= _CLOSE * based.point.seconds:
            final.append(self.harder(free, self.effort))
        best = min(tried.point.seconds for tried in (based, *final))
        bases = self.close(fitting, _CLOSE * best)
        final += [self.harder(self.widened(tried), _BASE * self.effort) for tried in bases]
        if self.effort <= 1:
            return final if bases else [based, *final]
        return [*final, self.harder(min((based, *final), key=_rank), self.effort)]

    def close(self, fitting: Sequence[_Tried], limit: float) -> list[_Tried]:
        """The best of each base that is as quick: at a glance they are hard to tell apart. With
        little effort, or large tables, the best one alone; with much, of each placement as well."""
        found: dict[tuple[str, str], _Tried] = {}
        for tried in fitting:
            base, placement = tried.choice.base, tried.choice.placement
            if base != AUTO and tried.point.seconds <= limit:
                found.setdefault((base, placement if self.effort > 1 else ""), tried)
        few = self.effort < _BASE or any(map(self.large, found.values()))
        return list(found.values())[: 1 if few else int(_FINALISTS * max(1, self.effort))]

    def widened(self, tried: _Tried) -> _Tried:
        """With the window that `nest` finds worth while, if that is quicker and fits."""
        choice, option, *_ = tried
        known = choice.window is None or "modality" in self.live
        if known or self.effort < _BASE or self.large(tried):
            return tried
        found = self.attempt(choice._replace(window=None), option, _GLANCE)
        return min(tried, found, key=_rank) if found and found.point.fits else tried

    @staticmethod
    def large(tried: _Tried) -> bool:
        """Whether its table has so many ops that effort does little."""
        return sum(map(len, tried.table.rows)) >= _LARGE

    def harder(self, tried: _Tried, effort: float) -> _Tried:
        """The same choice with more effort, if that finds a better table."""
        choice, option, *_ = tried
        effort *= min(1.0, sum(map(len, tried.table.rows)) / _SMALL)
        glance, more = (self.ops(option, choice, x) for x in (_GLANCE, effort))
        found = self.attempt(choice, option, effort) if more > glance else None
        return min(tried, found, key=_rank) if found and found.point.fits else tried

    def last(self, free: Iterable[Choice]) -> list[_Tried]:
        """The first order that all effort finds to fit, where no glance has found one."""
        for choice in free:
            option = self.option(choice)
            found = option and self.attempt(choice, option, self.effort)
            if found and found.point.fits:
                return [found]
        return []


def _front(seen: Sequence[_Tried], final: Sequence[_Tried], chosen: _Tried) -> tuple[Point, ...]:
    """All points; where a choice was derived again, the later one."""
    done = [tried.choice for tried in final]
    points = [tried.point._replace(chosen=tried is chosen) for tried in final]
    return with_best([*points, *(tried.point for tried in seen if tried.choice not in done)])


def _rank(tried: _Tried) -> tuple[object, ...]:
    """Less is better."""
    return *tried.point.rank, tried.choice.plainness


def _shown(choice: Choice) -> str:
    """How a point names owners."""
    match choice.owners:
        case None:
            return "free" if choice.placement == "nested" else ""
        case str(name):
            return name
    return "given"
