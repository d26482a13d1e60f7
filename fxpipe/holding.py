"""What each rank holds of a model, for all variants together, and what its optimizer has of it."""

from collections.abc import Callable, Collection, Mapping, Set

from torch import Tensor

from fxpipe.copies import Copies, Names
from fxpipe.errors import BatchError
from fxpipe.union import Union


class Holding:
    """The tensors of each rank of one pipe, and which of its parameters each rank has given out.

    every: gives the names of all the model's tensors
    """

    def __init__(self, copies: Copies, ranks: int, every: Callable[[], Set[str]]) -> None:
        self.copies = copies
        self._every = every
        self._ranks = ranks
        self._handed: Names = ()
        self._whole: tuple[Union, Union] | None = None
        self._names: tuple[Union, Names] | None = None
        self._checked: Union | None = None  # what each rank trains of it, its optimizer has

    def whole(self, found: Union) -> Union:
        """A union with the parameters that were given out; the same for the same one."""
        if self._whole is None or self._whole[0] is not found:
            self._whole = found, found.keeping(self._handed)
        return self._whole[1]

    def by_rank(self, union: Union) -> Names:
        """The names that each rank holds; the same object for the same union."""
        if self._names is None or self._names[0] is not union:
            every = self._every()
            self._names = union, tuple(union.held([r], every) for r in range(self._ranks))
        return self._names[1]

    def hand_out(self, found: Union, ranks: Collection[int], state: Mapping[str, Tensor]) -> bool:
        """Note what ranks give out from now on, some of them in this process; whether that changes
        the union as a whole."""
        before = self.whole(found)
        self._handed, self._whole, self._checked = (), None, None
        self._handed = self.by_rank(self.whole(found))
        if len(ranks) < self._ranks:
            self.copies.hand_out(self._handed, ranks, state)
        return before is not found

    def check(self, union: Union) -> None:
        """Raises BatchError if a rank trains a parameter that its optimizer has not: it would stay
        as it is there, while other ranks train their copies of it."""
        if self._checked is union:
            return
        for rank, held in enumerate(self.by_rank(union)):
            trained = held & union.trained
            if self._handed:
                _refuse(rank, trained - self._handed[rank])
            elif self.copies.in_use:
                given = self.copies.handed
                _refuse(rank, trained - given[rank] if rank < len(given) else trained)
        self._checked = union


def _refuse(rank: int, new: Collection[str]) -> None:
    if new:
        raise BatchError(
            f"rank {rank} now trains {min(new)}, which was not among the parameters that it has "
            "given out: its optimizer would not train it. Take this pipe's parameters for a new "
            "optimizer and repeat the step; where a new kind of microbatch has brought it, give "
            "compile an example of each kind, example=[...]"
        )
