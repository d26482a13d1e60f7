"""What a step costs over the ideal: a bare hand-written loop, fxpipe, torch.distributed.pipelining.

    python -m benchmarks.overhead [--ranks 4] [--microbatches 8] [--schedule 1f1b] [--json FILE]
    python -m benchmarks.overhead --schedule interleaved [--plot FILE.png]        # or zb-v, gpipe

Processes over gloo on one machine, ops that sleep; the runners take turns in one run. The excess
is the median step minus the ideal of the runner's own order of ops (but in zb-v, torch's backward
is one op, whose gradient leaves at its end; the others send it before the weight gradient).
Exit code 1 when fxpipe's excess is more than 1.25 x the bare loop's or 0.75 x torch's.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.multiprocessing as mp

from benchmarks import plots
from benchmarks.measure import worker
from benchmarks.runners import RUNNERS, TORCH, Setting

BARS = {"bare": 1.25, "torch": 0.75}
_SECONDS = 25.0  # of steps per runner and length of op, unless --rounds says otherwise


def main() -> int:
    """The command line."""
    given = arguments()
    count = given.microbatches or 2 * given.ranks
    setting = Setting(given.schedule, given.ranks, count, given.rows, given.width)
    units = {
        ms / 1e3: (given.rounds or _rounds(setting, ms / 1e3, given.steps), given.steps)
        for ms in given.ms
    }
    samples = measure(setting, tuple(given.runners), units)
    report = [summary(sample) for sample in samples]
    verdicts = verdict(samples, given.steps)
    print(text(setting, report, verdicts))
    if given.plot:
        plot(given.plot, setting, report)
    if given.json:
        record = {
            "setting": vars(given),
            "samples": samples,
            "report": report,
            "verdicts": verdicts,
        }
        Path(given.json).write_text(json.dumps(record, indent=1))
    return int(not all(found["reached"] for found in verdicts))


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=tuple(TORCH), default="1f1b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, help="default: 2 per rank")
    parser.add_argument("--ms", type=float, nargs="+", default=[10.0, 50.0], help="per op")
    parser.add_argument("--rows", type=int, default=4, help="rows of a microbatch")
    parser.add_argument("--width", type=int, default=256, help="floats per row")
    parser.add_argument("--rounds", type=int, help="default: about 25 s of each runner")
    parser.add_argument("--steps", type=int, default=3, help="of one runner at a stretch")
    parser.add_argument("--runners", nargs="+", choices=tuple(RUNNERS), default=list(RUNNERS))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png", help="where the excess lies")
    return parser.parse_args()


def _rounds(setting: Setting, unit: float, steps: int) -> int:
    step = 3 * setting.chunks * (setting.microbatches + setting.ranks - 1) * unit
    return 6 * max(1, round(_SECONDS / (steps * step) / 6))  # every order equally often


def measure(
    setting: Setting, names: tuple[str, ...], units: dict[float, tuple[int, int]]
) -> list[dict[str, Any]]:
    """The samples of one run on `setting.ranks` fresh processes."""
    answer = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        spawn: Any = vars(mp)["spawn"]  # untyped
        spawn(worker, (setting, names, units, store, answer), nprocs=setting.ranks)
        samples: list[dict[str, Any]] = answer.get()
        return samples


def summary(sample: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a runner's step, its excess over the ideal, CPU microseconds per op."""
    steps = sorted(1e3 * s for s in sample["seconds"])
    quartiles = statistics.quantiles(steps, n=4)
    ideal, ops = 1e3 * sample["ideal"], sample["ops"]
    return {
        "runner": sample["runner"],
        "unit": 1e3 * sample["unit"],
        "steps": len(steps),
        "ideal": ideal,
        "min": steps[0],
        "median": quartiles[1],
        "quartiles": (quartiles[0], quartiles[2]),
        "mean": statistics.fmean(steps),
        "deviation": statistics.stdev(steps),
        "excess": quartiles[1] - ideal,
        "parts": {kind: 1e3 * statistics.median(p) for kind, p in sample["parts"].items()},
        "main_us": 1e6 * statistics.median(sample["main"]) / ops,
        "process_us": 1e6 * statistics.median(sample["process"]) / ops,
    }


def verdict(samples: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """fxpipe's excess against each bar, for each length of op; the spread is over the rounds."""
    by_name = {(sample["runner"], sample["unit"]): sample for sample in samples}
    pairs = [
        (by_name["fxpipe", unit], by_name[peer, unit], bar)
        for unit in sorted({sample["unit"] for sample in samples})
        for peer, bar in BARS.items()
        if ("fxpipe", unit) in by_name and (peer, unit) in by_name
    ]
    return [_compare(ours, theirs, bar, steps) for ours, theirs, bar in pairs]


def _compare(
    ours: dict[str, Any], theirs: dict[str, Any], bar: float, steps: int
) -> dict[str, Any]:
    ratio = _excess(ours) / _excess(theirs)
    rounds = [
        _excess(ours, slice(at, at + steps)) / _excess(theirs, slice(at, at + steps))
        for at in range(0, len(ours["seconds"]), steps)
    ]
    return {
        "unit": 1e3 * ours["unit"],
        "against": theirs["runner"],
        "ratio": ratio,
        "quartiles": statistics.quantiles(rounds * (1 + (len(rounds) == 1)), n=4)[::2],
        "bar": bar,
        "reached": ratio <= bar,
    }


def _excess(sample: dict[str, Any], steps: slice = slice(None)) -> float:
    """Seconds of the median step over the ideal."""
    excess: float = statistics.median(sample["seconds"][steps]) - sample["ideal"]
    return excess


def plot(path: str, setting: Setting, report: list[dict[str, Any]]) -> None:
    """What lies on the critical path beside the ops, by runner, for each length of op."""
    panels = []
    for unit in dict.fromkeys(row["unit"] for row in report):
        found = {row["runner"]: row["parts"] for row in report if row["unit"] == unit}
        parts = list(next(iter(found.values())))
        rows = {name: [max(0.0, own[part]) for part in parts] for name, own in found.items()}
        title = f"{setting.schedule}, {setting.ranks} ranks, ops of {unit:g} ms: excess, ms"
        panels.append(plots.Bars(title, rows, parts))
    plots.bars(path, panels)


def text(setting: Setting, report: list[dict[str, Any]], verdicts: list[dict[str, Any]]) -> str:
    """What a person reads."""
    lines = [
        f"{setting.schedule}, {setting.ranks} ranks, {setting.microbatches} microbatches of "
        f"{4 * setting.rows * setting.width} bytes, gloo, {os.cpu_count()} cores",
        "runner   op ms  steps    ideal      min   median   (quartiles)         mean +- sd       "
        "excess          CPU us/op main, process",
    ]
    lines += [
        f"{r['runner']:8s} {r['unit']:5g} {r['steps']:6d} {r['ideal']:8.1f} {r['min']:8.1f} "
        f"{r['median']:8.1f}   ({r['quartiles'][0]:.1f}, {r['quartiles'][1]:.1f})"
        f" {r['mean']:10.1f} +- {r['deviation']:4.1f} {r['excess']:9.1f} ms "
        f"{100 * r['excess'] / r['ideal']:5.1f} % {r['main_us']:8.0f} {r['process_us']:8.0f}"
        for r in report
    ]
    lines += ["where the excess lies, median ms (see benchmarks/critical.py):"]
    lines += [
        f"{r['runner']:8s} {r['unit']:5g}  "
        + "  ".join(f"{kind} {part:.2f}" for kind, part in r["parts"].items())
        for r in report
    ]
    lines += [
        f"{v['unit']:g} ms ops: fxpipe's excess is {v['ratio']:.2f} x that of {v['against']} "
        f"(quartiles of rounds {v['quartiles'][0]:.2f}, {v['quartiles'][1]:.2f}), "
        f"bar {v['bar']:g}: {'PASS' if v['reached'] else 'FAIL'}"
        for v in verdicts
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
