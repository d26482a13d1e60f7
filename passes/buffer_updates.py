"""What forward does to tensors of the model is taken out of the graph, and put in order.

before  y = batch_norm(x, w, b, None, None, ...); m = mean(x); n = mean * 0.9 + m * 0.1
        return (loss, n)
after   y = batch_norm(x, w, b, None, None, ...); m = mean(x)              a stage computes `m`
        return (loss,)                      later, in eager's order: mean = mean * 0.9 + m * 0.1

Eager changes such a tensor once in each microbatch, in their order; stages run in another one, on
several ranks. There are three kinds (`fxpipe.updates`):

deferred   no stage reads it: what its update reads is exchanged, and it is updated after the step
foreseen   its update reads nothing of the microbatch (a counter): all its values are known before
carried    a stage reads it, and what it becomes depends on data: one F hands it to the next
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from fxpipe.dataflow import ASIDE, alias_of, closure, data_inputs, is_in_place
from fxpipe.errors import CaptureError
from fxpipe.passes.scatters import written_by
from fxpipe.sizes import is_ratio, is_size, ratios_behind
from fxpipe.torch_internals import expression, is_unbacked
from fxpipe.updates import Recipe, Updates

Labels = Sequence[tuple[str, bool]]


def changed_state(
    module: fx.GraphModule, labels: Labels, trained: frozenset[str]
) -> tuple[str, ...]:
    """Names of what forward writes to. Raises CaptureError on an argument, a trained parameter, or
    a tensor that is no buffer."""
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    label = dict(zip(holders, labels, strict=True))
    found: dict[str, None] = {}
    for node in module.graph.nodes:
        first = written_by(node) if is_in_place(node) else None
        while isinstance(first, fx.Node) and first not in label:
            first = alias_of(first)
        if isinstance(first, fx.Node):
            name, is_state = label[first]
            _check_write(name, is_state, node, trained)
            found[name] = None
    return tuple(found)


def _check_write(name: str, is_state: bool, node: fx.Node, trained: frozenset[str]) -> None:
    if not is_state:
        raise CaptureError(
            f"argument {name} is changed by forward ({node.target}): the microbatch is the "
            f"caller's, and other ranks read it as well. Write to a copy: x = {name}.clone()"
        )
    if name in trained:
        raise CaptureError(
            f"parameter {name} is changed by forward ({node.target}) and trained as well: its "
            "gradient would belong to neither value. Change it after the step, under no_grad"
        )
    if "#" in name:
        plain = name.partition("#")[0]
        raise CaptureError(
            f"tensor {plain} is changed by forward ({node.target}) and is no buffer of the model: "
            "nobody would save it or hand it to the other ranks. Make it one with register_buffer"
        )


def returning(module: fx.GraphModule, labels: Labels, names: Sequence[str]) -> fx.GraphModule:
    """The same graph, which also returns these tensors of the model: after `functionalise`, that
    is what they have become."""
    if not names:
        return module
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    outputs: Any = graph.graph_copy(module.graph, env)
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    holder: dict[str, fx.Node] = {}
    for node, (name, _) in zip(holders, labels, strict=True):
        holder.setdefault(name, env[node])
    graph.output((*outputs, *(holder[name] for name in names)))
    return fx.GraphModule(module, graph)


def buffer_updates(
    module: fx.GraphModule, state: Mapping[str, str], names: Sequence[str], trained: frozenset[str]
) -> tuple[fx.GraphModule, Updates | None]:
    """The graph without updates, in which what they read stands aside; and the updates."""
    if not names:
        return module, None
    sorting = _Sorting(module, state, names, trained)
    updates = sorting.updates()
    return sorting.without_updates(), updates


class _Sorting:
    """The written tensors by kind; `stats`: the nodes that stages compute for the updates."""

    def __init__(
        self,
        module: fx.GraphModule,
        state: Mapping[str, str],
        names: Sequence[str],
        trained: frozenset[str],
    ) -> None:
        self.graph = fx.Graph()
        outputs: Any = self.graph.graph_copy(module.graph, {})
        self.module, self.state, self.trained = module, state, trained
        self.terms, finals = outputs[: -len(names)], outputs[-len(names) :]
        holder = {state[n.name]: n for n in self.graph.nodes if n.name in state}
        final = {holder[name]: node for name, node in zip(names, finals, strict=True)}
        self.final = {held: node for held, node in final.items() if held is not node}
        self.needed = closure(self.terms)
        self.foreseen = self._foreseen()
        self.carried = self._carried()
        unread = [h for h in self.final if h not in self.foreseen and h not in self.carried]
        self.late = self._depending(unread)
        self.deferred = unread
        reads = [n for node in self._late_nodes() for n in data_inputs(node) if n not in self.late]
        straight = [self.final[h] for h in unread if self.final[h] not in self.late]
        carried = [self.final[h] for h in self.carried]
        wanted = dict.fromkeys(n for n in [*reads, *straight, *carried] if not self._at_hand(n))
        self.stats = tuple(wanted)
        for node in self.stats:
            self._check_stat(node)

    def _foreseen(self) -> list[fx.Node]:
        """Those whose new value reads nothing but other ones, and state that does not change."""
        found = list(self.final)
        while True:
            kept = [h for h in found if all(self._known(n, found) for n in self._sources(h))]
            if kept == found:
                return found
            found = kept

    def _sources(self, held: fx.Node) -> list[fx.Node]:
        behind = closure([self.final[held]])
        return [n for n in behind if n.op == "placeholder"]

    def _known(self, node: fx.Node, foreseen: Sequence[fx.Node]) -> bool:
        if node in self.final:
            return node in foreseen
        return node.name in self.state and self.state[node.name] not in self.trained

    def _carried(self) -> list[fx.Node]:
        """Those that the loss reads, and what their own new values read."""
        found: list[fx.Node] = []
        read = set(self.needed)
        while True:
            more = [h for h in self.final if h in read and h not in [*found, *self.foreseen]]
            if not more:
                return [h for h in self.final if h in found]
            found += more
            read |= closure(self.final[h] for h in more)

    def _depending(self, holders: Iterable[fx.Node]) -> set[fx.Node]:
        found = set(holders)
        for node in self.graph.nodes:
            if any(source in found for source in data_inputs(node)):
                found.add(node)
        return found

    def _late_nodes(self) -> list[fx.Node]:
        """What is computed after the step, in order."""
        behind = closure(self.final[h] for h in self.deferred)
        return [n for n in self.graph.nodes if n in behind and n in self.late and not _held(n)]

    def _at_hand(self, node: fx.Node) -> bool:
        """Whether every rank has a value of its own that is equal."""
        if node.op != "placeholder" or node.name not in self.state or node in self.final:
            return False
        return self.state[node.name] not in self.trained

    def _check_stat(self, node: fx.Node) -> None:
        value = node.meta["val"]
        if not isinstance(value, Tensor) or any(map(is_unbacked, value.shape)):
            names = ", ".join(self.state[h.name] for h in self.final)
            raise CaptureError(
                f"what forward writes to one of {names} has a size that depends on data "
                f"({node.name}): other ranks cannot know it. Write a value of a fixed size, or "
                "freeze the buffer with .eval()"
            )

    def updates(self) -> Updates:
        """The record of all that forward changes."""
        behind = closure(self.final[h] for h in self.foreseen)
        early = [n for n in self.graph.nodes if n in behind and not _held(n)]
        return Updates(
            stats=tuple(node.name for node in self.stats),
            carried={self.state[h.name]: self.final[h].name for h in self.carried},
            foreseen=self._recipe(self.foreseen, early),
            deferred=self._recipe(self.deferred, self._late_nodes()),
        )

    def _recipe(self, holders: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> Recipe:
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {}
        reads: list[tuple[str, object]] = []
        nodes = [*ratios_behind(self.graph, nodes), *nodes]
        wanted = [n for node in nodes for n in node.all_input_nodes if n not in nodes]
        for node in dict.fromkeys([*wanted, *(self.final[h] for h in holders)]):
            if node in nodes:
                continue
            kind, key = self._origin(node)
            if kind == "size" and expression(node.meta["val"]).is_number:
                env[node] = int(expression(node.meta["val"]))
                continue
            reads.append((kind, key))
            env[node] = graph.placeholder(node.name)
        for node in nodes:
            if node not in env and not is_size(node):
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[self.final[h]] for h in holders))
        module = fx.GraphModule(self.module, graph)
        return Recipe(tuple(self.state[h.name] for h in holders), tuple(reads), module)

    def _origin(self, node: fx.Node) -> tuple[str, object]:
        if is_size(node):
            return "size", expression(node.meta["val"])
        if node in self.stats:
            return "stat", node.name
        return "state", self.state[node.name]

    def without_updates(self) -> fx.GraphModule:
        """The graph of the loss; what stands aside is marked, and has no reader in it."""
        aside, spare = closure(self.stats) - self.needed, closure(self.final.values())
        self.graph.output(tuple(self.terms))
        for node in reversed(list(self.graph.nodes)):
            if node.op != "call_function" or node in self.needed:
                continue
            if node in aside:
                node.meta[ASIDE] = not is_size(node) and not is_ratio(node)
            elif not node.users and node in spare:
                self.graph.erase_node(node)
        self.graph.lint()
        return fx.GraphModule(self.module, self.graph)


def _held(node: fx.Node) -> bool:
    return node.op == "placeholder"
