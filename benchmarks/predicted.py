"""Predicted and measured: E, w, spill, bubble and step of tables, and where an encoder turns dear.

    python -m benchmarks.predicted [--quick] [--plots FOLDER]

Measured is on emulated chips (`fxpipe.emulator`): real programs, processes and transfers, ops that
sleep, stretched so that the backbone's shortest takes `--unit` ms. E_r, spill and bubble are of the
step itself; w_r, the idle time of rank r before its first backbone forward, is that of the same
base rows run alone. The sensitivity sweep takes the encoder from none of its work to four times as
much, in more images and in larger ones: up to the marked threshold, in closed form
(`fxpipe.formulas`), the slack of Mpipe's owner map hides all of it.
Exit code 1 when a measured step is further from the predicted one than its bar.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.seeds_emulated import Job, in_turns, shortest, spread
from benchmarks.systems import BY_NAME, Row, simulated, with_microbatches
from benchmarks.workloads import BIGMAC_U, WORKLOADS, Workload
from fxpipe.costmodel import Hiding, base_alone, measured, predicted
from fxpipe.emulation import stretched
from fxpipe.passes.communicate import communicate
from fxpipe.simulate import simulate
from fxpipe.timeline import Timeline

SYSTEMS = ("upfront", "transpose, slack", "nested/zb-h1", "nested/zb-v")
CLOSE, QUICK = 0.03, 0.15  # of a step; on a machine that does other things as well
_HEADS = (
    "workload, system", "step: predicted, s", "measured, s", "difference", "E", "w", "spill",
    "bubble",
)  # fmt: skip


def main() -> int:
    """The command line."""
    given = _options()
    print(f"| {' | '.join(_HEADS)} |")
    print("|---" * len(_HEADS) + "|")
    far = []
    for workload in [with_microbatches(BIGMAC_U, 8)] if given.quick else WORKLOADS:
        far += _compared(workload, given)
    bar = QUICK if given.quick else CLOSE
    reached = max(far) <= bar
    print(f"\nsteps within {bar:.0%} of predicted: worst {max(far):.1%}: ", end="")
    print("PASS" if reached else "FAIL")
    if given.plots:
        from benchmarks.predicted_plots import plot  # needs matplotlib

        plot(Path(given.plots), given)
    return int(not reached)


def _compared(workload: Workload, given: argparse.Namespace) -> list[float]:
    """How far each system's measured step is from the predicted one."""
    rows = [simulated(workload, BY_NAME[name], effort=given.effort) for name in SYSTEMS]
    factor = max(1.0, given.unit / 1e3 / min(map(shortest, rows)))
    jobs = [job for row in rows for job in with_base(row, factor)]
    steps = in_turns(jobs, given.rounds, given.fraction)
    far = []
    for at, row in enumerate(rows):
        cells, excess = compare(jobs[2 * at], steps[2 * at], steps[2 * at + 1])
        print(f"| {workload.name}, {row.system.name} | {' | '.join(cells)} |", flush=True)
        far.append(abs(excess))
    return far


def with_base(row: Row, factor: float) -> tuple[Job, Job]:
    """A system's table and its base rows alone, with times so many times as long."""
    costs = stretched(row.found.costs, factor)
    alone = communicate(base_alone(row.found.table), costs=costs)
    return (row.found.table, costs), (alone, costs)


def compare(
    job: Job, steps: Sequence[Timeline], alone: Sequence[Timeline]
) -> tuple[list[str], float]:
    """The cells of a row: seconds, and the greatest difference of any rank in E, w, spill, bubble.

    alone: measured steps of the base rows.
    """
    table, costs = job
    seconds = simulate(table, costs).makespan
    told = predicted(table, costs)
    seen = [measured(table, step, costs) for step in steps]
    slack = [_mean([_waits(step) for step in alone])]
    work, bubble = (_mean([getattr(x, name) for x in seen]) for name in ("work", "bubble"))
    found = Hiding(work, slack[0], bubble)
    excess = fmean(step.makespan for step in steps) / seconds - 1
    cells = [f"{seconds:.3f}", spread([step.makespan for step in steps]), f"{excess:+.1%}"]
    for name in ("work", "slack", "spill"):
        cells.append(f"{_far(getattr(told, name), getattr(found, name)) / seconds:.1%} of the step")
    return [*cells, f"{100 * _far(told.bubble, found.bubble):.1f} points"], excess


def _waits(alone: Timeline) -> tuple[float, ...]:
    """When the first backbone forward of each rank starts."""
    ranks = range(alone.cut.ranks)
    starts = [[span.start for span in alone.compute if span.rank == rank] for rank in ranks]
    return tuple(min(found, default=alone.start) - alone.start for found in starts)


def _mean(found: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(map(fmean, zip(*found, strict=True)))


def _far(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(one, other, strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small workload, in a minute")
    parser.add_argument("--effort", type=float, default=0.3, help="of each search")
    parser.add_argument("--unit", type=float, help="ms of the shortest op; 50, or 15 with --quick")
    parser.add_argument("--rounds", type=int, help="of emulated steps; 3, or 1 with --quick")
    parser.add_argument(
        "--fraction", type=float, default=1 / 64, help="of the transfers' bytes that travel"
    )
    parser.add_argument("--plots", metavar="FOLDER", help="the sweep; needs matplotlib")
    given = parser.parse_args()
    given.unit = given.unit or (15.0 if given.quick else 50.0)
    given.rounds = given.rounds or (1 if given.quick else 3)
    return given


if __name__ == "__main__":
    sys.exit(main())
