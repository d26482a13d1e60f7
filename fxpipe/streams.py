"""The stream of random numbers of one step, from the microbatches that it runs."""

from collections.abc import Collection, Sequence
from functools import partial

from fxpipe.bind import Bound
from fxpipe.chance import Stream, Walk
from fxpipe.table import Table


def held(table: Table, ranks: Collection[int]) -> tuple[str, ...]:
    """The stages that these ranks run."""
    return tuple(s.name for s in table.cut.stages if s.rank is None or s.rank in ranks)


def stream_of(
    batch: Sequence[Bound],
    order: Sequence[int],
    stages: Sequence[str],
    seeds: Sequence[int] | None,
    alone: bool = False,
) -> Stream:
    """The stream of a step; every microbatch will ask it for states.

    order: eager's number of each microbatch; stages: those of this process; alone: there is no
    other rank
    """
    walks: dict[int, Walk] = {}
    device = batch[0].weight.device
    for mb in batch:
        walks[order[mb.index]] = Walk(mb.draws, mb.size, mb.fields(stages), mb.tensors)
    stream = Stream([walks[place] for place in range(len(batch))], device, seeds, alone)
    for mb in batch:
        mb.chance = partial(stream.state, order[mb.index])
    return stream
