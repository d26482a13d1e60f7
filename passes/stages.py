"""Regions are cut into stages by their blocks, balanced by work; a region of one stage stays whole.

What stands before and after the blocks (embedding, head, loss) counts as work of the first and the
last stage. A value that is cheap to derive from the inputs (masks, positions, rotary tables) is
computed in every stage that uses it.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import sympy
from torch import fx

from fxpipe.capture import Captured
from fxpipe.dataflow import ahead, calls, data_inputs, work
from fxpipe.errors import StageError
from fxpipe.passes.chains import find_chains
from fxpipe.passes.finer import finer
from fxpipe.passes.regions import Regions

Blocks = tuple[tuple[fx.Node, ...], ...]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Placed:
    """Where a region is cut: the blocks of each stage, from and to; and for each parameter of the
    blocks the first of these stages that reads it."""

    spans: Spans
    homes: Mapping[str, int]


@dataclass(frozen=True)
class Staging:
    """region: stage -> its region, in topological order; of: node -> the stages that compute it.

    A stage of which the microbatch runs nothing is left out. placed: where regions are cut
    """

    region: Mapping[str, str]
    of: Mapping[fx.Node, tuple[str, ...]]
    cost: Mapping[str, float]
    placed: Mapping[str, Placed]


def assign_stages(
    captured: Captured,
    regions: Regions,
    symbols: Mapping[sympy.Symbol, sympy.Integer],
    names: Mapping[str, Sequence[str]],
    known: Mapping[str, Placed] | None = None,
) -> Staging:
    """Cut every region into the stages named; one whose only stage has its own name stays whole.

    known: where other variants cut these regions: one parameter should be in the same stage in all.
    Raises StageError if a region has fewer blocks than stages.
    """
    nodes = calls(captured.graph.graph)
    effort = {node: work(node, symbols) for node in nodes}
    region = {stage: name for name in regions.roles for stage in names[name]}
    blocks = {
        name: finer(_blocks(captured, regions, name), len(names[name]), effort)
        for name in _cut_ones(regions, names)
    }
    reads = {n: [_parameters(captured, block) for block in found] for n, found in blocks.items()}
    cuts = {}
    for name, found in blocks.items():
        like = _alike((known or {}).get(name), reads[name], len(names[name]))
        cuts[name] = like or _spans(regions, name, found, effort, names[name])
    of = _fixed(regions, nodes, blocks, cuts, names)
    for name in blocks:
        _settle_late(regions, nodes, of, blocks[name], (name, names[name]))
    _settle_early(regions, nodes, of, region, names)
    for node in nodes:
        if node.target is operator.getitem:
            of[node] = of[node.all_input_nodes[0]]
    used = {stage for stages in of.values() for stage in stages}
    region = {stage: name for stage, name in region.items() if stage in used}
    cost = {s: sum(effort[n] for n in nodes if s in of[n]) for s in region}
    placed = {n: Placed(cuts[n], _homes(cuts[n], reads[n])) for n in blocks if blocks[n]}
    return Staging(region, of, cost, placed)


def _parameters(captured: Captured, block: Sequence[fx.Node]) -> list[str]:
    """The names of the parameters that a block reads."""
    names = (captured.state.get(source.name) for node in block for source in data_inputs(node))
    return [name for name in dict.fromkeys(names) if name in captured.parameters]


def _homes(spans: Spans, reads: Sequence[Sequence[str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for stage, (start, stop) in enumerate(spans):
        for names in reads[start:stop]:
            found |= {name: stage for name in names if name not in found}
    return found


def _alike(known: Placed | None, reads: Sequence[Sequence[str]], stages: int) -> Spans | None:
    """The cut of other variants, brought to these blocks; None where it says nothing of them.

    As many blocks are cut at the same places. Of more or fewer, each goes where its parameters are,
    or with the block before it.
    """
    if known is None or len(known.spans) != stages:
        return None
    if known.spans[-1][1] == len(reads):
        return known.spans
    homes = [[known.homes[name] for name in names if name in known.homes] for names in reads]
    if reads and not any(homes):
        return None
    at, count = 0, [0] * stages
    for found in homes:
        at = max([at, *found[:1]])
        count[at] += 1
    ends = list(accumulate(count))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _cut_ones(regions: Regions, names: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for name in regions.roles if list(names[name]) != [name]]


def _blocks(captured: Captured, regions: Regions, name: str) -> Blocks:
    """The blocks of a region, in order of execution: those of every chain that lies in it."""
    if name == regions.backbone:
        return regions.blocks
    chains = find_chains(captured.graph.graph)
    inside = [c for c in chains if all(regions.of.get(n) == (name,) for n in c.nodes)]
    return tuple(block for chain in inside for block in chain.blocks)


def _spans(
    regions: Regions,
    name: str,
    blocks: Blocks,
    effort: Mapping[fx.Node, float],
    stages: Sequence[str],
) -> Spans:
    """The blocks of each stage, balanced by work."""
    if len(stages) > max(1, len(blocks)):
        raise StageError(
            f"{len(stages)} stages were asked of region {name}, whose blocks can be cut into "
            f"{len(blocks)} parts; use at most {max(1, len(blocks))} stages for it: "
            "a smaller ranks= or chunks="
        )
    core = {node for block in blocks for node in block}
    after = ahead(core, lambda _: False) - core
    loose = [n for n in effort if regions.of[n] == (name,) and n not in core]
    costs = [sum(effort.get(node, 0.0) for node in block) for block in blocks]
    if costs:
        costs[0] += sum(effort[node] for node in loose if node not in after)
        costs[-1] += sum(effort[node] for node in loose if node in after)
    return tuple(balance(costs, len(stages)))


def _fixed(
    regions: Regions,
    nodes: Sequence[fx.Node],
    blocks: Mapping[str, Blocks],
    cuts: Mapping[str, Spans],
    names: Mapping[str, Sequence[str]],
) -> dict[fx.Node, tuple[str, ...]]:
    """Nodes whose stage their region or their block decides."""
    known = set(nodes)
    of = {n: regions.of[n] for n in nodes if len(regions.of[n]) == 1}
    of = {n: owner for n, owner in of.items() if owner[0] not in blocks}
    for name, found in blocks.items():
        for stage, (start, stop) in zip(names[name], cuts[name], strict=True):
            for block in found[start:stop]:
                of.update((node, (stage,)) for node in block if node in known)
        if not found:
            of.update((n, (names[name][0],)) for n in nodes if regions.of[n] == (name,))
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
    blocks: Blocks,
    own: tuple[str, Sequence[str]],
) -> None:
    """Nodes of a region outside its blocks that read a block run where the last of these is."""
    name, stages = own
    late = ahead([n for block in blocks for n in block], lambda _: False)
    for node in nodes:
        if node not in of and node in late and regions.of[node] == (name,):
            inputs = {stage for source in data_inputs(node) for stage in of.get(source, ())}
            if inputs.intersection(stages):
                of[node] = (max(inputs.intersection(stages), key=list(stages).index),)


def _settle_early(
    regions: Regions,
    nodes: Sequence[fx.Node],
    of: dict[fx.Node, tuple[str, ...]],
    region: Mapping[str, str],
    names: Mapping[str, Sequence[str]],
) -> None:
    """The rest is placed by its readers: the first one's stage, or each of them if it is cheap."""
    order = {stage: index for index, stage in enumerate(region)}
    for node in reversed(nodes):
        if node in of:
            continue
        own = regions.of[node]
        readers = {stage for user in node.users for stage in of.get(user, ())}
        if any(user.op == "output" for user in node.users):
            readers.add(names[own[-1]][-1])
        stages = sorted(readers, key=order.__getitem__) or [names[own[0]][0]]
        inside = [stage for stage in stages if region[stage] in own] or stages
        of[node] = tuple(stages) if node in regions.cheap else (inside[0],)
