"""The sensitivity sweep of `benchmarks.predicted`: a step over the encoder's work.

plot(folder, given)    writes predicted_sweep.png, and prints the thresholds
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import sympy

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks.devices import effort
from benchmarks.seeds_emulated import in_turns, shortest
from benchmarks.systems import BY_NAME, simulated
from benchmarks.workloads import MPIPE_B, Workload
from fxpipe.emulation import stretched
from fxpipe.formulas import Head, threshold

_FACTORS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0)
_SIDES = (128, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
_DRAWN = ("upfront", "transpose, slack", "nested/zb-h1")
_MEASURED = 4  # every so many points
_PATCH = 16  # pixels


def plot(folder: Path, given: Namespace) -> None:
    """Steps over the share of images and over their resolution; dots are measured."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    shares = [_images(MPIPE_B, factor) for factor in _FACTORS]
    _lines(left, list(_FACTORS), shares, given)
    _mark(left, _threshold_of_images(MPIPE_B), "times as many images")
    sides = [_resolution(MPIPE_B, side) for side in _SIDES]
    _lines(right, list(_SIDES), sides, given)
    _mark(right, _threshold_of_sides(MPIPE_B), "pixels on a side of 8 images per microbatch")
    left.set_ylabel(f"step of {MPIPE_B.name}, seconds")
    figure.savefig(folder / "predicted_sweep.png", dpi=110)
    pyplot.close(figure)


def _images(workload: Workload, factor: float) -> Workload:
    return replace(workload, weight=max(factor, 1e-6))


def _resolution(workload: Workload, side: int) -> Workload:
    patches = (side / _PATCH) ** 2
    count = workload.encoder.tokens / workload.encoder.span
    seen = replace(workload.encoder, tokens=int(count * patches), span=patches)
    return replace(workload, encoder=seen)


def _lines(panel: Any, at: Sequence[float], cases: Sequence[Workload], given: Namespace) -> None:
    for number, name in enumerate(_DRAWN):
        rows = [simulated(case, BY_NAME[name], effort=given.effort) for case in cases]
        colour = f"C{number}"
        panel.plot(at, [row.seconds for row in rows], "-", color=colour, label=name)
        picked = range(1, len(cases), _MEASURED)
        factor = max(1.0, given.unit / 1e3 / min(shortest(rows[i]) for i in picked))
        jobs = [(rows[i].found.table, stretched(rows[i].found.costs, factor)) for i in picked]
        steps = in_turns(jobs, 1, given.fraction)
        seconds = [fmean(step.makespan for step in found) / factor for found in steps]
        panel.plot([at[i] for i in picked], seconds, "o", color=colour, fillstyle="none")
    panel.grid(alpha=0.3)


def _mark(panel: Any, found: float, what: str) -> None:
    print(f"the slack hides the whole encoder up to {found:.4g} {what} (predicted)")
    panel.axvline(found, color="black", linestyle=":", label=f"predicted threshold: {found:.3g}")
    panel.set_xlabel(what)
    panel.legend(fontsize=8)


def _head(workload: Workload, encoder: sympy.Expr) -> Head:
    stage = workload.efforts["llm"].forward / workload.ranks
    hop = workload.chip.latency + workload.backbone.sent / workload.chip.link
    return Head(encoder, stage, hop, workload.ranks, workload.microbatches, "slack")


def _threshold_of_images(workload: Workload) -> float:
    factor = sympy.Symbol("factor", positive=True)
    head = _head(workload, factor * workload.efforts["vision"].forward)
    return float(threshold(sympy.Le(head.pays, 0), factor))


def _threshold_of_sides(workload: Workload) -> float:
    """An encoder takes a * patches + b * patches^2 where its products are bound by flops."""
    patches = sympy.Symbol("patches", positive=True)
    one, two = (_resolution(workload, side).encoder for side in (512, 1024))
    times = [effort(model, workload.chip).forward for model in (one, two)]
    square = (times[1] / two.span - times[0] / one.span) / (two.span - one.span)
    linear = times[0] / one.span - square * one.span
    head = _head(workload, linear * patches + square * patches**2)
    return float(_PATCH * sympy.sqrt(threshold(sympy.Le(head.pays, 0), patches)))
