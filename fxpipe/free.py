"""Orders of everything at once: the best rows that are found within limits, whatever their base.

Backbone, encoders and generators are listed together, so that the weight gradients of the backbone
fill the gaps that units leave, and polished. The order is frozen in the table that comes out.
"""

from fxpipe.costs import Costs
from fxpipe.cut import Cut
from fxpipe.nest import windowed
from fxpipe.numbering import build
from fxpipe.polish import polish
from fxpipe.problem import Limits, Owners, Problem
from fxpipe.search import search
from fxpipe.table import Rows

TRIES = 1000  # more are not made, however few ops there are
FEWEST = 100  # are made, up to four times the usual effort
SEARCH, POLISH = 160_000, 100_000  # ops placed, and ops looked at for each direction of time


def free(
    cut: Cut,
    microbatches: int,
    costs: Costs,
    *,
    owners: Owners | None = None,
    limits: Limits | None = None,
    effort: float = 1.0,
) -> Rows | None:
    """The best rows found; None if none keep to the limits. effort: how long to look; 1 is usual,
    about a second."""

    def problem(limits: Limits, microbatches: int) -> Problem:
        return build(cut, microbatches, costs, owners=owners, limits=limits)

    limits = windowed(cut, microbatches, problem, limits or Limits(), based=False)
    whole = problem(limits, microbatches)
    usual = max(SEARCH, min(4 * SEARCH, FEWEST * len(whole.ops)))
    placed = min(usual, TRIES * len(whole.ops))
    looked = min(POLISH, TRIES * len(whole.ops))
    tries = [
        polish(
            whole,
            whole.in_order(found.listed.ranks, found.listed.starts),
            effort=int(looked * effort),
        )
        for found in search(cut, whole, effort=int(placed * effort))
    ]
    if not tries:
        return None
    best = min(tries, key=lambda polished: polished.end)
    return whole.named(best.rows)
