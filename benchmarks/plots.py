"""The plots that several benchmarks draw alike; they need matplotlib.

bars(path, panels)     one panel beside the other, each with a horizontal bar for every runner
lines(path, panels)    one panel beside the other, each with a line for every runner
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True)
class Bars:
    """rows: label -> the lengths of what a bar is made of, one colour each; parts: their names,
    where there are several; mark: the value of a line across all bars, and what it is."""

    title: str
    rows: Mapping[str, Sequence[float]]
    parts: Sequence[str] = ()
    mark: tuple[float, str] | None = None


@dataclass(frozen=True)
class Lines:
    """lines: label -> points; logs: whether both axes are logarithmic."""

    title: str
    across: str
    lines: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    logs: bool = False


def bars(path: str | Path, panels: Sequence[Bars]) -> None:
    """Draw panels of bars; labels that begin with fxpipe, or with a star, stand out."""
    most = max(len(panel.rows) for panel in panels)
    with _Figure(path, len(panels), (6.0, 1.2 + 0.3 * most)) as axes:
        for axis, panel in zip(axes, panels, strict=True):
            _stack(axis, panel)
            if panel.mark:
                axis.axvline(panel.mark[0], color="C3", linestyle="--", label=panel.mark[1])
            axis.set_title(panel.title, fontsize=10)
            if panel.parts or panel.mark:
                axis.legend(fontsize=7)


def _stack(axis: Any, panel: Bars) -> None:
    names = list(panel.rows)[::-1]  # the first on top
    starts = [0.0] * len(names)
    for at in range(max(len(parts) for parts in panel.rows.values())):
        lengths = [panel.rows[name][at] for name in names]
        ours = ["C0" if name.startswith(("fxpipe", "*")) else "C7" for name in names]
        look: dict[str, Any] = {"label": panel.parts[at]} if panel.parts else {"color": ours}
        axis.barh(range(len(names)), lengths, left=starts, **look)
        starts = [a + b for a, b in zip(starts, lengths, strict=True)]
    axis.set_yticks(range(len(names)), names, fontsize=8)
    for height, end in enumerate(starts):
        axis.text(end, height, f" {end:.3g}", va="center", fontsize=7)
    axis.margins(x=0.12)


def lines(path: str | Path, panels: Sequence[Lines]) -> None:
    """Draw panels of lines."""
    with _Figure(path, len(panels), (5.0, 4.0)) as axes:
        for axis, panel in zip(axes, panels, strict=True):
            for label, points in panel.lines.items():
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
            if panel.logs:
                axis.set_xscale("log", base=2)
                axis.set_yscale("log", base=2)
            axis.set_title(panel.title, fontsize=10)
            axis.set_xlabel(panel.across)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)


class _Figure:
    """Axes side by side; the figure is written when the block is through."""

    def __init__(self, path: str | Path, count: int, size: tuple[float, float]) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        self._path, self._pyplot = path, pyplot
        self._figure, axes = pyplot.subplots(
            1, count, figsize=(size[0] * count, size[1]), layout="constrained", squeeze=False
        )
        self._axes = list(axes[0])

    def __enter__(self) -> list[Any]:
        return self._axes

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._figure.savefig(self._path, dpi=100)
        self._pyplot.close(self._figure)
