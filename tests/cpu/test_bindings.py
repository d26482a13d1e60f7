"""Graphs run by Python's own bindings: the same kernels on the same values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.accumulation import accumulate, owned
from fxpipe.passes.bindings import FUNCTIONS, METHODS, bindings

aten = torch.ops.aten
X, Y, V, NUMBERS = torch.rand(3, 3), torch.rand(3, 3), torch.rand(3), torch.tensor([0, 2])
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.t.default, (X,), {}),
    (aten.transpose.int, (X, 0, -1), {}),
    (aten.permute.default, (X, [1, 0]), {}),
    (aten.reshape.default, (X, [-1]), {}),
    (aten.view.default, (X, [9]), {}),
    (aten.expand.default, (V, [2, 3]), {"implicit": False}),
    (aten.expand.default, (V, [2, 3]), {}),
    (aten.select.int, (X, 1, -1), {}),
    (aten.unsqueeze.default, (X, -1), {}),
    (aten.squeeze.dim, (X[:, :1], 1), {}),
    (aten.squeeze.dim, (X, 1), {}),
    (aten.split_with_sizes.default, (X, [1, 2], 1), {}),
    (aten.masked_fill.Scalar, (X, X > 0.5, float("-inf")), {}),
    (aten.unbind.int, (X, 1), {}),
    (aten.unbind.int, (X,), {}),
    (aten.contiguous.default, (X.t(),), {"memory_format": torch.contiguous_format}),
    (aten.clone.default, (X,), {"memory_format": torch.contiguous_format}),
    (aten.clone.default, (X,), {}),
    (aten.mm.default, (X, Y), {}),
    (aten.bmm.default, (X[None], Y[None]), {}),
    (aten.addmm.default, (V, X, Y), {"alpha": 2, "beta": 3}),
    (aten.add.Tensor, (X, Y), {"alpha": 2}),
    (aten.add.Tensor, (X, 1), {}),
    (aten.add.Tensor, (NUMBERS, 1.5), {}),
    (aten.sub.Tensor, (X, Y), {"alpha": 2}),
    (aten.sub.Tensor, (X, 2), {}),
    (aten.mul.Tensor, (X, Y), {}),
    (aten.mul.Tensor, (NUMBERS, 0.5), {}),
    (aten.div.Tensor, (X, 3), {}),
    (aten.div.Tensor, (NUMBERS, NUMBERS + 1), {}),
    (aten.pow.Tensor_Scalar, (X, 2), {}),
    (aten.pow.Tensor_Scalar, (NUMBERS, 0.5), {}),
    *[(op, (X,), {}) for op in (aten.exp.default, aten.cos.default, aten.sin.default)],
    (aten.relu.default, (X,), {}),
    (aten.neg.default, (X,), {}),
    (aten.rsqrt.default, (X,), {}),
    (aten.sigmoid.default, (X,), {}),
    (aten.tanh.default, (X,), {}),
    (aten.where.self, (X > 0.5, X, Y), {}),
    (aten.cat.default, ([X, Y], 1), {}),
    (aten.cat.default, ([X, Y],), {}),
    (aten.stack.default, ([X, Y], -1), {}),
    (aten.sum.dim_IntList, (X, [0], True), {}),
    (aten.sum.dim_IntList, (X, [0]), {"dtype": torch.float64}),
    (aten.sum.dim_IntList, (X, []), {}),
    (aten.mean.dim, (X, [0, 1]), {}),
    (aten.embedding.default, (X, NUMBERS), {}),
    (aten.embedding.default, (X, NUMBERS, 2, False, False), {}),
    (aten.native_layer_norm.default, (X, [3], V, V, 1e-5), {}),
    (aten.native_layer_norm.default, (X, [3], None, None, 1e-5), {}),
    (aten.native_group_norm.default, (X[None], V, V, 1, 3, 3, 3, 1e-5), {}),
    (
        aten.convolution.default,
        (X[None], X[:, None], None, [1], [1], [1], False, [0], 3),
        {},
    ),
    (aten.gelu.default, (X,), {"approximate": "tanh"}),
    (aten.gelu.default, (X,), {}),
]


class _Log(TorchDispatchMode):
    """The operators that run, and all that they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        named = [(a.name, v) for a, v in zip(func._schema.arguments, args, strict=False)]
        every = {a.name: a.default_value for a in func._schema.arguments} | dict(named)
        self.seen.append((func, {k: _plain(v) for k, v in (every | (kwargs or {})).items()}))
        return func(*args, **(kwargs or {}))


def _plain(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def logged(run: Callable[[], Any]) -> tuple[Any, list[object]]:
    with torch.no_grad(), _Log() as log:
        return run(), log.seen


def test_every_binding_is_looked_at() -> None:
    assert {call[0] for call in CALLS} == {*METHODS, *FUNCTIONS}


@pytest.mark.parametrize(
    ("target", "args", "kwargs"), CALLS, ids=[f"{i}-{call[0]}" for i, call in enumerate(CALLS)]
)
def test_a_binding_calls_what_the_operator_does(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    graph, given = fx.Graph(), []

    def holder(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [holder(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(given)}")
        node.meta["val"] = value
        given.append(value)
        return node

    places = tuple(map(holder, args))
    graph.output(graph.call_function(target, places, kwargs))
    module = fx.GraphModule({}, graph)
    bound = bindings(module)
    assert "torch.ops" in module.code and "torch.ops" not in bound.code
    (old, before), (new, after) = (logged(lambda m=m: m(*given)) for m in (module, bound))
    assert before == after
    torch.testing.assert_close(old, new, rtol=0, atol=0, equal_nan=True)


def test_views_of_views() -> None:
    graph, x = fx.Graph(), torch.rand(3, 4)
    holder = graph.placeholder("x")

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = x
        return node

    holder.meta["val"] = x
    turned = call(aten.t.default, holder)
    one = call(aten.reshape.default, call(aten.reshape.default, turned, [2, 6]), [6, 2])
    both = call(aten.reshape.default, turned, [12])
    two = call(aten.reshape.default, both, [2, 6])
    same = call(aten.t.default, call(aten.t.default, holder))
    graph.output((one, both, two, same))
    module = fx.GraphModule({}, graph)
    bound = bindings(module)
    assert module.code.count("reshape.default") == 4 and bound.code.count(".reshape(") == 3
    assert module.code.count("aten.t.") == 3 and bound.code.count(".t()") == 1
    for old, new in zip(module(x), bound(x), strict=True):
        assert torch.equal(old, new)


def test_a_gradient_of_its_own_is_not_copied() -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        product, other = torch.mm(x, y), torch.mm(y, x)
        own = torch.mm(x, x)
        return aten.t.default(own), product, aten.t.default(product), other + 0, x

    x, y = torch.rand(3, 3), torch.rand(3, 3)
    module = make_fx(run)(x, y)
    assert owned(module) == (True, False, False, False, False)
    names = "abcde"
    state = {name: torch.nn.Parameter(torch.rand(3, 3)) for name in names}
    new = dict(zip(names, module(x, y), strict=True))
    wanted = {name: 2 * grad for name, grad in new.items()}
    with torch.no_grad():
        sums = accumulate({}, new, state, {"a", "b"})
        assert sums["b"] is new["b"] and all(sums[n] is not new[n] for n in "acde")
        sums = accumulate(sums, {name: grad.clone() for name, grad in new.items()}, state)
    assert all(torch.equal(sums[name], wanted[name]) for name in "acde")
