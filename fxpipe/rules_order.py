"""Rules on compute ops: that each runs once, in its place, after what it reads, as was claimed."""

from collections.abc import Iterator

from fxpipe.cut import Kind, Layout
from fxpipe.errors import ScheduleError
from fxpipe.rendezvous import stuck
from fxpipe.rules import near, rows
from fxpipe.schedule import base_rows
from fxpipe.table import Op, Table, live_units


def defined_once(table: Table) -> Iterator[str]:
    """Every F, B and W stands in the table once."""
    home = table.numbered.home
    if len(home) == sum(map(len, table.compute)):
        return
    first: dict[Op, int] = {}
    for rank, row in enumerate(table.rows):
        for at, op in enumerate(row):
            if op.way or op.kind is Kind.R:
                continue
            if op in first:
                yield f"{near(table, rank, at)}: {op} runs already on rank {first[op]}; leave one"
            first.setdefault(op, rank)


def placed(table: Table) -> Iterator[str]:
    """Sharded stages run on their rank; F, B and W of a stage and microbatch on one rank, but where
    a replicated stage keeps nothing, its backward on any."""
    home: dict[tuple[str, int | None, bool], int] = {}
    fixed = {stage.name: stage.rank for stage in table.cut.stages}
    apart = {stage.name for stage in table.cut.stages if not table.cut.keeps(stage.name)}
    for rank, row in enumerate(table.rows):
        for at, op in enumerate(row):
            if op.way or op.kind is Kind.R:
                continue
            lives = fixed[op.stage]
            part = op.stage in apart and op.kind is Kind.F
            expected = home.setdefault((op.stage, op.mb, part), rank) if lives is None else lives
            if rank != expected:
                reason = "its forward is there" if lives is None else "the stage lives there"
                yield f"{near(table, rank, at)}: {op} belongs on rank {expected}: {reason}"


def complete(table: Table) -> Iterator[str]:
    """Microbatches are numbered without a gap, and every kind of every stage runs for each."""
    numbered = table.numbered
    found = sorted({number // len(numbered.names) for number in numbered.home})
    if not found:
        yield "the rows run no microbatch; add the ops of microbatch 0"
    gap = next((at for at, mb in enumerate(found) if at != mb), None)
    if gap is not None:
        yield (
            f"no op of microbatch {gap}, but ops of microbatch {found[gap]}; "
            f"number the {len(found)} microbatches from 0 to {len(found) - 1}"
        )
    for stage in table.cut.stages:
        where = "its owner" if stage.rank is None else f"rank {stage.rank}"
        for kind in stage.kinds:
            code = numbered.names.index((stage.name, kind))
            for mb in found:
                if mb * len(numbered.names) + code not in numbered.home:
                    yield f"{Op(stage.name, kind, mb)} is missing; add it to the row of {where}"


def read_after_write(table: Table) -> Iterator[str]:
    """What a rank reads of its own is made earlier in its row; what it sends, too."""
    numbered, there = table.numbered, set[int]()
    for rank, row in rows(table):
        for at, op, number in row:
            if op.way == "<":
                continue
            for value in (number,) if op.way else numbered.inputs(number):
                if value not in there and numbered.home.get(value) == rank:
                    made = numbered.op(value)
                    yield f"{near(table, rank, at)}: {op} reads {made}, which is made after it"
            if not op.way:
                there.add(number)


def bounded(table: Table) -> Iterator[str]:
    """No rank holds more live units of a region than the table states."""
    for claim in table.live:
        for rank, bound in enumerate(claim.units):
            live = live_units(table, claim.region, rank)
            if max(live, default=0) > bound:
                at = next(at for at, units in enumerate(live) if units > bound)
                op = table.compute[rank][at]
                yield (
                    f"{near(table, rank, table.rows[rank].index(op))}: {op} brings the live units "
                    f"of {claim.region} on rank {rank} to {live[at]}, and the table states {bound};"
                    f" end a backward before it, or state {max(live)}"
                )


def base_kept(table: Table) -> Iterator[str]:
    """Sharded stages run in the order of the base that the table says it was made from."""
    mbs = table.microbatches
    if not table.schedule or not 0 < mbs <= len(table.numbered.home):  # numbered with a gap
        return
    try:
        base = base_rows(table.cut, mbs, table.schedule)
    except ScheduleError:
        return  # an order that depends on more than the cut
    kept = table.only(r.name for r in table.cut.regions if r.layout is Layout.SHARDED)
    for rank, (found, expected) in enumerate(zip(kept, base, strict=True)):
        pairs = zip(found, expected, strict=False)
        wrong = next(((one, other) for one, other in pairs if one != other), None)
        if wrong is not None:
            yield (
                f"{near(table, rank, table.rows[rank].index(wrong[0]))}: {wrong[0]} stands where "
                f"{table.schedule} has {wrong[1]}; keep the order of the base, or leave the line "
                "`schedule` out"
            )


def makes_progress(table: Table) -> Iterator[str]:
    """The table ends under the strictest transport (see `rendezvous`)."""
    for rank, at, reason in stuck(table):
        yield f"{near(table, rank, at)}: stuck, {reason}"
