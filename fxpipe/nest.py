"""The nested pipeline: encoder and generator units inside the base rows (BigMac, arXiv 2605.25451).

Removing the ops of replicated stages from any row gives the base row back: the base is never
reordered, only waited for. Where the units go, and which rank owns them, is found by list
scheduling (`search`), so a nested table is an execution and cannot deadlock.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from fxpipe.costs import Costs
from fxpipe.cut import Cut
from fxpipe.errors import ScheduleError
from fxpipe.numbering import build
from fxpipe.problem import Limits, Owners, Problem
from fxpipe.search import search
from fxpipe.table import Rows

_EFFORT = 200_000  # ops placed
_TRIES = 300  # more are not made, however few ops there are
_WINDOW = 20_000
_WORTH = 0.01  # a wider window must end so much sooner, as a fraction


def nest(
    cut: Cut,
    microbatches: int,
    costs: Costs,
    base: Callable[[int], Rows],
    *,
    owners: Owners | None = None,
    limits: Limits | None = None,
    effort: float = 1.0,
) -> Rows:
    """Put the units of encoders and generators into base rows. Raises ScheduleError.

        rank 0: llm0.F0 llm0.F1 llm0.B0 ...  ->  vision.F0 llm0.F0 llm0.F1 vision.F2 llm0.B0 ...

    base: the base rows for a number of microbatches. limits: by default a rank holds as many units
    of a region as `windowed` finds worth while. effort: how long to look; 1 is usual.
    """
    limits = limits or Limits()
    if limits == Limits() and all(stage.rank is not None for stage in cut.stages):
        return base(microbatches)  # there is nothing to put in, and no limit to keep to

    def problem(limits: Limits, microbatches: int) -> Problem:
        given = {region: tuple(of)[:microbatches] for region, of in (owners or {}).items()}
        return build(cut, microbatches, costs, base=base(microbatches), owners=given, limits=limits)

    tried = windowed(cut, microbatches, problem, limits, based=True)
    while True:
        whole = problem(tried, microbatches)
        placed = min(_EFFORT, _TRIES * len(whole.ops))
        found = search(cut, whole, effort=int(placed * effort), based=True)
        if found:
            break
        if limits.modality < math.inf or tried.modality > microbatches:
            raise ScheduleError(f"no order of the units keeps to {limits}; allow more")
        # A base that holds all microbatches needs as many units of them.
        tried = replace(tried, modality=2 * tried.modality, generator=2 * tried.generator)
    return whole.rows(found[0].listed.ranks, found[0].listed.starts)


def windowed(
    cut: Cut,
    microbatches: int,
    problem: Callable[[Limits, int], Problem],
    limits: Limits,
    *,
    based: bool,
) -> Limits:
    """The limits with the least windows that are worth while: units of a region live on a rank.

    A window is tried out on as many microbatches as make a steady state, so that it does not
    depend on how many there are: too small a one deadlocks, and a wider one than needed holds
    memory for nothing. A generator's, whose backward follows its forward, is tried last.
    """
    if limits.modality < math.inf:
        return limits
    each = max(1, sum(len(stage.kinds) for stage in cut.stages))
    few = min(microbatches, max(2 * cut.ranks, min(4 * cut.ranks, _WINDOW // each)))

    if each * few > _WINDOW:  # no time to try: BigMac's, and wider if it is too small
        return replace(limits, modality=3, generator=1)

    def end(limits: Limits) -> float:
        tried = problem(limits, few)
        effort = min(_WINDOW, _TRIES * len(tried.ops))
        found = search(cut, tried, effort=effort, based=based)
        return found[0].listed.end if found else math.inf

    limits = _least(replace(limits, generator=1), "modality", few, end)
    return _least(limits, "generator", int(min(few, limits.modality)), end)


def _least(limits: Limits, name: str, most: int, end: Callable[[Limits], float]) -> Limits:
    """The limits with the least number that a larger one does not improve on."""
    best, chosen = math.inf, limits
    for window in range(1, most + 1):
        tried = replace(limits, **{name: window})
        found = end(tried)
        if found < best * (1 - _WORTH):
            best, chosen = found, tried
        elif best < math.inf:
            break
    return chosen


def limits_of(live: Mapping[str, int] | None, chunks: int, memory: float) -> Limits:
    """Limits from the units that "modality" and "llm" may hold: those of a whole rank's share."""
    asked = dict(live or {})
    unknown = set(asked) - {"modality", "llm"}
    if unknown:
        raise ScheduleError(f"live names {sorted(unknown)}; expected modality or llm")
    limits = Limits(memory=memory)
    if "modality" in asked:
        limits = replace(limits, modality=asked["modality"])
    if "llm" in asked:
        limits = replace(limits, sharded=asked["llm"] * chunks)
    return limits
