"""Backends: where ranks run and how they exchange tensors. `choose` is the one place that decides.

local    every rank in this process, for tests, debugging and breakpoints
gloo     one process per rank, on CPUs            nccl  on CUDA devices       hccl  on NPUs
emulated gloo processes whose ops sleep, for as long as a table of costs says
"""

if __name__ != "fxpipe.backends":
    raise ImportError(f"import this package as fxpipe.backends, not as {__name__}")

import atexit
from collections.abc import Sequence
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.backends.base import Backend, DifferError, LostError, Transport
from fxpipe.backends.device import Device
from fxpipe.backends.distributed import Distributed
from fxpipe.backends.emulated import Emulated
from fxpipe.backends.local import Local
from fxpipe.costs import Costs
from fxpipe.device import Device as Speed
from fxpipe.errors import BackendError
from fxpipe.torch_internals import forget_world

__all__ = [
    "NAMES",
    "Backend",
    "Device",
    "DifferError",
    "Emulated",
    "LostError",
    "Transport",
    "choose",
]

NAMES = ("local", "gloo", "nccl", "hccl", "emulated")

_LIBRARIES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

# One per group of processes, with the world that it belongs to: pipelines share connections.
_open: dict[tuple[str, tuple[int, ...]], tuple[object, Distributed]] = {}
_made: WeakSet[Distributed] = WeakSet()


def choose(
    name: str | None = None,
    ranks: int | None = None,
    mesh: DeviceMesh | None = None,
    costs: Costs | Speed | None = None,
) -> Backend:
    """The backend of this name, or the one that torch.distributed was started for.

    ranks: by default the size of the mesh, or of the world; 1 where there is neither. mesh: of one
    dimension, or with one named "pp". costs: what ops take on an emulated machine. In every
    process, call it with the same arguments.
    """
    if name is not None and name not in NAMES:
        raise BackendError(f"unknown backend {name!r}; there are {', '.join(map(repr, NAMES))}")
    started = dist.is_available() and dist.is_initialized()
    if name == "local" or (name is None and not started):
        return _local(ranks, mesh)
    if not started:
        raise BackendError(
            f"backend {name!r} needs torch.distributed: start the script with torchrun and call "
            "torch.distributed.init_process_group() first, or use backend='local'"
        )
    group = _group(mesh)
    members = tuple(dist.get_process_group_ranks(group))
    if ranks not in (None, len(members)):
        where = "the world" if mesh is None else "the mesh"
        raise BackendError(
            f"ranks={ranks}, but {where} has {len(members)} ranks; "
            f"start {ranks} processes, leave `ranks` out, or use backend='local'"
        )
    if name == "emulated":
        return Emulated(_distributed("gloo", members), costs)
    return _distributed(name or _library(group), members)


def _local(ranks: int | None, mesh: DeviceMesh | None) -> Local:
    if mesh is not None:
        raise BackendError("backend 'local' runs every rank in this process and takes no mesh")
    if ranks is not None and not (isinstance(ranks, int) and ranks >= 1):
        raise BackendError(f"ranks={ranks!r}; expected an integer of at least 1")
    return Local(ranks or 1)


def _group(mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if mesh is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    if mesh.ndim == 1:
        return mesh.get_group()
    if "pp" not in (mesh.mesh_dim_names or ()):
        raise BackendError(
            f"the mesh has the dimensions {mesh.mesh_dim_names}; name one 'pp', or pass a slice "
            "of it that has one dimension"
        )
    return mesh.get_group("pp")


def _library(group: dist.ProcessGroup) -> str:
    """The library with which a group was started, for the device that this process has."""
    config = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    found = {device: lib for device, lib in config.items() if lib == _LIBRARIES.get(device)}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in found:
        return found[accelerator.type]
    if "cpu" in found:
        return found["cpu"]
    raise BackendError(
        f"the process group is of {config}; fxpipe has {', '.join(_LIBRARIES.values())}"
    )


def _distributed(name: str, members: Sequence[int]) -> Distributed:
    if list(members) != sorted(members):
        raise BackendError(f"the ranks of the mesh are {members}; they must ascend")
    world = dist.group.WORLD
    key = (name, tuple(members))
    for other, (held, _) in list(_open.items()):
        if held is not world:
            del _open[other]
    if key not in _open or _open[key][1].failure is not None:
        _open[key] = (world, Distributed(name, members))
        _made.add(_open[key][1])
    return _open[key][1]


@atexit.register
def _close_all() -> None:
    """A pipe may live as long as the interpreter, and its groups with it, whatever the process has
    destroyed. Their threads end here: one that lets go of a tensor while the interpreter ends waits
    for a lock that it never gets, and takes the process down."""
    _open.clear()
    while _made:
        _made.pop().close()
    forget_world()
