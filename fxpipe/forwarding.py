"""F of every stage of a graph that is never differentiated: it is there already, stage by stage."""

from typing import Any

from torch import fx

from fxpipe.capture import Captured
from fxpipe.copying import Joint, Parts
from fxpipe.dataflow import aten
from fxpipe.joint import Differentiated, graphs_of, parts_of
from fxpipe.opaque_joint import is_opaque, opaque_joint
from fxpipe.split import Stage, Stages
from fxpipe.torch_internals import fake_mode, guards


def forward_alone(captured: Captured, stages: Stages) -> Differentiated:
    """F of every stage and nothing else. Nothing is traced, so the operators are eager's own."""
    mode = fake_mode([n.meta["val"] for n in captured.graph.graph.nodes if n.op == "placeholder"])
    traced = {name: _forward(captured, stages, name, mode) for name in stages}
    graphs = graphs_of(captured, traced, ())
    return Differentiated(graphs, {}, tuple(guards(mode)), traced)


def _forward(captured: Captured, stages: Stages, name: str, mode: Any) -> tuple[Joint, Parts]:
    stage = stages[name]
    joint = opaque_joint(captured, stage, (), mode) if is_opaque(stage) else _apart(stage)
    return joint, parts_of(captured, stages, name, {}, joint)


def _apart(stage: Stage) -> Joint:
    """A stage's forward, in the form in which graphs are cut; what it sends is contiguous."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    outputs: Any = graph.graph_copy(stage.graph.graph, env)
    holders = {node.name: env[node] for node in stage.graph.graph.nodes if node.op == "placeholder"}
    sent = []
    for node in outputs[0]:
        sent.append(graph.call_function(aten.contiguous.default, (node,)))
        sent[-1].meta = dict(node.meta)
    graph.output((tuple(sent), *outputs[1:]))
    return Joint(fx.GraphModule(stage.graph, graph), holders, sent, outputs[1], {}, outputs[2])
