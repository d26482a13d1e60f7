"""Devices: which one a transport library works on, how to wait for it, what memory it holds."""

import importlib
import resource
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from fxpipe.errors import BackendError


@dataclass(frozen=True)
class Device:
    """One device of this process. `torch.cuda` and `torch.npu` bear the same names."""

    device: torch.device

    @property
    def _module(self) -> ModuleType | None:
        return None if self.device.type == "cpu" else torch.get_device_module(self.device)

    def synchronize(self) -> None:
        """Wait until everything queued on the device has run."""
        if self._module is not None:
            self._module.synchronize(self.device)

    def peak_bytes(self) -> int:
        """The most bytes allocated so far; on a CPU, the process's resident set."""
        if self._module is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(self._module.max_memory_allocated(self.device))


def device_of(library: str) -> Device:
    """The device of a transport library, ready for use. The one place where this is chosen."""
    match library:
        case "gloo":
            _require(dist.is_gloo_available(), library, "this torch is built without it")
            return Device(torch.device("cpu"))
        case "nccl":
            _require(dist.is_nccl_available(), library, "this torch is built without it")
            _require(torch.cuda.is_available(), library, "torch sees no CUDA device")
            return Device(torch.device("cuda", torch.cuda.current_device()))
        case "hccl":
            return _npu()
        case _:
            raise BackendError(
                f"unknown backend {library!r}; there are 'local', 'gloo', 'nccl' and 'hccl'"
            )


def _npu() -> Device:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise BackendError(f"backend 'hccl' needs the package torch_npu: {error}") from error
    npu = torch.get_device_module("npu")
    _require(npu.is_available(), "hccl", "torch_npu sees no device")
    return Device(torch.device("npu", npu.current_device()))


def _require(available: bool, library: str, reason: str) -> None:
    if not available:
        raise BackendError(f"backend {library!r} is not available here: {reason}; use 'local'")
