"""Every node of a captured graph gets a region: the backbone, an encoder, or a generator.

What feeds the backbone is an encoder for each modality, with its stem and its projector; what
consumes its hidden states and ends in a loss of its own is a generator. Everything follows from
the graph: no model, class or module name decides where a node belongs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from fxpipe.capture import Captured
from fxpipe.cut import Role
from fxpipe.dataflow import behind, calls, is_random, path, data_inputs
from fxpipe.errors import RegionError
from fxpipe.passes.seeds import Facts, Seeds, found_seeds, given_seeds

CHEAP = 0.02


@dataclass(frozen=True)
class Regions:
    """roles: region -> role, in topological order; blocks: the backbone's, in order.

    of: node -> the regions that need it; one for most nodes, several for a value that is cheap to
    derive from the inputs and is therefore computed wherever it is used. cheap: all such values.
    why: node -> the reason.
    """

    roles: Mapping[str, Role]
    of: Mapping[fx.Node, tuple[str, ...]]
    why: Mapping[fx.Node, str]
    blocks: tuple[tuple[fx.Node, ...], ...]
    cheap: frozenset[fx.Node]

    @property
    def backbone(self) -> str:
        """The name of the backbone."""
        return next(name for name, role in self.roles.items() if role is Role.BACKBONE)

    def __str__(self) -> str:
        lines = []
        for name, role in self.roles.items():
            nodes = [node for node, owners in self.of.items() if owners == (name,)]
            modules = sorted({".".join(path(node).split(".")[:2]) for node in nodes} - {""})
            blocks = f", {len(self.blocks)} blocks" if role is Role.BACKBONE else ""
            lines.append(f"{name} ({role}, {len(nodes)} nodes{blocks}): {', '.join(modules)}")
        return "\n".join(lines)


def find_regions(
    captured: Captured,
    symbols: Mapping[sympy.Symbol, sympy.Integer],
    given: Mapping[str, Sequence[str]] | None = None,
) -> Regions:
    """Regions of a captured graph; `given` (region -> module names) overrides what is found.

    symbols: sizes of the example microbatch, by which work is weighed. Raises RegionError when a
    given name is no module, or the regions would depend on one another in a circle.
    """
    facts = Facts(captured, symbols)
    seeds = given_seeds(facts, given) if given else found_seeds(facts)
    return _grow(facts, seeds)


def _grow(facts: Facts, seeds: Seeds) -> Regions:
    """Colours flow forward from the seeds; what has none is claimed by what uses it."""
    backbone = next(name for name, role in seeds.roles.items() if role is Role.BACKBONE)
    rank = {name: index for index, name in enumerate(seeds.roles)}
    colours = _colours(facts, seeds, backbone)
    of: dict[fx.Node, tuple[str, ...]] = {}
    why = dict(seeds.why)
    for node in calls(facts.graph):
        if colours[node]:
            of[node] = (_owner(seeds, colours[node], backbone, rank),)
            why.setdefault(node, f"computed from {', '.join(sorted(colours[node], key=rank.get))}")
    _claim_connectors(facts, seeds, of, why, backbone)
    cheap = cheap_nodes(facts)
    _claim_rest(facts, cheap, of, why, backbone, rank)
    regions = Regions(seeds.roles, of, why, seeds.blocks, frozenset(cheap))
    _check_order(facts, regions, rank)
    return regions


def _colours(facts: Facts, seeds: Seeds, backbone: str) -> dict[fx.Node, frozenset[str]]:
    """The regions that a node is computed from; a seed starts afresh with its own."""
    core = [node for node, name in seeds.forced.items() if name == backbone]
    others = {node for node, name in seeds.forced.items() if name != backbone}
    near = behind(core, others.__contains__)
    colours: dict[fx.Node, frozenset[str]] = {}
    for node in facts.graph.nodes:
        if node in seeds.forced:
            colours[node] = frozenset({seeds.forced[node]})
        elif node in near and facts.is_token_embedding(node):
            colours[node] = frozenset({backbone})
        else:
            colours[node] = frozenset().union(*(colours[n] for n in data_inputs(node)))
    return colours


def _owner(seeds: Seeds, colours: frozenset[str], backbone: str, rank: Mapping[str, int]) -> str:
    """Where a node belongs that is computed from these regions."""
    last = max(colours, key=rank.__getitem__)
    if len(colours) > 1 and seeds.roles[last] is Role.ENCODER:
        return backbone
    return last


def _claim_connectors(
    facts: Facts,
    seeds: Seeds,
    of: dict[fx.Node, tuple[str, ...]],
    why: dict[fx.Node, str],
    backbone: str,
) -> None:
    """What is computed after the backbone for one generator alone belongs to the generator."""
    core = {node for node in seeds.forced if seeds.forced[node] == backbone}
    for node in reversed(calls(facts.graph)):
        users = {of[user] for user in node.users if user in of}
        if of.get(node) != (backbone,) or node in core or len(users) != 1:
            continue
        (owner,) = users
        leaves_graph = any(user.op == "output" for user in node.users)
        is_generator = seeds.roles[owner[0]] is Role.GENERATOR
        if is_generator and not leaves_graph and _weighs(facts, node, of, owner):
            of[node] = owner
            why[node] = f"only {owner[0]} uses it"


def _weighs(
    facts: Facts, node: fx.Node, of: Mapping[fx.Node, tuple[str, ...]], owner: tuple[str, ...]
) -> bool:
    """Not a bare selection of hidden states: that stays, so that less crosses the seam."""
    return facts.has_weights(node) or any(
        facts.has_weights(source) for source in data_inputs(node) if source in of
    )


def _claim_rest(
    facts: Facts,
    cheap: set[fx.Node],
    of: dict[fx.Node, tuple[str, ...]],
    why: dict[fx.Node, str],
    backbone: str,
    rank: Mapping[str, int],
) -> None:
    """Nodes that no seed reaches (masks, positions, stems) go where they are used."""
    for node in reversed(calls(facts.graph)):
        if node in of:
            continue
        users = {name for user in node.users if user in of for name in of[user]}
        if any(user.op == "output" for user in node.users) or not users:
            users |= {backbone}
        owners = tuple(sorted(users, key=rank.__getitem__))
        of[node] = owners if node in cheap else owners[:1]
        why[node] = (
            "cheap function of the inputs: computed where used"
            if node in cheap
            else (f"feeds {owners[0]}")
        )


def cheap_nodes(facts: Facts) -> set[fx.Node]:
    """Nodes derived from inputs, buffers and constants alone, at little cost, without chance.

    Such a value is computed again wherever it is used instead of being sent; its whole cone of
    inputs must cost less than 2 % of the model's forward.
    """
    weights = {node: 1 for node in facts.graph.nodes if facts.is_parameter(node)}
    total = facts.work(calls(facts.graph))
    cheap: set[fx.Node] = set()
    cone: dict[fx.Node, float] = {}
    for node in calls(facts.graph):
        sources = [source for source in data_inputs(node) if source.op == "call_function"]
        known = all(source in cheap for source in sources)
        cone[node] = facts.work([node]) + sum(cone.get(source, 0.0) for source in sources)
        direct = any(source in weights for source in data_inputs(node))
        if known and not direct and not is_random(node) and cone[node] <= CHEAP * total:
            cheap.add(node)
    return cheap


def _check_order(facts: Facts, regions: Regions, rank: Mapping[str, int]) -> None:
    for node in calls(facts.graph):
        for source in data_inputs(node):
            if source not in regions.of:
                continue
            reader, maker = regions.of[node][0], regions.of[source][-1]
            if len(regions.of[source]) == 1 and rank[maker] > rank[reader]:
                raise RegionError(
                    f"region {reader} reads {source.name} (module {path(source) or 'root'}) of "
                    f"region {maker}, which comes after it. Name the modules of each region with "
                    "regions={'encoder': [...], 'backbone': [...], 'generator': [...]}"
                )
