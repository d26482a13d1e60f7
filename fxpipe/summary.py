"""A summary of a schedule's figures in words and aligned columns."""

from collections.abc import Iterator, Sequence

from fxpipe.figures import Figures
from fxpipe.front import Point, shown


def summary(found: Figures, width: int) -> str:
    """Makespan against its bound; what each rank holds and waits for; who owns what."""
    lines = [_headline(found), "", *_ranks(found)]
    if found.owners:
        lines += ["", *(_owners(name, ranks, width) for name, ranks in found.owners.items())]
    return "\n".join(lines)


def front(points: Sequence[Point], most: int = 12) -> str:
    """The points worth a look: > is the choice, * those that none beats in both time and memory."""
    listed = shown(points, most)
    known = any(point.bytes for point in points)
    again = any(point.recompute for point in listed)
    heads = ["", "seconds", *(["bytes"] if known else []), *points[0].units]
    heads += ["chunks", "window", *(["recompute"] if again else []), "owners", "fits"]
    rows = []
    for point in listed:
        marks = f"{'>' if point.chosen else ' '}{'*' if point.best else ' '}"
        row = [f"{marks} {point.schedule}"]
        row += [f"{point.seconds:.6g}", *([f"{point.bytes:.4g}"] if known else [])]
        row += [str(units) for units in point.units.values()]
        row += [str(point.chunks), str(point.window or "")]
        row += [" ".join(point.recompute)] if again else []
        rows.append([*row, point.owners, "yes" if point.fits else "no"])
    what = "bytes" if known else "units"
    head = f"{len(points)} schedules tried; > chosen, * none is better in seconds and {what}"
    return "\n".join([head, "", *columns(heads, rows, left=1)])


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> Iterator[str]:
    """Lines of aligned columns: so many to the left, the others, numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        words = (
            f"{word:<{size}}" if at < left else f"{word:>{size}}"
            for at, (word, size) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(words).rstrip()


def _headline(found: Figures) -> str:
    above = found.makespan / found.lower_bound - 1 if found.lower_bound else 0.0
    bubble = sum(found.bubble) / len(found.bubble)
    return (
        f"makespan {found.makespan:.6g} s, lower bound {found.lower_bound:.6g} s "
        f"({above:.1%} above it), mean bubble {bubble:.1%}"
    )


def _ranks(found: Figures) -> Iterator[str]:
    live = {name: units for name, units in found.peak_live.items() if any(units)}
    heads = ["", "bubble", *(f"live {name}" for name in live)]
    rows = [
        [f"rank {rank}", f"{bubble:.1%}", *(str(units[rank]) for units in live.values())]
        for rank, bubble in enumerate(found.bubble)
    ]
    if found.peak_bytes:
        heads.append("bytes")
        for row, held in zip(rows, found.peak_bytes, strict=True):
            row.append(f"{held:.4g}")
    if any(found.encoder):
        heads += ["E", "w", "spill"]
        for rank, row in enumerate(rows):
            seconds = (found.encoder[rank], found.slack[rank], found.spill[rank])
            row += [f"{number:.4g}" for number in seconds]
    yield from columns(heads, rows, left=1)


def _owners(name: str, ranks: Sequence[int], width: int) -> str:
    line = f"owners {name}: {' '.join(map(str, ranks))}"
    if len(line) <= width:
        return line
    rest = f" ... ({len(ranks)} in all)"
    return line[: width - len(rest)].rsplit(" ", 1)[0] + rest
