"""Curves of `benchmarks.seeds`: ratios over a region's share of the work, with the papers' marks.

plot(folder, effort)    writes seeds_share.png
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks.systems import BY_NAME, PAPERS, Row, simulated
from benchmarks.workloads import BIGMAC_G, BIGMAC_U, MPIPE_A, MPIPE_B, Workload

_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6)
_NEEDED = ("stage", "inside", "upfront", *PAPERS, "auto")
_PANELS = (
    (MPIPE_B, "vision", PAPERS[:1]),
    (MPIPE_A, "vision", PAPERS[:1]),
    (BIGMAC_U, "vision", PAPERS[1:]),
    (BIGMAC_G, "image", PAPERS[1:]),
)


def plot(folder: Path, effort: float) -> None:
    """One panel for each workload: its papers' method against baselines, and auto against both."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 9), layout="constrained")
    for panel, (workload, region, methods) in zip(axes.flat, _PANELS, strict=True):
        curves: dict[str, list[float]] = {}
        for share in _SHARES:
            weighed = workload.weighed(share, region)
            rows = {n: simulated(weighed, BY_NAME[n], effort=effort) for n in _NEEDED}
            for label, ratio in _ratios(rows, methods).items():
                curves.setdefault(label, []).append(ratio)
        _panel(panel, workload, region, curves)
    figure.savefig(folder / "seeds_share.png", dpi=110)
    pyplot.close(figure)


def _ratios(rows: Mapping[str, Row], methods: tuple[str, ...]) -> dict[str, float]:
    seconds = {name: row.seconds for name, row in rows.items()}
    method = min(seconds[name] for name in methods)
    best = min(seconds[name] for name in PAPERS)
    bound, auto = rows["auto"].bound, seconds["auto"]
    return {
        "stage / the paper's method": seconds["stage"] / method,
        "inside / the paper's method": seconds["inside"] / method,
        "upfront / the paper's method": seconds["upfront"] / method,
        "better paper's method / auto": best / auto,
        "better paper's method / bound": best / bound,
    }


def _panel(panel: Any, workload: Workload, region: str, curves: Mapping[str, list[float]]) -> None:
    percent = [100 * share for share in _SHARES]
    for at, (label, ratios) in enumerate(curves.items()):
        style = "--" if label.endswith("bound") else "-"
        panel.plot(percent, ratios, style, marker=".", color=f"C{at}", label=label)
    for at, (base, (low, high)) in enumerate(workload.published.items()):
        colour = "C0" if base == "stage" else "C2"
        label = f"published over {base}" if base != "stage" else "published over an encoder stage"
        panel.axhspan(low - 0.005, high + 0.005, alpha=0.2, color=colour, label=label, zorder=at)
    panel.axvline(100 * workload.share[region], color="black", linewidth=1, linestyle=":")
    panel.set_yscale("log", base=2)
    panel.set_yticks(
        [1, 1.1, 1.25, 1.5, 2, 3, 4, 6], ["1", "1.1", "1.25", "1.5", "2", "3", "4", "6"]
    )
    panel.set_title(f"{workload.name}: P = {workload.ranks}, M = {workload.microbatches}")
    panel.set_xlabel(f"share of {region} in all work, % (dotted: the workload's)")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
