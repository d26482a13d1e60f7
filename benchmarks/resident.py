"""By how much a process grows while a step runs. Linux only."""

import gc
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

Step = Callable[[], object]


def peak_growth(step: Step) -> float:
    """MiB by which the resident set grows while a step runs."""
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what there is now
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
