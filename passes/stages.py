"""Regions are cut into stages: the backbone by its blocks, balanced by work; others stay whole.

Embedding, head and loss count as work of the first and the last stage. A value that is cheap to
derive from the inputs (masks, positions, rotary tables) is computed in every stage that uses it.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from fxpipe.capture import Captured
from fxpipe.cut import Role
from fxpipe.dataflow import ahead, calls, data_inputs, work
from fxpipe.errors import StageError
from fxpipe.passes.regions import Regions


@dataclass(frozen=True)
class Staging:
    """region: stage -> its region, in topological order; of: node -> the stages that compute it.

    spans: the blocks of each backbone stage, from and to
    """

    region: Mapping[str, str]
    of: Mapping[fx.Node, tuple[str, ...]]
    cost: Mapping[str, float]
    spans: Sequence[tuple[int, int]]


def assign_stages(
    captured: Captured,
    regions: Regions,
    symbols: Mapping[sympy.Symbol, sympy.Integer],
    count: int,
    spans: Sequence[tuple[int, int]] = (),
) -> Staging:
    """Cut the backbone into `count` stages, or at `spans` if it has as many blocks as they.

    Raises StageError if it has fewer blocks than stages.
    """
    nodes = calls(captured.graph.graph)
    effort = {node: work(node, symbols) for node in nodes}
    names = [f"{regions.backbone}{index}" for index in range(count)]
    region = {
        stage: name
        for name, role in regions.roles.items()
        for stage in (names if role is Role.BACKBONE else [name])
    }
    order = {stage: index for index, stage in enumerate(region)}
    if not spans or spans[-1][1] != len(regions.blocks):
        spans = _spans(regions, nodes, effort, names)
    of = _fixed(regions, nodes, names, spans)
    _settle_late(regions, nodes, of, order)
    _settle_early(regions, nodes, of, order, names)
    for node in nodes:
        if node.target is operator.getitem:
            of[node] = of[node.all_input_nodes[0]]
    cost = {s: sum(effort[n] for n in nodes if s in of[n]) for s in region}
    return Staging(region, of, cost, spans)


def _spans(
    regions: Regions, nodes: Sequence[fx.Node], effort: Mapping[fx.Node, float], names: list[str]
) -> list[tuple[int, int]]:
    """The blocks of each stage, balanced by work."""
    backbone = regions.backbone
    if len(names) > max(1, len(regions.blocks)):
        raise StageError(
            f"{len(names)} stages were asked of region {backbone}, which has {len(regions.blocks)} "
            f"blocks; use at most {max(1, len(regions.blocks))} ranks for it, or a smaller ranks="
        )
    core = {node for block in regions.blocks for node in block}
    after = ahead(core, lambda _: False) - core
    loose = [n for n in nodes if regions.of[n] == (backbone,) and n not in core]
    head = sum(effort[node] for node in loose if node not in after)
    tail = sum(effort[node] for node in loose if node in after)
    costs = [sum(effort.get(node, 0.0) for node in block) for block in regions.blocks]
    if costs:
        costs[0] += head
        costs[-1] += tail
    return balance(costs, len(names))


def _fixed(
    regions: Regions,
    nodes: Sequence[fx.Node],
    names: list[str],
    spans: Sequence[tuple[int, int]],
) -> dict[fx.Node, tuple[str, ...]]:
    """Nodes whose stage their region or their block decides."""
    backbone, known = (regions.backbone,), set(nodes)
    of = {n: regions.of[n] for n in nodes if len(regions.of[n]) == 1 and regions.of[n] != backbone}
    for name, (start, stop) in zip(names, spans, strict=True):
        for block in regions.blocks[start:stop]:
            of.update((node, (name,)) for node in block if node in known)
    if not regions.blocks:
        of.update((n, (names[0],)) for n in nodes if regions.of[n] == backbone)
    return of


def balance(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Cut a list into contiguous parts, none empty, so that the dearest part is cheapest.

    balance([4, 1, 1, 4], 2) == [(0, 2), (2, 4)]
    """
    if not costs:
        return [(0, 0)] * parts
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best = {end: (total[end], 0) for end in range(1, len(costs) + 1)}
    cuts: list[dict[int, tuple[float, int]]] = [best]
    for part in range(2, parts + 1):
        best = {
            end: min(
                (max(cuts[-1][start][0], total[end] - total[start]), start)
                for start in range(part - 1, end)
            )
            for end in range(part, len(costs) + 1)
        }
        cuts.append(best)
    spans, end = [], len(costs)
    for level in reversed(cuts):
        start = level[end][1]
        spans.append((start, end))
        end = start
    return spans[::-1]


def _settle_late(
    regions: Regions,
    nodes: Sequence[fx.Node],
    of: dict[fx.Node, tuple[str, ...]],
    order: Mapping[str, int],
) -> None:
    """Backbone nodes outside blocks that read a block run where the last of their inputs is."""
    backbone = regions.backbone
    late = ahead([n for block in regions.blocks for n in block], lambda _: False)
    for node in nodes:
        if node not in of and node in late and regions.of[node] == (backbone,):
            inputs = [stage for source in data_inputs(node) for stage in of.get(source, ())]
            of[node] = (max(inputs, key=order.__getitem__),)


def _settle_early(
    regions: Regions,
    nodes: Sequence[fx.Node],
    of: dict[fx.Node, tuple[str, ...]],
    order: Mapping[str, int],
    names: Sequence[str],
) -> None:
    """The rest is placed by its readers: the first one's stage, or each of them if it is cheap."""
    for node in reversed(nodes):
        if node in of:
            continue
        readers = {stage for user in node.users for stage in of.get(user, ())}
        if any(user.op == "output" for user in node.users):
            readers.add(names[-1])
        stages = sorted(readers, key=order.__getitem__) or [names[0]]
        of[node] = tuple(stages) if node in regions.cheap else tuple(stages[:1])
