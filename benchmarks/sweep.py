"""Nested schedules against the baselines and the bound, over sizes of encoder and generator.

    python -m benchmarks.sweep [--quick] [--csv FILE] [--plots FOLDER] [--jobs 2] [--effort 1]
    python -m benchmarks.sweep --seeds 50      encoder costs drawn for each microbatch

P in {2, 4, 8, 16} ranks, M in {2, 4, 8} P microbatches, an encoder of {1/4 ... 4} forwards of one
backbone stage and a generator of {0, 1/2 ... 4}; see `benchmarks/sweeping.py` for what one case is.
Every schedule runs in the simulator. Exit code 1 when a bar is missed; it says which cases miss it.
"""

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.sweep_bars import Groups, bars, bases, gain, grouped
from benchmarks.sweeping import BASES, Case, Look, Measured, Run, measure

RANKS, TIMES = (2, 4, 8, 16), (2, 4, 8)
ENCODERS, GENERATORS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.0, 0.5, 1.0, 2.0, 4.0)
DRAWN = ((0.5, 0.0), (2.0, 0.0), (1.0, 1.0), (4.0, 1.0))  # encoder, generator; drawn costs
_FEW = ("1f1b", "zb-h1", "zb-v")  # bases of short runs


def main() -> int:
    """The command line."""
    given = _options()
    if given.read:
        groups = grouped(_read(given.read))
        print(table(groups))
        return _plot(given.plots, groups)
    cases = sorted(drawn(given) if given.seeds else fixed(given), reverse=True)
    few = _FEW if given.quick or given.seeds else BASES
    look = Look(
        tuple(given.bases.split(",")) if given.bases else few,
        given.effort * (0.3 if given.quick else 1.0),
        enough=0.01 if given.seeds else 0.005,
    )
    begun = time.perf_counter()
    groups = grouped(_run(cases, look, given.jobs))
    print(f"{len(cases)} cases in {time.perf_counter() - begun:.0f} s\n")
    print(table(groups))
    found = list(bars(groups, whole=not given.quick))
    print("\n".join(["", *(bar.text() for bar in found)]))
    if given.csv:
        _write(given.csv, groups)
    return _plot(given.plots, groups) or int(any(bar.missed for bar in found))


def _plot(folder: str | None, groups: Groups) -> int:
    if folder:
        from benchmarks.sweep_plots import plot  # needs matplotlib

        Path(folder).mkdir(parents=True, exist_ok=True)
        plot(groups, Path(folder))
    return 0


def fixed(given: argparse.Namespace) -> Iterator[Case]:
    """The cases with the same costs for all microbatches."""
    ranks = tuple(map(int, given.ranks.split(","))) if given.ranks else RANKS
    if not given.quick:
        return (Case(*one) for one in product(ranks, TIMES, ENCODERS, GENERATORS))
    return (Case(*one) for one in product((2, 4), (4, 8), (0.5, 4.0), (0.0, 1.0)))


def drawn(given: argparse.Namespace) -> Iterator[Case]:
    """The cases with costs that are drawn."""
    ranks = tuple(map(int, given.ranks.split(","))) if given.ranks else (4, 8)
    for P, times, size, seed in product(ranks, (4, 8), DRAWN, range(given.seeds)):
        yield Case(P, times, *size, seed)


def table(groups: Groups) -> str:
    """The cases of one P and M in a row, as markdown: medians over cases and bases, and worsts."""
    lines = [
        "| P | M | upfront / nested | transpose / nested | stage / nested | ends / nested "
        "| at the caps | without caps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for P, times in sorted({(case.ranks, case.times) for case in groups}):
        at = [ones for case, ones in groups.items() if (case.ranks, case.times) == (P, times)]
        cells = [str(P), f"{times} P"]
        for over in ("upfront", "transpose", "stage", "ends"):
            if any(f"{over}/{base}" not in ones[0].runs for ones in at for base in bases(groups)):
                cells.append("")  # of an older file
                continue
            gains = [gain(ones, over, base) for ones in at for base in bases(groups)]
            cells.append(f"{min(gains):.2f}, {median(gains):.2f}, {max(gains):.2f}")
        for capped in (True, False):
            cells.append(_distances(at, capped=capped) if times >= 4 else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _distances(groups: Iterable[Sequence[Measured]], *, capped: bool) -> str:
    far = [
        median(one.distance(one.at_caps if capped else one.at_large) for one in ones)
        for ones in groups
    ]
    return f"{median(far):.1%}, {max(far):.1%}"


def _run(cases: Sequence[Case], look: Look, jobs: int) -> Iterator[Measured]:
    """The measured cases, in several processes; the number of those done on stderr."""
    with ProcessPoolExecutor(jobs) as pool:
        for at, one in enumerate(pool.map(partial(measure, look=look), cases), 1):
            print(f"\r{at} of {len(cases)}", end="", file=sys.stderr, flush=True)
            yield one
    print(file=sys.stderr)


def _write(path: str, groups: Groups) -> None:
    """A row for each case, and seed."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        names = ("upfront", "transpose", "stage", "ends", "nested")
        runs = [f"{name}/{base}" for base in bases(groups) for name in names]
        best = ("at_caps", "seconds", "without_caps", "seconds")
        writer.writerow(("P", "M", "encoder", "generator", "seed", "bound", *runs, *best))
        for one in (one for ones in groups.values() for one in ones):
            case = one.case
            row: list[object] = [case.ranks, case.microbatches, case.encoder, case.generator]
            row += [case.seed, f"{one.bound:.6g}"]
            row += [f"{one.runs[name].seconds:.6g}" for name in runs]
            for name in (one.at_caps, one.at_large):
                row += [name, name and f"{one.runs[name].seconds:.6g}"]
            writer.writerow(row)


def _read(path: str) -> Iterator[Measured]:
    """What `_write` wrote; it has seconds, and no units."""
    with open(path, newline="") as file:
        head, *rows = csv.reader(file)
    for row in rows:
        ranks, mbs, encoder, generator = map(float, row[:4])
        seed = int(row[4]) if row[4] else None
        case = Case(int(ranks), int(mbs / ranks), encoder, generator, seed)
        runs = {name: Run(float(x), {}, 0) for name, x in zip(head[6:-4], row[6:-4], strict=True)}
        at_caps, capped, at_large, large = row[-4:]
        runs |= {n: Run(float(x), {}, 0) for n, x in ((at_caps, capped), (at_large, large)) if n}
        yield Measured(case, float(row[5]), runs, at_caps or None, at_large or None)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few cases, in under a minute")
    parser.add_argument("--seeds", type=int, default=0, help="draw encoder costs so often")
    parser.add_argument("--ranks", help="as in 2,4")
    parser.add_argument("--bases", help="as in 1f1b,zb-h1; by default all")
    parser.add_argument("--effort", type=float, default=1.0, help="of each search")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--csv", metavar="FILE", help="write every case")
    parser.add_argument("--read", metavar="FILE", help="of an earlier run, instead of running")
    parser.add_argument("--plots", metavar="FOLDER", help="write plots; needs matplotlib")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
