"""The bars that the sweep must clear, and by how much each case misses one.

Cases that differ in the seed of their encoder costs alone are one case, of which the median counts.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from benchmarks.sweeping import PUBLISHED, Case, Measured

Groups = Mapping[Case, Sequence[Measured]]
_ROUNDING = 1e-9


class Value(NamedTuple):
    """What was measured of a case; `where` also says of which schedule."""

    number: float
    where: str


@dataclass(frozen=True)
class Bar:
    """A claim: no value is above the limit; values worst first."""

    claim: str
    limit: float
    values: tuple[Value, ...]

    @property
    def missed(self) -> tuple[Value, ...]:
        """The values above the limit."""
        return tuple(v for v in self.values if v.number > self.limit + _ROUNDING)

    def text(self, worst: int = 10) -> str:
        """A line, and one more for each of the worst cases."""
        if self.limit == math.inf:
            over = [value for value in self.values if value.number > 1 + _ROUNDING]
            rows = (f"    {x:9.4f}  {where}" for x, where in over[:worst])
            return "\n".join([f"{self.claim}: {len(over)} of {len(self.values)} over 1", *rows])
        verdict = f"MISSED by {len(self.missed)} of {len(self.values)}" if self.missed else "PASS"
        top = self.values[0].number if self.values else 0.0
        head = f"{self.claim}: worst {top:.4f}, bar {self.limit:.4f}, {verdict}"
        return "\n".join([head, *(f"    {x:9.4f}  {where}" for x, where in self.missed[:worst])])


def grouped(measured: Iterable[Measured]) -> Groups:
    """The measured cases by case, those of all seeds together."""
    found: dict[Case, list[Measured]] = defaultdict(list)
    for one in measured:
        found[replace(one.case, seed=None)].append(one)
    return dict(sorted(found.items()))


def bars(groups: Groups, *, whole: bool = True) -> Iterator[Bar]:
    """All bars, those of placements first. whole: also the median gain over all cases."""
    yield _bar("fastest nested / fastest of upfront and transpose", 1.0, _against(groups))
    yield _bar("the same base by base (no bar)", math.inf, _base_by_base(groups))
    if whole:
        yield _bar("1 / median of upfront as published / nested", 1 / 1.08, [_median_gain(groups)])
    yield _bar("1 / most of stage / nested, heavy", 1 / 2, _most_gain(groups))
    yield _bar("encoder units at the most microbatches, less those at fewer", 0, _growth(groups))
    yield _bar("backbone units beyond base and generator's group", 0, _each(groups, _over))
    yield _bar("backbone units of free orders beyond their cap", 0, _each(groups, _broken))
    for times, capped, large in ((4, 0.08, 0.05), (8, 0.05, 0.03)):
        at = {case: ones for case, ones in groups.items() if case.times == times}
        yield _bar(f"at the caps, over the bound, M = {times} P", capped, _each(at, _at_caps))
        yield _bar(f"without caps, over the bound, M = {times} P", large, _each(at, _at_large))


def gain(ones: Sequence[Measured], over: str, base: str) -> float:
    """How many times as fast nested is as another placement of the same base; the median."""
    return median(
        one.runs[f"{over}/{base}"].seconds / one.runs[f"nested/{base}"].seconds for one in ones
    )


def bases(groups: Groups) -> list[str]:
    """The bases that were run."""
    first = next(iter(groups.values()))[0]
    return [name.partition("/")[2] for name in first.runs if name.startswith("upfront/")]


def _bar(claim: str, limit: float, values: Iterable[Value]) -> Bar:
    return Bar(claim, limit, tuple(sorted(values, key=lambda value: -value.number)))


def _against(groups: Groups) -> Iterator[Value]:
    """The fastest nested order at the base's caps against the fastest of any base at the ends."""
    for case, ones in groups.items():
        ratios = []
        for one in ones:
            nested = {n: x for n, x in one.runs.items() if n.startswith(("nested", "auto"))}
            ends = {n: x for n, x in one.runs.items() if n.startswith(("upfront", "transpose"))}
            mine = min(nested, key=lambda name: nested[name].seconds)
            other = min(ends, key=lambda name: ends[name].seconds)
            ratios.append((nested[mine].seconds / ends[other].seconds, f"{mine} against {other}"))
        yield Value(median(ratio for ratio, _ in ratios), f"{case} {ratios[0][1]}")


def _base_by_base(groups: Groups) -> Iterator[Value]:
    """Where bases are the same. An encoder that fits into the slack costs nothing at the ends, at
    the price of all its activations: rows that hold a few units cannot have that."""
    for case, ones in groups.items():
        for base in bases(groups):
            slower, over = max(
                (1 / gain(ones, over, base), over) for over in ("upfront", "transpose")
            )
            held = ones[0].runs[f"nested/{base}"].live["vision"]
            most = ones[0].runs[f"{over}/{base}"].live["vision"]
            where = f"{case} nested/{base} against {over}: {held} encoder units against {most}"
            yield Value(slower, where)


def _median_gain(groups: Groups) -> Value:
    """Of the fastest nested table over upfront as it was published: on 1F1B, backward unsplit."""
    gains, most, same = [], [], []
    for ones in groups.values():
        for one in ones:
            published = one.runs[PUBLISHED].seconds
            fastest = min(run.seconds for name, run in one.runs.items() if name[:6] == "nested")
            gains.append(published / fastest)
            most.append(published / one.bound)
        same += [gain(ones, "upfront", base) for base in bases(groups)]
    gained = median(gains)
    where = f"{gained:.3f} of {median(most):.3f} down to the bound; base by base {median(same):.3f}"
    return Value(1 / gained, where)


def _most_gain(groups: Groups) -> list[Value]:
    """Where an encoder or a generator takes as long as two forwards of a stage, or longer."""
    gains = [
        Value(1 / gain(ones, "stage", base), f"{case} {base}")
        for case, ones in groups.items()
        if max(case.encoder, case.generator) >= 2
        for base in bases(groups)
    ]
    return sorted(gains)[:1]


def _growth(groups: Groups) -> Iterator[Value]:
    """Of encoder units, from fewer to the most microbatches, both at least four for each rank."""
    for case, ones in groups.items():
        if case.times <= 4 or (few := groups.get(replace(case, times=4))) is None:
            continue
        for base in bases(groups):
            name = f"nested/{base}"
            less, more = (median(one.runs[name].live["vision"] for one in at) for at in (few, ones))
            yield Value(more - less, f"{case} {name}: {less:g}, then {more:g}")


def _each(groups: Groups, number: Callable[[Measured], tuple[float, str]]) -> Iterator[Value]:
    """The median over the seeds of a case, beside what the first has to say of it."""
    for case, ones in groups.items():
        found = [number(one) for one in ones]
        yield Value(median(x for x, _ in found), f"{case} {found[0][1]}")


def _over(one: Measured) -> tuple[float, str]:
    return max((float(run.over), name) for name, run in one.runs.items())


def _broken(one: Measured) -> tuple[float, str]:
    """Free orders were told their caps."""
    wrong = [name for name, run in one.runs.items() if _free(name) and not run.capped]
    most = max((one.runs[name].excess, name) for name in wrong) if wrong else (0, "")
    return float(most[0]), most[1]


def _free(name: str) -> bool:
    return name.startswith("auto") and name.endswith("capped")


def _at_caps(one: Measured) -> tuple[float, str]:
    return one.distance(one.at_caps), str(one.at_caps)


def _at_large(one: Measured) -> tuple[float, str]:
    return one.distance(one.at_large), str(one.at_large)
