"""What a replicated encoder costs in closed form: the sympy side of `fxpipe.costmodel`.

    head = Head(encoder=layer_seconds(patches, hidden) * layers, stage=..., owners="slack")
    threshold(sympy.Le(head.pays, 0), patches)     up to here the encoder costs nothing

Seconds are expressions of the symbols below, of others, or plain numbers. A pipeline is linear
here: one stage per rank, all alike (Mpipe, arXiv 2607.03229, section 4.3). `fxpipe.roofline` makes
the seconds of real stages, in the symbols of their microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from fxpipe.errors import ScheduleError

tokens, images, patches, layers, hidden, ranks, microbatches = sympy.symbols(
    "tokens images patches layers hidden ranks microbatches", positive=True, integer=True
)
peak_flops, bandwidth, alpha, beta = sympy.symbols("peak_flops bandwidth alpha beta", positive=True)


def roofline(flops: sympy.Expr, moved: sympy.Expr) -> sympy.Expr:
    """Seconds of an op that computes so many flops and moves so many bytes of memory."""
    return sympy.Max(flops / peak_flops, moved / bandwidth)


def transfer(size: sympy.Expr) -> sympy.Expr:
    """Seconds until so many bytes have crossed from rank to rank; beta is seconds per byte."""
    return alpha + beta * size


def layer_seconds(
    length: sympy.Expr, width: sympy.Expr, count: sympy.Expr = 1, item: int = 2
) -> sympy.Expr:
    """Forward seconds of one transformer layer on `count` sequences of one length.

    Of a block with 12 * width^2 weights, which are read once, beside about 20 activations of
    length * width; an element takes `item` bytes.
    """
    flops = count * (24 * length * width**2 + 4 * length**2 * width)
    return roofline(flops, item * (12 * width**2 + 20 * count * length * width))


@dataclass(frozen=True)
class Head:
    """A replicated encoder whose forwards come before a linear pipeline of one stage per rank.

    encoder, stage: forward seconds of one microbatch, in the encoder and in one backbone stage;
    hop: seconds of a transfer to the next stage; owners: `round_robin`, microbatch m on rank
    m mod P, or `slack`, idle time in proportion, then all ranks alike. Under `slack` a microbatch
    counts as divisible: a real table pays at most one encoder forward more.
    """

    encoder: sympy.Expr
    stage: sympy.Expr
    hop: sympy.Expr = 0
    ranks: sympy.Expr = ranks
    microbatches: sympy.Expr = microbatches
    owners: str = "round_robin"

    def __post_init__(self) -> None:
        if self.owners not in ("round_robin", "slack"):
            raise ScheduleError(f"owners {self.owners!r} is unknown; use round_robin or slack")
        for name in ("encoder", "stage", "hop", "ranks", "microbatches"):
            object.__setattr__(self, name, sympy.sympify(getattr(self, name)))

    @property
    def total(self) -> sympy.Expr:
        """Seconds of all encoder forwards."""
        return self.microbatches * self.encoder

    @property
    def room(self) -> sympy.Expr:
        """Idle seconds before the first backbone forward, on all ranks: P(P - 1)/2 forwards."""
        return (self.stage + self.hop) * self.ranks * (self.ranks - 1) / 2

    def slack(self, rank: sympy.Expr) -> sympy.Expr:
        """w_r: a rank waits for the stages before it."""
        return rank * (self.stage + self.hop)

    def work(self, rank: sympy.Expr) -> sympy.Expr:
        """E_r: encoder forward seconds that a rank owns."""
        if self.owners == "round_robin":
            return self.encoder * sympy.ceiling((self.microbatches - rank) / self.ranks)
        share = 2 * rank / (self.ranks * sympy.Max(1, self.ranks - 1))
        return sympy.Min(self.slack(rank), self.total * share) + self.pays

    def spill(self, rank: sympy.Expr) -> sympy.Expr:
        """Encoder seconds of a rank that its slack does not hide."""
        if self.owners == "slack":
            return self.pays
        return sympy.Max(0, self.work(rank) - self.slack(rank))

    @property
    def pays(self) -> sympy.Expr:
        """Seconds that the step is longer for: the greatest spill.

        Round robin gives rank 0 the most work, and it has no slack: nothing is hidden.
        """
        if self.owners == "round_robin":
            return self.encoder * sympy.ceiling(self.microbatches / self.ranks)
        return sympy.Max(0, self.total - self.room) / self.ranks

    @property
    def hidden_share(self) -> sympy.Expr:
        """The fraction of all encoder forward seconds that is hidden; needs a number of ranks
        under round robin."""
        if self.owners == "slack":
            return sympy.Min(1, self.room / self.total)
        fits = (sympy.Min(self.work(r), self.slack(r)) for r in range(int(self.ranks)))
        return sympy.Add(*fits) / self.total

    def makespan(
        self, backward: sympy.Expr, weights: sympy.Expr = 0, tail: "Head | None" = None
    ) -> sympy.Expr:
        """Seconds of a step: all encoder forwards, then GPipe, or 1F1B without hops.

        backward, weights: of a backbone stage until its gradient is passed on, and after that;
        tail: the encoder's backwards, which have idle time of their own behind the pipeline.
        """
        both = self.stage + backward
        fill = (self.ranks - 1) * (both + 2 * self.hop)
        spills = self.pays + (tail.pays if tail else 0)
        return self.microbatches * (both + weights) + fill + spills

    def bubble(
        self,
        rank: sympy.Expr,
        backward: sympy.Expr,
        weights: sympy.Expr = 0,
        tail: "Head | None" = None,
    ) -> sympy.Expr:
        """The fraction of the makespan in which a rank computes nothing."""
        backbone = self.microbatches * (self.stage + backward + weights)
        busy = backbone + self.work(rank) + (tail.work(rank) if tail else 0)
        return 1 - busy / self.makespan(backward, weights, tail)


def threshold(condition: sympy.Basic, symbol: sympy.Symbol) -> sympy.Expr:
    """The largest value of a symbol for which `condition`, like Le(E, w), holds.

    The left side must not fall behind the right one as the symbol grows. In closed form where the
    sides are linear or quadratic in it, also inside a few Max and Min; else by bisection, for which
    no other symbol may be left. An integer symbol gets an integer; one that is less than the
    symbol can be means never. oo if the condition always holds. Raises ScheduleError.
    """
    if condition in (sympy.true, sympy.false):
        return sympy.oo if condition == sympy.true else -sympy.oo
    if not isinstance(condition, _INEQUALITIES):
        raise ScheduleError(f"{condition} is no inequality; write one like sympy.Le(work, slack)")
    found = _largest(condition.lts - condition.gts, symbol)
    return sympy.floor(found) if symbol.is_integer else found


_INEQUALITIES = (
    sympy.LessThan,
    sympy.StrictLessThan,
    sympy.GreaterThan,
    sympy.StrictGreaterThan,
)
_BRANCHES = 6  # Max and Min that are taken apart


def _largest(excess: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr:
    """The largest value for which `excess`, which grows with it, is at most 0."""
    if symbol not in excess.free_symbols:
        return sympy.Piecewise((sympy.oo, excess <= 0), (-sympy.oo, True))
    choices = [x for x in excess.atoms(sympy.Max, sympy.Min) if symbol in x.free_symbols]
    if not choices:
        return _root(excess, symbol)
    outer = max(choices, key=lambda choice: choice.count_ops())
    slope = _slope(excess, outer)
    if len(choices) > _BRANCHES or not (slope.is_positive or slope.is_negative):
        return _bisected(excess, symbol)
    every = isinstance(outer, sympy.Max) == bool(slope.is_positive)
    branches = [_largest(excess.xreplace({outer: x}), symbol) for x in outer.args]
    return (sympy.Min if every else sympy.Max)(*branches)


def _slope(excess: sympy.Expr, part: sympy.Expr) -> sympy.Expr:
    """By how much `excess` grows with a part of it; nan where that is no constant."""
    dummy = sympy.Dummy(real=True)
    slope = sympy.diff(excess.xreplace({part: dummy}), dummy)
    return sympy.nan if dummy in slope.free_symbols else sympy.simplify(slope)


def _root(excess: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr:
    """The upper root of a line or a parabola; of anything else, a number."""
    poly = sympy.expand(excess).as_poly(symbol)
    if poly is None or poly.degree() > 2:
        return _bisected(excess, symbol)
    if poly.LC().is_negative:
        raise ScheduleError(f"{excess} falls as {symbol} grows; it has no largest {symbol}")
    if poly.degree() == 1:
        first, constant = poly.all_coeffs()
        return -constant / first
    square, first, constant = poly.all_coeffs()
    inside = first**2 - 4 * square * constant
    if inside.is_negative:
        return -sympy.oo
    return (sympy.sqrt(inside) - first) / (2 * square)


def _bisected(excess: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr:
    """The largest value by bisection, exact for integers, else to twelve digits."""
    others = excess.free_symbols - {symbol}
    if others:
        names = ", ".join(sorted(map(str, others)))
        raise ScheduleError(
            f"{symbol} has no closed form in this inequality; put numbers for {names} first, with "
            "condition.subs(...)"
        )

    def holds(value: sympy.Expr) -> bool:
        return bool(float(excess.subs(symbol, value)) <= 0)

    low = sympy.Integer(1) if symbol.is_integer else sympy.Rational(1, 2**32)
    if not holds(low):
        return -sympy.oo
    high = 2 * low
    for _ in range(96):
        if not holds(high):
            return _between(low, high, holds, exact=bool(symbol.is_integer))
        low, high = high, 2 * high
    return sympy.oo


def _between(
    low: sympy.Expr, high: sympy.Expr, holds: Callable[[sympy.Expr], bool], *, exact: bool
) -> sympy.Expr:
    """The last value that holds, where `low` does and `high` does not."""
    while high - low > (1 if exact else low / 10**12):
        middle = (low + high) // 2 if exact else (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low if exact else sympy.Float(low, 12)
