"""Orders of base schedules: what a rank of a pipeline runs, and in which order.

A rank holds one or more stages, its chunks. An order yields steps (kind, chunk) and no microbatch
numbers: every chunk takes its microbatches in order, so the n-th step `F0` (the forward of chunk 0)
is that of microbatch n. An order may go on past the last microbatch; what is too much is left out,
and since a microbatch depends on no other one, what remains is still sound.

A rank is written as its place in the pipeline, the first stage of which is at place 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxpipe.cut import Kind

Step = tuple[Kind, int]

F0, F1 = (((Kind.F, chunk),) for chunk in (0, 1))
B0, B1 = (((Kind.B, chunk),) for chunk in (0, 1))
W0, W1 = (((Kind.W, chunk),) for chunk in (0, 1))


@dataclass(frozen=True)
class Place:
    """A rank of a pipeline, and how much it has to run.

    index: 0 holds the first stage. ranks: how many there are. chunks: stages per rank. lead: how
    many more microbatches are in flight than the order needs for itself, because the gradients of
    lead + 1 microbatches come back from behind the last stage together.
    """

    index: int
    ranks: int
    chunks: int
    microbatches: int
    lead: int

    @property
    def behind(self) -> int:
        """Ranks after this one."""
        return self.ranks - 1 - self.index


def breadth_first(place: Place) -> Iterator[Step]:
    """All forwards, chunk after chunk, then all backwards: GPipe, and looped BFS (2211.05953).

    Holds everything: microbatches x chunks.
    """
    for chunk in range(place.chunks):
        yield from [(Kind.F, chunk)] * place.microbatches
    for chunk in reversed(range(place.chunks)):
        yield from [(Kind.B, chunk), (Kind.W, chunk)] * place.microbatches


def one_f_one_b(place: Place) -> Iterator[Step]:
    """1F1B (1806.03377), and interleaved 1F1B (2104.04473) where there are several chunks.

    A backward goes straight down the pipeline and takes twice as long as a forward, so with
    several chunks a rank makes two forwards ahead for each rank behind it. Holds at most
    ranks - index + lead with one chunk, and `reach` + 2 behind + 1 with several.
    """
    hop = 2 if place.chunks > 1 else 1
    yield from _depth_first(place, place.behind * hop, delay=0)


def zero_bubble(place: Place) -> Iterator[Step]:
    """ZB-H1 (2401.10241, section 3.1), and the same interleaved where there are several chunks.

    The weight gradients on rank i stay i backwards behind, so that every rank holds as much as the
    first one does: chunks x ranks. They fill the end, where 1F1B waits for gradients.
    """
    yield from _depth_first(place, place.behind, delay=place.index)


def _depth_first(place: Place, ahead: int, delay: int) -> Iterator[Step]:
    """Forwards and backwards in turn; W is `delay` backwards late."""
    chunks, rounds = range(place.chunks), _rounds(place)
    forwards, backwards = (
        [chunk for size in rounds for chunk in order for _ in range(size)]
        for order in (chunks, chunks[::-1])
    )
    warmup = min(len(forwards), reach(rounds, place.chunks, place.lead) + ahead)
    yield from ((Kind.F, chunk) for chunk in forwards[:warmup])
    for at, chunk in enumerate(backwards):
        if warmup + at < len(forwards):
            yield Kind.F, forwards[warmup + at]
        yield Kind.B, chunk
        if at >= delay:
            yield Kind.W, backwards[at - delay]
    yield from ((Kind.W, chunk) for chunk in backwards[max(0, len(backwards) - delay) :])


def _rounds(place: Place) -> tuple[int, ...]:
    """Sizes of the groups of microbatches that go through one chunk before the next.

    The last rank hands the first microbatch to the first rank's next chunk after `ranks` forwards:
    a smaller group leaves holes, or ranks that wait for each other for ever. So what does not
    divide is spread over the groups or added to the last one, whichever holds less.
    """
    count = max(1, place.microbatches // place.ranks)
    size, rest = divmod(place.microbatches, count)
    even = tuple(size + (at < rest) for at in range(count))
    last = (*[place.ranks] * (count - 1), place.microbatches - place.ranks * (count - 1))
    return min(even, last, key=lambda rounds: reach(rounds, place.chunks, place.lead))


def reach(rounds: Sequence[int], chunks: int, lead: int) -> int:
    """Forwards of the last rank that a backward must follow, less the backwards before it; most.

    (chunks - 1) x the largest round + lead, where the groups of lead + 1 divide the rounds.
    """
    forward: list[int] = []  # where the last stage's steps stand among all of the last rank's
    backward: list[int] = []
    start = 0
    for size in rounds:
        backward += range(start, start + size)
        start += size * chunks
        forward += range(start - size, start)
    last, group = len(forward) - 1, lead + 1
    return max(
        forward[min(last, mb // group * group + lead)] - at for mb, at in enumerate(backward)
    )


def zb_v(place: Place) -> Iterator[Step]:
    """ZB-V (2401.10241, section 6; V-ZB of 2405.15362): the last stage is on the first rank.

    Holds at most 2 (ranks + lead) chunks. No rank waits between its first and its last step if F, B
    and W take as long as each other and there are 2 ranks - 1 microbatches or more.
    """
    total = max(place.microbatches, 2 * place.ranks - 1 + place.lead)
    down, up = place.behind + 1, place.index + place.lead
    yield from F0 * (2 * down - 1)
    yield from (F1 + F0) * up
    yield from (F1 + B1 + W1) * down
    yield from (F0 + B0 + W0 + F1 + B1 + W1) * (total - (2 * down - 1) - up)
    yield from (B0 + W0 + F1 + B1 + W1) * (down - 1)
    yield from (B0 + B1) * up
    yield from (B0 + W0) * down
    yield from (W1 * up) + (W0 * up)


def dualpipe_v(place: Place) -> Iterator[Step]:
    """DualPipeV (DualPipe of 2412.19437, cut in half): each forward stands beside a backward.

    In the pairs F0 B1 and F1 B0 of the steady state one can hide the transfers of the other. Holds
    at most 2 (ranks + lead) + 1 chunks.
    """
    total = max(place.microbatches, 2 * place.ranks + place.lead)
    behind, pairs = place.behind, place.index + 1 + place.lead
    yield from F0 * (2 * behind)
    yield from (F0 + F1) * pairs
    yield from (B1 + W1 + F1) * behind
    yield from (F0 + B1 + W1 + F1 + B0 + W0) * (total - 2 * behind - pairs)
    yield from (B1 + W1 + F1 + B0 + W0) * behind
    backwards = (B1 + B0) * pairs
    for kind, chunk in backwards[:pairs]:
        yield from ((kind, chunk), (Kind.W, chunk))
    late = [(Kind.W, chunk) for _, chunk in backwards[pairs:] + B0 * behind]
    yield from backwards[pairs:]
    for step in late[:behind]:
        yield from (step, *B0)
    yield from late[behind:]
