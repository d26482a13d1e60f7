"""What a step does to buffers: each microbatch's updates, applied in eager's order.

Stages run microbatches in the order of the table, on several ranks. What updates read of a
microbatch (`stats`) is noted where it is made, and travels with the last exchange of the step, so
that every rank applies all updates in one order: the same bits on each. Nothing is written to the
model's buffers here.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from fxpipe.bind import Bound, Spec
from fxpipe.errors import BatchError, ScheduleError
from fxpipe.table import Op, Table

_WORD = 8  # bytes of a float64, in which stats travel


class Changes:
    """The changed buffers of one step.

    batch: in the order of the table; order: eager's number of each; state: the model's tensors
    """

    def __init__(
        self,
        table: Table,
        batch: Sequence[Bound],
        order: Sequence[int],
        state: Mapping[str, Tensor],
    ) -> None:
        self._table, self._batch, self._state = table, batch, state
        self._eager = sorted(batch, key=lambda mb: order[mb.index])
        self._place = {mb.index: place for place, mb in enumerate(self._eager)}
        self._carried: dict[str, Tensor] = {}
        self._noted: dict[tuple[str, int], dict[str, Tensor]] = {}
        self._foreseen: list[dict[str, Tensor]] = [{}]
        self._any = any(mb.updates is not None for mb in batch)
        if self._any:
            self._check_variants()
            self._check_order()
            self._foresee()

    def value(self, mb: int, name: str) -> Tensor:
        """What a buffer is when a microbatch's forward begins."""
        foreseen = self._foreseen[self._place[mb]]
        if name in foreseen:
            return foreseen[name]
        return self._carried.get(name, self._state[name])

    def note(self, stage: str, mb: Bound, stats: Sequence[Tensor]) -> None:
        """What F of a stage has made for updates."""
        names = (name for name, _ in mb.stats(stage))
        made = dict(zip(names, (stat.clone() for stat in stats), strict=True))
        self._noted[stage, mb.index] = made
        carried = mb.updates.carried.items() if mb.updates is not None else ()
        self._carried.update((name, made[stat]) for name, stat in carried if stat in made)

    def words(self, rank: int) -> int:
        """How many float64 a rank adds to the last exchange."""
        return sum(_words(spec) for _, _, _, spec in self._sent(rank))

    def packed(self, rank: int, numbers: Tensor) -> Tensor:
        """Numbers of a rank, and behind them what it has noted, as so many float64."""
        if not self._any:
            return numbers
        found = [numbers]
        for stage, mb, name, spec in self._sent(rank):
            data = self._noted[stage, mb.index][name].cpu().reshape(-1).view(torch.uint8)
            room = _words(spec) * _WORD - len(data)
            found.append(torch.nn.functional.pad(data, (0, room)).view(torch.float64))
        return torch.cat(found)

    @torch.no_grad()
    def apply(self, tails: Iterable[Tensor]) -> dict[str, Tensor]:
        """The buffers' values after the step, from what all ranks have sent."""
        if not self._any:
            return {}
        stats = self._received(tails)
        now = dict(self._state)
        changed: dict[str, None] = {}
        for place, mb in enumerate(self._eager):
            if mb.updates is None:
                continue
            now.update(self._foreseen[place])
            own = stats[mb.index]
            new = mb.updates.deferred.apply(now, own, mb.size)
            new.update((n, own[stat]) for n, stat in mb.updates.carried.items() if stat in own)
            now.update(new)
            changed.update(dict.fromkeys(new))
        return {**{name: now[name] for name in changed}, **self._foreseen[-1]}

    def _received(self, tails: Iterable[Tensor]) -> dict[int, dict[str, Tensor]]:
        """Stats by microbatch, on the device of the buffers."""
        found: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for rank, tail in enumerate(tails):
            start = 0
            for _, mb, name, spec in self._sent(rank):
                (shape, dtype), end = spec, start + _words(spec)
                data = tail[start:end].clone().view(torch.uint8)
                size = prod(shape) * dtype.itemsize
                device = mb.weight.device
                found[mb.index][name] = data[:size].view(dtype).view(shape).to(device)
                start = end
        return found

    def _sent(self, rank: int) -> Iterator[tuple[str, Bound, str, Spec]]:
        """(stage, microbatch, stat, shape and dtype) of all that a rank sends, in its order."""
        for op in self._table.rows[rank] if self._any else ():
            if op.is_forward:
                mb = self._batch[op.mb or 0]
                for name, spec in mb.stats(op.stage):
                    if self._is_read(mb, name):
                        yield op.stage, mb, name, spec

    def _is_read(self, mb: Bound, stat: str) -> bool:
        """Of what is carried from F to F, only the last value is of use to others."""
        assert mb.updates is not None
        last = self._place[mb.index] == len(self._batch) - 1
        return last or ("stat", stat) in mb.updates.deferred.reads

    def _foresee(self) -> None:
        """The values before each microbatch, in eager's order, of buffers that need no data."""
        names = {n for mb in self._batch if mb.updates for n in mb.updates.foreseen.names}
        now = {name: self._state[name] for name in names}
        self._foreseen = [now]
        for mb in self._eager:
            if mb.updates is not None:
                now = {**now, **mb.updates.foreseen.apply({**self._state, **now}, {}, mb.size)}
            self._foreseen.append(now)

    def _carrying(self, mb: Bound) -> list[tuple[str, str]]:
        """(stage, buffer) where a stage hands a buffer's value to its next microbatch."""
        carried = mb.updates.carried if mb.updates is not None else {}
        made = {stage: {stat for stat, _ in mb.stats(stage)} for stage in self._table.cut.stage}
        return [(s, name) for name, stat in carried.items() for s in made if stat in made[s]]

    def _forwards(self, row: Sequence[Op]) -> list[Bound]:
        return [self._batch[op.mb or 0] for op in row if op.is_forward]

    def _check_variants(self) -> None:
        """A buffer that one microbatch changes must not be read as a constant by another one."""
        every = {id(mb.updates): mb.updates for mb in self._batch if mb.updates is not None}
        changed = {name for updates in every.values() for name in updates.names}
        moving = {name for updates in every.values() for name in updates.read}
        for mb in {mb.variant: mb for mb in self._batch}.values():
            own = mb.updates.read if mb.updates is not None else ()
            deferred = mb.updates.deferred.names if mb.updates is not None else ()
            for name in changed:
                if (name in mb.reads and name not in own) or name in moving.intersection(deferred):
                    raise BatchError(
                        f"buffer {name} is changed by some microbatches of this step and only "
                        "read, or only changed, by others, on another path through the model: run "
                        "them in separate steps, or freeze the buffer with .eval()"
                    )

    def _check_order(self) -> None:
        """What is carried goes from F to F of one rank, in eager's order."""
        for stage, name in dict.fromkeys(p for mb in self._batch for p in self._carrying(mb)):
            rows = [
                [self._place[mb.index] for mb in self._forwards(row) if mb.runs(stage)]
                for row in ([op for op in row if op.stage == stage] for row in self._table.rows)
            ]
            if sum(map(bool, rows)) > 1 or any(row != sorted(row) for row in rows):
                raise ScheduleError(
                    f"buffer {name} is read and changed by the forward of stage {stage}, so its "
                    "microbatches must run one after the other on one rank, and this table has "
                    "another order. Use a placement of stage or ends, without order=; or freeze "
                    "the buffer with .eval()"
                )


def _words(spec: Spec) -> int:
    shape, dtype = spec
    return -(-prod(shape) * dtype.itemsize // _WORD)
