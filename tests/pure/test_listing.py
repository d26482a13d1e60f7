"""List scheduling: what it keeps from step to step comes to what weighing every op anew does."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.costs import Costs
from fxpipe.listing import listing
from fxpipe.numbering import build as numbered
from fxpipe.policies import FREE
from fxpipe.problem import ANY, Limits, Problem
from fxpipe.schedule import base_rows
from fxpipe.search import Side
from tests.pure.cuts import Shape, build, shapes


class Plain:
    """List scheduling as it is defined: each step weighs every op on every rank."""

    def __init__(self, problem: Problem, urgency: list[float]) -> None:
        self.problem, self.urgency = problem, urgency
        self.order: list[int] = []
        self.starts: dict[int, float] = {}
        self.ranks: dict[int, int] = {}
        self.there: dict[tuple[int, int], float] = {}  # when a reader can have a value
        self.free = [0.0] * problem.ranks

    def run(self) -> None:
        while options := [x for rank in range(self.problem.ranks) for x in self.options(rank)]:
            _, rank, op, start = min(options)
            self.order.append(op)
            self.starts[op], self.ranks[op] = start, rank
            self.free[rank] = start + self.problem.seconds[op]
            for reader in self.problem.read_by[op]:
                late = 0.0 if self.home(reader) == rank else self.problem.delay[op]
                self.there[op, reader] = self.free[rank] + late

    def options(self, rank: int) -> Iterator[tuple[float, int, int, float]]:
        for op in range(len(self.problem.ops)):
            if self.may(op, rank) and self.fits(op, rank):
                start = max([self.free[rank], *(self.there[x, op] for x in self.reads(op))])
                yield start + self.urgency[op], rank, op, start

    def reads(self, op: int) -> list[int]:
        return self.problem.reads[op]

    def home(self, op: int) -> int:
        """The rank of an op, if it is known: a value goes to a unit without one as if from afar."""
        unit = self.problem.units[self.problem.unit[op]] if self.problem.home[op] == ANY else []
        return next((self.ranks[x] for x in unit if x in self.ranks), self.problem.home[op])

    def may(self, op: int, rank: int) -> bool:
        """Whether an op is ready, and the next one, for this rank."""
        problem = self.problem
        if op in self.starts or not all(x in self.starts for x in self.reads(op)):
            return False
        if (queue := problem.queue[op]) != ANY:
            return problem.home[op] == rank and op == self.next_of(problem.queues[queue])
        home = self.home(op)
        return op == self.next_unit(problem.pool[op]) if home == ANY else home == rank

    def next_of(self, ops: list[int]) -> int:
        return next(op for op in ops if op not in self.starts)

    def next_unit(self, pool: int) -> int:
        """The unit that was ready first."""
        place = {op: at for at, op in enumerate(self.order)}
        ops = self.problem.pools[pool]
        ready = [x for x in ops if x not in place and all(v in place for v in self.reads(x))]
        return min(ready, key=lambda x: max((place[v] for v in self.reads(x)), default=-1))

    def fits(self, op: int, rank: int) -> bool:
        problem = self.problem
        mine = [x for x in self.order if self.ranks[x] == rank]
        room = [of[rank] for of in problem.room] + [float("inf")]
        begun = set()
        for x in mine:
            if problem.opens[x] != ANY and problem.group[x] not in begun:
                room[problem.opens[x]] -= problem.weight[x]
                begun |= {problem.group[x]} - {ANY}
            room[problem.closes[x]] += 1
        takes = 0 if problem.group[op] in begun else problem.weight[op]
        return room[problem.opens[op]] >= takes


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(("auto", "nested/1f1b", "nested/interleaved", "nested/zb-v")),
    st.integers(1, 3),
    st.integers(1, 4),
    shapes(),
    st.integers(0, 9),
    st.booleans(),
)
def test_weighing_what_has_changed_is_enough(
    schedule: str, ranks: int, mbs: int, shape: Shape, seed: int, backwards: bool
) -> None:
    cut = build(schedule, ranks, shape)
    chance = Random(seed)
    costs = Costs.uniform(cut, {stage.name: chance.uniform(0.2, 2) for stage in cut.stages})
    base = None if schedule == "auto" else base_rows(cut, mbs, schedule)
    limits = Limits(modality=chance.randint(1, 3), sharded=2 * ranks + 2)
    problem = numbered(cut, mbs, replace(costs, latency=0.1), base=base, limits=limits)
    problem = problem.reversed if backwards else problem
    urgency = [chance.uniform(-3, 3) for _ in problem.ops]
    plain = Plain(problem, urgency)
    plain.run()
    found = listing(problem, urgency)
    assert found.placed == len(plain.order)
    placed = {op: (start, plain.ranks[op]) for op, start in plain.starts.items()}
    pairs = enumerate(zip(found.starts, found.ranks, strict=True))
    assert {op: pair for op, pair in pairs if pair[1] != ANY} == placed


def test_a_policy_that_is_met_again_comes_to_the_same_under_any_limit() -> None:
    cut = build("auto", 3, Shape(encoders=(True,), generators=(True,)))
    costs = Costs.uniform(cut, {stage.name: 0.1 + at / 7 for at, stage in enumerate(cut.stages)})
    problem = numbered(cut, 5, costs, limits=Limits(modality=2, sharded=3))
    side = Side(cut, problem, False, FREE[0])
    for policy in FREE[0]:
        end = side.listed(policy, float("inf")).end
        for limit in (end / 2, end * (1 - 1e-15), end, end * (1 + 1e-15), 2 * end):
            assert side.listed(policy, limit) == listing(problem, side.urgency(policy), limit)
