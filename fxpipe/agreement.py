"""What must be the same in every process, compared: the batch, and weights that several ranks hold.

A step that begins with other weights on another rank (a seed that was forgotten), or with another
batch (a sampler that gives each process its own part), would run, and train nonsense; with another
number of microbatches, ranks would wait for each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fxpipe.backends import Backend
from fxpipe.backends.base import DifferError, exchanged
from fxpipe.copies import Names
from fxpipe.errors import BatchError, RankError
from fxpipe.trees import take_apart

_SAMPLE = 4096  # elements of each tensor of a batch that are compared in a step


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


@contextmanager
def alike(
    backend: Backend, parts: Sequence[Any], purpose: Any, given: Mapping[str, Any]
) -> Iterator[None]:
    """What every rank does in here, it does only if all were called with the same batch, purpose
    and arguments. Raises BatchError otherwise, on every rank.

    The ranks compare one number, beside what they do until they exchange something.
    """
    digests = [_digest(purpose), *map(_digest, given.values()), *map(_digest, parts)]
    whole = crc32(repr(digests).encode()) >> 1
    backend.run(lambda rank, transport: transport.pledge(whole, digests))
    try:
        try:
            yield
        except Exception as error:  # of this rank alone, if its batch is another
            with suppress(RankError):
                backend.run(lambda rank, transport: transport.settle())
            raise error
    except DifferError as differ:
        end = ". Compile again to go on" if differ.broken else ""
        raise BatchError(_difference(differ.more, list(given)) + end) from differ


def _difference(found: Sequence[Sequence[int]], given: Sequence[str]) -> str:
    """How the calls of ranks differ, by the digests of all that they were called with."""
    first, skip = found[0], 1 + len(given)
    rank, theirs = next((r, own) for r, own in enumerate(found) if own != first)
    if theirs[0] != first[0]:
        return (
            f"rank {rank} does not do what rank 0 does: every rank of a pipeline calls step, or "
            "evaluate for the same outputs, with the model in the same mode, train or eval"
        )
    for name, own, others in zip(given, theirs[1:skip], first[1:skip], strict=True):
        if own != others:
            return (
                f"rank {rank} was called with another {name}= than rank 0; every rank of a "
                "pipeline makes the same call"
            )
    if len(theirs) != len(first):
        return (
            f"rank {rank} was given {len(theirs) - skip} microbatches and rank 0 "
            f"{len(first) - skip}; every rank of a pipeline takes the same batch"
        )
    at = next(i for i, digest in enumerate(theirs) if digest != first[i]) - skip
    return (
        f"microbatch {at} on rank {rank} is not that on rank 0; every rank of a pipeline takes the "
        "same batch: a sampler must give its ranks the same samples"
    )


def fingerprint(tensor: Tensor) -> int:
    """A number that other values are all but sure to change."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if not plain.numel():
        return 0
    return int(torch.hash_tensor(plain).view(torch.int64))


def _digest(value: Any) -> int:
    """A number that is the same in every process for the same value, in any order of its keys."""
    if isinstance(value, dict) and all(isinstance(leaf, Tensor) for leaf in value.values()):
        pairs = sorted(value.items(), key=itemgetter(0))  # as below, in less time
    else:
        leaves, tree = take_apart(value)
        pairs = sorted(zip(tree.paths(), leaves, strict=True), key=itemgetter(0))
    digest = 0
    for name, leaf in pairs:
        for content in (str(name).encode(), *_contents(leaf)):
            digest = crc32(content, digest)
    return digest


def _contents(leaf: object) -> tuple[Any, ...]:
    """What a leaf is, in bytes that are the same in every process."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {leaf.dtype}".encode(), _sample(leaf)
    plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes))
    return ((repr(leaf) if plain else type(leaf).__qualname__).encode(),)


def _sample(tensor: Tensor) -> Any:
    """Bytes of up to so many elements, from all over the tensor, in their order: a batch of other
    samples, or of the same ones in another order, differs in nearly all. (`fingerprint` would take
    as long as the batch is large, in every step, and does not see an order.)"""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return b""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    step = -(-len(flat) // _SAMPLE)
    few = flat if step <= 1 else flat[::step]
    return few.contiguous().view(torch.uint8).cpu().numpy()
