"""The two papers' tables: every system on their workloads, simulated, and emulated at the marks.

    python -m benchmarks.seeds [--quick] [--emulate] [--plots FOLDER] [--csv FILE]

Costs are a roofline of the models and chips (`benchmarks/workloads.py` says which sizes are
assumed). Simulated: every workload, with every microbatch alike and with image counts that are
drawn, tenfold apart; the batch sweep; curves over a region's share of the work. Emulated: real
programs in real processes over gloo, whose ops sleep; systems take turns in one run.
Exit code 1 when a bar is missed: `auto` must beat the papers' methods at every mark, memory must
stay flat while the batch grows eightfold.
"""

import argparse
import csv
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.asked import given, parser
from benchmarks.seeds_emulated import emulated
from benchmarks.seeds_tables import batch_sweep, lines, notes, published
from benchmarks.sweeping import factors
from benchmarks.systems import BY_NAME, PAPERS, SYSTEMS, Row, simulated
from benchmarks.workloads import BIGMAC_U, WORKLOADS, Workload

GAIN = 1.05  # of auto over the better of the papers' methods, in the median over the marks
NEAR = 0.5  # of what the bound leaves to gain, where that is less than GAIN
Marks = dict[str, dict[str, Row]]


def main() -> int:
    """The command line."""
    asked = _options()
    workloads = asked.workloads
    marks: Marks = {}
    for name, rows in _marks(workloads, asked.effort, drawn=not asked.quick):
        marks[name] = rows
        print("\n".join(["", *lines(name, rows)]), flush=True)
    print("\n".join(["", *published(marks.values()), "", *notes(workloads)]), flush=True)
    found = [_gains(marks)]
    if not asked.no_sweep:
        text, flat = batch_sweep(workloads[-1] if asked.quick else WORKLOADS[2], asked.effort)
        print("\n".join(["", *text]), flush=True)
        found.append(flat)
    if asked.emulate:
        alike = {name: rows for name, rows in marks.items() if "drawn" not in name}
        found.append(emulated(alike.values(), asked.unit / 1e3, asked.rounds, asked.fraction))
    if asked.csv:
        _write(asked.csv, marks)
    if asked.plots:
        from benchmarks.seeds_plots import plot  # needs matplotlib

        plot(Path(asked.plots), asked.effort)
    return int(not all(found))


def _marks(
    workloads: Sequence[Workload], effort: float, *, drawn: bool
) -> Iterator[tuple[str, dict[str, Row]]]:
    """Every system where the papers' workloads lie."""
    for workload in workloads:
        chance = factors(workload.microbatches, 1)
        for name, how in ((workload.name, ()), (f"{workload.name}, drawn", chance)):
            if how and not drawn:
                continue
            tried = {x.name: simulated(workload, x, effort=effort, factors=how) for x in SYSTEMS}
            more = simulated(workload, BY_NAME["auto"], effort=3 * effort, factors=how)
            tried["auto"] = min(tried["auto"], more, key=lambda row: row.seconds)
            yield name, tried


def _gains(marks: Marks) -> bool:
    """Whether auto beats the better of the papers' methods everywhere, and by how much."""
    gains, limits = [], []
    for name, rows in marks.items():
        best = min((rows[paper] for paper in PAPERS), key=lambda row: row.seconds)
        bound = rows["auto"].bound
        gains.append(best.seconds / rows["auto"].seconds)
        limits.append(best.seconds / bound)
        print(
            f"{name}: {best.system.name} / auto = {gains[-1]:.3f}; down to the bound "
            f"{limits[-1]:.3f} were to gain"
        )
    bar = min(GAIN, 1 + NEAR * (median(limits) - 1))
    reached = min(gains) >= 1 and median(gains) >= bar
    print(
        f"auto over the better of the papers' methods: median {median(gains):.3f}, least "
        f"{min(gains):.3f}; wanted {GAIN} in the median, the bound allows {median(limits):.3f}; "
        f"bar {bar:.3f}: {'PASS' if reached else 'FAIL'}"
    )
    return reached


def _write(path: str, marks: Marks) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("workload", "system", "seconds", "bound", "bubble", "mfu", "schedule"))
        for name, rows in marks.items():
            for row in rows.values():
                numbers = (row.seconds, row.bound, row.bubble, row.mfu(row.seconds))
                cells = [f"{number:.6g}" for number in numbers]
                writer.writerow((name, row.system.name, *cells, row.found.schedule))


def _options() -> argparse.Namespace:
    made = parser(__doc__, "all")
    made.add_argument("--no-sweep", action="store_true", help="leave the batch sweep out")
    made.add_argument("--csv", metavar="FILE", help="write every simulated row")
    made.add_argument("--plots", metavar="FOLDER", help="write the curves; needs matplotlib")
    return given(made, list(WORKLOADS), BIGMAC_U)


if __name__ == "__main__":
    sys.exit(main())
