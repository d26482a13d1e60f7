"""A graph is laid out over stages as graphs of the same model were before it.

A forward without a backward, or with other outputs, is another graph; each of its modules runs
where it runs in the graphs that train, so that every rank needs the tensors that it holds already.
"""

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import sympy
from torch import fx

from fxpipe.capture import Captured
from fxpipe.cut import Cut, Role
from fxpipe.dataflow import calls, data_inputs, path, work
from fxpipe.errors import StageError
from fxpipe.passes.anchors import Anchor
from fxpipe.passes.facts import Facts
from fxpipe.passes.regions import Regions, cheap_nodes
from fxpipe.passes.stages import Staging


@dataclass(frozen=True)
class Pattern:
    """Where the modules and the tensors of a model are.

    roles: region -> role; region: stage -> its region, in topological order; modules: path of a
    module -> the stages that run nodes of it; state: name of a tensor -> the stages that read it
    """

    roles: Mapping[str, Role]
    region: Mapping[str, str]
    modules: Mapping[str, Set[str]]
    state: Mapping[str, Set[str]]


def pattern_of(graphs: Sequence[tuple[Captured, Regions, Staging]], cut: Cut) -> Pattern:
    """The pattern of graphs that share the stages of a cut."""
    modules: dict[str, set[str]] = {}
    state: dict[str, set[str]] = {}
    for captured, _, of in ((c, r, s.of) for c, r, s in graphs):
        for node, stages in of.items():
            modules.setdefault(path(node), set()).update(stages)
            for source in data_inputs(node):
                if source.name in captured.state:
                    state.setdefault(captured.state[source.name], set()).update(stages)
    roles = {region.name: region.role for region in cut.regions}
    return Pattern(roles, {stage.name: stage.region for stage in cut.stages}, modules, state)


def follow(
    captured: Captured, symbols: Mapping[sympy.Symbol, sympy.Integer], pattern: Pattern
) -> tuple[Regions, Staging]:
    """Regions and stages of a graph. Raises StageError where no stage can run a node."""
    found = _Followed(captured, symbols, pattern)
    found.forwards()
    found.backwards()
    of = {node: found.of[node] for node in found.nodes}
    for node in found.nodes:
        if node.target is operator.getitem:
            of[node] = of[node.all_input_nodes[0]]
    effort = {node: work(node, symbols) for node in found.nodes}
    cost = {s: sum(effort[n] for n in found.nodes if s in of[n]) for s in pattern.region}
    owners = {n: tuple(dict.fromkeys(pattern.region[s] for s in of[n])) for n in found.nodes}
    why = dict.fromkeys(found.nodes, "where it runs in training")
    anchors = {name: Anchor(role, frozenset()) for name, role in pattern.roles.items()}
    regions = Regions(pattern.roles, owners, why, (), frozenset(found.cheap), anchors)
    return regions, Staging(pattern.region, of, cost, {})


class _Followed:
    """of: node -> its stages, as far as they are known."""

    def __init__(
        self,
        captured: Captured,
        symbols: Mapping[sympy.Symbol, sympy.Integer],
        pattern: Pattern,
    ) -> None:
        self.nodes = calls(captured.graph.graph)
        self.cheap = cheap_nodes(Facts(captured, symbols))
        self.of: dict[fx.Node, tuple[str, ...]] = {}
        self._captured = captured
        self._pattern = pattern
        self._stages = list(pattern.region)
        self._at = {stage: index for index, stage in enumerate(self._stages)}

    def forwards(self) -> None:
        """Nodes that read what a stage makes, or whose module is in one stage alone."""
        for node in self.nodes:
            homes = self._homes(node)
            inputs = [self.of[source][-1] for source in data_inputs(node) if source in self.of]
            latest = max((self._at[stage] for stage in inputs), default=-1)
            own = self._pattern.modules.get(path(node), set())
            known = self._sorted(own & homes if homes and own & homes else homes or own)
            if inputs:
                later = [stage for stage in known if self._at[stage] >= latest]
                if homes and not later:
                    raise StageError(self._nowhere(node, homes, self._stages[latest]))
                self.of[node] = (later[0] if later else self._stages[latest],)
            elif len(known) == 1 and node not in self.cheap:
                self.of[node] = (known[0],)

    def backwards(self) -> None:
        """The others run where they are read: in the first of these stages, or in each if cheap."""
        for node in reversed(self.nodes):
            if node in self.of:
                continue
            readers = {stage for user in node.users for stage in self.of.get(user, ())}
            stages = self._sorted(readers) or [self._stages[-1]]
            homes = self._homes(node)
            if homes and not (node in self.cheap and homes.issuperset(stages)):
                before = [s for s in self._sorted(homes) if self._at[s] <= self._at[stages[0]]]
                if not before:
                    raise StageError(self._nowhere(node, homes, stages[0]))
                stages = before[-1:]
            self.of[node] = tuple(stages) if node in self.cheap else (stages[0],)

    def _homes(self, node: fx.Node) -> set[str]:
        """The stages that hold every tensor of the model that a node reads; none if it reads none.

        A tensor that no stage reads in training is the same on every rank.
        """
        read = [self._captured.state.get(source.name) for source in data_inputs(node)]
        names = [name for name in read if name is not None]
        held = [set(self._pattern.state[name]) for name in names if name in self._pattern.state]
        if not held:
            return set()
        homes = set.intersection(*held)
        if not homes:
            raise StageError(
                f"{node.name} (module {path(node) or 'root'}) reads {', '.join(names)} together, "
                "which training holds in different stages; put the modules into one region with "
                "regions="
            )
        return homes

    def _sorted(self, stages: Set[str]) -> list[str]:
        return sorted(stages, key=self._at.__getitem__)

    def _nowhere(self, node: fx.Node, homes: Set[str], stage: str) -> str:
        return (
            f"{node.name} (module {path(node) or 'root'}) runs in stage {stage} or later, but only "
            f"{', '.join(self._sorted(homes))} holds the parameters that it reads in training"
        )
