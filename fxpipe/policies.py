"""Policies: how urgent list scheduling takes each op to be, and the ones to begin with.

The portfolios were learned (`benchmarks/policies.py`): on a few hundred sketches of models (2 to 8
ranks, encoders and generators of 1/4 to 4 forwards of a backbone stage, with base rows and without)
the best policies of long searches were kept, and of those the few that together come nearest to the
best everywhere. Cuts and costs are new each time, so they are where a search begins.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fxpipe.cut import Kind, Role

Sort = tuple[Role, Kind]

# How much later, in mean ops, an op may start than a backward of the backbone and still go first.
FORWARDS: Mapping[Sort, tuple[float, float]] = {
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
BACKWARDS: Mapping[Sort, tuple[float, float]] = {
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

    @staticmethod
    def parse(text: str) -> "Policy":
        """The policy of a line such as

            3.5 2.5 2.5  -2.4 0.7 0.5  2.4 0.8 1.8 | early gF+2.2 | drift 0.5 grouped

        weights of F, B and W of encoders, backbone and generators; then what is not as usual.
        """
        weights, *rest = text.split("|")
        found: dict[str, Any] = {}
        for part in rest:
            match part.split():
                case ["early" | "late" as phase, *terms]:
                    found[phase] = dict(map(_term, terms))
                case ["drift", amount, *grouped]:
                    found |= {"drift": float(amount), "grouped": bool(grouped)}
                case ["noise", amount, seed]:
                    found |= {"noise": float(amount), "seed": int(seed)}
                case [name, amount]:
                    found[name] = float(amount)
        return Policy(dict(zip(_SORTS, map(float, weights.split()), strict=True)), **found)


_SORTS = tuple((role, kind) for role in Role for kind in (Kind.F, Kind.B, Kind.W))
_LETTER = {role.value[0]: role for role in Role}


def _term(text: str) -> tuple[Sort, float]:
    """`eW+5.2`: the W of encoders."""
    return (_LETTER[text[0]], Kind(text[1])), float(text[2:])


def draw(ranges: Mapping[Sort, tuple[float, float]], chance: Random) -> Policy:
    return Policy(
        {sort: chance.uniform(low, high) for sort, (low, high) in ranges.items()},
        drift=chance.choice(_DRIFT),
        grouped=chance.random() < 0.4,
        tilt=chance.choice(_TILT),
        noise=chance.choice(_NOISE),
        patience=chance.choice(_PATIENCE),
        seed=chance.getrandbits(32),
    )


def vary(policy: Policy, ranges: Mapping[Sort, tuple[float, float]], chance: Random) -> Policy:
    """A policy near another one."""
    fresh = draw(ranges, chance)
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


def _portfolio(text: str) -> tuple[Policy, ...]:
    """The policies of lines; one that begins with a bar goes on."""
    return tuple(map(Policy.parse, re.sub(r"\n\s*\|", " |", text).strip().splitlines()))


# Weights of F, B and W of encoders, backbone and generators, and what is not as usual. Free: all
# rows are to be found; based: base rows are given. The first of each is for time as it runs, the
# second for time turned around.
FREE = (
    _portfolio(
        """
0.7 11.1 11.1 -0.6 3.7 7.9 2.3 -0.9 0.1 | early bB-7.7 | late eF-1 bF-1.2 | drift 0.5 grouped
    | patience 0.01
1.6 18.5 18.5 -13.2 0.8 6.6 5.9 -2.5 -1.5 | drift 1 grouped | patience 0.01
7.4 3.7 3.7 -4.4 -3.4 8.3 8.4 0.7 1.7 | patience 0.1
9.1 2.1 2.1 -1.3 0.6 9.5 3.2 -1.8 -0.8 | early bF+8.9 eW+1.5 | late eF-6.8 bF+0.5 | drift 0.2
    | patience 0.01
5 20.6 20.6 2.2 -1.4 7.7 4.9 -3.8 -2.8 | early bW+1.5 | late gF-1.1 | drift 1 grouped
    | patience 0.01
3.3 0 -0 -1.8 -1.9 -3.6 -3.3 1 2 | late eF-1.7 eW+1.3 bB-0.6 bF-2.6 | drift 0.2 | patience 0.25
-2.1 12.7 12.7 -2.4 2.1 7.5 2.7 -4.9 -3.9 | early eW+1.3 | late bF-2.4 eF-3.5 | drift 0.5
    | patience 0.1
0.5 19.9 19.9 -14.8 3.8 6.1 3 -3.5 -2.5 | late gF-1.7 eF-0.8 | drift 1 | tilt 0.3 | patience 0.01
-6.1 0.8 0.8 -8 0 7.3 -2.4 -1.4 -0.4 | early bF-4.4 bB-6.6 gB-2.6 gF+1.1 | late gB-9.8 bB-3
    | drift 0.5 | patience 0.1
0.6 8.9 8.9 -4.9 0.6 11.9 4.6 -2 -1 | late gF+5.3 | patience 0.25
"""
    ),
    _portfolio(
        """
7.7 1.9 1.9 -0.4 -3.4 0.9 -0.7 4.9 5.9 | early bW+1.5 | late bB+0.8 | tilt 0.3 | patience 0.1
5.2 -0.5 -0.5 -0.2 -0.8 5 -2.3 5 6 | early bF-4.7 | late eW-3.7 | patience 0.01
6 1.3 1.3 1.4 -1.1 0.4 2.8 4.1 5.1 | drift 0.5 | patience 0.01
6.7 1.6 1.6 -2.6 -1.5 -0.4 2.9 5.4 6.4 | early bB+5.8 | drift 0.5 | patience 0.1
2.8 2.6 2.6 -0.5 2.3 0.7 1.3 4.1 5.1 | early eF+0.2 | late eW-1.5 eF+0.5 | tilt -0.1 | patience 0.25
4.6 0.1 0.1 0.2 0.9 2.1 -1.5 1.8 2.8 | early bB-8.4 bF-1.2 | late gB-3 bB-5.1 | patience 0.01
5.1 3.3 3.3 -0.1 -3.7 -1.2 1.5 5.8 6.8 | early eF+1.9 | late bF+3.4 gF+1 | patience 0.25
8.9 -1.1 -1.1 1.8 -3.8 0.2 1.8 4.5 5.5 | early bW+1.6 | drift 0.5 | tilt -0.3 | noise 0.5 0
    | patience 0.01
5.8 1.2 1.2 -0.4 -0.3 -0.5 -5 2.5 3.5 | early gB-2.4 | late bB-2.7 | patience 0.1
5.2 2.5 2.5 0.7 -0.8 1 -2.3 6.5 7.5 | early bF-4.7 | late bB-2.7 | drift 0.2 | patience 0.1
"""
    ),
)
BASED = (
    _portfolio(
        """
5.1 7.6 7.6 0.8 -0.4 2 4.2 0.6 1.6 | patience 0.01
0.1 9.4 9.4 -3.2 2.5 -8 3.1 3.5 4.5 | early gF+2.3 eW+1.6 | late gB-2.4 eF+2 | drift 0.5 grouped
    | patience 0.1
1.7 5.9 5.9 1.8 0.3 2.6 5.2 1.7 2.7 | early bB-4 | late gF-1.1 bF+0.6 | drift 0.2 grouped
    | tilt 0.1 | patience 0.5
2.6 10 10 0.4 -2.1 2.6 3.5 -2 -1 | early bB-3.5 bF+1 | late bF-5.4 gF+0.3 eF-2.2 | patience 0.1
11.1 1.2 1.2 -3.4 -6.6 0.2 -2.4 -12.8 -11.8 | early bW-8.2 eF-5.1 | late bB-5.3 gF+1.7 bF+1
    | drift 0.2 | patience 0.1
-0.9 9.3 9.3 0.8 -1.1 -2.8 4.6 1.8 2.8 | patience 0.1
3.7 6.7 6.7 -0.3 -0.3 4.1 4.1 -0.1 0.9 | late bB+3.4 eF-2.2 | patience 0.5
-1.6 5.8 5.8 -3 -1.5 2.9 1.7 3.7 4.7 | patience 0.01
3.4 5.6 5.6 1.2 0 0.6 2.9 -1.6 -0.6 | drift 0.5 | patience 0.01
1.2 10 10 0.1 0.8 -10.1 1.9 1.7 2.7 | early bB-5.2 | late eF-1.7 bF-0.4 | drift 0.5 | patience 0.1
"""
    ),
    _portfolio(
        """
6.8 2.1 2.1 0 0.8 1.2 -3.7 4.2 5.2 | late gB+2.2 bF+4.8 | patience 0.1
3.7 1.6 1.6 0.8 0.2 -0.5 -6 2.8 3.8 | early bB-5.9 | patience 0.25
5.4 1.2 1.2 -0.1 0.6 -1.1 -1.4 5.8 6.8 | patience 0.5
40.6 5.4 5.4 -1.3 4 5.5 4.5 20.9 21.9 | drift 0.5 | patience 0.01
5.8 -3.7 -3.7 -1.6 -2.6 0.2 -20 1.4 2.4 | late bB+1.8 | drift 0.5 | patience 0.25
3.4 0.3 0.3 0.1 -1.4 -1.3 -3.9 4.7 5.7 | drift 0.2 | noise 1.5 0 | patience 0.25
4.4 7.3 7.3 0 2.5 0.3 -3.1 2.8 3.8 | drift 0.2 grouped | patience 0.01
5.1 0.5 0.5 -2.6 -0.4 0.2 1.6 4.5 5.5 | late gB-2.5 | drift 0.5 | patience 0.01
11.6 0.9 0.9 -1.6 -0.2 5.9 -1.1 10.8 11.8 | late bF+0.8 gB+3.7 | patience 0.01
2.9 1.4 1.4 -1.2 5.1 5.1 0.2 15.9 16.9 | late bF-4.6 eW+4.1 gF-3 | patience 0.01
"""
    ),
)

# For so many ops that there is time for a few tries: it does well on 64 ranks.
LARGE = Policy.parse("3.5 2.5 2.5 -2.4 0.7 0.5 2.4 0.8 1.8 | early gF+2.2 | patience 0.01")
