"""Large tables and deep models: seconds, memory, and how both grow.

    taskset -c 0 python -m benchmarks.scale [--only tables,models] [--json FILE] [--plot FILE.png]
    python -m benchmarks.scale --quick              # small sizes, the exponents alone

Tables: nested/1f1b with an encoder and a generator; derive, passes (with every rule after each),
simulate, and emit of the longest row, for 64 ranks and 512 microbatches and for fewer. Models: a
causal language model on the meta device, 30B parameters in 100 layers: `fxpipe.compile` for 8 ranks
beside `torch.distributed.pipelining.pipeline` split at the same 8 places, which differentiates
nothing yet, and a LLaVA of the same depth. CPU seconds, each in a process of its own; an exponent
is the slope in logarithms. Exit code 1 when the largest table takes over 10 s or 2 GiB (without
emit), or an exponent is over its bar.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks import plots
from fxpipe import passes
from fxpipe.cut import Role
from fxpipe.forecast import Ask, sketched
from fxpipe.schedule import derive
from fxpipe.simulate import simulate
from fxpipe.sketch import Sketch

SECONDS, MIB = 10.0, 2048.0  # of the largest table, to derive, verify and simulate
EXPONENT, QUICK = 1.2, 1.3
RANKS, MICROBATCHES = (8, 16, 32, 64), (64, 128, 256, 512)
SMALL = (8, 16, 32), (64, 128, 256)
LAYERS, FEW = (25, 50, 100), (8, 16)
WAYS = ("fxpipe", "torch", "fxpipe, LLaVA")

LEVELS = ("derive", "verify", "simulate", "emit", "seconds")

Row = dict[str, Any]


def main() -> int:
    """The command line."""
    given = arguments()
    if given.one:
        print(json.dumps(one(*given.one.split(":"))))
        return 0
    rows: list[Row] = []
    missed: list[str] = []
    for part in given.only.split(","):
        found, late = (tables if part == "tables" else models)(given.quick)
        rows, missed = rows + found, missed + late
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))
    if given.plot:
        plot(given.plot, rows)
    print(f"missed: {'; '.join(missed)}" if missed else "every bar is reached")
    return int(bool(missed))


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="tables,models", help="one of the two")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png", help="needs matplotlib")
    parser.add_argument("--one", metavar="WHAT:SIZE", help=argparse.SUPPRESS)
    return parser.parse_args()


def tables(quick: bool) -> tuple[list[Row], list[str]]:
    """Rows of all tables, and the bars that they miss."""
    ranks, counts = SMALL if quick else (RANKS, MICROBATCHES)
    sizes = [(p, counts[-1]) for p in ranks[:-1]] + [(ranks[-1], m) for m in counts]
    rows = []
    for p, m in sizes:
        rows.append(apart("table", f"{p}x{m}"))
        print(_table_text(rows[-1]), flush=True)
    longer = [row for row in rows if row["ranks"] == ranks[-1]]
    wider = [row for row in rows if row["microbatches"] == counts[-1]]
    missed = []
    for name, mine in (("microbatches", longer), ("ranks", wider)):
        slopes = {level: growth(mine, name, level) for level in LEVELS}
        print(
            "  ".join([f"{name}:", *(f"{level} ^{slope:.2f}" for level, slope in slopes.items())])
        )
        if slopes["seconds"] > _bar(quick):
            missed.append(f"tables over {name}")
    largest = rows[-1]
    if not quick and (largest["seconds"] > SECONDS or largest["MiB"] > MIB):
        missed.append(f"{largest['seconds']:.1f} s and {largest['MiB']} MiB of the largest table")
    return rows, missed


def models(quick: bool) -> tuple[list[Row], list[str]]:
    """Rows of all models, and the bars that they miss."""
    rows, missed = [], []
    for way in WAYS:
        if quick and "LLaVA" in way:
            continue
        mine = []
        for layers in FEW if quick else LAYERS:
            mine.append(apart(way, f"{layers}"))
            print(_model_text(mine[-1]), flush=True)
        rows += mine
        if any("error" in row for row in mine):
            continue
        slope = growth(mine, "layers")
        print(f"{' ' * 12} seconds grow as layers^{slope:.2f}")
        if way != "torch" and slope > _bar(quick):
            missed.append(f"{way} over layers")
    return rows, missed


def _bar(quick: bool) -> float:
    return QUICK if quick else EXPONENT


def apart(what: str, size: str) -> Row:
    """The row of one size, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--one", f"{what}:{size}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} of {size}: {done.stderr.strip().splitlines()[-1]}")
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def one(what: str, size: str) -> Row:
    """What `apart` runs."""
    if what == "table":
        ranks, microbatches = map(int, size.split("x"))
        return table(ranks, microbatches)
    from benchmarks import scale_models  # with torch and transformers

    return scale_models.measure(what, int(size))


def table(ranks: int, microbatches: int) -> Row:
    """Seconds of each level of one table, and the process's peak before emit, without torch."""
    regions = (
        Sketch("vision", Role.ENCODER, 1.0, (2.0,)),
        Sketch("llm", Role.BACKBONE, 1.0, (1.0, 1.0)),
        Sketch("image", Role.GENERATOR, 1.0, (2.0,)),
    )
    cut = sketched(Ask(regions, ranks, microbatches, "nested/1f1b"))
    derived, ordered = timed(lambda: derive(cut, microbatches, "nested/1f1b"))
    passed, whole = timed(lambda: passes.run(ordered))
    simulated, timeline = timed(lambda: simulate(whole))
    ops = microbatches * sum(len(stage.kinds) for stage in cut.stages)
    ran = sum(span.op.mb is not None for span in timeline.compute)
    if len(ordered.place) != ops or ran != ops:
        raise RuntimeError(f"{ran} of {ops} ops were simulated")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "ops": ops,
        "all ops": sum(map(len, whole.rows)),
        "derive": derived,
        "verify": passed,
        "simulate": simulated,
        "seconds": derived + passed + simulated,
        "MiB": peak,
        "emit": emitted(whole),
    }


def emitted(whole: Any) -> float:
    """Seconds to emit the program of the rank with the longest row, which has all its calls."""
    from fxpipe.costs import Costs
    from fxpipe.emulation import Emulation
    from fxpipe.program import emit

    rank = max(range(len(whole.rows)), key=lambda at: len(whole.rows[at]))
    seconds, program = timed(lambda: emit(whole, rank, (), {}, engine=Emulation(Costs({}))))
    calls = [node for node in program.module.graph.nodes if node.op == "call_module"]
    computed = sum(1 for op in whole.rows[rank] if not op.way)
    if len(calls) < computed:
        raise RuntimeError(f"{len(calls)} calls for {computed} ops of rank {rank}")
    return seconds


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a call, and what it returns."""
    start = process_time()
    result = function()
    return process_time() - start, result


def growth(rows: Sequence[Row], over: str, level: str = "seconds") -> float:
    """The slope of the logarithm of a level's seconds over that of a size: 1 is linear."""
    x = [math.log(row[over]) for row in rows]
    y = [math.log(row[level]) for row in rows]
    middle = sum(x) / len(x), sum(y) / len(y)
    pairs = zip(x, y, strict=True)
    cross = sum((a - middle[0]) * (b - middle[1]) for a, b in pairs)
    return cross / sum((a - middle[0]) ** 2 for a in x)


def plot(path: str, rows: Sequence[Row]) -> None:
    """Seconds over the ops of a table, and over the layers of a model."""
    tables = sorted((row for row in rows if "ops" in row), key=lambda row: row["ops"])
    models: dict[str, list[plots.Point]] = {}
    for row in rows:
        if "layers" in row and "seconds" in row:
            models.setdefault(row["way"], []).append((row["layers"], row["seconds"]))
    panels = []
    if tables:
        levels = {level: [(row["ops"], row[level]) for row in tables] for level in LEVELS}
        levels["together, without emit"] = levels.pop("seconds")
        panels.append(plots.Lines("tables: CPU seconds", "ops", levels, logs=True))
    if models:
        panels.append(plots.Lines("models: CPU seconds", "layers", models, logs=True))
    plots.lines(path, panels)


def _table_text(row: Row) -> str:
    return (
        f"{row['ranks']:3d} x {row['microbatches']:4d}: {row['ops']:7d} ops, "
        f"{row['all ops']:7d} with transfers; derive {row['derive']:.2f}, "
        f"passes and rules {row['verify']:.2f}, simulate {row['simulate']:.2f}, "
        f"together {row['seconds']:.2f} s, {row['MiB']} MiB; emit of a rank {row['emit']:.2f} s"
    )


def _model_text(row: Row) -> str:
    start = f"{row['way']}, {row['layers']} layers, {row['parameters'] / 1e9:.1f}B parameters"
    if "error" in row:
        return f"{start}: {row['error']}"
    return f"{start}: {row['seconds']:.1f} s, {row['MiB']} MiB, {row['stages']} stages"


if __name__ == "__main__":
    sys.exit(main())
