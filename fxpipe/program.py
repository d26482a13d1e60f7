"""From one row of the table to one program: straight-line Python, one call per op.

    vision_F1 = self.vision_F(rank, mb1, ())
    vision_F1_llm0 = vision_F1[0];  ...
    vision_F1_to0 = rank.send(0, (vision_F1_llm0,), 'vision.F1>0')
    llm1_F0_in = rank.wait(llm0_F0_from0)
    llm1_F0 = self.llm1_F(rank, mb0, (llm0_F0_llm1,))

The generated code drops each value after its last use: lifetimes need no store and no free op.
"""

import operator
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx

from fxpipe.cut import Kind, Seam
from fxpipe.delivery import arrivals, backward_of, carried, check_apart
from fxpipe.emulation import Emulation
from fxpipe.lower import holders
from fxpipe.modules import Parts, called, modules
from fxpipe.report import Report
from fxpipe.stageop import Variants, read_by
from fxpipe.table import Op, Table


@dataclass(frozen=True)
class Program:
    """What one rank runs in a step: `module(rank, mb0, mb1, ...)` -> (losses, gradients).

    losses: `llm1.F0` -> the loss terms made there; gradients: name of parameter -> tensor.
    params: names of the parameters, buffers and constants that the rank holds.
    """

    rank: int
    table: Table
    module: fx.GraphModule
    params: tuple[str, ...]

    @cached_property
    def report(self) -> Report:
        """What the ranks of this table tell each other when a step ends."""
        return Report(self.table)

    def __str__(self) -> str:
        return self.module.code.strip()


def emit(
    table: Table,
    rank: int,
    variants: Variants,
    state: Mapping[str, Tensor],
    *,
    owners: Mapping[str, tuple[str, ...]] | None = None,
    engine: str | Emulation = "aten",
    ahead: int = 0,
) -> Program:
    """The program of a rank. Linear in the length of its row.

    variants: for each captured graph, name of stage -> its graphs; more may be appended later.
    state: name -> parameter, buffer or constant, looked up whenever an op runs.
    owners: name of a trained parameter -> the stages that hold it; as these variants have it, where
    there were no others.
    engine: what runs the stages' graphs; an emulation needs none.
    ahead: how many receives of each channel are kept posted beyond what the row asks for; for
    transports that allow it (`Backend.ahead`), so that a transfer never waits for its post.
    """
    check_apart(table, variants)
    held = [stage for stage in table.cut.stages if stage.rank in (None, rank)]
    reads = {stage.name: read_by(stage.name, variants) for stage in table.cut.stages}
    names = dict.fromkeys(name for stage in held for name in reads[stage.name])
    if owners is None:
        trained = {n for graphs in variants for stage in graphs.values() for n in stage.trained}
        owners = holders(reads, trained)
    root = modules(table.cut, held, Parts(variants, state, owners), engine)
    emitter = _Emitter(table, rank, ahead)
    for index, op in enumerate(table.rows[rank]):
        emitter.op(index, op)
    emitter.finish()
    module = fx.GraphModule(root, emitter.graph, class_name=f"Rank{rank}")
    return Program(rank, table, module, tuple(names))


class _Emitter:
    """The graph so far, and the node of every value that is alive in it."""

    def __init__(self, table: Table, rank: int, ahead: int) -> None:
        self.graph = fx.Graph()
        self._table = table
        self._rank = self.graph.placeholder("rank")
        self._mbs = [self.graph.placeholder(f"mb{i}") for i in range(table.microbatches)]
        self._here = rank
        self._row = table.rows[rank]
        self._over = arrivals(table)[rank]
        # Bundles by (source, target, kind, mb): node that holds it, or the post that will bring it.
        self._bundles: dict[tuple[str, str, Kind, int | None], fx.Node] = {}
        self._posts: dict[tuple[str, str, Kind, int | None], tuple[Op, fx.Node]] = {}
        self._kept: dict[tuple[str, int | None], fx.Node] = {}
        self._sends: dict[int, fx.Node] = {}
        self._losses: dict[str, fx.Node] = {}
        self._grads: dict[str, fx.Node] = {}
        self._reduced: list[fx.Node] = []
        self._ahead = ahead
        self._due: list[Op] = []
        self._arrived: list[int] = []
        self._early: set[Op] = set()
        self._unposted: dict[int | None, deque[Op]] = defaultdict(deque)
        for op in self._row:
            if op.way == "<":
                self._unposted[op.peer].append(op)
        for channel in self._unposted.values():
            self._due += [channel.popleft() for _ in range(min(ahead, len(channel)))]

    def op(self, index: int, op: Op) -> None:
        """Emit one op of the row, and before it what is due; but what a peer waits for first."""
        if op.way != ">":
            self._catch_up()
        match op.way, op.kind:
            case ">", _:
                self._send(index, op)
            case "<", _:
                if op not in self._early:
                    self._post(self._unposted[op.peer].popleft())
            case _, Kind.R:
                self._reduce(op)
            case _, Kind.F:
                self._forward(index, op)
            case _, Kind.B:
                self._inputs(index, op)
            case _, Kind.W:
                self._weights(index, op)

    def _catch_up(self) -> None:
        for op in self._due:
            self._post(op)
        for index in self._arrived:
            self._sent(index)
        self._early.update(self._due)
        self._due.clear()
        self._arrived.clear()

    def finish(self) -> None:
        """Wait for the sends that are still under way, and return what the step gives."""
        self._catch_up()
        for index in list(self._sends):
            self._sent(index)
        grads = (self._in_order(self._grads), tuple(self._reduced))
        gradients = self._module("gradients", "gradients", (self._rank, *grads))
        self.graph.output((self._losses, gradients))

    def _send(self, index: int, op: Op) -> None:
        for over in self._over.get(index, ()):
            self._sent(over)
        seams = carried(self._table, op, self._here)
        bundles = tuple(self._bundles[_key(seam, op)] for seam in seams)
        name = called(op.stage, f"{op.kind}{op.mb}", f"to{op.peer}")
        self._sends[index] = self._method("send", (op.peer, bundles, str(op)), name)

    def _sent(self, index: int) -> None:
        send = self._sends.pop(index)
        self._method("sent", (send,), f"{send.name}_over")

    def _post(self, op: Op) -> None:
        seams = carried(self._table, op, self._here)
        name = called(op.stage, f"{op.kind}{op.mb}", f"from{op.peer}")
        ends = tuple((seam.source, seam.target) for seam in seams)
        args = (op.peer, self._mb(op), str(op.kind), ends, str(op))
        node = self._method("post", args, name)
        self._posts.update((_key(seam, op), (op, node)) for seam in seams)

    def _wait(self, op: Op, post: fx.Node) -> None:
        base = called(op.stage, f"{op.kind}{op.mb}")
        node = self._method("wait", (post,), f"{base}_in")
        for i, seam in enumerate(carried(self._table, op, self._here)):
            self._posts.pop(_key(seam, op))
            self._bundles[_key(seam, op)] = self._item(node, i, f"{base}_{_far_end(seam, op)}")
        if self._ahead and self._unposted[op.peer]:
            self._due.append(self._unposted[op.peer].popleft())

    def _read(self, index: int, seams: Iterable[Seam], op: Op) -> tuple[fx.Node, ...]:
        """The bundles that an op reads; whatever is still under way is waited for here."""
        seams = tuple(seams)
        for seam in seams:
            if _key(seam, op) in self._posts:
                self._wait(*self._posts[_key(seam, op)])
        self._arrived += self._over.get(index, ())
        return tuple(self._bundles[_key(seam, op)] for seam in seams)

    def _forward(self, index: int, op: Op) -> None:
        cut = self._table.cut
        received = self._read(index, cut.seams_into[op.stage], op)
        node = self._stage_op(op, (received,))
        seams = cut.seams_from[op.stage]
        self._outputs(node, seams, op)
        self._losses[str(op)] = self._item(node, len(seams), f"{node.name}_losses")
        if len(cut.stage[op.stage].kinds) > 1:
            self._keep(node, len(seams) + 1, op)

    def _inputs(self, index: int, op: Op) -> None:
        cut = self._table.cut
        wanted = self._read(index, _with_grads(cut.seams_from[op.stage]), op._replace(kind=Kind.B))
        node = self._stage_op(op, (self._kept_for(op), wanted))
        seams = _with_grads(cut.seams_into[op.stage])
        self._outputs(node, seams, op)
        if Kind.W in cut.stage[op.stage].kinds:
            self._keep(node, len(seams), op)

    def _weights(self, index: int, op: Op) -> None:
        wanted: tuple[fx.Node, ...] = ()
        if backward_of(self._table, op.stage, op.mb) == op:
            seams = _with_grads(self._table.cut.seams_from[op.stage])
            wanted = self._read(index, seams, op._replace(kind=Kind.B))
        grads = self._grads.get(op.stage)
        self._grads[op.stage] = self._stage_op(op, (grads, self._kept_for(op), wanted))

    def _reduce(self, op: Op) -> None:
        name = called(op.stage, op.kind)
        held = {s: self._grads[s] for s in self._table.cut.groups[op.stage] if s in self._grads}
        self._reduced.append(self._module(name, name, (self._rank, self._in_order(held))))

    def _outputs(self, node: fx.Node, seams: Iterable[Seam], op: Op) -> None:
        for i, seam in enumerate(seams):
            self._bundles[_key(seam, op)] = self._item(node, i, f"{node.name}_{_far_end(seam, op)}")

    def _keep(self, node: fx.Node, index: int, op: Op) -> None:
        self._kept[op.stage, op.mb] = self._item(node, index, f"{node.name}_kept")

    def _kept_for(self, op: Op) -> fx.Node:
        """What the op before kept; an empty list where it ran on another rank, and kept nothing."""
        if (op.stage, op.mb) in self._kept:
            return self._kept.pop((op.stage, op.mb))
        return self.graph.call_function(list)

    def _in_order(self, grads: Mapping[str, fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(grads[stage] for stage in self._table.cut.stage if stage in grads)

    def _mb(self, op: Op) -> fx.Node:
        return self._mbs[op.mb or 0]

    def _stage_op(self, op: Op, args: tuple[fx.node.Argument, ...]) -> fx.Node:
        name = called(op.stage, f"{op.kind}{op.mb}")
        return self._module(called(op.stage, op.kind), name, (self._rank, self._mb(op), *args))

    def _module(self, target: str, name: str, args: tuple[fx.node.Argument, ...]) -> fx.Node:
        return self.graph.create_node("call_module", target, args, name=name)

    def _method(self, target: str, args: tuple[fx.node.Argument, ...], name: str) -> fx.Node:
        return self.graph.create_node("call_method", target, (self._rank, *args), name=name)

    def _item(self, node: fx.Node, index: int, name: str) -> fx.Node:
        return self.graph.create_node("call_function", operator.getitem, (node, index), name=name)


def _with_grads(seams: Iterable[Seam]) -> tuple[Seam, ...]:
    return tuple(seam for seam in seams if seam.grads)


def _key(seam: Seam, op: Op) -> tuple[str, str, Kind, int | None]:
    """What a bundle is looked up by; a stage without B still reads gradients of kind B."""
    return seam.source, seam.target, op.kind, op.mb


def _far_end(seam: Seam, op: Op) -> str:
    """The stage for which an op makes a bundle: the target of values, the source of gradients."""
    return called(seam.target if op.kind is Kind.F else seam.source)
