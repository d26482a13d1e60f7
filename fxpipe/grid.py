"""The time grid: a timeline as one line of columns per rank, in colour or in letters.

    rank 0 F0F1....B0--F2B1--    an op is its letter and its microbatch; idle time is dots
    rank 1 ..F0B0--F1B1--..F2

In colour an op is a box of its region's hue with the number of its microbatch, where that fits.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.text import Text

from fxpipe.cut import Kind
from fxpipe.marks import REDUCTION, Mark, marks
from fxpipe.timeline import Span, Timeline

_FINE = 4  # columns of the shortest op, at most
_TICK = 8  # columns between two numbers of the time axis, at least
_GAP = " : "
_Cell = tuple[str, str]  # a character and its style


@dataclass(frozen=True)
class Window:
    """slot: seconds of one column; total: columns of the step; head and tail: columns that are
    shown from its start and up to its end, tail 0 where nothing is left out."""

    slot: float
    total: int
    head: int
    tail: int = 0

    def column(self, seconds: float) -> int:
        """The column that starts closest to a time since the start."""
        return round(seconds / self.slot)

    def pieces(self, first: int, last: int) -> list[tuple[int, int]]:
        """What is shown of an op's columns."""
        shown = [(0, self.head), (self.total - self.tail, self.total)]
        cut = [(max(first, a), min(last, b)) for a, b in shown]
        return [(a, b) for a, b in cut if a < b]

    def shown(self, line: Sequence[_Cell]) -> list[_Cell]:
        """What is shown of a line of all columns."""
        if not self.tail:
            return list(line)
        return [*line[: self.head], *((letter, "dim") for letter in _GAP), *line[-self.tail :]]


def grid(timeline: Timeline, width: int, *, colour: bool) -> Text:
    """The grid of a timeline with its time axis, legend and notes, `width` columns wide."""
    ranks = range(timeline.cut.ranks)
    digits = len(str(len(ranks) - 1))
    view = window(timeline, max(width - len("rank  ") - digits, 8))
    marked = marks(timeline.cut)
    spans: list[list[Span]] = [[] for _ in ranks]
    for span in timeline.compute:
        spans[span.rank].append(span)
    text = Text(no_wrap=True)
    _line(text, " " * (len("rank  ") + digits), _axis(view))
    for rank in ranks:
        cells = _row(spans[rank], view, timeline.start, marked, colour)
        _line(text, f"rank {rank:>{digits}} ", cells)
    used = {_mark(span, marked) for span in timeline.compute if span.seconds > 0}
    listed = dict.fromkeys([*marked.values(), REDUCTION])
    order = sorted(
        (mark for mark in listed if mark in used), key=lambda mark: "FBWR".index(mark.kind)
    )
    text.append_text(_legend(order, colour=colour, width=width))
    return text.append(_note(view, timeline))


def window(timeline: Timeline, columns: int) -> Window:
    """The finest slot that fits: a fraction of the unit that divides all ops, else what makes the
    step fit; where an ordinary op would be lost by that, start and end of the step are shown."""
    lengths = [span.seconds for span in timeline.compute if span.seconds > 0]
    makespan = timeline.makespan
    if not lengths or not makespan:
        return Window(1.0, 1, 1)
    unit, ordinary = _unit(lengths), median(lengths)
    if makespan / unit <= columns + 1e-6:
        fine = min(_FINE, int((columns + 1e-6) * unit / makespan))
        total = round(makespan / unit * fine)
        return Window(unit / fine, total, total)
    slot = makespan / columns
    if slot <= ordinary:
        return Window(slot, columns, columns)
    slot = unit if ordinary <= _FINE * unit else ordinary / 2
    total = math.ceil(makespan / slot - 1e-6)
    half = (columns - len(_GAP)) // 2
    return Window(slot, total, half, half)


def _unit(lengths: Iterable[float]) -> float:
    """The greatest common divisor of some seconds, up to rounding."""
    unit = 0.0
    for length in sorted({round(length, 9) for length in lengths}, reverse=True):
        a, b = length, unit
        while b > 1e-6 * length:
            a, b = b, a % b
            b = 0.0 if a - b < 1e-6 * length else b
        unit = a
    return unit


def _row(
    spans: Iterable[Span],
    view: Window,
    start: float,
    marked: dict[tuple[str, Kind], Mark],
    colour: bool,
) -> list[_Cell]:
    line: list[_Cell] = [("·", "dim") if colour else (".", "")] * view.total
    for span in sorted(spans, key=lambda span: span.seconds):  # idle columns show short ops, too
        first, last = view.column(span.start - start), view.column(span.end - start)
        mark = _mark(span, marked)
        for at, end in view.pieces(first, max(last, first + 1) if span.seconds else first):
            words = _words(span, mark, end - at, colour)
            line[at:end] = [(letter, mark.style if colour else "") for letter in words]
    return view.shown(line[: view.total])


def _words(span: Span, mark: Mark, columns: int, colour: bool) -> str:
    """What stands in the columns of an op."""
    number = "" if span.op.mb is None else str(span.op.mb)
    if colour:
        return f"{number if len(number) <= columns else '':{columns}}"
    return f"{mark.letter}{number if len(number) < columns else ''}".ljust(columns, "-")


def _mark(span: Span, marked: dict[tuple[str, Kind], Mark]) -> Mark:
    return marked.get((span.op.stage, span.op.kind), REDUCTION)


def _axis(view: Window) -> list[_Cell]:
    """Round numbers of seconds at their columns; none is cut by what is left out."""
    step = _round_up(_TICK * view.slot)
    line: list[_Cell] = [(" ", "")] * view.total
    for tick in range(math.ceil(view.total * view.slot / step)):
        at, word = view.column(tick * step), f"{tick * step:g}"
        whole = not view.tail or at + len(word) <= view.head or at >= view.total - view.tail
        if whole and at + len(word) <= view.total:
            line[at : at + len(word)] = [(letter, "dim") for letter in word]
    shown = view.shown(line)
    while shown and shown[-1][0] == " ":
        shown.pop()
    return shown


def _round_up(seconds: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not less."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= seconds * (1 - 1e-6))


def _legend(order: Sequence[Mark], *, colour: bool, width: int) -> Text:
    """`vision v:F V:W  llm F:F B:B W:W`, in as many lines as it takes."""
    text, used = Text("\n"), 0
    for what in dict.fromkeys(mark.what for mark in order):
        entry = Text(what)
        for mark in order:
            if mark.what == what:
                entry.append(" ")
                shown = f" {mark.kind} " if colour else f"{mark.letter}:{mark.kind}"
                entry.append(shown, mark.style if colour else "")
        if used:
            wraps = used + 3 + len(entry) > width
            text.append("\n" if wraps else "   ")
            used = 0 if wraps else used + 3
        text.append_text(entry)
        used += len(entry)
    return text.append("\n")


def _note(view: Window, timeline: Timeline) -> str:
    notes = [f"one column is {view.slot:.3g} s"]
    if view.tail:
        left = (view.total - view.head - view.tail) * view.slot
        notes.append(f"{left:.3g} of {timeline.makespan:.3g} s in the middle are left out")
    exact = all(
        math.isclose(time, round(time), abs_tol=1e-3)
        for span in timeline.compute
        for time in ((span.start - timeline.start) / view.slot, span.seconds / view.slot)
    )
    if not exact:
        notes.append("times are rounded to columns")
    return f"{'; '.join(notes)}\n"


def _line(text: Text, label: str, cells: Iterable[_Cell]) -> None:
    """Append a line; neighbours of one style become one piece."""
    text.append(label)
    piece, style = "", ""
    for letter, own in cells:
        if own != style:
            text.append(piece, style)
            piece, style = "", own
        piece += letter
    text.append(piece, style)
    text.append("\n")
