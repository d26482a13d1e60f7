"""Where the values for updates of buffers are computed: in the stage that has what they read."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from fxpipe.capture import Captured
from fxpipe.dataflow import aside, data_inputs
from fxpipe.errors import StageError
from fxpipe.passes.stages import Staging


def place_asides(
    captured: Captured, staging: Staging
) -> tuple[Staging, Mapping[str, tuple[fx.Node, ...]]]:
    """The staging with a stage for each node that stands aside; and the stats of each stage.

    Raises StageError on a buffer that several stages read, or that one reads and another changes.
    """
    if captured.updates is None:
        return staging, {}
    of = dict(staging.of)
    order = {stage: index for index, stage in enumerate(staging.region)}
    readers = _readers(captured, of)
    for node in captured.graph.graph.nodes:
        if aside(node):
            of[node] = (_home(node, of, readers, order),)
    placed = replace(staging, of=of)
    by_name = {node.name: node for node in captured.graph.graph.nodes}
    stats: dict[str, list[fx.Node]] = {}
    for node in map(by_name.__getitem__, captured.updates.stats):
        held = node.op == "placeholder"
        stage = next(iter(readers.get(node, order))) if held else of[node][0]
        stats.setdefault(stage, []).append(node)
    _check_carried(captured, of)
    return placed, {stage: tuple(nodes) for stage, nodes in stats.items()}


def _readers(
    captured: Captured, of: Mapping[fx.Node, tuple[str, ...]]
) -> dict[fx.Node, tuple[str, ...]]:
    """The stages that read each placeholder anyway."""
    found: dict[fx.Node, dict[str, None]] = {}
    for node, stages in of.items():
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                found.setdefault(source, {}).update(dict.fromkeys(stages))
    return {node: tuple(stages) for node, stages in found.items()}


def _home(
    node: fx.Node,
    of: Mapping[fx.Node, tuple[str, ...]],
    readers: Mapping[fx.Node, tuple[str, ...]],
    order: Mapping[str, int],
) -> str:
    """The first stage in which all that a node reads can be had."""

    def sources() -> Iterator[str]:
        for source in data_inputs(node):
            if source in of:
                yield of[source][0]
            elif source in readers:
                yield readers[source][0]

    return max(sources(), key=order.__getitem__, default=next(iter(order)))


def _check_carried(captured: Captured, of: Mapping[fx.Node, tuple[str, ...]]) -> None:
    """What one microbatch leaves to the next stays in one stage."""
    assert captured.updates is not None
    readers = _readers(captured, of)
    by_name = {node.name: node for node in captured.graph.graph.nodes}
    holder = {name: by_name[placeholder] for placeholder, name in captured.state.items()}
    for name, stat in captured.updates.carried.items():
        node = by_name[stat]
        makers = of[node] if node in of else readers.get(node, ())
        reading = readers.get(holder[name], ())
        if set(reading) - set(makers[:1]):
            raise StageError(
                f"buffer {name} is read by the forward of stage {', '.join(reading)} and changed "
                f"in stage {makers[0]}: each microbatch needs what the one before has left, and "
                "would wait for it through the whole pipeline. Put its modules into one stage "
                "(ranks=1, or regions=), or freeze the buffer with .eval()"
            )
