"""Graphs whose arguments come in bundles: the calling convention of F, B and W.

    def forward(self, state, feed, kept):
        weight = state[0]; tokens = feed[1]; hidden = kept[0]; kept.clear()

A graph of a hundred inputs is called with three arguments, and because the list of kept
activations is emptied once it is unpacked, each activation dies at its last use inside the graph.
"""

from collections.abc import Mapping, Sequence

from torch import fx
from torch.fx.graph import CodeGen


class BundleCodeGen(CodeGen):
    """Writes `forward(self, *bundles)` and unpacks each placeholder from its bundle.

    bundles: names of the arguments; where: placeholder -> the expression that holds its value;
    consumed: bundles that are lists and are emptied after unpacking.
    """

    def __init__(
        self, bundles: Sequence[str], where: Mapping[str, str], consumed: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.bundles = tuple(bundles)
        self.where = dict(where)
        self.consumed = tuple(consumed)

    def gen_fn_def(
        self,
        free_vars: list[str],
        maybe_return_annotation: str,
        *,
        expanded_def: bool = False,
    ) -> str:
        """The signature, and a line for each placeholder that is used."""
        names = [name.split(":")[0].strip() for name in free_vars]
        pairs = [(name, self.where[name]) for name in names if name in self.where]
        lines = [f"{name} = {place}" for name, place in pairs if name != place]
        lines += [f"{bundle}.clear()" for bundle in self.consumed]
        head = f"def forward(self, {', '.join(self.bundles)}){maybe_return_annotation}:"
        return "\n    ".join([head, *lines])


def bundled(
    owner: fx.GraphModule,
    graph: fx.Graph,
    bundles: Sequence[str],
    where: Mapping[str, str],
    consumed: Sequence[str] = (),
) -> fx.GraphModule:
    """A module of `graph` that is called with bundles; attributes come from `owner`."""
    graph.set_codegen(BundleCodeGen(bundles, where, consumed))
    graph.lint()
    return fx.GraphModule(owner, graph)
