"""How the gradients of microbatches add up, and which of them need no copy for that."""

from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx

from fxpipe.dataflow import aten, is_item, is_view
from fxpipe.state import grad_dtype
from fxpipe.torch_internals import add_each

Grads = dict[str, Tensor]

# They make new memory, whatever they are given; few others make gradients of parameters.
_NEW = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.sum.dim_IntList,
    aten.embedding_dense_backward.default,
    aten.convolution_backward.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
}


def owned(module: object) -> tuple[bool, ...]:
    """For each tensor that a graph returns, whether the graph has made its memory for it alone.

    An input is not the receiver's, nor are two results that may lie in one memory. Of a stage that
    is no graph nothing is known.
    """
    if not isinstance(module, fx.GraphModule):
        return ()
    result = module.graph.output_node().args[0]
    assert isinstance(result, (tuple, list))
    bases = [_base(node) for node in result]
    uses = Counter(bases)
    return tuple(base is not None and _is_new(base) and uses[base] == 1 for base in bases)


def _base(node: object) -> fx.Node | None:
    """The node in whose memory a tensor lies."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
        return None
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_new(node: fx.Node) -> bool:
    maker = node.all_input_nodes[0] if is_item(node) else node
    return maker.target in _NEW


def accumulate(
    grads: Grads,
    new: Mapping[str, Tensor | None],
    state: Mapping[str, Tensor],
    own: Collection[str] = (),
) -> Grads:
    """`grads` with `new` added in place, as autograd accumulates: in the dtype of each `.grad`.

    The first gradient of a parameter is copied: it may be a view of a value that others still read.
    own: those that nobody else reads, which are taken as they are if their layout is the usual one.
    """
    sums, summands = [], []
    for name, grad in new.items():
        if grad is None:
            continue  # an opaque stage did not use it for this microbatch
        if name in grads:
            sums.append(grads[name])
            summands.append(grad)
        elif name in own and _is_plain(grad, grad_dtype(state[name])):
            grads[name] = grad
        else:
            dtype, layout = grad_dtype(state[name]), torch.contiguous_format
            grads[name] = grad.to(dtype, copy=True, memory_format=layout)
    if sums:
        add_each(sums, summands)
    return grads


def _is_plain(grad: Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient is packed, in its dtype, and fills its memory."""
    if grad.dtype is not dtype or grad.layout is not torch.strided or not grad.is_contiguous():
        return False
    lazy = grad.is_conj() or grad.is_neg()
    return not lazy and grad.untyped_storage().nbytes() == grad.nbytes
