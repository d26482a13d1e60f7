"""Every operator that draws random numbers is given the state of the generator as an input.

before  y = dropout(x, 0.1, True)
after   ones = full([s0, 8], 1); mask = fxpipe::dropout(chance_0, ones, 0.1, True); y = mul(x, mask)

The numbers then follow from that state alone, not from what else has been drawn on the same rank.
What is drawn has the shape and the memory order that eager's has, since these decide which number
goes where; the gradient flows through ordinary operators.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.building import Builder
from fxpipe.chance import Blank, Draw, inverse, seeded, state_of
from fxpipe.dataflow import aten, differentiable, function, is_in_place, is_random, path
from fxpipe.errors import CaptureError
from fxpipe.packed import memory_order
from fxpipe.torch_internals import expression

# Masks of these multiply their input; the others follow from the mask as written below.
_MASKS = {
    aten.dropout: aten.dropout.default,
    aten.dropout_: aten.dropout.default,
    aten.feature_dropout: aten.feature_dropout.default,
    aten.feature_dropout_: aten.feature_dropout.default,
}
_ALPHA = {
    aten.alpha_dropout: None,
    aten.alpha_dropout_: None,
    aten.feature_alpha_dropout: aten.feature_dropout.default,
    aten.feature_alpha_dropout_: aten.feature_dropout.default,
}
# Of these only the shape of the first argument counts.
_LIKE = {aten.rand_like, aten.randn_like, aten.randint_like}
# In-place operators that are not named after what makes a new tensor.
_NEW = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
}
# How many numbers these draw depends on the numbers.
_REJECTING = {
    aten.poisson,
    aten.binomial,
    aten._standard_gamma,
    aten._sample_dirichlet,
}
# The gradients of their arguments are zeros, and not none.
_ZEROS = {aten.normal, aten.bernoulli, aten.poisson, aten.binomial}
_INSIDE = (aten.rrelu, aten.rrelu_, aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
_SDPA = aten.scaled_dot_product_attention.default
_SELU = 1.7580993408473766  # minus the value to which SELU saturates


def draws(module: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Draw, ...]]:
    """The graph with one more placeholder for each operator that draws, and these operators in
    their order. Raises CaptureError on one that cannot be told what to draw."""
    if not any(map(draws_numbers, module.graph.nodes)):
        return module, ()
    writer = _Writer(module)
    for node in module.graph.nodes:
        writer.copy(node)
    return writer.builder.finish(), tuple(writer.found)


def draws_numbers(node: fx.Node) -> bool:
    """Whether an operator draws: dropout that is switched off, or of nothing, does not.

    A custom autograd function may, but that shows only when it is differentiated.
    """
    if not is_random(node) or function(node).namespace == "fxpipe":
        return False
    packet = function(node).overloadpacket
    if packet in _MASKS or packet in _ALPHA:
        return bool(node.args[1]) and bool(node.args[2])
    given = _given(node)
    if "dropout_p" in given:
        return bool(given["dropout_p"])
    if "dropout" in given and "train" in given:
        return bool(given["dropout"]) and bool(given["train"])
    return bool(given.get("training", True))


def _given(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, defaults included."""
    names = function(node)._schema.arguments
    found = {a.name: a.default_value for a in names if a.has_default_value()}
    found.update(zip((a.name for a in names), node.args, strict=False))
    return {**found, **node.kwargs}


class _Writer:
    """The new graph, and the operators that draw, as far as it is written."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.builder = Builder(module)
        self.found: list[Draw] = []
        self.last: fx.Node | None = None

    def copy(self, node: fx.Node) -> None:
        """Take over one node of the old graph."""
        if not draws_numbers(node):
            self.builder.copy(node)
            if node.op == "placeholder":
                self.last = self.builder.env[node]
            return
        packet = function(node).overloadpacket
        if packet in _INSIDE or function(node).namespace != "aten":
            raise CaptureError(_refusal(node))
        value = self._value(node, packet)
        if is_in_place(node):
            target = self.builder.args(node)[0]
            value = self.builder.call(aten.copy_.default, node, target, value)
        self.builder.env[node] = value

    def _value(self, node: fx.Node, packet: Any) -> fx.Node:
        """What an operator makes, as a new tensor."""
        call, args = self.builder.call, self.builder.args(node)
        if packet in _MASKS:
            mask = self._draw(node, _MASKS[packet], (self._like(node, args[0]), *args[1:]), {})
            return call(aten.mul.Tensor, node, args[0], mask)  # type: ignore[no-any-return]
        if packet in _ALPHA:
            return self._alpha(node, args[0], args[1], _ALPHA[packet])
        if node.target is _SDPA:
            return self._attention(node)
        made = _NEW.get(function(node)) or _functional(node)
        if packet in _LIKE or is_in_place(node):
            args = (self._like(node, args[0]), *args[1:])
        args = tuple(self._plain(node, value) for value in args)
        kwargs = fx.node.map_arg(dict(node.kwargs), self.builder.read)
        value = self._draw(node, made, args, dict(kwargs))
        return value if is_in_place(node) else self._with_zeros(node, packet, value)

    def _with_zeros(self, node: fx.Node, packet: Any, value: fx.Node) -> fx.Node:
        """What is drawn, with the gradient that eager has for what decides about it: zeros."""
        for given in self.builder.args(node) if packet in _ZEROS else ():
            if isinstance(given, fx.Node) and differentiable(given.meta["val"]):
                nothing = self.builder.call(aten.mul.Tensor, node, given, 0)
                value = self.builder.call(aten.add.Tensor, node, value, nothing)
        return value

    def _plain(self, node: fx.Node, value: Any) -> Any:
        """A tensor that decides about what is drawn, in the memory order that eager's has."""
        if not isinstance(value, fx.Node) or not isinstance(value.meta["val"], Tensor):
            return value
        order = memory_order(value.meta["val"])
        value = self.builder.call(aten.detach.default, node, value)
        value = self.builder.call(aten.permute.default, node, value, list(order))
        value = self.builder.call(aten.contiguous.default, node, value)
        return self.builder.call(aten.permute.default, node, value, inverse(order))

    def _like(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """Ones, of the shape and the memory order that a new tensor like this one has in eager."""
        like, call = value.meta["val"], self.builder.call
        order = memory_order(like)
        sizes = [self._size(node, value, dim) for dim in order]
        kwargs = {"dtype": like.dtype, "device": like.device}
        ones = call(aten.full.default, node, sizes, 1, **kwargs)
        if list(order) == sorted(order):
            return ones  # type: ignore[no-any-return]
        return call(aten.permute.default, node, ones, inverse(order))  # type: ignore[no-any-return]

    def _size(self, node: fx.Node, value: fx.Node, dim: int) -> Any:
        size = value.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        return self.builder.call(aten.sym_size.int, node, value, dim)

    def _draw(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        """The call of an operator that is told what to draw."""
        state = self._state(node)
        made = self.builder.call(seeded(target), node, state, *args, **kwargs)
        known = _blanks(args, kwargs)
        apart = known is None or function(node).overloadpacket in _REJECTING
        blanks, more = ((), {}) if apart or known is None else known
        kind = made.meta["val"].device.type
        self.found.append(Draw(state.name, target, blanks, more, kind, apart))
        return made  # type: ignore[no-any-return]

    def _state(self, node: fx.Node) -> fx.Node:
        """The placeholder of a new state."""
        graph = self.builder.graph
        with graph.inserting_after(self.last):
            holder = graph.placeholder(f"chance_{len(self.found)}")
        with self.builder.mode:
            state = torch.empty(state_of(torch.device("cpu")).shape, dtype=torch.uint8)
        holder.meta = {"val": state}
        self.last = holder
        return holder

    def _alpha(self, node: fx.Node, x: fx.Node, p: float, mask: Any) -> fx.Node:
        """alpha_dropout: what is dropped becomes -SELU, and an affine map restores the moments."""
        call, like = self.builder.call, self._like(node, x)
        if mask is None:
            kept = self._draw(node, aten.bernoulli.p, (like, 1 - p), {})
        else:
            drawn = self._draw(node, mask, (like, p, True), {})
            kept = call(aten.sign.default, node, drawn)
        scale = ((_SELU**2 * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
        lost = call(aten.mul.Tensor, node, call(aten.sub.Tensor, node, kept, 1), _SELU * scale)
        shift = call(aten.add.Tensor, node, lost, _SELU * scale * p)
        product = call(aten.mul.Tensor, node, x, call(aten.mul.Tensor, node, kept, scale))
        return call(aten.add.Tensor, node, product, shift)  # type: ignore[no-any-return]

    def _attention(self, node: fx.Node) -> fx.Node:
        """Attention with dropout, as softmax and products around a mask of its own."""
        given = {
            name: fx.node.map_arg(value, self.builder.read) for name, value in _given(node).items()
        }
        query, key, p = given["query"], given["key"], given["dropout_p"]
        like = query.meta["val"]
        sizes = [self._size(node, query, dim) for dim in range(like.dim() - 1)]
        sizes.append(self._size(node, key, key.meta["val"].dim() - 2))
        kwargs = {"dtype": like.dtype, "device": like.device}
        ones = self.builder.call(aten.full.default, node, sizes, 1, **kwargs)
        drawn = self._draw(node, aten.dropout.default, (ones, p, True), {})
        mask = self.builder.call(aten.ne.Scalar, node, drawn, 0)
        pair = self.builder.call(
            aten._scaled_dot_product_attention_math.default,
            node,
            *(given[name] for name in ("query", "key", "value", "attn_mask")),
            p,
            given["is_causal"],
            mask,
            scale=given["scale"],
            enable_gqa=given["enable_gqa"],
        )
        return self.builder.call(operator.getitem, node, pair, 0)  # type: ignore[no-any-return]


class _UnknownError(Exception):
    """How much is drawn depends on data."""


def _blanks(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments with shapes in place of tensors; None where one is a number that is no size."""
    try:
        known, more = fx.node.map_arg((args, kwargs), _blank)
    except _UnknownError:
        return None
    return tuple(known), dict(more)


def _blank(node: fx.Node) -> Any:
    value = node.meta["val"]
    if isinstance(value, Tensor):
        shape = tuple(map(expression, value.shape))
        return Blank(shape, memory_order(value), value.dtype, value.device.type)
    if not isinstance(value, (int, torch.SymInt)):
        raise _UnknownError
    return expression(value)


def _functional(node: fx.Node) -> Callable[..., Any]:
    """The operator itself, or what makes a new tensor of what it does in place."""
    if not is_in_place(node):
        return function(node)  # type: ignore[no-any-return]
    packet = getattr(aten, function(node).overloadpacket.__name__.removesuffix("_"), None)
    found: Any = getattr(packet, function(node)._overloadname, None)
    if found is None or found._schema.is_mutable:
        raise CaptureError(_refusal(node))
    return found  # type: ignore[no-any-return]


def check_seeded(graph: fx.Graph, where: str) -> None:
    """Raises CaptureError on an operator of a differentiated graph that draws for itself."""
    for node in graph.nodes:
        if node.op == "call_function" and draws_numbers(node):
            raise CaptureError(
                f"{where}: {node.target} draws random numbers inside of a custom autograd function "
                "or of a backward, so they would depend on the schedule. Draw them in forward, and "
                "pass them to the function as an argument"
            )


def _refusal(node: fx.Node) -> str:
    return (
        f"module {path(node) or '(the model itself)'}: {node.target} draws random numbers in a way "
        "that other ranks cannot follow, so masks would depend on the schedule. Use nn.Dropout "
        "beside it (dropout=0 inside), or draw with torch.rand, torch.randn or Tensor.bernoulli_"
    )
