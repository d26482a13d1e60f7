"""Where the time over the ideal goes: a step's critical path, walked back from its last op.

ends: before the first op of the step and after the last; overshoot: ops that slept longer than
they should; local: from one op of a rank to its next; transfers: from an op on one rank to the op
on another that had to wait for its value. Their sum and the ideal make the step.
"""

from itertools import pairwise

from benchmarks.ideal import Op, Rows, needs, ranks_of

Spans = list[list[tuple[float, float]]]


def excess(
    rows: Rows, spans: Spans, seconds: float, unit: float, *, fused: bool
) -> dict[str, float]:
    """Seconds of each kind. spans: for each rank, start and end of each op of its row."""
    at: dict[Op, tuple[float, float]] = {
        op: span for rank, row in enumerate(rows) for op, span in zip(row, spans[rank], strict=True)
    }
    before = {op: earlier for row in rows for earlier, op in pairwise(row)}
    home = ranks_of(rows)
    last = here = max(at, key=lambda key: at[key][1])
    found = {"overshoot": _overshoot(at[here], unit), "local": 0.0, "transfers": 0.0}
    while True:
        sources = list(needs(here, len(home), fused))
        if here in before:
            sources.append(before[here])
        if not sources:
            return {"ends": seconds - (at[last][1] - at[here][0]), **found}
        source = max(sources, key=lambda key: at[key][1])
        kind = "local" if home[source[1]] == home[here[1]] else "transfers"
        found[kind] += at[here][0] - at[source][1]
        found["overshoot"] += _overshoot(at[source], unit)
        here = source


def _overshoot(span: tuple[float, float], unit: float) -> float:
    return span[1] - span[0] - unit
