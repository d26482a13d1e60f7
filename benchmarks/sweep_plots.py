"""Plots of the sweep: one panel for each number of ranks, over the encoder's share of the work.

plot(groups, folder)    writes sweep_gain.png and sweep_bound.png
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks.sweep_bars import Groups, gain
from benchmarks.sweeping import Case, Measured

_LINES = {2: ":", 4: "--", 8: "-"}  # of each M / P


def plot(groups: Groups, folder: Path) -> None:
    """Write both plots."""
    _panels(
        groups,
        lambda ones: gain(ones, "upfront", "1f1b"),
        "upfront/1f1b ÷ nested/1f1b",
        folder / "sweep_gain.png",
    )
    capped = {case: ones for case, ones in groups.items() if case.times >= 4}
    _panels(
        capped,
        lambda ones: 100 * median(one.distance(one.at_caps) for one in ones),
        "fastest at the base's caps: % over the bound",
        folder / "sweep_bound.png",
    )


def _panels(
    groups: Groups, height: Callable[[Sequence[Measured]], float], label: str, path: Path
) -> None:
    """One panel for each P; a colour for each generator, a kind of line for each M."""
    ranks = sorted({case.ranks for case in groups})
    figure, axes = pyplot.subplots(
        1, len(ranks), figsize=(4 * len(ranks), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for P, panel in zip(ranks, axes[0], strict=True):
        of_rank = {case: height(ones) for case, ones in groups.items() if case.ranks == P}
        _lines(panel, of_rank)
        panel.set_title(f"P = {P}")
        panel.set_xlabel("encoder's share of all work, %")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel(label)
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lines(panel: Any, heights: dict[Case, float]) -> None:
    generators = sorted({case.generator for case in heights})
    for generator, times in sorted({(case.generator, case.times) for case in heights}):
        found = sorted(
            (100 * case.encoder / (case.encoder + case.ranks + case.generator), height)
            for case, height in heights.items()
            if (case.generator, case.times) == (generator, times)
        )
        panel.plot(
            [x for x, _ in found],
            [y for _, y in found],
            _LINES.get(times, "-."),
            color=f"C{generators.index(generator)}",
            marker=".",
            linewidth=1,
            label=f"g = {generator:g}, M = {times} P",
        )
