"""The nested pipeline: encoder and generator units inside the base rows (BigMac, arXiv 2605.25451).

Removing the ops of replicated stages from any row gives the base row back: the base is never
reordered, only waited for. The microbatches kP..kP+P-1 are wave k; microbatch m is owned by rank
m mod P, and each rank runs one unit of each wave.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind, Role, Stage
from fxpipe.table import Op, Table, inputs
from fxpipe.units import backward, forward, replicated
from fxpipe.walk import Wave, walk


def nest(base: Table, costs: Costs) -> Table:
    """Put the waves of encoders and generators into base rows.

        rank 0: llm0.F0 llm0.F1 llm0.B0 ...  ->  vision.F0 llm0.F0 llm0.F1 vision.F2 llm0.B0 ...

    The rows are walked in time with the durations of `costs`. A wave is ready for all ranks at
    once, so they all pause their base at the same time and the pipeline shifts as a whole. A wave
    that is not urgent fills idle time first. The walk is an execution: no deadlock can come of it.
    It is walked twice, with encoder forwards that wait for memory and with ones that do not, and
    the second is taken only where it ends sooner.
    """
    parts = _Parts.of(base)
    starts = range(0, base.microbatches, base.cut.ranks)
    walks = [
        walk(base, [wave for start in starts for wave in parts.at(start, patient)], costs)
        for patient in (True, False)
    ]
    _, rows = min(walks, key=lambda walked: walked[0])
    return Table(base.cut, rows)


@dataclass(frozen=True)
class _Parts:
    """The three waves of a group of microbatches, and when each runs."""

    base: Table
    encoders: tuple[Stage, ...]
    generators: tuple[Stage, ...]
    reader: Stage | None  # the first sharded stage that an encoder feeds
    before: dict[Op, Op | None]  # what stands before each op of the reader's row

    @staticmethod
    def of(base: Table) -> "_Parts":
        encoders = replicated(base.cut, Role.ENCODER)
        generators = replicated(base.cut, Role.GENERATOR)
        reader = _reader(base.cut, encoders)
        row = () if reader is None or reader.rank is None else base.rows[reader.rank]
        before = dict(zip(row, (None, *row), strict=False))
        return _Parts(base, encoders, generators, reader, before)

    def at(self, start: int, patient: bool) -> Iterator[Wave]:
        """Encoder forwards; generator forwards and backwards; encoder backwards.

        Forwards of encoders must run once their reader is next and may one wave earlier; a patient
        one not before the gradients of the wave before that are there. Their backwards run once the
        gradients of the whole wave are. So two units live on a rank while the base holds P
        microbatches, or three, whatever the number of microbatches is.
        """
        middle = self._generator_units(start)
        behind = self._backward_units(start)
        yield Wave(self._forward_units(start), self._must(start), self._may(start, patient))
        yield Wave(middle, waits=self._reads(middle))
        yield Wave(behind, waits=self._reads(behind))

    def _owned(self, start: int) -> Iterator[range]:
        """For each rank its microbatch of a wave, or none in the last, partial one."""
        end = min(start + self.base.cut.ranks, self.base.microbatches)
        return (range(mb, min(mb + 1, end)) for mb in range(start, start + self.base.cut.ranks))

    def _forward_units(self, start: int) -> tuple[tuple[Op, ...], ...]:
        return tuple(
            tuple(op for mb in own for op in forward(self.encoders, mb))
            for own in self._owned(start)
        )

    def _generator_units(self, start: int) -> tuple[tuple[Op, ...], ...]:
        return tuple(
            tuple(
                op for mb in own for half in (forward, backward) for op in half(self.generators, mb)
            )
            for own in self._owned(start)
        )

    def _backward_units(self, start: int) -> tuple[tuple[Op, ...], ...]:
        return tuple(
            tuple(op for mb in own for op in backward(self.encoders, mb))
            for own in self._owned(start)
        )

    def _reads(self, units: Sequence[tuple[Op, ...]]) -> frozenset[Op]:
        """What the units of a wave read that they do not make."""
        own = {op for unit in units for op in unit}
        return frozenset(value for op in own for value in inputs(op, self.base.cut)) - own

    def _must(self, start: int) -> frozenset[Op]:
        """What stands before the wave's first reader in its row."""
        if self.reader is None:
            made = {op for unit in self._forward_units(start) for op in unit}
            return self._reads(self._generator_units(start)) - made
        before = self.before[Op(self.reader.name, Kind.F, start)]
        return frozenset() if before is None else frozenset([before])

    def _may(self, start: int, patient: bool) -> frozenset[Op] | None:
        earlier = start - self.base.cut.ranks
        if self.reader is None or earlier < 0:
            return None
        before = earlier - self.base.cut.ranks
        wanted = patient and before >= 0
        freed = frozenset() if not wanted else self._reads(self._backward_units(before))
        return freed | {Op(self.reader.name, Kind.F, earlier)}


def _reader(cut: Cut, encoders: Sequence[Stage]) -> Stage | None:
    names = {stage.name for stage in encoders}
    fed = {seam.target for seam in cut.seams if seam.source in names}
    return next((s for s in cut.stages if s.name in fed and s.rank is not None), None)
