"""What `benchmarks.real` prints and draws, and its bars."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import NamedTuple

from benchmarks.real_engines import Times

Found = dict[tuple[str, str], list[float]]  # by workload and runner
EVEN, BALANCED, QUICK = 1.3, 1.1, 0.9  # of torch's seconds over fxpipe's


class Measured(NamedTuple):
    """Seconds of steps, of CPU in them on both ranks, and MiB by which each rank has grown."""

    seconds: Found
    work: Found
    memory: Found


def report(measured: Measured, engines: Mapping[str, Times], *, quick: bool) -> tuple[str, bool]:
    """The tables, and whether every bar is reached."""
    lines = ["| microbatches | runner | step, mean ± sd | median | over fxpipe's | CPU | peak |"]
    lines.append("|---" * 7 + "|")
    reached = True
    for kind in dict.fromkeys(kind for kind, _ in measured.seconds):
        own = {name: found for (of, name), found in measured.seconds.items() if of == kind}
        ours = [name for name in own if name.startswith("fxpipe") and "inductor" not in name]
        best = min(ours, key=lambda name: median(own[name]))
        lines += [_row(kind, name, own[best], measured) for name in own]
        for text, good in _bars(kind, best, own, measured.memory, quick=quick):
            lines.append(f"{kind}: {text}: {'reached' if good else 'MISSED'}")
            reached &= good
    for text, good in _engine_bars(engines):
        lines.append(f"{text}: {'reached' if good else 'MISSED'}")
        reached &= good
    return "\n".join(lines), reached


def _row(kind: str, name: str, best: Sequence[float], measured: Measured) -> str:
    found, work = measured.seconds[kind, name], measured.work[kind, name]
    low, middle, high = _ratio(found, best)
    cells = [kind, name, f"{1e3 * fmean(found):.0f} ± {1e3 * stdev(found):.0f} ms"]
    cells += [f"{1e3 * median(found):.0f} ms", f"{middle:.2f} ({low:.2f}, {high:.2f})"]
    cells.append(f"{1e3 * median(work):.0f} ms")
    grown = measured.memory.get((kind, name))
    cells.append(", ".join(f"{x:.0f}" for x in grown) + " MiB" if grown else "")
    return f"| {' | '.join(cells)} |"


def _ratio(found: Sequence[float], best: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles and median of the ratios round by round."""
    low, middle, high = quantiles([a / b for a, b in zip(found, best, strict=True)], n=4)
    return low, middle, high


def _bars(
    kind: str, best: str, own: Mapping[str, Sequence[float]], memory: Found, *, quick: bool
) -> list[tuple[str, bool]]:
    """What is asked of a workload, and whether it is so."""
    ours, bars = median(own[best]), []
    for form, bar in (("even", EVEN), ("balanced", BALANCED if kind == "varying" else 1.0)):
        names = [name for name in own if name.startswith("torch") and name.endswith(form)]
        name = min(names, key=lambda n: median(own[n]))
        times, wanted = median(own[name]) / ours, QUICK if quick else bar
        bars.append((f"{best} {times:.2f} × {name}, bar {wanted}", times >= wanted))
    if memory:
        theirs = [n for n in own if n.startswith("torch")]
        theirs.sort(key=lambda n: median(own[n]))
        few = next(name for name in own if name.startswith("fxpipe") and "few live" in name)
        for mine, other in ((best, theirs[0]), (few, theirs[0])):
            pair = max(memory[kind, mine]), max(memory[kind, other])
            text = f"{mine} holds {pair[0]:.0f} MiB, {other} {pair[1]:.0f}"
            bars.append((text, pair[0] <= pair[1]))
    return bars


def _engine_bars(engines: Mapping[str, Times]) -> list[tuple[str, bool]]:
    if not engines:
        return []
    bars = []
    for region, (forward, backward) in engines["eager"].items():
        ours = engines["aten"][region]
        ratio = sum(ours) / (forward + backward)
        text = f"aten on {region}: {1e3 * ours[0]:.1f} + {1e3 * ours[1]:.1f} ms, eager "
        text += f"{1e3 * forward:.1f} + {1e3 * backward:.1f} ms, ratio {ratio:.3f}, bar 1"
        bars.append((text, ratio <= 1.0))
    return bars


def plot(path: Path, measured: Measured) -> None:
    """Steps of every runner, and what they hold at most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    seconds, _, memory = measured
    kinds = list(dict.fromkeys(kind for kind, _ in seconds))
    figure, axes = pyplot.subplots(
        len(kinds), 2, figsize=(12, 4 * len(kinds)), layout="constrained", squeeze=False
    )
    for (left, right), kind in zip(axes, kinds, strict=True):
        names = sorted((n for k, n in seconds if k == kind), key=lambda n: median(seconds[kind, n]))
        colours = ["C0" if name.startswith("fxpipe") else "C7" for name in names]
        left.boxplot([[1e3 * x for x in seconds[kind, n]] for n in names], orientation="horizontal")
        left.set_yticks(range(1, 1 + len(names)), names, fontsize=8)
        left.set_title(f"images {kind}: ms of a step", fontsize=10)
        held = [max(memory.get((kind, name), [0.0])) for name in names]
        right.barh(range(1, 1 + len(names)), held, color=colours)
        right.set_yticks([])
        right.set_title("MiB at the peak, of the worst rank", fontsize=10)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
