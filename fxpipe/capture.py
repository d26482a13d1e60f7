"""The whole model's forward, with its loss, as one ATen FX graph with symbolic shapes.

    capture(model, microbatch) -> Captured

torch.export traces the model once; sizes that may differ between microbatches stay symbols.
Parameters keep the model's own names, and every node keeps the path of the module that made it.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from fxpipe.advice import DERIVATIVES
from fxpipe.chance import Draw, placed
from fxpipe.dataflow import arguments
from fxpipe.datasizes import DataSizes, find_data_sizes
from fxpipe.errors import CaptureError
from fxpipe.exporting import Traced, WithLoss, check_call, export
from fxpipe.faithful import settled
from fxpipe.functions import recording_functions
from fxpipe.inputs import Leaf, Microbatch, apart, contents, flatten, rebuild
from fxpipe.opaque import Prefix
from fxpipe.packed import LayoutRead, layout_refusal, memory_order
from fxpipe.passes.buffer_updates import buffer_updates, changed_state, returning
from fxpipe.passes.draws import draws
from fxpipe.passes.functionalise import functionalise
from fxpipe.passes.inline_no_grad import inline_no_grad
from fxpipe.passes.inline_vmap import inline_vmap
from fxpipe.passes.loss_terms import loss_terms
from fxpipe.passes.off_meta import off_meta
from fxpipe.passes.one_input import input_name, tidy, tied
from fxpipe.passes.running_statistics import check_norms, running_statistics
from fxpipe.refusals import check_loss, refuse_outside
from fxpipe.state import canonical_names
from fxpipe.torch_chance import trusting_distributions
from fxpipe.torch_internals import expression, is_wrapped
from fxpipe.torch_patches import SEEDED
from fxpipe.updates import Updates
from fxpipe.wanted import LOSS_ONLY, LossFn, Outputs, Reader, Returned

PREFIX = "model."


@dataclass(frozen=True)
class Captured:
    """One variant of the model: its graph, and what the graph assumes of a microbatch.

    graph: placeholders are `state` then `leaves`; its outputs are the additive terms of the loss,
    and then what `returned` says
    state: placeholder -> the model's own name of the parameter, buffer or constant
    constants: tensors made while it was traced, by the name in `state`; ranges: sizes of a symbol
    leaves: the tensors of a microbatch; fixed: its other values, which must repeat
    data: how sizes that depend on a microbatch's data are found before a step
    prefix, crossing: where the first stage runs the model's own code, what it is and what it makes
    values: the tensors whose values must repeat too, because Python reads them; reads: and where
    parameters: names of all parameters; trained: those with `requires_grad`
    updates: what forward does to buffers; draws: operators that draw random numbers, in order
    layout: where code reads how tensors lie in memory, which must then be packed
    """

    graph: fx.GraphModule
    state: Mapping[str, str]
    constants: Mapping[str, Tensor]
    leaves: tuple[Leaf, ...]
    structure: Any
    fixed: tuple[tuple[str, object], ...]
    data: DataSizes
    values: Mapping[str, Tensor]
    reads: tuple[str, ...]
    ranges: Mapping[sympy.Symbol, tuple[sympy.Expr, sympy.Expr]]
    parameters: frozenset[str]
    trained: frozenset[str]
    returned: Returned = LOSS_ONLY
    updates: Updates | None = None
    draws: tuple[Draw, ...] = ()
    prefix: Prefix | None = None
    crossing: tuple[Leaf, ...] = ()
    layout: LayoutRead | None = None

    @property
    def ends(self) -> tuple[fx.Node, ...]:
        """All that the graph returns: the loss terms, then the other values."""
        found: tuple[fx.Node, ...] = arguments(self.graph.graph.output_node())[0]
        return found

    @property
    def terms(self) -> tuple[fx.Node, ...]:
        """The nodes of the loss terms; none where the model returned no loss."""
        return self.ends[: len(self.ends) - self.returned.count]

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the model's loss."""
        dtype: torch.dtype = self.terms[0].meta["val"].dtype if self.terms else torch.float32
        return dtype

    def moves(self, placeholder: str) -> bool:
        """Whether this holds a buffer that has another value in each microbatch."""
        return self.updates is not None and self.state.get(placeholder) in self.updates.read

    def __str__(self) -> str:
        sizes = ", ".join(f"{leaf.name}{list(leaf.shape)}" for leaf in self.leaves)
        return (
            f"captured {len(self.graph.graph.nodes)} nodes; {sizes}; {len(self.terms)} loss terms"
        )


def capture(
    model: nn.Module,
    microbatch: Microbatch,
    loss_fn: LossFn | None = None,
    *,
    outputs: Outputs = False,
    train: bool = True,
    hold: Collection[str] = (),
) -> Captured:
    """Trace `model` on one microbatch (a dict of keyword arguments, or a tuple).

    The model returns a scalar loss, an object with `.loss`, or anything that `loss_fn` turns into
    a scalar; outputs: what else is wanted of it (`wanted.Reader`). Without `train` the model runs
    under no_grad. hold: tensors whose values the graph may use, and then holds for alone. Raises
    CaptureError naming the module, the source line and the construct.
    """
    check_norms(model)
    if train:
        check_loss(model, loss_fn)
    tensors, fixed, structure = flatten(microbatch)
    check_call(model, *rebuild([tensor for _, tensor in tensors], structure, fixed))
    reader = Reader(loss_fn, outputs)
    names = [name for name, _ in tensors]
    held = frozenset(number for number, name in enumerate(names) if name in hold)
    whole = WithLoss(model, structure, fixed, reader)
    with recording_functions(), trusting_distributions(), torch.set_grad_enabled(train):
        leaves = apart([tensor for _, tensor in tensors])
        exported = settled(model, whole.moved, lambda: export(whole, leaves, held))
    reason = layout_refusal(exported.layout, tensors)
    if reason:
        raise CaptureError(reason)
    found = captured_of(model, exported, (names, fixed, structure), reader.returned)
    if not train:
        return replace(found, trained=frozenset())
    refuse_outside(found)
    return found


def captured_of(
    model: nn.Module,
    traced: Traced,
    taken: tuple[Sequence[str], tuple[tuple[str, object], ...], Any],
    returned: Returned,
    unknown: Sequence[str] = (),
) -> Captured:
    """What an exported model is. taken: names of its inputs, other values and structure of the
    microbatch; unknown: the inputs whose values only one rank has."""
    (names, fixed, structure), exported = taken, traced.program
    labels, constants = _labels(model, exported, names)
    parameters, trained = _parameters(model)
    module = running_statistics(inline_no_grad(inline_vmap(tied(exported.graph_module, labels))))
    changed = changed_state(module, labels, trained)
    module, drawing = draws(returning(module, labels, changed))
    labels += [(draw.placeholder, False) for draw in drawing]
    module, state = tidy(functionalise(module), labels)
    module = off_meta(loss_terms(module, returned.count + len(changed)))
    chances = [node.name for node in _inputs(module, state)[len(names) :]]
    moving = {*chances, *_varying(state, {*parameters, *changed}, unknown)}
    module, data = find_data_sizes(module, moving)
    module, updates = buffer_updates(module, state, changed, trained)
    return Captured(
        graph=module,
        state=state,
        constants=constants,
        leaves=tuple(map(_leaf, names, _inputs(module, state))),
        structure=structure,
        fixed=fixed,
        data=data,
        values={names[number]: tensor for number, tensor in traced.values.items()},
        reads=traced.reads,
        ranges={s: (r.lower, r.upper) for s, r in exported.range_constraints.items()},
        parameters=parameters,
        trained=trained,
        returned=returned,
        updates=updates,
        draws=placed(drawing, chances, data.symbols),
        layout=traced.layout,
    )


def _parameters(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """Names of all, and of those that want a gradient."""
    wants = {name: p.requires_grad for name, p in model.named_parameters()}
    return frozenset(wants), frozenset(name for name, trained in wants.items() if trained)


def _inputs(module: fx.GraphModule, state: Mapping[str, str]) -> list[fx.Node]:
    """The placeholders of what a microbatch has, and then of what is drawn for it."""
    return [n for n in module.graph.nodes if n.op == "placeholder" and n.name not in state]


def _varying(state: Mapping[str, str], names: Set[str], unknown: Sequence[str]) -> set[str]:
    """The inputs whose values a rank cannot know before a step."""
    return {n for n, name in state.items() if name in names} | set(map(input_name, unknown))


def _labels(
    model: nn.Module, exported: ExportedProgram, names: Sequence[str]
) -> tuple[list[tuple[str, bool]], dict[str, Tensor]]:
    """(name, is state) of every input of the exported graph; and the constants by name."""
    canonical = canonical_names(model)
    labels, constants, leaves = [], {}, iter(names)
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            labels.append((next(leaves), False))
            continue
        own = str(spec.target).removeprefix(PREFIX)
        if own not in canonical:
            constant = exported.constants[str(spec.target)]
            if not isinstance(constant, Tensor):
                raise CaptureError(_strange(constant))
            if is_wrapped(constant):
                raise CaptureError(f"a tensor is made by a transform of forward. {DERIVATIVES}")
            own = f"{own}#{_digest(constant)}"
            constants[own] = constant
        labels.append((canonical.get(own, own), True))
    return labels, constants


def _strange(constant: object) -> str:
    """Why an object cannot be a constant of a graph, and what to do."""
    if isinstance(constant, torch.Generator):
        return f"forward draws from a torch.Generator of its own. {SEEDED}"
    kind = type(constant).__name__
    return f"forward hands an operator a {kind}, of which nothing is known; pass it tensors"


def _digest(tensor: Tensor) -> str:
    """Constants of two variants may be called alike: only equal ones get one name."""
    if tensor.is_meta:
        return f"meta{tuple(tensor.shape)}"
    about = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(about + contents(tensor)).hexdigest()[:12]


def _leaf(name: str, node: fx.Node) -> Leaf:
    value = node.meta["val"]
    shape = tuple(expression(size) for size in value.shape)
    return Leaf(name, node.name, shape, value.dtype, memory_order(value))
