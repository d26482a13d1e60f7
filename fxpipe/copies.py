"""Which copies of a model's parameters are the newest, where every process has its own.

A process holds the whole model and trains the parameters of the stages that it runs; its copies of
the others stay as they were. Another schedule, an evaluation, or a microbatch on another path may
have it run these too: then they are fetched from a rank that has trained them.

    copies_of(model).trained(...)          after each step
                    .bring(...)            before ranks run; a collective
                    .refuse(...)           where nothing can be fetched
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fxpipe.backends import Backend
from fxpipe.backends.base import Transport, exchanged
from fxpipe.errors import BatchError

_AT_ONCE = 64 << 20  # bytes of parameters that are under way together
_KNOWN = 16  # sets of held tensors that need not be looked at again

Names = tuple[Set[str], ...]  # of each rank


class Mark(NamedTuple):
    """A tensor as it was: which one, and how often it had been written to."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Mark":
        """As it is now."""
        return cls(tensor, tensor._version)

    def same(self, tensor: Tensor) -> bool:
        """Whether nobody has replaced it or written to it since."""
        return tensor is self.tensor and tensor._version == self.version


class Copies:
    """The copies of one model's parameters, in all processes that train it.

    handed: the names of those that each rank has given out last; in_use: whether an optimizer has
    changed some since
    """

    def __init__(self) -> None:
        self.handed: Names = ()
        self.in_use = False
        self._given: dict[str, Mark] = {}  # of those handed out here, as they were then
        self._rank = 0
        self._behind: Names = ()
        self._marks: dict[str, Mark] = {}  # of those that are behind here, since they are
        self._own: dict[str, Mark] = {}  # of those trained here, at the first step
        self._settled: dict[int, tuple[Names, Names]] = {}  # what was looked at, by id of the first

    def trained(self, held: Names, names: Set[str], rank: int, state: Mapping[str, Tensor]) -> None:
        """A step gave these parameters gradients, on the ranks that hold them."""
        before = self._behind or tuple(frozenset[str]() for _ in held)
        behind = tuple(old | (names - own) for old, own in zip(before, held, strict=True))
        if behind != self._behind:
            self._rank, self._behind = rank, behind
            self._own = {name: Mark.of(state[name]) for name in names & held[rank]} | self._own
            for name in behind[rank] - self._marks.keys():
                self._marks[name] = Mark.of(state[name])

    def hand_out(self, names: Names, ranks: Collection[int], state: Mapping[str, Tensor]) -> None:
        """Ranks give out parameters to an optimizer, some of them in this process."""
        self.handed, self.in_use = names, False
        here = frozenset[str]().union(*(names[rank] for rank in ranks))
        parameters = {n: state[n] for n in here if isinstance(state[n], nn.Parameter)}
        self._given = {name: Mark.of(parameter) for name, parameter in parameters.items()}

    def bring(self, backend: Backend, held: Names, state: Mapping[str, Tensor]) -> bool:
        """Fetch what ranks are about to read and have not trained; whether there was anything new
        to look at. Every rank calls it, with the same `held`. What a rank has been given since by
        the user (`load_state_dict`) stays.

        Raises BatchError if the ranks were others when the model was trained.
        """
        before = self._settled.get(id(held))
        if before is not None and before[1] is self._behind:
            return False
        if self._behind:
            self._compare(backend, state)
        pairs = list(zip(held, self._behind, strict=True)) if self._behind else []
        lacking = tuple(own & behind for own, behind in pairs)
        if any(lacking):
            backend.run(lambda rank, transport: self._fetch(rank, transport, lacking, state))
            self._behind = tuple(old - new for old, new in zip(self._behind, lacking, strict=True))
            for name in lacking[self._rank]:
                del self._marks[name]
                self._own.pop(name, None)
                if name in self._given:
                    self._given[name] = Mark.of(state[name])
        self._settled[id(held)] = held, self._behind
        if len(self._settled) > _KNOWN:
            del self._settled[next(iter(self._settled))]
        return True

    def _compare(self, backend: Backend, state: Mapping[str, Tensor]) -> None:
        """Learn whether optimizers are in use. Raises BatchError, on every rank, if one was another
        rank when the model was trained."""
        written = any(not mark.same(state[name]) for name, mark in self._given.items())
        # Who loads a state writes to the others too.
        in_use = written and any(mark.same(state[name]) for name, mark in self._marks.items())
        said = exchanged(backend, [len(self._behind), self._rank, in_use])
        for rank, (ranks, before, _) in enumerate(said):
            if (ranks, before) != (backend.ranks, rank):
                raise BatchError(
                    f"rank {rank} of {backend.ranks} trained this model as rank {before} of "
                    f"{ranks}, and where its newest parameters are is not known. Gather the "
                    "state_dict() of all ranks, load it into a new model, and compile that"
                )
        self.in_use = any(used for _, _, used in said)

    @property
    def any_behind(self) -> bool:
        """Whether a parameter has fallen behind in this process."""
        return bool(self._marks)

    def refuse(self, names: Set[str], state: Mapping[str, Tensor]) -> None:
        """Raises BatchError if one of these tensors is not the newest in this process. Where what
        is trained here has not changed, no optimizer has run, and all are as they were."""
        if self._own and all(mark.same(state[name]) for name, mark in self._own.items()):
            return
        old = sorted(n for n in names & self._marks.keys() if self._marks[n].same(state[n]))
        if old:
            raise BatchError(
                f"{old[0]} and {len(old) - 1} more are not the newest in this process: other "
                "ranks have trained them. Run the same schedule and ranks as then, or gather the "
                "state_dict() of all ranks and load it into the model here first"
            )

    def _fetch(
        self, rank: int, transport: Transport, lacking: Names, state: Mapping[str, Tensor]
    ) -> None:
        """Say what is still lacking here, then exchange that, a part at a time."""
        names = sorted(frozenset().union(*lacking))
        own = [n in lacking[rank] and self._marks[n].same(state[n]) for n in names]
        mask = torch.tensor(own, dtype=torch.uint8, device=state[names[0]].device)
        asked = transport.collect({(rank, 0): mask}, None)
        missing = {n for at, n in enumerate(names) if any(bool(m[at]) for m in asked.values())}
        for part in _parts(names, missing, state):
            sent = {
                (0, at): state[name].detach()
                for at, name in part.items()
                if next(r for r, old in enumerate(self._behind) if name not in old) == rank
            }
            found = transport.collect(sent, None)
            with torch.no_grad():
                for at, name in part.items():
                    if own[at]:
                        state[name].copy_(found[0, at])


def _parts(
    names: Sequence[str], missing: Set[str], state: Mapping[str, Tensor]
) -> Iterator[dict[int, str]]:
    """The missing ones by number, so many at once as take little memory."""
    part: dict[int, str] = {}
    size = 0
    for at, name in enumerate(names):
        if name in missing:
            part[at] = name
            size += state[name].nbytes
        if part and (size > _AT_ONCE or at == len(names) - 1):
            yield part
            part, size = {}, 0


_COPIES: WeakKeyDictionary[nn.Module, Copies] = WeakKeyDictionary()


def copies_of(model: nn.Module) -> Copies:
    """What all pipes of a model know of its copies."""
    return _COPIES.setdefault(model, Copies())
