"""Seeds of the regions: the nodes whose region is known before anything flows from them.

The backbone is the chain of repeated blocks with the most work among those that read the token
embeddings; other chains before it are encoders, chains after it with a loss of their own are
generators. A user's `regions=` replaces all of this by the names of modules.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from fxpipe.cut import Role
from fxpipe.dataflow import ahead, behind, calls, data_inputs, path
from fxpipe.errors import RegionError
from fxpipe.passes.chains import Chain
from fxpipe.passes.facts import Facts

BACKBONE = "llm"
MINOR = 0.02  # of the work of generators: what is less is no encoder of theirs, but a part
MODALITIES = {
    "vision": ("vision", "visual", "image", "pixel", "vit", "img"),
    "audio": ("audio", "speech", "mel", "sound", "input_features"),
    "video": ("video",),
}


@dataclass
class Seeds:
    """What is known before colours flow: nodes that belong to a region by themselves."""

    roles: dict[str, Role]
    forced: dict[fx.Node, str]
    blocks: tuple[tuple[fx.Node, ...], ...]
    why: dict[fx.Node, str] = field(default_factory=dict)


def without(seeds: Seeds, region: str) -> Seeds:
    """Without a region: its nodes go where those around them go."""
    forced = {node: name for node, name in seeds.forced.items() if name != region}
    roles = {name: role for name, role in seeds.roles.items() if name != region}
    why = {node: reason for node, reason in seeds.why.items() if node in forced}
    return Seeds(roles, forced, seeds.blocks, why)


def earlier(seeds: Seeds, region: str, before: str) -> Seeds:
    """With a region before another one of its role."""
    names = [name for name in seeds.roles if name != region]
    names.insert(names.index(before), region)
    return replace(seeds, roles={name: seeds.roles[name] for name in names})


def found_seeds(facts: Facts) -> Seeds:
    """Seeds from the chains of the graph; without any chain, all of it is the backbone. What runs
    the model's own code is an encoder."""
    seeds = Seeds({}, {}, ())
    if facts.opaque:
        _add(facts, seeds, Role.ENCODER, facts.opaque)
        read = ", ".join(facts.opaque[0].meta["prefix"].lines)
        seeds.why.update(dict.fromkeys(facts.opaque, f"opaque: values are read at {read}"))
    if not facts.chains:
        every = dict.fromkeys(calls(facts.graph), BACKBONE) | seeds.forced
        return Seeds({**seeds.roles, BACKBONE: Role.BACKBONE}, every, (), seeds.why)
    backbone = _pick_backbone(facts)
    core = set(backbone.nodes)
    downstream = ahead(core, lambda _: False)
    others = [chain for chain in facts.chains if chain is not backbone]
    after = [chain for chain in others if downstream.intersection(chain.nodes)]
    alone = [c for c in others if not core and facts.recognised(Role.GENERATOR, c.nodes)]
    before = [c for c in others if c not in after and not _serves(facts, c, after or alone, core)]
    late: list[Sequence[fx.Node]] = []  # generators of a microbatch that does not run the backbone
    seeds.blocks = backbone.blocks
    for group in _merged(facts, before, core):
        nodes = [n for chain in group for n in chain.nodes]
        if not core and facts.recognised(Role.GENERATOR, nodes):
            late.append(nodes)
        else:
            _add(facts, seeds, Role.ENCODER, nodes)
    encoding = behind([n for chain in before for n in chain.nodes], lambda _: False)
    chained = {n for chain in others for n in chain.nodes} | set(facts.opaque)
    for stem in _stems(facts, core, chained, encoding):
        _add(facts, seeds, Role.ENCODER, stem)
    seeds.roles[BACKBONE] = Role.BACKBONE
    seeds.forced.update(dict.fromkeys(backbone.nodes, BACKBONE))
    seeds.why.update(dict.fromkeys(backbone.nodes, f"block of {backbone.parent}"))
    late += _generators(facts, core, downstream, _merged(facts, after, set()))
    for generator in late:
        _add(facts, seeds, Role.GENERATOR, generator)
    return seeds


def _pick_backbone(facts: Facts) -> Chain:
    """The chain with the most work among those next to a token embedding, or among all; the one of
    other variants, if there are any, and no blocks where the microbatch does not run it."""
    known = facts.known.get(BACKBONE)
    if known is not None and known.parameters:
        mine = [chain for chain in facts.chains if facts.recognised(Role.BACKBONE, chain.nodes)]
        return max(mine, key=lambda chain: facts.work(chain.nodes), default=Chain("", ()))
    member = {node: chain.parent for chain in facts.chains for node in chain.nodes}

    def reads_tokens(chain: Chain) -> bool:
        found = behind(chain.nodes, lambda node: member.get(node, chain.parent) != chain.parent)
        return any(map(facts.is_token_embedding, found))

    others = (Role.ENCODER, Role.GENERATOR)
    free = [c for c in facts.chains if not any(facts.recognised(role, c.nodes) for role in others)]
    candidates = [chain for chain in free if reads_tokens(chain)] or free
    return max(candidates, key=lambda chain: facts.work(chain.nodes), default=Chain("", ()))


def _serves(facts: Facts, chain: Chain, after: Sequence[Chain], core: set[fx.Node]) -> bool:
    """Whether a chain is a small part of what follows the backbone, as an embedding of time is."""
    served = {node for other in after if other is not chain for node in other.nodes}
    reached = ahead(chain.nodes, lambda _: False)
    small = facts.work(chain.nodes) <= MINOR * facts.work(list(served))
    return small and bool(reached & served) and not reached & core


def _merged(facts: Facts, chains: Sequence[Chain], core: set[fx.Node]) -> list[list[Chain]]:
    """Chains joined where one's results reach the rest of the model only through the next, or
    where both encode the same inputs: layers of one tower of which several feed the backbone."""
    groups: list[list[Chain]] = []
    for chain in reversed(chains):
        for group in groups:
            inside = {node for other in group for node in other.nodes}
            reached = ahead(chain.nodes, inside.__contains__)
            feeds = any(
                source in reached or source in set(chain.nodes)
                for node in inside
                for source in data_inputs(node)
            )
            through = not (reached & core) and not any(n.op == "output" for n in reached)
            inputs = facts.encoded(chain.nodes)
            alike = bool(core) and inputs > 0 and inputs == facts.encoded(inside)
            if feeds and (through or alike):
                group.insert(0, chain)
                break
        else:
            groups.insert(0, [chain])
    return groups


def _stems(
    facts: Facts, core: set[fx.Node], chained: set[fx.Node], encoding: set[fx.Node]
) -> list[list[fx.Node]]:
    """Weighted operations on float inputs that enter a token model without any chain of blocks.

    encoding: what feeds the blocks of encoders, and belongs to them also if it passes them by
    """
    near = behind(core, chained.__contains__)
    tokens = {node for node in near if facts.is_token_embedding(node)}
    if not tokens:
        return []
    known = ahead(tokens | chained, lambda _: False) | chained | encoding
    found = [
        node
        for node in calls(facts.graph)
        if node in near
        and node not in known
        and facts.leaves[node] & facts.float_leaves
        and facts.has_weights(node)
    ]
    groups: dict[int, list[fx.Node]] = {}
    for node in found:
        bits = facts.leaves[node] & facts.float_leaves
        overlapping = [key for key in groups if key & bits]
        nodes = [n for key in overlapping for n in groups.pop(key)]
        groups[bits | sum(set(overlapping))] = [*nodes, node]
    return list(groups.values())


def _generators(
    facts: Facts, core: set[fx.Node], downstream: set[fx.Node], groups: Sequence[Sequence[Chain]]
) -> Iterator[list[fx.Node]]:
    """Chains after the backbone with a loss of their own, and weighted terms on float targets."""
    ends = facts.captured.terms or facts.captured.ends
    terms = [term for term in ends if term in downstream]
    taken: set[fx.Node] = set()
    for group in groups:
        nodes = [node for chain in group for node in chain.nodes]
        reached = ahead(nodes, lambda _: False) | set(nodes)
        mine = [term for term in terms if term in reached]
        extra = _own_leaves(facts, mine, core)
        known = facts.recognised(Role.GENERATOR, nodes)
        if len(mine) < len(terms) or extra & facts.float_leaves or known:
            taken.update(mine)
            yield nodes
    for term in terms:
        own = [n for n in behind([term], lambda n: n in core) | {term} if n in downstream]
        shared = behind([t for t in terms if t is not term], lambda n: n in core)
        weighted = [n for n in own if n not in shared and facts.has_weights(n)]
        extra = _own_leaves(facts, [term], core)
        own_loss = len(terms) > 1 and weighted and extra & facts.float_leaves
        if term not in taken and (own_loss or facts.recognised(Role.GENERATOR, weighted)):
            yield weighted


def _own_leaves(facts: Facts, terms: Sequence[fx.Node], core: set[fx.Node]) -> int:
    """The inputs that reach these terms past the backbone."""
    bits = 0
    for node in behind(terms, core.__contains__):
        if node.op == "placeholder":
            bits |= facts.leaves[node]
    return bits


def _add(facts: Facts, seeds: Seeds, role: Role, nodes: Sequence[fx.Node]) -> None:
    known = facts.recognised(role, nodes, seeds.roles)
    name = known or _name(facts, role, nodes, {**facts.known, **seeds.roles})
    seeds.roles[name] = role
    seeds.forced.update(dict.fromkeys(nodes, name))
    parents = sorted({path(node) for node in nodes}, key=lambda name: (len(name), name))
    seeds.why.update(dict.fromkeys(nodes, f"{role}: block or stem at {parents[0] or 'the root'}"))


def _name(facts: Facts, role: Role, nodes: Sequence[fx.Node], taken: Collection[str]) -> str:
    bits = 0
    for node in nodes:
        bits |= facts.leaves[node]
    leaves = [leaf.name for i, leaf in enumerate(facts.captured.leaves) if bits >> i & 1]
    texts = [path(nodes[0]).lower(), *(leaves if role is Role.ENCODER else ())]
    words = ((name, word) for name, known in MODALITIES.items() for word in known)
    plain = next((name for name, word in words if any(word in text for text in texts)), str(role))
    if role is Role.GENERATOR:
        plain = {"vision": "image"}.get(plain, plain)
    if plain not in taken:
        return plain
    return next(f"{plain}_{letter}" for letter in "bcdefghijkl" if f"{plain}_{letter}" not in taken)


def given_seeds(facts: Facts, given: Mapping[str, Sequence[str]]) -> Seeds:
    """Seeds from the names of modules; a key that is a role's name gets that role."""
    members = {name: _under(facts, name, modules) for name, modules in given.items()}
    backbone = _given_backbone(facts, members)
    members = {name: nodes for name, nodes in members.items() if nodes or name == backbone}
    core = set(members[backbone])
    downstream = ahead(core, lambda _: False)
    roles = dict.fromkeys(members, Role.ENCODER)
    roles[backbone] = Role.BACKBONE
    for name, nodes in members.items():
        after = name != Role.ENCODER and set(nodes) & downstream - core
        if name in facts.known:
            roles[name] = facts.known[name].role
        elif name != backbone and (name == Role.GENERATOR or after):
            roles[name] = Role.GENERATOR
    forced = {node: name for name, nodes in members.items() for node in nodes}
    why = {node: f"given: regions[{name!r}]" for node, name in forced.items()}
    inside = [chain for chain in facts.chains if set(chain.nodes) <= core]
    blocks = max(inside, key=lambda chain: facts.work(chain.nodes)).blocks if inside else ()
    ordered = sorted(roles.items(), key=lambda item: list(Role).index(item[1]))
    return Seeds(dict(ordered), forced, blocks, why)


def _under(facts: Facts, region: str, modules: Sequence[str]) -> list[fx.Node]:
    names = [modules] if isinstance(modules, str) else list(modules)
    found: list[fx.Node] = []
    for name in names:
        nodes = [n for n in calls(facts.graph) if f"{path(n)}.".startswith(f"{name}.")]
        if not nodes and facts.opaque and not found:
            nodes = facts.opaque  # the only region whose modules are not in the graph
        if not nodes and not any(n.startswith(f"{name}.") for n in facts.captured.parameters):
            known = sorted({path(n).split(".")[0] for n in calls(facts.graph)} - {""})
            raise RegionError(
                f"regions[{region!r}] names module {name!r}, which runs nothing in this model; "
                f"its top-level modules are {', '.join(known)}"
            )
        found.extend(nodes)
    return found


def _given_backbone(facts: Facts, members: Mapping[str, list[fx.Node]]) -> str:
    known = [name for name, anchor in facts.known.items() if anchor.role is Role.BACKBONE]
    named = known or [name for name in members if name in (Role.BACKBONE, BACKBONE)]
    return named[0] if named else max(members, key=lambda name: facts.work(members[name]))
