"""Rename the microbatches of a table: which of the batch runs first, and which beside which."""

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.costs import Costs
from fxpipe.errors import ScheduleError
from fxpipe.simulate import simulate
from fxpipe.table import Op, Table

POLICIES = ("heavy-first", "heavy-last", "waves", "smooth")


def reorder(table: Table, order: Sequence[int]) -> Table:
    """What the table calls microbatch k becomes microbatch order[k].

        order (2, 0, 1):  rank 0: llm0.F0 llm0.F1 llm0.F2  ->  rank 0: llm0.F2 llm0.F0 llm0.F1

    Losses, weights and gradients go by the name, so a step's result stays what it is, up to the
    order in which gradients are summed. Raises ScheduleError if order is no permutation.
    """
    order = check_order(order, table.microbatches)
    if order == tuple(range(len(order))):
        return table
    rows = (tuple(_renamed(op, order) for op in row) for row in table.rows)
    # It is no longer what the schedule of that name makes.
    return replace(table, rows=tuple(rows), schedule="")


def check_order(order: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """The order as a tuple. Raises ScheduleError unless it has each microbatch once."""
    found = tuple(map(int, order))
    if sorted(found) != list(range(microbatches)):
        raise ScheduleError(
            f"order {list(found)} is no permutation of the microbatches 0..{microbatches - 1}"
        )
    return found


def order_by(sizes: Sequence[float], policy: str = "smooth", ranks: int = 1) -> tuple[int, ...]:
    """An order of microbatches by what is known of them: images, tokens, or seconds of an encoder.

    heavy-first, heavy-last: sorted; equal ones keep their order
    waves:  as alike as can be beside each other, since the heaviest of `ranks` microbatches that
            run at a time decides how long all of them wait; the ranks take turns at the heaviest
    smooth: any stretch has about its share of the whole, and each of the `ranks` that take
            microbatches in turn (owner m mod ranks) has about its share too

        order_by([0, 0, 0, 9, 9, 9])  ->  (0, 3, 1, 4, 2, 5)
    """
    numbers = range(len(sizes))
    match policy:
        case "heavy-first":
            return tuple(sorted(numbers, key=lambda i: (-sizes[i], i)))
        case "heavy-last":
            return tuple(sorted(numbers, key=lambda i: (sizes[i], i)))
        case "waves":
            ordered = order_by(sizes, "heavy-first")
            waves = [ordered[start : start + ranks] for start in range(0, len(sizes), ranks)]
            return tuple(mb for k, wave in enumerate(waves) for mb in wave[:: (1, -1)[k % 2]])
        case "smooth":
            return _smooth(sizes, ranks)
    raise ScheduleError(f"unknown policy {policy!r}; there are {', '.join(POLICIES)}")


def best_order(table: Table, costs: Costs, sizes: Sequence[float]) -> tuple[int, ...]:
    """The order in which a simulated step ends first: of those by policy, and of the one given.

    costs: with amounts for each microbatch of the batch, as `costs.scaled(cut, {"vision": sizes})`.
    """
    orders = [tuple(range(len(sizes)))]
    orders += [order_by(sizes, policy, table.cut.ranks) for policy in POLICIES]
    return min(orders, key=lambda order: simulate(reorder(table, order), costs).end)


def _smooth(sizes: Sequence[float], ranks: int) -> tuple[int, ...]:
    """The next microbatch is the one that brings the sum so far closest to its share, and the
    load of the rank whose turn it is."""
    left = dict.fromkeys(range(len(sizes)))
    mean = sum(sizes) / max(1, len(sizes))
    loads = [0.0] * ranks
    done, order = 0.0, []
    for turn in range(len(sizes)):
        rank = turn % ranks
        ahead, own = done - mean * turn, loads[rank] - mean * (turn // ranks)

        def distance(i: int, ahead: float = ahead, own: float = own) -> float:
            return abs(ahead + sizes[i] - mean) + abs(own + sizes[i] - mean) * (ranks > 1)

        best = min(left, key=lambda i: (distance(i), i))
        del left[best]
        order.append(best)
        done += sizes[best]
        loads[rank] += sizes[best]
    return tuple(order)


def _renamed(op: Op, order: Sequence[int]) -> Op:
    return op if op.mb is None else op._replace(mb=order[op.mb])
