"""Blocks are cut where there are fewer of them than stages: between attention and MLP, for example.

finer(blocks, 4, effort)    -> at least 4 blocks, if that can be had
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from fxpipe.dataflow import data_inputs, is_item

Blocks = tuple[tuple[fx.Node, ...], ...]
_LEAST = 0.15  # of a block's work that each part must have


def finer(blocks: Blocks, wanted: int, effort: Mapping[fx.Node, float]) -> Blocks:
    """The dearest block is cut in two until there are as many as wanted, or none can be cut."""
    found = list(blocks)
    while 0 < len(found) < wanted:
        order = sorted(found, key=lambda block: -_work(block, effort))
        parts = next(filter(None, (_halves(block, effort) for block in order)), None)
        if parts is None:
            break
        at = next(i for i, block in enumerate(found) if block[0] is parts[0][0])
        found[at : at + 1] = parts
    return tuple(found)


def _work(nodes: Sequence[fx.Node], effort: Mapping[fx.Node, float]) -> float:
    return sum(effort.get(node, 0.0) for node in nodes)


def _halves(block: tuple[fx.Node, ...], effort: Mapping[fx.Node, float]) -> Blocks | None:
    """Where the fewest values cross, and then nearest to the middle; None if there is no place."""
    total, done = _work(block, effort), 0.0
    best: tuple[int, float, int] | None = None
    for i in range(1, len(block)):
        done += effort.get(block[i - 1], 0.0)
        if is_item(block[i]) or not _LEAST * total <= done <= (1 - _LEAST) * total:
            continue
        place = _crossing(block, i), abs(done - total / 2), i
        best = min(best or place, place)
    return None if best is None else (block[: best[2]], block[best[2] :])


def _crossing(block: Sequence[fx.Node], at: int) -> int:
    """How many tensors made before a place in a block are read after it; a number costs more."""
    after = set(block[at:])
    read = {source for node in after for source in data_inputs(node)} - after
    made = [node for node in read if node.op == "call_function"]
    return sum(1 if isinstance(node.meta["val"], Tensor) else 100 for node in made)
