"""A search for the policy under which list scheduling ends soonest.

A policy says how urgent each op is. Policies are drawn at random around good sense, then around the
best one so far, forwards and backwards in time: a problem turned around is scheduled by the same
code, and often better. All chance comes from one seed, and effort is counted in ops, not in
seconds, so that every rank of every machine finds the same schedule.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from fxpipe.cut import Cut, Kind, Role
from fxpipe.listing import Listed, listing
from fxpipe.problem import Problem

Sort = tuple[Role, Kind]

# How much later, in mean ops, an op may start than a backward of the backbone and still go first.
_FORWARDS: Mapping[Sort, tuple[float, float]] = {
    (Role.BACKBONE, Kind.F): (-1, 4),
    (Role.BACKBONE, Kind.B): (0, 0),
    (Role.BACKBONE, Kind.W): (0, 8),
    (Role.ENCODER, Kind.F): (-1, 8),
    (Role.ENCODER, Kind.B): (-1, 6),
    (Role.ENCODER, Kind.W): (-1, 6),
    (Role.GENERATOR, Kind.F): (-1, 4),
    (Role.GENERATOR, Kind.B): (-5, 4),
    (Role.GENERATOR, Kind.W): (-5, 8),
}
_BACKWARDS: Mapping[Sort, tuple[float, float]] = {
    (Role.BACKBONE, Kind.F): (0, 0),
    (Role.BACKBONE, Kind.B): (-1, 4),
    (Role.BACKBONE, Kind.W): (-2, 6),
    (Role.ENCODER, Kind.F): (-1, 6),
    (Role.ENCODER, Kind.B): (-1, 8),
    (Role.ENCODER, Kind.W): (-1, 8),
    (Role.GENERATOR, Kind.F): (-5, 4),
    (Role.GENERATOR, Kind.B): (-1, 4),
    (Role.GENERATOR, Kind.W): (-2, 8),
}
_PATIENCE = (0.01, 0.1, 0.25, 0.5, 1.0)
_DRIFT = (0.0, 0.0, 0.2, 0.5, 1.0, 2.0)
_TILT = (0.0, 0.0, 0.0, 0.1, 0.3, -0.1, -0.3)
_NOISE = (0.0, 0.0, 0.5, 1.5)


@dataclass(frozen=True)
class Policy:
    """How urgent ops are, in mean ops.

    weights: by role and kind; early, late: more of them, for the first and the last microbatches,
    one for each rank; drift: for each microbatch, or, if grouped, for all those that came with it
    to the ranks; tilt: for each rank of a stage with a home; noise: at random, from `seed`;
    patience: what all of it counts against starting late.
    """

    weights: Mapping[Sort, float]
    early: Mapping[Sort, float] = field(default_factory=dict)
    late: Mapping[Sort, float] = field(default_factory=dict)
    drift: float = 0.0
    grouped: bool = False
    tilt: float = 0.0
    noise: float = 0.0
    patience: float = 0.25
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """The best schedule, as times of a problem that runs forwards."""

    listed: Listed
    policy: Policy
    effort: int


def search(cut: Cut, problem: Problem, *, effort: int, seed: int = 0) -> Found | None:
    """The best schedule of as many tries as place `effort` ops; None if no try can end.

    Ends early where a try reaches `problem.bound`.
    """
    sides = (_Side(cut, problem, False), _Side(cut, problem, True))
    chance = Random(seed)
    spent = tries = 0
    while spent < effort or not tries:
        side = sides[tries % 2]
        if spent > 0.6 * effort:
            side = min(sides, key=lambda side: side.end)
        spent += side.attempt(chance)
        tries += 1
        if side.end <= problem.bound * (1 + 1e-9):
            break
    best = min(sides, key=lambda side: side.end)
    return None if best.best is None else Found(best.forwards(), best.policy, spent)


class _Side:
    """The tries in one direction of time, and the best of them."""

    def __init__(self, cut: Cut, problem: Problem, backwards: bool) -> None:
        self.problem = problem.reversed if backwards else problem
        self.backwards = backwards
        self.ranges = _BACKWARDS if backwards else _FORWARDS
        self.sorts = [(cut.role(op.stage), op.kind) for op in problem.ops]
        last = max((op.mb or 0 for op in problem.ops), default=0)
        self.turns = [last - (op.mb or 0) if backwards else op.mb or 0 for op in problem.ops]
        self.unit = sum(problem.seconds) / max(1, len(problem.ops))
        self.best: Listed | None = None
        self.policy = _middle(self.ranges)
        self.end = math.inf

    def attempt(self, chance: Random) -> int:
        """Try another policy; the ops that were placed."""
        policy = self.policy
        if self.best is not None:
            fresh = chance.random() < 0.3
            policy = _draw(self.ranges, chance) if fresh else _vary(policy, self.ranges, chance)
        listed = listing(self.problem, self.urgency(policy), self.end)
        if listed.complete and listed.end <= self.end:
            self.best, self.policy, self.end = listed, policy, listed.end
        elif self.best is None:
            self.policy = _draw(self.ranges, chance)
        return listed.placed

    def urgency(self, policy: Policy) -> list[float]:
        """Seconds for each op."""
        ranks, scale = self.problem.ranks, self.unit * policy.patience
        weights = self.weights(policy)
        group = ranks if policy.grouped else 1
        last = max(self.turns, default=0)
        drifts = [policy.drift * (turn - turn % group) for turn in range(last + 1)]
        phases = [
            0 if turn < ranks else 2 if turn > last - ranks else 1 for turn in range(last + 1)
        ]
        found = [
            scale * (weights[phases[turn]][sort] + drifts[turn])
            for sort, turn in zip(self.sorts, self.turns, strict=True)
        ]
        if policy.tilt:
            tilt = scale * policy.tilt
            pairs = zip(found, self.problem.home, strict=True)
            found = [x + tilt * max(0, home) for x, home in pairs]
        if policy.noise:
            chance, noise = Random(policy.seed), scale * policy.noise
            found = [x + noise * chance.random() for x in found]
        return found

    def weights(self, policy: Policy) -> list[dict[Sort, float]]:
        """By sort, for early, middle and late microbatches."""
        phases: list[Mapping[Sort, float]] = [policy.early, {}, policy.late]
        return [
            {sort: policy.weights.get(sort, 0.0) + more.get(sort, 0.0) for sort in self.ranges}
            for more in phases
        ]

    def forwards(self) -> Listed:
        """The best schedule, in forward time."""
        assert self.best is not None
        if not self.backwards:
            return self.best
        pairs = zip(self.best.starts, self.problem.seconds, strict=True)
        return replace(self.best, starts=[self.end - start - spent for start, spent in pairs])


def _middle(ranges: Mapping[Sort, tuple[float, float]]) -> Policy:
    return Policy({sort: (low + high) / 2 for sort, (low, high) in ranges.items()})


def _draw(ranges: Mapping[Sort, tuple[float, float]], chance: Random) -> Policy:
    return Policy(
        {sort: chance.uniform(low, high) for sort, (low, high) in ranges.items()},
        drift=chance.choice(_DRIFT),
        grouped=chance.random() < 0.4,
        tilt=chance.choice(_TILT),
        noise=chance.choice(_NOISE),
        patience=chance.choice(_PATIENCE),
        seed=chance.getrandbits(32),
    )


def _vary(policy: Policy, ranges: Mapping[Sort, tuple[float, float]], chance: Random) -> Policy:
    """A policy near another one."""
    fresh = _draw(ranges, chance)
    weights = {
        sort: weight + chance.gauss(0, 1) if chance.random() < 0.25 else weight
        for sort, weight in policy.weights.items()
    }
    sort = chance.choice(list(weights))
    if chance.random() < 0.1:
        weights[sort] = fresh.weights[sort]
    early, late = dict(policy.early), dict(policy.late)
    if chance.random() < 0.5:
        phase = chance.choice((early, late))
        if sort in phase and chance.random() < 0.3:
            del phase[sort]
        else:
            phase[sort] = phase.get(sort, 0.0) + chance.gauss(0, 2)
    changes = {name: getattr(fresh, name) for name in _SINGLE if chance.random() < 0.12}
    return replace(policy, weights=weights, early=early, late=late, **changes)


_SINGLE = ("drift", "grouped", "tilt", "noise", "patience", "seed")
