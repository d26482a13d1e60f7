"""Thirty-one public multimodal architectures, trained for a step and compared with eager.

    python -m benchmarks.architectures [--names llava,whisper] [--ranks 2,4] [--double] [--gloo]
                                       [--schedules nested/1f1b,stage/1f1b] [--csv FILE]

Tiny random models of transformers and diffusers (`benchmarks/zoo`), whose microbatches differ in
the number and the sizes of images; `benchmarks/training.py` says what is compared and how. Each
model runs in a process of its own, so that a crash is one row. Prints a table as markdown; exit
code 1 when a loss is further from eager's than 1e-6 or a gradient than 1e-5 (1e-9 in float64).
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.training import Run, Setting, Trained, said, train
from benchmarks.zoo import ALL

LOSS_BAR = 1e-6
GRADIENT_BAR = {"float32": 1e-5, "float64": 1e-9}
GLOO = Setting("nested/1f1b", 2, "gloo")
OVER_GLOO = (  # one of each kind
    "llava",
    "gemma3",
    "idefics3",
    "mllama",
    "blip2",
    "qwen2_5_vl",
    "qwen3_vl",
    "whisper",
    "llm_sd3",
    "llm_pixart",
)
HEAD = (
    "model | regions | rung, graphs | stages, seam values | nodes | capture, compile | loss | "
    "gradient | float32's own | microbatches | not as drawn, or refused"
)


def main() -> int:
    """The command line."""
    given = arguments()
    if given.one:
        torch.set_num_threads(1)
        print(json.dumps(asdict(_here(given))))
        return 0
    found = []
    print(f"| {HEAD} |\n|{'---|' * (HEAD.count('|') + 1)}", flush=True)
    for name in given.names.split(",") if given.names else ALL:
        found.append(_alone(name, given))
        print(row(found[-1]), flush=True)
    wrong = list(bars(found))
    print("\n".join(["", *wrong, summary(found)]))
    if given.csv:
        _write(Path(given.csv), found)
    return int(bool(wrong))


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", help="of architectures; default: all")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--schedules", default="nested/1f1b,stage/1f1b")
    parser.add_argument("--double", action="store_const", const="float64", dest="dtype")
    parser.add_argument("--gloo", action="store_true", help="ten of them over gloo as well")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a model")
    parser.add_argument("--csv", metavar="FILE", help="a line for each step")
    parser.add_argument("--one", metavar="NAME", help="this one, here, as JSON")
    parser.set_defaults(dtype="float32")
    return parser.parse_args()


def settings(given: argparse.Namespace, name: str) -> list[Setting]:
    """The steps to run of an architecture."""
    ranks = map(int, given.ranks.split(","))
    made = [Setting(s, r) for r, s in product(ranks, given.schedules.split(","))]
    over_gloo = given.gloo and (given.names or name in OVER_GLOO)
    return [*made, GLOO] if over_gloo else made


def _here(given: argparse.Namespace) -> Trained:
    """What this process found of one architecture."""
    try:
        return train(given.one, ALL[given.one], given.dtype, settings(given, given.one))
    except Exception as error:  # eager itself: a capture has left something behind in the model
        return Trained(given.one, given.dtype, runs=[Run("eager", error=said(error))])


def _alone(name: str, given: argparse.Namespace) -> Trained:
    """What another process found; a process that ends without saying anything is a crash."""
    command = [sys.executable, "-m", "benchmarks.architectures", "--one", name]
    command += ["--ranks", given.ranks, "--schedules", given.schedules]
    command += ["--double"] * (given.dtype == "float64") + ["--gloo"] * given.gloo
    command += ["--names", given.names] if given.names else []
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=given.limit)
    except subprocess.TimeoutExpired:
        why = f"crash: not done after {given.limit:g} s"
    else:
        lines = ended.stdout.splitlines()
        if ended.returncode == 0 and lines:
            found = json.loads(lines[-1])
            return Trained(**{**found, "runs": [Run(**run) for run in found["runs"]]})
        last = (ended.stderr.splitlines() or [""])[-1]
        why = f"crash: exit code {ended.returncode}: {last}"
    return Trained(name, given.dtype, runs=[Run("-", error=why)])


def row(found: Trained) -> str:
    """A line of the table."""
    done = [run for run in found.runs if not run.error]
    sizes = dict.fromkeys(f"{run.stages}, {run.values}" for run in done)
    loss, gradient = _worst(done)
    cells = [
        found.name,
        " ".join(found.regions),
        _rung(found) if found.nodes else "",
        "; ".join(sizes),
        str(found.nodes or ""),
        f"{found.capture:.1f}, {found.compile:.1f} s" if found.nodes else "",
        f"{loss:.0e}" if done else "",
        f"{gradient:.0e}" if done else "",
        f"{found.rounding:.0e}" if done else "",
        ("equal" if found.equal else "differ") if done else "",
        "; ".join(_remarks(found)),
    ]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _rung(found: Trained) -> str:
    """1: a graph for all values; 2: graphs for the values of some inputs."""
    rung = f"2 ({', '.join(found.concrete)})" if found.concrete else "1"
    return f"{rung}, {found.captures}"


def _worst(runs: Sequence[Run]) -> tuple[float, float]:
    return max((r.loss for r in runs), default=0.0), max((r.gradient for r in runs), default=0.0)


def _remarks(found: Trained) -> Iterator[str]:
    yield from found.apart
    if found.equal:
        yield f"differing microbatches: {_short(found.equal)}"
    reasons: dict[str, list[str]] = {}
    for run in found.runs:
        if run.error:
            reasons.setdefault(_short(run.error), []).append(run.setting)
    yield from (f"{', '.join(where)}: {why}" for why, where in reasons.items())


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:157]}..."


def bars(found: Sequence[Trained]) -> Iterator[str]:
    """What is further from eager than it may be, or did not run."""
    for one in found:
        for run in one.runs:
            if run.error:
                yield f"{one.name}: {run.setting}: {run.error}"
            elif run.loss > LOSS_BAR or not run.gradient <= GRADIENT_BAR[one.dtype]:
                far = f"loss {run.loss:.1e}, gradient {run.gradient:.1e} of {run.worst}"
                yield f"{one.name}: {run.setting}: {far}"
        if one.equal:
            yield f"{one.name}: differing microbatches: {one.equal}"


def summary(found: Sequence[Trained]) -> str:
    """How many there are, and how many are right."""
    right = sum(not any(bars([one])) for one in found)
    drawn = sum(not one.apart and bool(one.regions) for one in found)
    return f"{right} of {len(found)} as eager, {drawn} with the regions as drawn"


def _write(path: Path, found: Sequence[Trained]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "dtype", "nodes", *(f.name for f in fields(Run))])
        for one in found:
            for run in one.runs:
                writer.writerow([one.name, one.dtype, one.nodes, *asdict(run).values()])


if __name__ == "__main__":
    sys.exit(main())
