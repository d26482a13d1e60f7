"""Why every module and loose node is where it is, as text."""

from collections.abc import Iterator, Sequence

from torch import fx

from fxpipe.dataflow import path
from fxpipe.lower import Lowered


def explain(variants: Sequence[Lowered]) -> str:
    """One line per module: region, stage, rank and reason; then what crosses, and the variants."""
    lowered = variants[0]
    lines = [*_modules(lowered), "", *map(str, lowered.cut.seams), *_shared(lowered)]
    if len(variants) > 1:
        lines += ["", f"{len(variants)} variants: the model's code unrolls over these sizes"]
        lines += [f"  {variant.captured}" for variant in variants]
    return "\n".join(lines)


def _modules(lowered: Lowered) -> Iterator[str]:
    """Nodes in order, those of one module with the same fate in one line."""
    rows: dict[tuple[str, tuple[str, ...], str], int] = {}
    for node, stages in lowered.staging.of.items():
        key = (_label(node), stages, lowered.regions.why.get(node, "reads a later block"))
        rows[key] = rows.get(key, 0) + 1
    ordered = {node: index for index, node in enumerate(lowered.captured.graph.graph.nodes)}
    first: dict[tuple[str, tuple[str, ...], str], int] = {}
    for node, stages in lowered.staging.of.items():
        key = (_label(node), stages, lowered.regions.why.get(node, "reads a later block"))
        first[key] = min(first.get(key, ordered[node]), ordered[node])
    for key in sorted(rows, key=first.__getitem__):
        label, stages, why = key
        where = ", ".join(f"{stage} {_home(lowered, stage)}" for stage in stages)
        count = f"{rows[key]} node{'s' * (rows[key] > 1)}"
        yield f"{label} ({count}): {where}: {why}"


def _label(node: fx.Node) -> str:
    return path(node) or f"loose node {node.name}"


def _home(lowered: Lowered, stage: str) -> str:
    rank = lowered.cut.stage[stage].rank
    return "on the owner of each microbatch" if rank is None else f"on rank {rank}"


def _shared(lowered: Lowered) -> Iterator[str]:
    for group in lowered.cut.shared:
        yield f"parameters shared by {', '.join(group)}: gradients are summed over their ranks"
