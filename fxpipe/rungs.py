"""The third rung of the ladder: an opaque stage for what reads values, and a graph for the rest.

    capture_opaque(model, microbatch, reader, others) -> Captured

The graph has one node for the whole prefix, whose results are the arguments of the boundary. Which
values the microbatch has plays no part in it, so that it serves all of them.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx, nn

from fxpipe.boundary import boundaries, record
from fxpipe.capture import Captured, captured_of
from fxpipe.chance import Draw, state_of
from fxpipe.dataflow import ASIDE
from fxpipe.dry import call_of, draw_as_python
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.exporting import Traced, export_symbolic
from fxpipe.faithful import no_trace_left
from fxpipe.functions import recording_functions
from fxpipe.inputs import Leaf, Microbatch, flatten, rebuild
from fxpipe.opaque import Prefix, kind_of_call
from fxpipe.opaque_run import measured
from fxpipe.packed import layout_refusal
from fxpipe.passes.one_input import input_name
from fxpipe.prefix import Suffix
from fxpipe.python_chance import PYTHON, python_state
from fxpipe.refusals import refuse_hooks, refuse_outside
from fxpipe.state import named_state
from fxpipe.torch_internals import fake_mode, watching_hooks
from fxpipe.torch_modes import fake_like
from fxpipe.trial import try_out
from fxpipe.undone import undone
from fxpipe.updates import Updates, no_updates
from fxpipe.wanted import Reader

_CROSSING = "before the boundary"


def capture_opaque(
    model: nn.Module,
    microbatch: Microbatch,
    reader: Reader,
    others: Sequence[Microbatch] = (),
    *,
    train: bool = True,
) -> Captured:
    """Cut a model at the outermost module call at which that can be done.

    others: microbatches with which the result is tried out. Raises CaptureError, which says why no
    boundary will do.
    """
    tensors, fixed, structure = flatten(microbatch)
    args, kwargs = rebuild([tensor for _, tensor in tensors], structure, fixed)
    recording = record(model, args, kwargs, train)
    if not recording.reads:
        raise CaptureError("no values of the input are read")
    lines = tuple(dict.fromkeys(line for _, line in recording.reads))
    failures: list[str] = []
    for boundary in boundaries(recording):
        try:
            suffix, prefix = _cut_at(model, boundary, microbatch, reader, lines, train)
            prefix = replace(prefix, flags=_foretold(prefix, microbatch))
            whole = _attached(suffix, prefix)
            for other in (microbatch, *others):
                try_out(whole, suffix, reader, other)
            return whole
        except Exception as error:
            failures.append(f"at {boundary}: {' '.join(str(error).split())[:300]}")
    raise CaptureError(
        f"values of the input are read at {', '.join(lines)}, and no call of a module after that "
        f"can begin a graph ({'; '.join(failures) or 'none holds blocks'}). Read them in a module "
        "of its own, before the blocks, and pass its results on as arguments"
    )


def _foretold(prefix: Prefix, microbatch: Microbatch) -> bool:
    """Whether the flags that it reads follow from integers, so that every rank can know them."""
    leaves = [tensor for _, tensor in flatten(microbatch)[0]]
    return call_of(prefix, leaves) == kind_of_call(prefix.form, prefix.sources)


def _cut_at(
    model: nn.Module,
    boundary: str,
    microbatch: Microbatch,
    reader: Reader,
    lines: tuple[str, ...],
    train: bool,
) -> tuple[Captured, Prefix]:
    """The graph of what follows the boundary, and what comes before."""
    tensors, fixed, structure = flatten(microbatch)
    leaves = [tensor for _, tensor in tensors]
    rebuilt = structure, fixed
    prefix, crossing = measured(model, boundary, rebuilt, leaves, lines, train)
    inputs = [value.detach().requires_grad_(value.requires_grad) for value in crossing]
    hooks: list[str] = []
    suffix = Suffix(model, boundary, rebuilt, reader, leaves, hooks)
    grad = torch.set_grad_enabled(train)
    with no_trace_left(model), undone(model), grad, recording_functions(), watching_hooks(hooks):
        program = export_symbolic(suffix, [*leaves, *inputs])
    refuse_hooks(hooks if train else ())
    unknown = [f"{_CROSSING} {i}" for i in range(len(inputs))]
    names = [*(name for name, _ in tensors), *unknown]
    layout = suffix.layout.found
    reason = layout_refusal(layout, list(zip(names, [*leaves, *inputs], strict=True)))
    if reason:
        raise CaptureError(reason)
    traced, prefix = Traced(program, {}, (), layout), replace(prefix, layout=layout)
    found = captured_of(model, traced, (names, fixed, structure), reader.returned, unknown)
    if not train:
        return replace(found, trained=frozenset()), prefix
    refuse_outside(found)
    return found, prefix


def opaque(leaves: Any, state: Any) -> Any:
    """Stands in a captured graph for all that comes before the boundary."""
    raise FxpipeError("an opaque stage is run by its own graphs")


def _attached(suffix: Captured, prefix: Prefix) -> Captured:
    """One graph of both: a node for the prefix makes what the suffix was traced with."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    old = suffix.graph.graph
    holders = [node for node in old.nodes if node.op == "placeholder"]
    count = len(suffix.leaves) - prefix.sources.count(None)
    inputs = [node for node in holders if node.name not in suffix.state]
    leaves, crossing = inputs[:count], inputs[count : len(suffix.leaves)]
    if not any(node.users for node in crossing):
        raise CaptureError("nothing that comes before it is used after it")
    for holder in [node for node in holders if node.name in suffix.state]:
        env[holder] = graph.node_copy(holder)
    by_name = {suffix.state[holder.name]: env[holder] for holder in env}
    by_name |= _more_state(graph, prefix, by_name, fake_mode([n.meta["val"] for n in holders]))
    env |= {n: graph.node_copy(n) for n in inputs if n not in crossing}
    drawing = _drawing(graph, prefix, fake_mode([n.meta["val"] for n in holders]))
    given = (*(env[n] for n in leaves), *drawing), tuple(by_name[name] for name in prefix.state)
    made = graph.call_function(opaque, given)
    buffers = [by_name[name].meta["val"] for name in prefix.buffers]
    values = *(n.meta["val"] for n in crossing), *buffers
    made.meta = {"val": values, "flops": prefix.flops, "prefix": prefix}
    parts = [graph.call_function(operator.getitem, (made, at)) for at in range(len(values))]
    env |= dict(zip(crossing, parts, strict=False))
    for part, value in zip(parts, values, strict=True):
        crosses = part in parts[: len(crossing)]
        part.meta = {"val": value, "prefix": prefix} if crosses else {"val": value, ASIDE: True}
    for node in (node for node in old.nodes if node not in env):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.lint()
    own = zip(suffix.leaves[:count], leaves, strict=True)
    return replace(
        suffix,
        graph=fx.GraphModule(suffix.graph, graph),
        state={node.name: name for name, node in by_name.items()},
        leaves=tuple(leaf if node.users else _free(leaf) for leaf, node in own),
        draws=(*drawing.values(), *suffix.draws),
        updates=_updates(prefix, suffix, [part.name for part in parts[len(crossing) :]]),
        prefix=prefix,
        crossing=suffix.leaves[count:],
    )


def _updates(prefix: Prefix, suffix: Captured, made: Sequence[str]) -> Updates | None:
    """What a microbatch does to buffers, before the boundary and after it. made: the nodes that are
    what the prefix's have become. Raises CaptureError where both sides have to do with one."""
    if not prefix.buffers:
        return suffix.updates
    known = suffix.updates or no_updates()
    read = [n for n in suffix.graph.graph.nodes if n.name in suffix.state and n.users]
    both = {*known.names, *(suffix.state[n.name] for n in read)}.intersection(prefix.buffers)
    if both:
        raise CaptureError(f"buffer {min(both)} is changed before it, and read or changed after it")
    return known.also(dict(zip(prefix.buffers, made, strict=True)))


def _more_state(
    graph: fx.Graph, prefix: Prefix, known: Mapping[str, fx.Node], mode: Any
) -> dict[str, fx.Node]:
    """Inputs for what the prefix reads of the model, and the suffix does not."""
    tensors = dict(named_state(prefix.model))
    made = {}
    for name in (name for name in prefix.state if name not in known):
        made[name] = graph.placeholder(input_name(f"p_{name}"))
        made[name].meta = {"val": fake_like(mode, tensors[name])}
    return made


def _drawing(graph: fx.Graph, prefix: Prefix, mode: Any) -> dict[fx.Node, Draw]:
    """Inputs for the states of the generators that the prefix draws from: of its own, unless it is
    known what it draws from torch's for a microbatch (`dry.with_own`)."""
    made = {}
    for kind in prefix.draws:
        node = graph.placeholder(f"chance_{kind}")
        state = python_state() if kind == PYTHON else state_of(torch.device(kind))
        node.meta = {"val": fake_like(mode, state)}
        draw, own = partial(draw_as_python, prefix), kind != PYTHON
        followed = own and len({*prefix.draws} - {PYTHON}) == 1
        made[node] = Draw(node.name, draw, (), {}, kind, own, followed)
    return made


def _free(leaf: Leaf) -> Leaf:
    """A leaf that only the prefix reads: its sizes are its own."""
    sizes = tuple(
        sympy.Symbol(f"{leaf.placeholder}_{dim}", integer=True, nonnegative=True)
        for dim in range(len(leaf.shape))
    )
    return replace(leaf, shape=sizes)
