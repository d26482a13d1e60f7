"""Why every module and loose node is where it is, as text."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx

from fxpipe.dataflow import path
from fxpipe.lower import Lowered


def explain(variants: Sequence[Lowered]) -> str:
    """One line per module: region, stage, rank and reason; then what crosses, and the variants."""
    lowered = variants[0]
    lines = [*_modules(lowered), "", *map(str, lowered.cut.seams), *_shared(lowered)]
    lines += [line for variant in variants[:1] for line in _held(variant)]
    if len(variants) > 1:
        lines += ["", f"{len(variants)} variants: the model's code unrolls over these sizes"]
        lines += [f"  {variant.captured}" for variant in variants]
    return "\n".join(lines)


def _held(lowered: Lowered) -> Iterator[str]:
    """Which values one variant holds for, and which lines of code read them."""
    captured = lowered.captured
    if captured.values:
        names, lines = ", ".join(captured.values), ", ".join(dict.fromkeys(captured.reads))
        yield f"a graph for the values of {names} that it was traced with: read at {lines}"


def _modules(lowered: Lowered) -> Iterator[str]:
    """Nodes in order, those of one module with the same fate in one line."""
    staging, why = lowered.staging.of, lowered.regions.why
    rows = Counter(
        (_label(node), staging[node], why.get(node, "reads a later block"))
        for node in lowered.captured.graph.graph.nodes
        if node in staging
    )
    for (label, stages, reason), count in rows.items():
        where = ", ".join(f"{stage} {_home(lowered, stage)}" for stage in stages)
        yield f"{label} ({count} node{'s' * (count > 1)}): {where}: {reason}"


def _label(node: fx.Node) -> str:
    return path(node) or f"loose node {node.name}"


def _home(lowered: Lowered, stage: str) -> str:
    rank = lowered.cut.stage[stage].rank
    return "on the owner of each microbatch" if rank is None else f"on rank {rank}"


def _shared(lowered: Lowered) -> Iterator[str]:
    for group in lowered.cut.shared:
        yield f"parameters shared by {', '.join(group)}: gradients are summed over their ranks"
