"""What each rank holds of a model, for all variants together, and what its optimizer has of it."""

from collections.abc import Callable, Collection, Set

from fxpipe.copies import Copies, Names
from fxpipe.errors import BatchError
from fxpipe.union import Union


class Holding:
    """The tensors of each rank of one pipe.

    every: gives the names of all the model's tensors. What ranks have given out begins with what
    the pipes before have: their optimizers may be the ones in use.
    """

    def __init__(self, copies: Copies, ranks: int, every: Callable[[], Set[str]]) -> None:
        self.copies = copies
        self._every = every
        self._ranks = ranks
        self._handed: Names = copies.handed if len(copies.handed) == ranks else ()
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

    def hand_out(self, found: Union) -> bool:
        """Note what ranks give out from now on; whether that changes the union as a whole."""
        before = self.whole(found)
        self._handed, self._whole = (), None
        self._handed = self.copies.handed = self.by_rank(self.whole(found))
        self._checked = None
        return before is not found

    def check(self, union: Union) -> None:
        """Raises BatchError if microbatches have brought a rank a parameter that it has not given
        out: its optimizer would leave it as it is, while other ranks train their copies of it."""
        if self._handed and self._checked is not union:
            for rank, held in enumerate(self.by_rank(union)):
                _check(rank, (held & union.trained) - self._handed[rank])
        self._checked = union


def _check(rank: int, new: Collection[str]) -> None:
    if new:
        raise BatchError(
            f"rank {rank} now trains {min(new)}, which was not among the parameters that it has "
            "given out: its optimizer would not train it. Give compile an example of each path, "
            "example=[...]; or take this pipe's parameters again for a new optimizer, and repeat "
            "the step"
        )
