"""Learn the portfolios of `fxpipe/policies.py`, from which every search begins.

    python -m benchmarks.policies free --seconds 500      orders of everything
    python -m benchmarks.policies based --seconds 500     orders within base rows

On sketches drawn at random a long search looks for the best policy. Of all that were found, those
are taken that together come nearest to the best everywhere (greedily), and whatever can be left out
of them without loss is. Prints lines that `Policy.parse` reads.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import NamedTuple

from fxpipe.cut import Cut, Kind, Role
from fxpipe.forecast import Ask, costs_of, sketched
from fxpipe.listing import listing
from fxpipe.numbering import build
from fxpipe.policies import BASED, FREE, Policy
from fxpipe.problem import Limits, Problem
from fxpipe.schedule import base_rows
from fxpipe.search import Side
from fxpipe.sketch import regions

SIZE = 8  # policies of a portfolio
EFFORT = 130_000  # ops placed in a long search
SMALL = 600  # ops: problems on which policies are compared
STUCK = 3.0  # what a policy counts that cannot end, times the best
LOSS = 0.00015  # what may be lost, in the mean, where something is left out
MICROBATCHES = (2, 3, 4, 5)  # per rank
SIZES = (0, 0.25, 0.5, 1, 2, 3, 4)  # forwards of a backbone stage
BASES = ("1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v")

SORTS = tuple((role, kind) for role in Role for kind in (Kind.F, Kind.B, Kind.W))
NAMES = {sort: f"{sort[0].value[0]}{sort[1]}" for sort in SORTS}


class Case(NamedTuple):
    """A problem, and the end of the best schedule that was found for it."""

    cut: Cut
    problem: Problem
    best: float


def problems(based: bool, chance: Random) -> Iterator[tuple[Cut, Problem]]:
    """Sketches without end."""
    space = list(product((2, 3, 4, 6, 8), MICROBATCHES, SIZES, SIZES, ("1,2", "1,1,1"), BASES))
    while True:
        ranks, each, encoder, generator, backbone, base = chance.choice(space)
        if not encoder and not generator:
            continue
        schedule = f"nested/{base if based else '1f1b'}"
        named = [f"llm=backbone:{backbone}"]
        named += [f"vision=encoder:{encoder},{2 * encoder}"] if encoder else []
        named += [f"image=generator:{generator},{2 * generator}"] if generator else []
        ask = Ask(regions(named), ranks, ranks * each, schedule)
        cut = sketched(ask)
        held = Limits(3) if based else Limits(3, ranks * (2 if generator else 1))
        rows = base_rows(cut, ask.microbatches, schedule) if based else None
        yield cut, build(cut, ask.microbatches, costs_of(ask, cut), base=rows, limits=held)


def learn(based: bool, backwards: bool, seconds: float) -> tuple[list[Policy], list[Case]]:
    """The best policies of as many problems as there is time for."""
    policies, cases = [], []
    stop = time.monotonic() + seconds
    plain = FREE[backwards][2:4], (*FREE[backwards], *BASED[backwards])
    for cut, problem in problems(based, Random(0)):
        sides = []
        for seed, portfolio in enumerate(plain):
            side = Side(cut, problem, backwards, portfolio)
            chance, spent = Random(seed), 0
            while spent < EFFORT and side.end > problem.bound * (1 + 1e-9):
                spent += side.attempt(chance)
            sides.append(side)
        best = min(sides, key=lambda side: side.end)
        if best.best is not None:
            policies.append(clean(best.policy))
            if len(problem.ops) < SMALL:
                cases.append(Case(cut, problem, best.end))
        if time.monotonic() > stop:
            return policies, cases
    raise AssertionError("problems have no end")


def clean(policy: Policy) -> Policy:
    """The policy in round numbers; what a sketch does not have (B of encoders, W of generators) is
    like what it has."""

    def rounded(weights: dict[tuple[Role, Kind], float]) -> dict[tuple[Role, Kind], float]:
        return {sort: round(x, 1) for sort, x in weights.items() if abs(x) >= 0.05}

    weights = {sort: round(policy.weights.get(sort, 0.0), 1) for sort in SORTS}
    weights[Role.ENCODER, Kind.B] = weights[Role.ENCODER, Kind.W]
    weights[Role.GENERATOR, Kind.W] = round(weights[Role.GENERATOR, Kind.B] + 1, 1)
    phases = [
        {sort: x for sort, x in rounded(dict(phase)).items() if sort not in _UNSEEN}
        for phase in (policy.early, policy.late)
    ]
    return replace(
        policy, weights=weights, early=phases[0], late=phases[1], seed=policy.seed % 1000
    )


_UNSEEN = ((Role.ENCODER, Kind.B), (Role.GENERATOR, Kind.W))


def ratios(policy: Policy, cases: Sequence[Case], backwards: bool) -> list[float]:
    """How much later than the best a policy ends, by case."""
    found = []
    for cut, problem, best in cases:
        side = Side(cut, problem, backwards, (policy,))
        listed = listing(side.problem, side.urgency(policy))
        found.append(listed.end / best if listed.complete else STUCK)
    return found


def choose(policies: Sequence[Policy], rate: Callable[[Policy], list[float]]) -> list[Policy]:
    """The portfolio, the best alone first."""
    rated = [(policy, rate(policy)) for policy in policies]
    chosen: list[Policy] = []
    nearest = [STUCK] * len(rated[0][1])
    while len(chosen) < SIZE:
        policy, found = min(rated, key=lambda x: sum(map(min, nearest, x[1])))
        if policy in chosen:
            break
        chosen.append(policy)
        nearest = list(map(min, nearest, found))
        print(
            f"# {len(chosen)} policies: {sum(nearest) / len(nearest):.4f} of the best", flush=True
        )
    return chosen


def simplify(chosen: list[Policy], rate: Callable[[Policy], list[float]]) -> list[Policy]:
    """The portfolio without what does not help."""
    chosen, rows = list(chosen), [rate(policy) for policy in chosen]
    for at, _ in enumerate(chosen):
        for change in list(simpler(chosen[at])):
            tried = change(chosen[at])
            row = rate(tried)
            without = [*rows[:at], row, *rows[at + 1 :]]
            if mean(without) <= mean(rows) + LOSS:
                chosen[at], rows = tried, without
    print(f"# simplified: {mean(rows):.4f} of the best")
    return chosen


def mean(rows: Sequence[Sequence[float]]) -> float:
    """Of the best of the rows, over the cases."""
    return sum(map(min, zip(*rows, strict=True))) / len(rows[0])


def simpler(policy: Policy) -> Iterator[Callable[[Policy], Policy]]:
    """Ways to leave something out."""
    for sort in policy.early:
        yield lambda p, s=sort: replace(p, early={k: x for k, x in p.early.items() if k != s})
    for sort in policy.late:
        yield lambda p, s=sort: replace(p, late={k: x for k, x in p.late.items() if k != s})
    yield lambda p: replace(p, noise=0.0)
    yield lambda p: replace(p, tilt=0.0)
    yield lambda p: replace(p, drift=0.0, grouped=False)


def written(policy: Policy) -> str:
    """The line that `Policy.parse` reads."""
    parts = [" ".join(f"{policy.weights[sort]:g}" for sort in SORTS)]
    for name, phase in (("early", policy.early), ("late", policy.late)):
        if phase:
            parts.append(" ".join([name, *(f"{NAMES[s]}{x:+g}" for s, x in phase.items())]))
    if policy.drift:
        parts.append(f"drift {policy.drift:g}{' grouped' * policy.grouped}")
    if policy.tilt:
        parts.append(f"tilt {policy.tilt:g}")
    if policy.noise:
        parts.append(f"noise {policy.noise:g} {policy.seed}")
    return " | ".join([*parts, f"patience {policy.patience:g}"])


def main() -> None:
    """Learn both portfolios of a kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("free", "based"))
    parser.add_argument("--seconds", type=float, default=500.0, help="for each direction of time")
    asked = parser.parse_args()
    for backwards in (False, True):
        policies, cases = learn(asked.kind == "based", backwards, asked.seconds)

        def rate(policy: Policy, cases=cases, backwards=backwards) -> list[float]:  # type: ignore[no-untyped-def]
            return ratios(policy, cases, backwards)

        print(f"# {'backwards' if backwards else 'forwards'}: {len(policies)} policies")
        print("\n".join(map(written, simplify(choose(policies, rate), rate))), flush=True)


if __name__ == "__main__":
    main()
