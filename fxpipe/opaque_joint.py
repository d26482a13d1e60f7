"""The forward and backward of an opaque stage as one joint graph, to be cut as any other is."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.capture import Captured
from fxpipe.copying import Joint
from fxpipe.dataflow import aten
from fxpipe.opaque import Prefix, forward, pull
from fxpipe.split import Stage
from fxpipe.torch_internals import expression


def is_opaque(stage: Stage) -> bool:
    """Whether a stage runs the model's own code."""
    return any("prefix" in node.meta for node in stage.graph.graph.nodes)


def opaque_joint(
    captured: Captured, stage: Stage, wanted: Sequence[tuple[str, str]], mode: Any
) -> Joint:
    """(state, leaves, sizes, wanted gradients) -> (crossing values, saved, gradients).

    wanted: crossing values whose gradients come back, each with the stage that gives it
    """
    assert captured.prefix is not None
    return _Writer(captured.prefix, stage, mode, captured).joint(wanted)


class _Writer:
    """The joint graph as it grows."""

    def __init__(self, prefix: Prefix, stage: Stage, mode: Any, captured: Captured) -> None:
        self.prefix, self.stage, self.mode, self.captured = prefix, stage, mode, captured
        self.graph = fx.Graph()
        self.holders: dict[str, fx.Node] = {}
        old = list(stage.graph.graph.nodes)
        self.made = next(node for node in old if isinstance(node.meta.get("val"), tuple))
        self.number = {n.name: n.args[1] for n in old if n.target is operator.getitem}
        for node in old:
            if node.op == "placeholder":
                self.holders[node.name] = self.holder(node.name, node.meta["val"])

    def holder(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.target = node.name
        node.meta = {"val": value}
        return node

    def call(self, called: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self.graph.call_function(called, args)
        node.meta = {"val": value}
        return node

    def joint(self, wanted: Sequence[tuple[str, str]]) -> Joint:
        crossing = self.made.meta["val"][: len(self.prefix.reach)]
        sizes = [[self._size(size) for size in value.shape] for value in crossing]
        tangents = {
            f"d_{value}_{to}": self.holder(f"d_{value}_{to}", self._value(value))
            for value, to in wanted
        }
        self.holders |= tangents
        self.holders["weight"] = self._weight()
        state = tuple(self.holders[name] for name in self.stage.state)
        leaves = tuple(self.holders[name] for name in self.stage.fields)
        values = self.made.meta["val"]
        names = [self.captured.state[name] for name in self.stage.state]
        places = [names.index(name) for name in self.prefix.buffers]
        made = self.call(forward(self.prefix, places), (state, leaves, sizes), values)
        made.meta["flops"] = self.prefix.flops
        sent, stats = (
            [self._item(made, self.number[name], self._value(name)) for name in names]
            for names in (self.stage.sent, self.stage.stats)
        )
        gradients = self._gradients(made, wanted, tangents)
        self.graph.output((*sent, *stats, *gradients.values()))
        graph = fx.GraphModule(nn.Module(), self.graph)
        return Joint(graph, self.holders, sent, [], gradients, stats)

    def _gradients(
        self, made: fx.Node, wanted: Sequence[tuple[str, str]], tangents: Mapping[str, fx.Node]
    ) -> dict[str, fx.Node]:
        sums: dict[str, fx.Node] = {}
        for value, to in wanted:
            tangent = tangents[f"d_{value}_{to}"]
            if value in sums:
                add = aten.add.Tensor
                sums[value] = self.call(add, (sums[value], tangent), self._value(value))
            else:
                sums[value] = tangent
        numbers = [self.number[value] for value in sums]
        behind = frozenset().union(*(self.prefix.reach[number] for number in numbers))
        names = [n for n in self.stage.state if self.captured.state[n] in behind]
        if not names:
            return {}
        with self.mode:
            saved = torch.empty(self.prefix.bytes, dtype=torch.uint8)
        kept = self._item(made, len(self.made.meta["val"]), saved)
        parameters = tuple(self.holders[name] for name in names)
        values = tuple(self.holders[name].meta["val"] for name in names)
        pulled = self.call(pull(numbers), (kept, tuple(sums.values()), parameters), values)
        pulled.meta["flops"] = 2 * self.prefix.flops
        return {
            name: self._item(pulled, index, value)
            for index, (name, value) in enumerate(zip(names, values, strict=True))
        }

    def _item(self, node: fx.Node, index: int, value: Any) -> fx.Node:
        return self.call(operator.getitem, (node, index), value)

    def _value(self, name: str) -> Tensor:
        value: Tensor = self.made.meta["val"][self.number[name]]
        return value

    def _size(self, size: Any) -> fx.Node | int:
        expr = expression(size)
        if expr.is_number:
            return int(expr)
        name = f"size_of_{expr}"
        if name not in self.holders:
            self.holders[name] = self.holder("size", size)
        return self.holders[name]

    def _weight(self) -> fx.Node:
        with self.mode:
            return self.holder("weight", torch.empty((), dtype=self.captured.loss_dtype))
