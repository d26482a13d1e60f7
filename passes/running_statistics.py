"""Normalisation in training mode: its hidden writes to running statistics become visible ones.

before  y = batch_norm(x, w, b, mean, var, True, 0.1, 1e-5, True)
after   y = batch_norm(x, w, b, None, None, True, 0.1, 1e-5, True)
        v, m = var_mean(detach(x)); copy_(mean, 0.9 mean + 0.1 m); copy_(var, 0.9 var + 0.1 v)

No schema says that these operators change their arguments; after this pass, the graph does.
"""

import operator
from typing import Any

from torch import fx, nn

from fxpipe.building import Builder
from fxpipe.dataflow import arguments, aten, function
from fxpipe.errors import CaptureError
from fxpipe.passes.inline_no_grad import NO_GRAD
from fxpipe.torch_internals import expression

_MODULES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORMS = (aten.batch_norm.default, aten.instance_norm.default)


def check_norms(model: nn.Module) -> None:
    """Raises CaptureError on batch normalisation in training mode that no graph can hold."""
    for name, module in model.named_modules():
        if not isinstance(module, _MODULES) or not module.training:
            continue
        if isinstance(module, nn.SyncBatchNorm):
            raise CaptureError(
                f"module {name} is a SyncBatchNorm in training mode: it talks to all processes of "
                "its group in each forward, and a pipeline's ranks run other microbatches at that "
                "time. Use BatchNorm, GroupNorm or LayerNorm, or call .eval() on it"
            )
        if module.track_running_stats and module.momentum is None:
            raise CaptureError(
                f"module {name} has momentum=None: it reads its buffer {name}.num_batches_tracked "
                "in Python, which no graph can. Give it a momentum, or call .eval() on it"
            )


def running_statistics(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation, with every running statistic updated by `copy_`."""
    if not any(map(_tracks, module.graph.nodes)):
        return module
    builder = Builder(module)
    for node in module.graph.nodes:
        if _tracks(node):
            _split(builder, node)
        else:
            builder.copy(node)
    return builder.finish()


def _tracks(node: fx.Node) -> bool:
    return node.target in _NORMS and bool(node.args[5]) and isinstance(node.args[3], fx.Node)


def _split(builder: Builder, node: fx.Node) -> None:
    x, weight, bias, mean, var, *rest = builder.args(node)
    call = builder.call
    builder.env[node] = call(function(node), node, x, weight, bias, None, None, *rest)
    sizes = [expression(size) for size in x.meta["val"].shape]
    if 0 in sizes:
        return  # of nothing, eager takes no statistics
    x = call(aten.detach.default, node, x)
    if x.meta["val"].dtype != mean.meta["val"].dtype:
        x = call(aten.to.dtype, node, x, mean.meta["val"].dtype)
    count = None if all(size.is_positive for size in sizes) else _count(builder, node, x)
    for buffer, found in zip((var, mean), _moments(builder, node, x), strict=True):
        _blend(builder, node, buffer, found, count)


def _moments(builder: Builder, node: fx.Node, x: fx.Node) -> list[fx.Node]:
    """Unbiased variance and mean of each channel; of an instance norm, their means."""
    dims = list(range(2, x.meta["val"].dim()))
    each = node.target is aten.instance_norm.default
    pair = builder.call(
        aten.var_mean.correction, node, x, dims if each else [0, *dims], correction=1
    )
    found = [builder.call(operator.getitem, node, pair, i) for i in (0, 1)]
    if each:
        found = [builder.call(aten.mean.dim, node, value, [0]) for value in found]
    return found


def _count(builder: Builder, node: fx.Node, x: fx.Node) -> fx.Node:
    """Of how many numbers a channel consists, which may be none."""
    dims = [dim for dim in range(x.meta["val"].dim()) if dim != 1]
    ones = builder.call(aten.ones_like.default, node, x)
    found: fx.Node = builder.call(aten.sum.dim_IntList, node, ones, dims)
    return found


def _blend(
    builder: Builder, node: fx.Node, buffer: fx.Node, found: fx.Node, count: fx.Node | None
) -> None:
    """buffer = (1 - momentum) buffer + momentum found, where it is found of anything"""
    momentum: Any = arguments(node)[6]
    old = builder.call(aten.mul.Tensor, node, buffer, 1 - momentum)
    new = builder.call(aten.mul.Tensor, node, found, momentum)
    total = builder.call(aten.add.Tensor, node, old, new)
    if count is not None:
        some = builder.call(aten.gt.Scalar, node, count, 0)
        total = builder.call(aten.where.self, node, some, total, buffer)
    written = builder.graph.call_function(aten.copy_.default, (buffer, total))
    written.meta = {**node.meta, "val": buffer.meta["val"], NO_GRAD: True}
