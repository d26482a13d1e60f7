"""What a rank keeps between its ops, counted while the values live: units and bytes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxpipe.opaque import Saved


class Meter:
    """What one rank keeps of one stage: units (microbatches) and bytes, each storage once.

    Bytes are counted when the rank has time, at the latest before any are let go: looking at every
    storage right after an op would delay what other ranks wait for.
    """

    def __init__(self, state: Sequence[Any]) -> None:
        self.peak_units = 0
        self.peak_bytes = 0
        self.forward_bytes = 0
        self._held = _addresses(state)
        self._units: dict[int, int] = {}
        self._storages: dict[int, tuple[int, int]] = {}  # address -> uses, bytes
        self._bytes = 0
        self._uncounted: list[tuple[Kept, Sequence[Any]]] = []

    def take(self, mb: int, kept: Sequence[Any], feed: Sequence[Any]) -> "Kept":
        """The list that counts while it lives. Parameters and inputs are not kept: others do."""
        result = Kept(kept, self, mb, by_forward=mb not in self._units)
        self._units[mb] = self._units.get(mb, 0) + 1
        self.peak_units = max(self.peak_units, len(self._units))
        if kept:
            self._uncounted.append((result, feed))
        return result

    def count(self) -> None:
        """Count the bytes of what was taken since the last time."""
        while self._uncounted:
            kept, feed = self._uncounted.pop()
            seen = _addresses(feed)
            for storage in [v.untyped_storage() for v in _tensors(kept)]:
                address = storage.data_ptr()
                if address not in self._held and address not in seen:
                    seen.add(address)
                    uses, size = self._storages.get(address, (0, storage.nbytes()))
                    self._storages[address] = (uses + 1, size)
                    self._bytes += 0 if uses else size
                    kept.storages.append(address)
            if kept.by_forward:
                size = sum(self._storages[address][1] for address in kept.storages)
                self.forward_bytes = max(self.forward_bytes, size)
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def free(self, storages: list[int]) -> None:
        """The op that reads them has started, and lets go of each as it goes."""
        for address in storages:
            uses, size = self._storages.pop(address)
            if uses > 1:
                self._storages[address] = (uses - 1, size)
            else:
                self._bytes -= size
        storages.clear()

    def end(self, mb: int) -> None:
        """A list is gone."""
        self._units[mb] -= 1
        if not self._units[mb]:
            del self._units[mb]


class Kept(list[Any]):
    """A list of kept values that tells its meter when it is cleared and when it dies."""

    __slots__ = ("_mb", "_meter", "by_forward", "storages")

    def __init__(self, values: Sequence[Any], meter: Meter, mb: int, by_forward: bool) -> None:
        super().__init__(values)
        self.by_forward = by_forward
        self.storages: list[int] = []
        self._meter = meter
        self._mb = mb

    def clear(self) -> None:
        """Let go of every value."""
        self._meter.count()
        super().clear()
        self._meter.free(self.storages)

    def __del__(self) -> None:
        self._meter.free(self.storages)
        self._meter.end(self._mb)


def _tensors(kept: Sequence[Any]) -> list[Tensor]:
    """The tensors among kept values, and those that autograd has saved for an opaque stage."""
    saved = [t for value in kept if isinstance(value, Saved) for t in value.tensors]
    return [*(value for value in kept if isinstance(value, Tensor)), *saved]


def _addresses(values: Sequence[Any]) -> set[int]:
    return {v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor)}
