"""Exact schedule arithmetic: the rows of a chain's schedule, and the time that they must take.

An op is (kind, microbatch); row r is what stage r runs, in order. Stage 0 has no B: its input
needs no gradient. Transfers take no time, an op takes one unit.
"""

from collections.abc import Iterator

Op = tuple[str, int]
Rows = tuple[tuple[Op, ...], ...]


def rows(schedule: str, ranks: int, microbatches: int) -> Rows:
    """The rows of `gpipe` or `1f1b`, each B directly followed by its W."""
    warmups = [microbatches if schedule == "gpipe" else ranks - rank for rank in range(ranks)]
    return tuple(
        tuple(_row(rank, min(microbatches, warmup), microbatches))
        for rank, warmup in enumerate(warmups)
    )


def _row(rank: int, warmup: int, microbatches: int) -> Iterator[Op]:
    yield from (("F", mb) for mb in range(warmup))
    for mb in range(microbatches):
        if rank:
            yield "B", mb
        yield "W", mb
        if mb + warmup < microbatches:
            yield "F", mb + warmup


def makespan(rows: Rows, *, fused: bool) -> float:
    """Units from the first op to the last. fused: a gradient leaves only after the next W."""
    ends: dict[tuple[int, Op], float] = {}
    clock, done = [0.0] * len(rows), [0] * len(rows)
    while any(done[rank] < len(row) for rank, row in enumerate(rows)):
        before = sum(done)
        for rank, row in enumerate(rows):
            while done[rank] < len(row):
                wanted = list(needs(rank, row[done[rank]], len(rows), fused))
                if not all(need in ends for need in wanted):
                    break
                clock[rank] = max([clock[rank], *(ends[need] for need in wanted)]) + 1.0
                ends[rank, row[done[rank]]] = clock[rank]
                done[rank] += 1
        if sum(done) == before:
            raise ValueError(f"the rows make no progress; done per rank: {done}")
    return max(clock)


def needs(rank: int, op: Op, ranks: int, fused: bool) -> Iterator[tuple[int, Op]]:
    """The op of another rank whose value an op reads, if any."""
    kind, mb = op
    if kind == "F" and rank > 0:
        yield rank - 1, ("F", mb)
    first_of_backward = kind == "B" or (kind == "W" and rank == 0)
    if first_of_backward and rank < ranks - 1:
        yield rank + 1, ("W" if fused else "B", mb)
