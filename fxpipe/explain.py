"""Why every module and loose node is where it is, as text."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx

from fxpipe.cut import Cut
from fxpipe.dataflow import path
from fxpipe.lower import Lowered
from fxpipe.variants import LIMIT, Variants

_LOOSE = "loose node "


def explain(variants: Variants) -> str:
    """One line per module: region, stage, rank and reason; then what crosses, and the variants."""
    cut, every = variants.union.cut, list(variants.all.values())
    shown: set[object] = set()
    modules = [line for lowered in every for line in _modules(lowered, cut, shown)]
    lines = [*modules, "", *map(str, cut.seams), *_shared(cut), *_held(variants.first)]
    if len(every) > 1 or variants.dropped:
        lines += ["", *_variants(variants, every)]
    return "\n".join(lines)


def _variants(variants: Variants, every: Sequence[Lowered]) -> Iterator[str]:
    """Which paths microbatches have taken, and the stages of each."""
    dropped = f"; {variants.dropped} more were let go" * bool(variants.dropped)
    yield (
        f"{len(every)} variants, one for each path that microbatches have taken and each size that "
        f"the model's code unrolls over; at most {LIMIT} are kept{dropped}"
    )
    for lowered in every:
        yield f"  {lowered.captured}; stages {', '.join(lowered.stages)}"


def _held(lowered: Lowered) -> Iterator[str]:
    """Which values one variant holds for, and which lines of code read them."""
    captured = lowered.captured
    if captured.values:
        names, lines = ", ".join(captured.values), ", ".join(dict.fromkeys(captured.reads))
        yield f"a graph for the values of {names} that it was traced with: read at {lines}"


def _modules(lowered: Lowered, cut: Cut, shown: set[object]) -> Iterator[str]:
    """Nodes in order, those of one module with the same fate in one line; without what a variant
    before has shown."""
    staging, why = lowered.staging.of, lowered.regions.why
    rows = Counter(
        (_label(node), staging[node], why.get(node, "reads a later block"))
        for node in lowered.captured.graph.graph.nodes
        if node in staging
    )
    loose = bool(shown)  # what no module made has another name in each variant
    new = {
        row: count
        for row, count in rows.items()
        if row[:2] not in shown and not (loose and row[0].startswith(_LOOSE))
    }
    shown.update(row[:2] for row in rows)
    for (label, stages, reason), count in new.items():
        where = ", ".join(f"{stage} {_home(cut, stage)}" for stage in stages)
        yield f"{label} ({count} node{'s' * (count > 1)}): {where}: {reason}"


def _label(node: fx.Node) -> str:
    return path(node) or f"{_LOOSE}{node.name}"


def _home(cut: Cut, stage: str) -> str:
    rank = cut.stage[stage].rank
    return "on the owner of each microbatch" if rank is None else f"on rank {rank}"


def _shared(cut: Cut) -> Iterator[str]:
    for group in cut.shared:
        yield f"parameters shared by {', '.join(group)}: gradients are summed over their ranks"
