"""Exact schedule arithmetic: the rows of a chain's schedule, and the time that they must take.

An op is (kind, stage, microbatch); a row is what a rank runs, in order. Stage 0 has no B: its input
needs no gradient. Transfers take no time, an op takes one unit.
"""

from collections.abc import Callable, Iterator

from fxpipe.skeletons import base, homes, pattern_rows

Op = tuple[str, int, int]
Rows = tuple[tuple[Op, ...], ...]


def rows(schedule: str, ranks: int, microbatches: int) -> Rows:
    """The rows of `gpipe`, `1f1b`, `interleaved` or `zb-v`, in the order that torch runs them."""
    chosen = base(schedule)
    return tuple(
        tuple((str(k), stage, mb) for k, stage, mb in row if stage or str(k) != "B")
        for row in pattern_rows(chosen, homes(chosen, ranks), microbatches)
    )


def ranks_of(rows: Rows) -> dict[int, int]:
    """The rank of each stage."""
    return {stage: rank for rank, row in enumerate(rows) for _, stage, _ in row}


def makespan(rows: Rows, *, fused: bool, takes: Callable[[Op], float] = lambda op: 1.0) -> float:
    """From the first op to the last. fused: a gradient leaves only after the next W. takes: how
    long an op is; one unit each, by default."""
    ends: dict[Op, float] = {}
    stages = len(ranks_of(rows))
    clock, done = [0.0] * len(rows), [0] * len(rows)
    while any(done[rank] < len(row) for rank, row in enumerate(rows)):
        before = sum(done)
        for rank, row in enumerate(rows):
            while done[rank] < len(row):
                op = row[done[rank]]
                wanted = list(needs(op, stages, fused))
                if not all(need in ends for need in wanted):
                    break
                clock[rank] = max([clock[rank], *(ends[need] for need in wanted)]) + takes(op)
                ends[op] = clock[rank]
                done[rank] += 1
        if sum(done) == before:
            raise ValueError(f"the rows make no progress; done per rank: {done}")
    return max(clock)


def needs(op: Op, stages: int, fused: bool) -> Iterator[Op]:
    """The op of another stage whose value an op reads, if any."""
    kind, stage, mb = op
    if kind == "F" and stage > 0:
        yield "F", stage - 1, mb
    first_of_backward = kind == "B" or (kind == "W" and stage == 0)
    if first_of_backward and stage < stages - 1:
        yield "W" if fused else "B", stage + 1, mb
