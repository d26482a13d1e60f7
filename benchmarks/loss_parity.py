"""Loss curves of every placement beside eager's: the same model, data and Adam, 200 steps.

    python -m benchmarks.loss_parity [--steps 200] [--ranks 4] [--plot FILE.png] [--csv FILE]
    python -m benchmarks.loss_parity --quick        # 20 steps, two placements

One process (backend `local`). A control is eager a second time, its microbatches summed in the
opposite order: what rounding alone does. Exit code 1 when a loss is further than 1e-9 (relative)
from eager's in float64, or in float32 further than ten times the control.
"""

import argparse
import copy
import csv
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.three import Three, batches

PLACEMENTS = ("stage", "upfront", "transpose", "nested")
BASES = ("1f1b", "zb-v")
QUICK = ("stage/1f1b", "nested/zb-v")
EAGER, CONTROL = "eager", "eager, other order"
DTYPES = {"float64": torch.float64, "float32": torch.float32}
BAR, NOISE = 1e-9, 10.0  # float64, relative; float32, times the control
_POOL = 10  # batches, which come again and again
_RATE = 3e-3

Batch = list[dict[str, Tensor]]
Curves = dict[tuple[str, str], list[float]]  # by dtype and name


@dataclass(frozen=True)
class Row:
    """How far one curve is from eager's. distance: the largest relative difference of a loss, at
    which step; weights: the largest difference of a parameter after the last step."""

    name: str
    dtype: str
    distance: float
    at: int
    first: float
    last: float
    weights: float


def main() -> int:
    """The command line."""
    given = arguments()
    torch.set_num_threads(1)
    schedules = QUICK if given.quick else [f"{p}/{b}" for b in BASES for p in PLACEMENTS]
    steps = 20 if given.quick else given.steps
    rows: list[Row] = []
    curves: Curves = {}
    for dtype in DTYPES:
        found = train(schedules, given.ranks, steps, dtype)
        curves |= {(dtype, name): losses for name, (losses, _) in found.items()}
        rows += compare(found, dtype)
        print(text(rows[-len(found) + 1 :], steps, given.ranks), flush=True)
    if given.csv:
        write(Path(given.csv), curves)
    if given.plot:
        plot(Path(given.plot), curves)
    missed = [f"{row.name} in {row.dtype}" for row in rows if not reached(row, rows)]
    print(f"missed: {', '.join(missed)}" if missed else "every curve is eager's")
    return int(bool(missed))


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="20 steps, two placements")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--csv", metavar="FILE")
    return parser.parse_args()


def train(
    schedules: Sequence[str], ranks: int, steps: int, dtype: str
) -> dict[str, tuple[list[float], list[Tensor]]]:
    """Name -> losses of all steps and parameters after them; each starts from the same weights."""
    torch.manual_seed(0)
    model = Three().to(DTYPES[dtype])
    pool = batches(_POOL, DTYPES[dtype])
    begin = copy.deepcopy(model.state_dict())
    runs: dict[str, Callable[[Batch], float]] = {
        EAGER: lambda batch: eager(model, batch),
        CONTROL: lambda batch: eager(model, batch[::-1]),
    }
    pipe = fxpipe.compile(model, pool[0][0], schedule=schedules[0], ranks=ranks, backend="local")
    for schedule in schedules:
        runs[schedule] = piped(pipe.reschedule(schedule, ranks), schedule)
    found = {}
    for name, run in runs.items():
        model.load_state_dict(begin)
        losses = curve(model, run, pool, steps)
        found[name] = losses, [p.detach().clone() for p in model.parameters()]
    return found


def eager(model: nn.Module, batch: Batch) -> float:
    """The mean loss of the microbatches, and its gradients."""
    losses = []
    for mb in batch:
        loss: Tensor = model(**mb)
        torch.autograd.backward(loss / len(batch))
        losses.append(loss.item())
    return sum(losses) / len(losses)


def piped(pipe: fxpipe.Pipe, schedule: str) -> Callable[[Batch], float]:
    """The same by a pipe, which must have run the schedule that was asked for."""

    def run(batch: Batch) -> float:
        found = pipe.step(batch).loss
        ops = [op for row in pipe.table.rows for op in row if not op.way and op.mb is not None]
        kinds = sum(len(stage.kinds) for stage in pipe.cut.stages)
        if not pipe.table.schedule.startswith(schedule) or len(ops) != kinds * len(batch):
            raise RuntimeError(f"asked for {schedule}, ran {len(ops)} ops:\n{pipe.table}")
        return float(found)

    return run


def curve(
    model: nn.Module, run: Callable[[Batch], float], pool: Sequence[Batch], steps: int
) -> list[float]:
    """The losses of so many steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(run(pool[step % len(pool)]))
        optimizer.step()
    return losses


def compare(found: Mapping[str, tuple[list[float], list[Tensor]]], dtype: str) -> list[Row]:
    """A row for each curve but eager's own."""
    truth, weights = found[EAGER]
    rows = []
    for name, (losses, mine) in found.items():
        if name == EAGER:
            continue
        apart = [abs(ours - true) / abs(true) for ours, true in zip(losses, truth, strict=True)]
        worst = max(range(len(apart)), key=apart.__getitem__)
        moved = max(float((a - b).abs().max()) for a, b in zip(mine, weights, strict=True))
        rows.append(Row(name, dtype, apart[worst], worst, losses[0], losses[-1], moved))
    return rows


def reached(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a curve is within its bar, and has learned anything at all."""
    control = next(r.distance for r in rows if (r.name, r.dtype) == (CONTROL, row.dtype))
    bar = BAR if row.dtype == "float64" else NOISE * control
    return row.last < row.first and (row.name == CONTROL or row.distance <= bar)


def text(rows: Sequence[Row], steps: int, ranks: int) -> str:
    """What a person reads."""
    lines = [
        f"{rows[0].dtype}, {steps} steps of Adam, {ranks} ranks; loss of the first and last step",
        "run                    first    last   furthest from eager, at step    weights at the end",
    ]
    lines += [
        f"{row.name:20s} {row.first:7.4f} {row.last:7.4f}     {row.distance:10.1e} {row.at:12d}"
        f" {row.weights:20.1e}"
        for row in rows
    ]
    return "\n".join(lines)


def write(path: Path, curves: Curves) -> None:
    """One line a step, one column a curve."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *(f"{name} {dtype}" for dtype, name in curves)])
        for step, losses in enumerate(zip(*curves.values(), strict=True)):
            writer.writerow([step, *(f"{loss:.12g}" for loss in losses)])


def plot(path: Path, curves: Curves) -> None:
    """All curves over one another, and under them how far each is from eager's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, 2, figsize=(12, 7), layout="constrained", sharex=True, squeeze=False
    )
    for (upper, lower), dtype in zip(axes.T, DTYPES, strict=True):
        mine = {name: losses for (of, name), losses in curves.items() if of == dtype}
        truth = mine[EAGER]
        for at, (name, losses) in enumerate(mine.items()):
            thick = 5.0 if name == EAGER else 1.0
            upper.plot(losses, linewidth=thick, alpha=0.35 if name == EAGER else 1.0, label=name)
            if name != EAGER:
                far = [abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True)]
                dashes = "--" if name == CONTROL else "-"
                lower.plot(far, dashes, linewidth=1, color=f"C{at}")
        upper.set_title(f"{dtype}: loss")
        upper.legend(fontsize=7)
        lower.set_yscale("log")
        lower.set_ylabel("relative distance from eager")
        lower.set_xlabel("step")
        lower.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
