"""Passes over tables. A pass is a function Table -> Table; reading DEFAULT is reading the compiler.

After every pass the table is verified by the rules that hold from then on. FXPIPE_DUMP=dir writes
the table that comes in and one numbered file after each pass: `diff` is the debugger.
"""

if __name__ != "fxpipe.passes":
    raise ImportError(f"import this package as fxpipe.passes, not as {__name__}")

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fxpipe.errors import TableError
from fxpipe.passes.communicate import communicate
from fxpipe.passes.reduce import reduce
from fxpipe.rules import Rule
from fxpipe.table import Table
from fxpipe.verify import ORDER, REDUCTIONS, TRANSFERS, settled, verify

Pass = Callable[[Table], Table]

ALL: dict[str, Pass] = {"communicate": communicate, "reduce": reduce}
DEFAULT: tuple[Pass, ...] = (communicate, reduce)

# Rules that hold once a pass has run; ORDER holds always.
ESTABLISHES: dict[str, tuple[Rule, ...]] = {"communicate": TRANSFERS, "reduce": REDUCTIONS}


def run(table: Table, passes: Sequence[Pass] = DEFAULT) -> Table:
    """The table after the passes, in order. Raises TableError that says which pass broke it.

    A rule is not asked again after a pass that has left all that it reads as it was.
    """
    rules = ORDER
    _check(table, rules, "the table before all passes")
    _dump(table, 0, "derive")
    done: list[str] = []
    for number, step in enumerate(passes, start=1):
        name = _name(step)
        before, table = table, step(table)
        kept = set(rules) & set(settled(before, table))
        rules += ESTABLISHES.get(name, ())
        asked = [rule for rule in rules if rule not in kept]
        _check(
            table, asked, f"the table after {name} (passes before it: {', '.join(done) or 'none'})"
        )
        _dump(table, number, name)
        done.append(name)
    return table


def _name(step: Pass) -> str:
    """A pass's own name, also where its options are bound with functools.partial."""
    return str(getattr(getattr(step, "func", step), "__name__", type(step).__name__))


def _check(table: Table, rules: Sequence[Rule], what: str) -> None:
    try:
        verify(table, rules)
    except TableError as error:
        raise TableError(f"{what} is broken\n{error}\n{table}") from error


def _dump(table: Table, number: int, name: str) -> None:
    folder = os.environ.get("FXPIPE_DUMP")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{number:02}_{name}.txt").write_text(f"{table}\n", encoding="utf-8")
