"""The rules of a table, and in which order they are asked.

    verify(table)                  every rule: the table runs on every transport
    verify(table, rules=ORDER)     a table of compute ops only, before `communicate` and `reduce`

The rules are in `rules`, `rules_order` and `rules_transfers`.
"""

from collections.abc import Iterator, Sequence

from fxpipe.cut import Kind
from fxpipe.errors import TableError
from fxpipe.rules import Rule, footprint, known
from fxpipe.rules_order import (
    base_kept,
    bounded,
    complete,
    defined_once,
    makes_progress,
    placed,
    read_after_write,
)
from fxpipe.rules_transfers import (
    channels_in_order,
    made_where_sent,
    posted,
    read_where_received,
    reduced_in_order,
    reduced_once,
    sends_meet_receives,
)
from fxpipe.table import Op, Table

# Rules that read the cut, the claims and the compute ops, and no transfer or reduction.
WORK: tuple[Rule, ...] = (footprint, defined_once, placed, complete, bounded, base_kept)
ORDER: tuple[Rule, ...] = (known, *WORK, read_after_write, makes_progress)
TRANSFERS: tuple[Rule, ...] = (
    posted,
    made_where_sent,
    sends_meet_receives,
    read_where_received,
    channels_in_order,
)
MOVES: tuple[Rule, ...] = (read_after_write, *TRANSFERS)  # rules that read no reduction
REDUCTIONS: tuple[Rule, ...] = (reduced_once, reduced_in_order)
RULES: tuple[Rule, ...] = (*ORDER, *TRANSFERS, *REDUCTIONS)

_SHOWN = 20  # broken rules in one message
_FIRST, _LAST = (known, footprint), (makes_progress,)


def verify(table: Table, rules: Sequence[Rule] | None = None) -> None:
    """Raise TableError with everything in the table that breaks a rule.

    `known` and `footprint` come first, since the others look names up in the cut and follow its
    stars; `makes_progress` last, since a table with an unmet send is stuck anyway and the reason is
    the better message.
    """
    for phase in _phases(RULES if rules is None else rules):
        broken = [f"{rule.__name__}: {text}" for rule in phase for text in rule(table)]
        if broken:
            more = [f"... and {len(broken) - _SHOWN} more"] if len(broken) > _SHOWN else []
            raise TableError("\n".join(broken[:_SHOWN] + more))


def settled(before: Table, after: Table) -> tuple[Rule, ...]:
    """The rules that have the same answer for both tables, since all that they read is equal."""
    claims = [(table.cut, table.schedule, table.live) for table in (before, after)]
    if claims[0] != claims[1] or before.compute != after.compute:
        return ()
    return (*WORK, *MOVES) if _unreduced(before) == _unreduced(after) else WORK


def _unreduced(table: Table) -> list[list[Op]]:
    reduction = Kind.R
    return [[op for op in row if op.kind is not reduction] for row in table.rows]


def _phases(rules: Sequence[Rule]) -> Iterator[list[Rule]]:
    yield [rule for rule in rules if rule in _FIRST]
    yield [rule for rule in rules if rule not in (*_FIRST, *_LAST)]
    yield [rule for rule in rules if rule in _LAST]
