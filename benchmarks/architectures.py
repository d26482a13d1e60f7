"""Thirty-one public multimodal architectures, trained for a step and compared with eager.

    python -m benchmarks.architectures [--names llava,whisper] [--double] [--csv FILE [--table]]
                                       [--steps "nested/1f1b on 2; nested/1f1b on 2 over gloo"]

Tiny random models of transformers and diffusers (`benchmarks/zoo`), whose microbatches differ in
the number and the sizes of images; `benchmarks/training.py` says what is compared and how. Each
model runs in a process of its own, so that a crash is one row. Steps that FILE holds already, and
that were right, are not run again, so that all can be run in parts. Prints a table as markdown;
exit code 1 when a loss is further from eager's than 1e-6 or a gradient than 1e-5 (1e-9 in float64).
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.architecture_rows import (
    Row,
    line,
    markdown,
    merged,
    read,
    rows_of,
    summary,
    write,
    wrong,
)
from benchmarks.training import Run, Setting, Trained, said, train
from benchmarks.zoo import ALL

STEPS = "nested/1f1b on 2; stage/1f1b on 4; nested/1f1b on 4; stage/1f1b on 2"
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


def main() -> int:
    """The command line."""
    given = arguments()
    if given.one:
        torch.set_num_threads(1)
        print(json.dumps(asdict(_here(given))))
        return 0
    path = Path(given.csv) if given.csv else None
    known = read(path) if path else []
    rows: list[Row] = []
    names = [] if given.table else given.names.split(",") if given.names else list(ALL)
    for name in names:
        done = {
            row.setting for row in known if row.key[:2] == (name, given.dtype) and not row.wrong
        }
        left = [setting for setting in settings(given, name) if str(setting) not in done]
        if left:
            rows += rows_of(_alone(name, given, left))
            print(line([row for row in rows if row.model == name]), flush=True)
        if left and path:
            write(path, merged(read(path), rows, list(ALL)))
    rows = merged(known, rows, list(ALL))
    bad = [f"{row.model} ({row.dtype}): {row.setting}: {row.wrong}" for row in wrong(rows)]
    print("\n".join(["", *markdown(rows), "", *bad, summary(rows)]))
    return int(bool(bad))


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", help="of architectures; default: all")
    parser.add_argument("--steps", help=f"default: {STEPS}; and over gloo for ten of them")
    parser.add_argument("--double", action="store_const", const="float64", dest="dtype")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for a model")
    parser.add_argument("--csv", metavar="FILE", help="a line for each step; what it has is kept")
    parser.add_argument("--table", action="store_true", help="run nothing, show what FILE holds")
    parser.add_argument("--one", metavar="NAME", help="this one, here, as JSON")
    parser.set_defaults(dtype="float32")
    return parser.parse_args()


def settings(given: argparse.Namespace, name: str) -> list[Setting]:
    """The steps to run of an architecture."""
    made = [_setting(text) for text in (given.steps or STEPS).split(";")]
    return made if given.steps or name not in OVER_GLOO else [*made, GLOO]


def _setting(text: str) -> Setting:
    """What `nested/1f1b on 2 over gloo` says."""
    schedule, _, ranks, *backend = text.split()
    return Setting(schedule, int(ranks), backend[-1] if backend else "local")


def _here(given: argparse.Namespace) -> Trained:
    """What this process found of one architecture."""
    steps = settings(given, given.one)
    try:
        return train(given.one, ALL[given.one], given.dtype, steps)
    except Exception as error:  # eager itself: a capture has left something behind in the model
        return _failed(given.one, given, steps, f"eager: {said(error)}")


def _failed(name: str, given: argparse.Namespace, steps: Sequence[Setting], why: str) -> Trained:
    return Trained(name, given.dtype, runs=[Run(str(step), error=why) for step in steps])


def _alone(name: str, given: argparse.Namespace, steps: Sequence[Setting]) -> Trained:
    """What another process found; a process that ends without saying anything is a crash."""
    command = [sys.executable, "-m", "benchmarks.architectures", "--one", name]
    command += ["--double"] * (given.dtype == "float64") + ["--steps", "; ".join(map(str, steps))]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=given.limit)
    except subprocess.TimeoutExpired:
        return _failed(name, given, steps, f"crash: not done after {given.limit:g} s")
    lines = ended.stdout.splitlines()
    if ended.returncode == 0 and lines:
        found = json.loads(lines[-1])
        return Trained(**{**found, "runs": [Run(**run) for run in found["runs"]]})
    last = (ended.stderr.splitlines() or [""])[-1]
    return _failed(name, given, steps, f"crash: exit code {ended.returncode}: {last}")


if __name__ == "__main__":
    sys.exit(main())
