"""F of every stage of a graph that is never differentiated: it is there already, stage by stage."""

from typing import Any

from torch import fx

from fxpipe import copying
from fxpipe.capture import Captured
from fxpipe.copying import Joint, Parts, Whole
from fxpipe.cut import Kind
from fxpipe.dataflow import aten, is_random
from fxpipe.joint import Differentiated, StageGraphs, moving, others, parts_of
from fxpipe.opaque_joint import is_opaque, opaque_joint
from fxpipe.split import Stage, Stages
from fxpipe.torch_internals import fake_mode, guards


def forward_alone(captured: Captured, stages: Stages) -> Differentiated:
    """F of every stage and nothing else. Nothing is traced, so the operators are eager's own."""
    mode = fake_mode([n.meta["val"] for n in captured.graph.graph.nodes if n.op == "placeholder"])
    traced = {name: _forward(captured, stages, name, mode) for name in stages}
    graphs = {name: _graphs(captured, *found) for name, found in traced.items()}
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


def _graphs(captured: Captured, joint: Joint, parts: Parts) -> StageGraphs:
    stage, whole = parts.stage, Whole(joint, parts)
    losses = [whole.source[node] for node in joint.losses]
    stats = [whole.source[node] for node in joint.stats]
    checks = [n for n in whole.order if n.op == "call_function" and n.is_impure()]
    checks = [n for n in checks if not is_random(n)]
    nothing = fx.GraphModule({}, fx.Graph())
    return StageGraphs(
        stage=stage.name,
        state=tuple(captured.state[holder] for holder in stage.state),
        trained=(),
        fields=stage.fields,
        kept_b=(),
        kept_w=(),
        kinds=(Kind.F,),
        F=copying.forward(whole, parts.sent, losses, stats, [], checks),
        B=nothing,
        W=nothing,
        sizes=tuple(whole.sizes),
        ends=parts.ends,
        others=others(captured, stage),
        stats=stage.stats,
        moving=moving(captured, stage),
        opaque=is_opaque(stage),
    )
