"""What must be the same in every process, compared: the batch, and weights that several ranks hold.

A step that begins with other weights on another rank (a seed that was forgotten), or with another
batch (a sampler that gives each process its own part), would run, and train nonsense.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.backends import Backend
from fxpipe.backends.base import exchanged
from fxpipe.copies import Names
from fxpipe.errors import BatchError
from fxpipe.trees import take_apart


def check_weights(backend: Backend, held: Names, state: Mapping[str, Tensor]) -> None:
    """Raises BatchError, on every rank, if ranks hold different values of one tensor."""
    every = sorted(frozenset().union(*held))
    shared = [name for name in every if sum(name in own for own in held) > 1]
    if not shared:
        return
    mine = held[backend.mine[0]]
    hashes = [fingerprint(state[name]) if name in mine else 0 for name in shared]
    found = exchanged(backend, hashes)
    for at, name in enumerate(shared):
        ranks = [rank for rank, own in enumerate(held) if name in own]
        other = next((r for r in ranks if found[r][at] != found[ranks[0]][at]), None)
        if other is not None:
            raise BatchError(
                f"ranks {ranks[0]} and {other} both hold {name}, with different values. Build the "
                "model with the same seed in every process, or load the same state into each"
            )


def check_batch(backend: Backend, parts: Sequence[Any]) -> None:
    """Raises BatchError, on every rank, if ranks were given different batches."""
    found = exchanged(backend, [_digest(part) for part in parts] or [0])
    for rank, digests in enumerate(found):
        if len(digests) != len(found[0]):
            raise BatchError(
                f"rank {rank} was given {len(digests)} microbatches and rank 0 {len(found[0])}; "
                "every rank of a pipeline takes the same batch"
            )
        at = next((i for i, d in enumerate(digests) if d != found[0][i]), None)
        if at is not None:
            raise BatchError(
                f"microbatch {at} on rank {rank} is not that on rank 0; every rank of a pipeline "
                "takes the same batch: a sampler must give its ranks the same samples"
            )


def fingerprint(tensor: Tensor) -> int:
    """A number that other values are all but sure to change."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if not plain.numel():
        return 0
    return int(torch.hash_tensor(plain).view(torch.int64))


def _digest(part: Any) -> int:
    leaves, tree = take_apart(part)
    text = str([*tree.paths(), *map(_text, leaves)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _text(leaf: object) -> str:
    """A leaf in words that are the same in every process."""
    if isinstance(leaf, Tensor):
        known = 0 if leaf.is_meta else fingerprint(leaf)
        return f"{tuple(leaf.shape)} {leaf.dtype} {known}"
    plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes))
    return repr(leaf) if plain else type(leaf).__qualname__
