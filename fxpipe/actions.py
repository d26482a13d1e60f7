"""The CSV of actions that torch.distributed.pipelining dumps (`_dump_csv`) and loads (`_load_csv`).

A line is a rank, and an action the number of a stage, a kind and a microbatch. Number 1 is the
second sharded stage of the cut; there called llm1, it gives

    1F3     llm1.F3                        1I3     llm1.B3, where a 1W3 follows later
    1B3     llm1.B3 and then llm1.W3       1W3     llm1.W3
    (1F3;1B0)OVERLAP_F_B                   these actions, in this order

Of B, I and W, a stage has what its kinds allow: without a W, its B does the whole backward, and the
other way round. What moves values or parameters (SEND_F, UNSHARD, REDUCE_GRAD, ...) is left out, as
both sides derive it.
"""

import csv
import re
from collections.abc import Iterator, Sequence

from fxpipe.cut import Cut, Kind, Stage
from fxpipe.errors import ScheduleError
from fxpipe.table import Op, Table

_COMPUTE = re.compile(r"(\d+)([FIBW])(\d+)")
_DERIVED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
_FUSED = re.compile(r"\((.*)\)OVERLAP_F_B")
_KINDS = {"F": (Kind.F,), "I": (Kind.B,), "B": (Kind.B, Kind.W), "W": (Kind.W,)}


def write_actions(table: Table) -> str:
    """The ops of a table as CSV in torch's format `compute_only`. Raises ScheduleError.

    Transfers are left out. An op of a replicated stage, a reduction, and a stage without backward
    have no action.
    """
    numbers = {stage.name: number for number, stage in enumerate(_sharded(table.cut))}
    lines = []
    for rank, row in enumerate(table.rows):
        ops = [op for op in row if not op.way]
        _check(ops, rank, table.cut, numbers)
        named = _named(ops, table.cut)
        lines.append(",".join(f"{numbers[op.stage]}{kind}{op.mb}" for kind, op in named))
    return "".join(f"{line}\n" for line in lines)


def _sharded(cut: Cut) -> list[Stage]:
    return [stage for stage in cut.stages if stage.rank is not None]


def _check(ops: Sequence[Op], rank: int, cut: Cut, numbers: dict[str, int]) -> None:
    for op in ops:
        if op.stage not in numbers:
            raise ScheduleError(
                f"rank {rank}: {op} is no action of torch, which knows F, B and W of stages that "
                "live on one rank; write a table without replicated stages and reductions"
            )
        if cut.stage[op.stage].kinds == (Kind.F,):
            raise ScheduleError(
                f"rank {rank}: {op} is no action of torch, which wants a backward of every stage; "
                f"{op.stage} has none"
            )


def _named(ops: Sequence[Op], cut: Cut) -> Iterator[tuple[str, Op]]:
    """Ops and torch's names of their kinds; B and the W that follows it are one B."""
    for before, op, after in zip([None, *ops], ops, [*ops[1:], None], strict=False):
        split = {Kind.B, Kind.W} <= set(cut.stage[op.stage].kinds)
        match op.kind:
            case Kind.F:
                yield "F", op
            case Kind.B | Kind.W if not split:
                yield "B", op
            case Kind.B:
                yield "B" if after == op._replace(kind=Kind.W) else "I", op
            case Kind.W if before != op._replace(kind=Kind.B):
                yield "W", op


def read_actions(text: str, cut: Cut) -> tuple[tuple[Op, ...], ...]:
    """The rows that the CSV means for the sharded stages of a cut. Raises ScheduleError."""
    lines = list(csv.reader(text.splitlines()))
    if len(lines) != cut.ranks:
        raise ScheduleError(
            f"{len(lines)} lines of actions for {cut.ranks} ranks; expected one line for each"
        )
    stages = _sharded(cut)
    return tuple(
        tuple(op for token in line for op in _ops(token.strip(), rank, stages))
        for rank, line in enumerate(lines)
    )


def _ops(token: str, rank: int, stages: Sequence[Stage]) -> Iterator[Op]:
    if fused := _FUSED.fullmatch(token):
        for part in fused[1].split(";"):
            yield from _ops(part.strip(), rank, stages)
    elif found := _COMPUTE.fullmatch(token):
        stage = _stage(token, int(found[1]), rank, stages)
        kinds = (kind for kind in _KINDS[found[2]] if kind in stage.kinds)
        yield from (Op(stage.name, kind, int(found[3])) for kind in kinds)
    elif token and not _DERIVED.fullmatch(token):
        raise ScheduleError(
            f"line {rank + 1}: {token!r} is no action; expected one like 0F3, 0I3, 0W3, 0B3 or "
            "(0F3;1B0)OVERLAP_F_B"
        )


def _stage(token: str, number: int, rank: int, stages: Sequence[Stage]) -> Stage:
    if number >= len(stages):
        raise ScheduleError(
            f"line {rank + 1}: {token!r} is of stage {number}; the cut has {len(stages)} sharded "
            f"stages: {', '.join(stage.name for stage in stages)}"
        )
    stage = stages[number]
    if stage.rank != rank:
        raise ScheduleError(
            f"line {rank + 1}: {token!r} stands in the line of rank {rank}, but stage {number} is "
            f"{stage.name} on rank {stage.rank}; lay the cut out as the schedule does"
        )
    return stage
