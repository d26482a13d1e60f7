"""Put the reductions of shared gradients into a table."""

from dataclasses import replace

from fxpipe.cut import Kind
from fxpipe.table import Op, Table


def reduce(table: Table) -> Table:
    """Sum what several ranks train at the end of each of their rows, in one order.

    rank 0: ... llm0.W3 vision.W2  ->  ... llm0.W3 vision.W2 vision.R
    rank 1: ... llm1.W3 vision.W3  ->  ... llm1.W3 vision.W3 vision.R
    """
    rows = (
        (
            *row,
            *(
                Op(name, Kind.R)
                for name, stages in table.cut.groups.items()
                if rank in table.cut.ranks_of(stages)
            ),
        )
        for rank, row in enumerate(table.rows)
    )
    return replace(table, rows=tuple(rows))
