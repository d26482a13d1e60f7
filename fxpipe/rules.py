"""What every rule needs, and the rules that come first: the others look names up in the cut.

A rule is a function from a table to what breaks it, in words. What it says must let a person mend
the table, so it shows the row around the op. Rules work on the numbers of `table.numbered`.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count

from fxpipe.cut import Cut, Kind, Seam, Stage
from fxpipe.errors import ScheduleError
from fxpipe.schedule import Schedule
from fxpipe.table import Op, Table

Rule = Callable[[Table], Iterator[str]]
_Form = tuple[str, Kind, bool, str, int | None]  # an op with every microbatch the same


def rows(table: Table) -> Iterator[tuple[int, Iterable[tuple[int, Op, int]]]]:
    """Each rank, and its row: the place in it, the op, the number of the op's value."""
    for rank, (row, numbers) in enumerate(zip(table.rows, table.numbered.rows, strict=True)):
        yield rank, zip(count(), row, numbers)


def near(table: Table, rank: int, at: int) -> str:
    """`rank 1: ... llm0.F0<0 [llm1.F0] llm1.B0 ...`"""
    row = table.rows[rank]
    left, right = max(0, at - 3), at + 4
    words = [f"[{op}]" if left + i == at else str(op) for i, op in enumerate(row[left:right])]
    return " ".join([f"rank {rank}:", *["..."] * (left > 0), *words, *["..."] * (right < len(row))])


def known(table: Table) -> Iterator[str]:
    """Every token names a stage, a kind, a group and ranks that the cut has; so do the claims."""
    cut = table.cut
    if len(table.rows) != cut.ranks:
        yield f"the cut has {cut.ranks} ranks, the table {len(table.rows)} rows"
        return
    for rank, row in enumerate(table.rows):
        forms = {(op.stage, op.kind, op.mb is None, op.way, op.peer) for op in row}
        unknown = {form: list(_unknown(form, rank, cut)) for form in forms}
        if not any(unknown.values()):
            continue
        for at, op in enumerate(row):
            for problem in unknown[op.stage, op.kind, op.mb is None, op.way, op.peer]:
                yield f"{near(table, rank, at)}: {op} {problem}"
    yield from _unknown_claims(table)


def _unknown(form: _Form, rank: int, cut: Cut) -> Iterator[str]:
    name, kind, whole, way, peer = form
    if kind is Kind.R:
        if name not in cut.groups:
            yield f"reduces no shared entry of the cut; it has {', '.join(cut.groups) or 'none'}"
        if way:
            yield "is a transfer, but a reduction makes no value to move"
        return
    stage = cut.stage.get(name)
    if stage is None:
        yield f"names no stage; the cut has {', '.join(cut.stage)}"
    elif kind not in stage.kinds:
        yield f"does not exist; {name} has only {''.join(stage.kinds)}"
    if whole:
        yield "names no microbatch"
    if bool(way) != (peer is not None):
        yield "is half a transfer; one names a way, < or >, and a rank"
    if peer is not None and (peer == rank or not 0 <= peer < cut.ranks):
        yield f"names rank {peer}; expected another one of 0..{cut.ranks - 1}"
    if way and kind is Kind.W:
        yield "is a transfer, but weight gradients stay on their rank"


def _unknown_claims(table: Table) -> Iterator[str]:
    if table.schedule:
        try:
            Schedule.parse(table.schedule)
        except ScheduleError as error:
            yield f"{error}; or leave the line `schedule` out"
    for claim in table.live:
        if claim.region not in table.cut.region:
            regions = ", ".join(table.cut.region)
            yield f"`{claim}` names no region; the cut has {regions}"
        if len(claim.units) != table.cut.ranks:
            yield (
                f"`{claim}` states {len(claim.units)} of {table.cut.ranks} ranks; "
                "write a number for each"
            )


def footprint(table: Table) -> Iterator[str]:
    """Backwards exist where gradients go (the backward-footprint lemma; Mpipe, section 3).

    A star on a value of a seam asks the target for a B, which makes the gradient, and the source
    for a B or a W, which reads it; and without a star on what enters a stage, it has no B.
    """
    for stage in table.cut.stages:
        yield from _unasked(stage, table.cut)
    for seam in table.cut.seams:
        if seam.grads:
            yield from _unanswered(seam, table.cut)
    for entry in table.cut.shared:
        if not any(_trains(table.cut.stage[name]) for name in entry):
            yield (
                f"`shared {' '.join(entry)}`: none of these has a backward op, so they train "
                f"nothing to share; give one a W, or leave the line out"
            )


def _unasked(stage: Stage, cut: Cut) -> Iterator[str]:
    if Kind.B in stage.kinds and not any(seam.grads for seam in cut.seams_into[stage.name]):
        yield (
            f"`{stage}`: no starred value enters {stage.name}, so nothing reads what its B makes; "
            f"make its kinds FW (W is its whole backward) or F, or star a value of a seam into it"
        )


def _unanswered(seam: Seam, cut: Cut) -> Iterator[str]:
    source, target = cut.stage[seam.source], cut.stage[seam.target]
    star = f"`{seam}` has a star, so"
    if Kind.B not in target.kinds:
        yield (
            f"{star} {target.name} must make the gradient, but has only "
            f"{''.join(target.kinds)}; give it a B, or take the star away"
        )
    if not _trains(source):
        yield (
            f"{star} {source.name} must read the gradient, but has no backward op; "
            f"give it a W if it trains and a B if one before it does, or take the star away"
        )


def _trains(stage: Stage) -> bool:
    return Kind.B in stage.kinds or Kind.W in stage.kinds
