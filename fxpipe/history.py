"""What autograd remembers of a run: what it has saved, and from which leaves a value comes."""

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    """What autograd saves, each storage once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def hooks(self) -> saved_tensors_hooks:
        """The context in which saving is seen."""
        return saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor.detach())
        return tensor

    @property
    def bytes(self) -> int:
        """Their size, parameters and inputs among them."""
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self.tensors)}
        return sum(storages.values())


def behind(values: Iterable[Tensor]) -> set[int]:
    """The leaves of autograd, by identity, from which values are computed."""
    found: set[int] = set()
    seen: set[object] = set()
    stack = [value.grad_fn for value in values if value.grad_fn is not None]
    found.update(id(value) for value in values if value.grad_fn is None and value.requires_grad)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return found
