"""A pass of your own: Table -> Table, printed before and after, checked, simulated. No torch.

python examples/write_a_pass.py
"""

from functools import partial

from fxpipe import passes
from fxpipe.cut import Cut, Kind
from fxpipe.errors import TableError
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table

# A cut is text, too: three backbone stages, no encoder.
CUT = Cut.parse("""
    ranks 3
    region llm backbone sharded
    stage llm0 of llm: FW, rank 0, cost 1
    stage llm1 of llm: FBW, rank 1, cost 1
    stage llm2 of llm: FBW, rank 2, cost 1
    seam llm0 -> llm1: hidden*
    seam llm1 -> llm2: hidden*
""")


def defer_weights(table: Table, *, by: int) -> Table:
    """Weight gradients move `by` compute ops later in their row: nothing waits for them.

    before   llm1.F0 llm1.B0 llm1.W0 llm1.F1 llm1.B1 llm1.W1
    after    llm1.F0 llm1.B0 llm1.F1 llm1.W0 llm1.B1 llm1.W1     (by=1)
    """
    return Table(table.cut, tuple(_deferred(row, by) for row in table.rows))


def _deferred(row: tuple[Op, ...], by: int) -> tuple[Op, ...]:
    places = [(at + (by + 0.5) * (op.kind is Kind.W), op) for at, op in enumerate(row)]
    return tuple(op for _, op in sorted(places, key=lambda place: place[0]))


def forget_weights(table: Table) -> Table:
    """A broken pass: the last op of every row is lost."""
    return Table(table.cut, tuple(row[:-1] for row in table.rows))


def show(title: str, table: Table) -> None:
    """A table's rows, and when each rank works if every op takes one second."""
    timeline = simulate(table)
    print(f"\n{title}: {timeline.makespan:g} s")
    for rank, row in enumerate(table.rows):
        print(f"  rank {rank} ({timeline.bubble(rank):4.0%} idle): {' '.join(map(str, row))}")


def main() -> None:
    """Derive a schedule, run the pass, then run a broken one."""
    compute = derive(CUT, 4, "nested/1f1b")
    show("1F1B, every op where its base puts it", passes.run(compute))

    # Options are bound where the list of passes is written. Every rule of verify.py runs after
    # every pass, so what comes out has no deadlock and loses no gradient.
    mine = partial(defer_weights, by=2)
    show("the same with weight gradients later", passes.run(compute, (mine, *passes.DEFAULT)))

    try:
        passes.run(compute, (mine, forget_weights, *passes.DEFAULT))
    except TableError as error:
        print("\na broken pass is caught at once:")
        print("\n".join(f"  {line[:110]}" for line in str(error).splitlines()[:4]))


if __name__ == "__main__":
    main()
