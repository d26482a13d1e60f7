"""Every node of a captured graph gets a region: the backbone, an encoder, or a generator.

What feeds the backbone is an encoder for each modality, with its stem and its projector; what
consumes its hidden states and ends in a loss of its own is a generator. Everything follows from
the graph: no model, class or module name decides where a node belongs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from fxpipe.capture import Captured
from fxpipe.cut import Role
from fxpipe.dataflow import behind, calls, data_inputs, is_random, is_view, path
from fxpipe.errors import RegionError
from fxpipe.passes.anchors import Anchor, Known
from fxpipe.passes.facts import Facts
from fxpipe.passes.seeds import (
    BACKBONE,
    Seeds,
    earlier,
    found_seeds,
    given_seeds,
    without,
)

CHEAP = 0.02


@dataclass(frozen=True)
class Regions:
    """roles: region -> role, in topological order; blocks: the backbone's, in order.

    of: node -> the regions that need it; one for most nodes, several for a value that is cheap to
    derive from the inputs and is therefore computed wherever it is used. cheap: all such values.
    why: node -> the reason. anchors: what other variants know each region by.
    """

    roles: Mapping[str, Role]
    of: Mapping[fx.Node, tuple[str, ...]]
    why: Mapping[fx.Node, str]
    blocks: tuple[tuple[fx.Node, ...], ...]
    cheap: frozenset[fx.Node]
    anchors: Mapping[str, Anchor]

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
    known: Known | None = None,
) -> Regions:
    """Regions of a captured graph; `given` (region -> module names) overrides what is found.

    symbols: sizes of the example microbatch, by which work is weighed. known: the regions of other
    variants, which keep their names and their roles. Found regions that would depend on one another
    in a circle become one. Raises RegionError when a given name is no module, or given regions
    depend on one another in a circle.
    """
    facts = Facts(captured, symbols, known)
    seeds = given_seeds(facts, given) if given else found_seeds(facts)
    growth, turned = _Growth(facts, seeds), set[frozenset[str]]()
    while clash := growth.clash():
        source, reader, maker = clash
        if given:
            raise RegionError(
                f"region {reader} reads {source.name} (module {path(source) or 'root'}) of region "
                f"{maker}, which comes after it. Name the modules of each region with "
                "regions={'encoder': [...], 'backbone': [...], 'generator': [...]}"
            )
        pair = frozenset({reader, maker})
        if seeds.roles[reader] is seeds.roles[maker] and pair not in turned:
            turned.add(pair)
            seeds = earlier(seeds, maker, reader)
        else:
            seeds = without(seeds, maker if reader == BACKBONE else reader)
        growth = _Growth(facts, seeds)
    return growth.regions()


class _Growth:
    """Colours flow forward from the seeds; what has none is claimed by what uses it.

    of, why: node -> its regions, and the reason, as far as they are found
    """

    def __init__(self, facts: Facts, seeds: Seeds) -> None:
        self.facts, self.seeds = facts, seeds
        self.nodes = calls(facts.graph)
        self.cheap = cheap_nodes(facts)
        self.backbone = next(n for n, role in seeds.roles.items() if role is Role.BACKBONE)
        self.rank = {name: index for index, name in enumerate(seeds.roles)}
        self.of: dict[fx.Node, tuple[str, ...]] = {}
        self.why = dict(seeds.why)

    def regions(self) -> Regions:
        """What `clash` has claimed."""
        seeds = self.seeds
        nodes = {
            name: [n for n, own in seeds.forced.items() if own == name] for name in seeds.roles
        }
        anchors = {
            name: Anchor(role, self.facts.parameters(nodes[name]))
            for name, role in seeds.roles.items()
        }
        cheap = frozenset(self.cheap)
        return Regions(seeds.roles, self.of, self.why, seeds.blocks, cheap, anchors)

    def _claim_coloured(self) -> None:
        """Nodes that are computed from seeds."""
        colours = self._colours()
        for node in self.nodes:
            if colours[node]:
                opaque = node in self.facts.opaque
                owner = self.seeds.forced[node] if opaque else self._owner(colours[node])
                self.of[node] = (owner,)
                named = sorted(colours[node], key=self.rank.__getitem__)
                self.why.setdefault(node, f"computed from {', '.join(named)}")

    def _colours(self) -> dict[fx.Node, frozenset[str]]:
        """The regions that a node is computed from; a seed starts afresh with its own."""
        forced, backbone = self.seeds.forced, self.backbone
        core = [node for node, name in forced.items() if name == backbone]
        others = {node for node, name in forced.items() if name != backbone}
        near = behind(core, others.__contains__)
        colours: dict[fx.Node, frozenset[str]] = {}
        for node in self.facts.graph.nodes:
            if node in self.facts.opaque:
                # Only the model's own code can run there: what is computed from it comes later.
                colours[node] = frozenset({backbone})
            elif node in forced:
                colours[node] = frozenset({forced[node]})
            elif node in near and self.facts.is_token_embedding(node):
                colours[node] = frozenset({backbone})
            else:
                colours[node] = frozenset().union(*(colours[n] for n in data_inputs(node)))
        return colours

    def _owner(self, colours: frozenset[str]) -> str:
        """Where a node belongs that is computed from these regions."""
        last = max(colours, key=self.rank.__getitem__)
        if len(colours) > 1 and self.seeds.roles[last] is Role.ENCODER:
            return self.backbone
        return last

    def _claim_connectors(self) -> None:
        """What is computed after the backbone for one generator alone belongs to the generator,
        from the first weights on: a selection of hidden states stays, so that less crosses."""
        of, mine = self.of, self._for_one_generator()
        weighted = [node for node in mine if self.facts.has_weights(node)]
        modules = set(map(path, weighted)) - {""}
        weighed: set[fx.Node] = set()
        for node, owner in mine.items():
            beside = path(node) in modules and not is_view(node)
            if node in weighted or beside or any(n in weighed for n in data_inputs(node)):
                weighed.add(node)
                of[node] = owner
                self.why[node] = f"only {owner[0]} uses it"

    def _for_one_generator(self) -> dict[fx.Node, tuple[str, ...]]:
        """What follows the backbone's blocks and is used by one generator alone, in order."""
        of, seeds = self.of, self.seeds
        core = {node for node in seeds.forced if seeds.forced[node] == self.backbone}
        mine: dict[fx.Node, tuple[str, ...]] = {}
        for node in reversed(self.nodes):
            users = {mine.get(user, of[user]) for user in node.users if user in of}
            if of.get(node) != (self.backbone,) or node in core or len(users) != 1:
                continue
            (owner,) = users
            if seeds.roles[owner[0]] is Role.GENERATOR and not _is_scalar(node):
                mine[node] = owner
        return dict(reversed(mine.items()))

    def _claim_rest(self) -> None:
        """Nodes that no seed reaches (masks, positions, stems) go where they are used."""
        for node in reversed(self.nodes):
            if node in self.of:
                continue
            users = {name for user in node.users if user in self.of for name in self.of[user]}
            if _is_returned(node) or not users:
                users |= {self.backbone}
            owners = tuple(sorted(users, key=self.rank.__getitem__))
            if node in self.cheap:
                self.of[node] = owners
                self.why[node] = "cheap function of the inputs: computed where used"
            else:
                self.of[node] = owners[:1]
                self.why[node] = f"feeds {owners[0]}"

    def clash(self) -> tuple[fx.Node, str, str] | None:
        """Claim every node; one that a region reads of a later one, the reader and the maker."""
        self._claim_coloured()
        self._claim_connectors()
        self._claim_rest()
        for node in self.nodes:
            for source in data_inputs(node):
                makers = self.of.get(source, ())
                if len(makers) == 1 and self.rank[makers[0]] > self.rank[self.of[node][0]]:
                    return source, self.of[node][0], makers[0]
        return None


def _is_scalar(node: fx.Node) -> bool:
    """A loss: the backbone's own stays there, also where it is added to a generator's."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def cheap_nodes(facts: Facts) -> set[fx.Node]:
    """Nodes derived from inputs, buffers and constants alone, at little cost, without chance.

    Such a value is computed again wherever it is used instead of being sent; its whole cone of
    inputs must cost less than 2 % of the model's forward.
    """
    total = facts.work(calls(facts.graph))
    cheap: set[fx.Node] = set()
    cone: dict[fx.Node, float] = {}
    for node in calls(facts.graph):
        sources = [source for source in data_inputs(node) if source.op == "call_function"]
        known = all(source in cheap for source in sources)
        cone[node] = facts.work([node]) + sum(cone.get(source, 0.0) for source in sources)
        derived = known and not facts.has_weights(node) and not is_random(node)
        derived = derived and node not in facts.opaque
        if derived and cone[node] <= CHEAP * total:
            cheap.add(node)
    return cheap
