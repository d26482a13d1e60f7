"""A search for the policy under which list scheduling ends soonest.

First the policies of a portfolio are tried, then variations of the best one, forwards and backwards
in time: a problem turned around is scheduled by the same code, and often better. All chance comes
from one seed, and effort is counted in ops, not in seconds, so that every rank of every machine
finds the same schedule.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from fxpipe.cut import Cut
from fxpipe.listing import Listed, listing
from fxpipe.policies import BACKWARDS, BASED, FORWARDS, FREE, LARGE, Policy, Sort, draw, vary
from fxpipe.problem import Problem

_FRESH = 0.2  # of the tries: a new policy, and not a variation
_ELITE = 3  # policies that variations are made of
_BOTH = 0.8  # of the effort: both directions of time, then the better one alone
_FEW = 4  # tries that are too few for a portfolio
_LEAST = 1000  # ops, however little effort is asked for


@dataclass(frozen=True)
class Found:
    """A schedule, as times of a problem that runs forwards, and how it was found."""

    listed: Listed
    policy: Policy


def search(
    cut: Cut, problem: Problem, *, effort: int, based: bool = False, seed: int = 0
) -> list[Found]:
    """The best schedule of each direction of time, of as many tries as place `effort` ops, the
    sooner one first; none if no try can end.

    based: whether the problem has base rows. Ends early where a try reaches `problem.bound`.
    """
    first, second = (BASED, FREE) if based else (FREE, BASED)
    sides = [
        Side(cut, problem, backwards, (*first[backwards], *second[backwards]))
        for backwards in (False, True)
    ]
    if effort < _FEW * len(problem.ops):
        sides[0].untried.insert(0, LARGE)
    chance = Random(seed)
    spent = tries = 0
    best = sides[0]
    while (spent < effort or best.best is None) and spent < 4 * effort + _LEAST:
        side = sides[tries % 2] if spent < _BOTH * effort or sides[tries % 2].untried else best
        spent += side.attempt(chance)
        tries += 1
        best = min(sides, key=lambda side: side.end)
        if best.end <= problem.bound * (1 + 1e-9):
            break
    found = (side for side in sides if side.best is not None)
    return sorted((side.found() for side in found), key=lambda found: found.listed.end)


class Side:
    """The tries in one direction of time, and the best of them.

    A cell is a sort and a turn: before tilt and noise its ops are as urgent as one another.
    """

    def __init__(
        self, cut: Cut, problem: Problem, backwards: bool, portfolio: Sequence[Policy]
    ) -> None:
        self.problem = problem.reversed if backwards else problem
        self.backwards = backwards
        self.ranges = BACKWARDS if backwards else FORWARDS
        self.last = max((op.mb or 0 for op in problem.ops), default=0)
        cells = [
            (cut.role(op.stage), op.kind, self.last - (op.mb or 0) if backwards else op.mb or 0)
            for op in problem.ops
        ]
        number = {cell: at for at, cell in enumerate(dict.fromkeys(cells))}
        self.cells = [((role, kind), turn) for role, kind, turn in number]
        self.cell = [number[cell] for cell in cells]
        self.lean = [max(0, home) for home in problem.home]
        self.unit = sum(problem.seconds) / max(1, len(problem.ops))
        self.untried = list(portfolio)
        self.elite: list[tuple[float, Policy]] = []
        # What is complete, by urgency, and the least limit that lets it be.
        self.known: dict[tuple[float, ...], tuple[Listed, float]] = {}
        self.best: Listed | None = None
        self.policy = portfolio[0]
        self.end = math.inf

    def attempt(self, chance: Random) -> int:
        """Try another policy; the ops that were placed, or all, while every try gets stuck."""
        policy = self.next_policy(chance)
        full = len(self.elite) == _ELITE
        limit = self.elite[-1][0] if full else math.inf
        listed = self.listed(policy, limit)
        if listed.complete and listed.end <= limit:
            self.elite = sorted([*self.elite, (listed.end, policy)], key=lambda x: x[0])[:_ELITE]
            if listed.end <= self.end:
                self.best, self.policy, self.end = listed, policy, listed.end
        return listed.placed if self.elite else len(listed.starts)

    def listed(self, policy: Policy, limit: float) -> Listed:
        """What a policy comes to; many a variation changes only what no op is of."""
        urgency = tuple(self.urgency(policy))
        found, least = self.known.get(urgency, (None, math.inf))
        if found is None or least > limit:
            found = listing(self.problem, urgency, limit)
            if found.complete:
                self.known[urgency] = found, found.least(self.problem)
        return found

    def next_policy(self, chance: Random) -> Policy:
        """One of the portfolio, then one near one of the best, or a new one."""
        if self.untried:
            return self.untried.pop(0)
        if not self.elite or chance.random() < _FRESH:
            return draw(self.ranges, chance)
        return vary(chance.choice(self.elite)[1], self.ranges, chance)

    def urgency(self, policy: Policy) -> list[float]:
        """Seconds for each op."""
        ranks, scale = self.problem.ranks, self.unit * policy.patience
        phases = self.weights(policy)
        group = ranks if policy.grouped else 1
        of_cell = []
        for sort, turn in self.cells:
            weights = phases[0 if turn < ranks else 2 if turn > self.last - ranks else 1]
            of_cell.append(scale * (weights[sort] + policy.drift * (turn - turn % group)))
        found = [of_cell[cell] for cell in self.cell]
        if policy.tilt:
            tilts = [scale * policy.tilt * rank for rank in range(ranks)]
            found = [x + tilts[rank] for x, rank in zip(found, self.lean, strict=True)]
        if policy.noise:
            noise, number = scale * policy.noise, Random(policy.seed).random
            found = [x + noise * number() for x in found]
        return found

    def weights(self, policy: Policy) -> list[dict[Sort, float]]:
        """By sort, for early, middle and late microbatches."""
        phases: list[Mapping[Sort, float]] = [policy.early, {}, policy.late]
        return [
            {sort: policy.weights.get(sort, 0.0) + more.get(sort, 0.0) for sort in self.ranges}
            for more in phases
        ]

    def found(self) -> Found:
        """The best schedule, in forward time."""
        assert self.best is not None
        starts = self.best.starts
        if self.backwards:
            pairs = zip(starts, self.problem.seconds, strict=True)
            starts = [self.end - start - spent for start, spent in pairs]
        return Found(replace(self.best, starts=starts), self.policy)
