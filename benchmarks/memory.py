"""What fxpipe holds: live encoder activations as microbatches grow, and bytes kept between F and B.

    python -m benchmarks.memory [--ranks 4] [--schedule nested/1f1b] [--json FILE]

(a) The most units of the encoder that each rank holds at once in a step of M = 8, 16, 32, 64, as
    the runtime counted them. They must not grow with M.
(b) For each stage, the bytes that it keeps of one microbatch between F and B, beside those that
    eager autograd saves in the same modules: distinct storages, without parameters and inputs.
    They must not be more. (The runtime's peak is a little higher: it also has what B keeps for W.)
One process (backend `local`). Exit code 1 when either does not hold.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.plain import Plain, microbatches
from fxpipe.cut import Kind, Role
from fxpipe.runtime import Rank

COUNTS = (8, 16, 32, 64)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedule", default="nested/1f1b")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Plain()
    pipe = fxpipe.compile(
        model,
        example=microbatches(1)[0],
        schedule=given.schedule,
        ranks=given.ranks,
        backend="local",
    )
    kept = kept_bytes(pipe, model)
    live = live_units(pipe)
    print(text(given, live, kept))
    if given.json:
        Path(given.json).write_text(json.dumps({"live": live, "kept": kept}, indent=1))
    return int(not (flat(live) and all(row["fxpipe"] <= row["eager"] for row in kept)))


def live_units(pipe: Any) -> dict[int, dict[str, int]]:
    """For each number of microbatches, the encoder's peak units and bytes over the ranks."""
    found = {}
    for count in COUNTS:
        pipe.step(microbatches(count))
        encoders = {s.name for s in pipe.cut.of(Role.ENCODER)}
        peaks = [peak for peak in pipe.timeline.peaks if peak.stage in encoders]
        found[count] = {
            "units": max(peak.units for peak in peaks),
            "bytes": max(peak.bytes for peak in peaks),
            "all": sum(peak.units for peak in peaks),
        }
    return found


def flat(live: dict[int, dict[str, int]]) -> bool:
    """Whether the most that any rank holds is the same for every number of microbatches."""
    return len({row["units"] for row in live.values()}) == 1


def kept_bytes(pipe: Any, model: nn.Module) -> list[dict[str, Any]]:
    """For each stage, the bytes that fxpipe keeps of one microbatch and that eager saves."""
    batch = microbatches(1)
    ours: dict[str, int] = {}
    with observed(ours):
        pipe.step(batch)
    peaks = {peak.stage: peak.bytes for peak in pipe.timeline.peaks}
    homes = {name: stage for stage in ours for name in pipe.graphs[stage].trained}
    eager = saved_bytes(model, batch[0], homes)
    return [
        {"stage": stage, "fxpipe": size, "eager": eager[stage], "peak": peaks[stage]}
        for stage, size in ours.items()
    ]


@contextmanager
def observed(kept_bytes: dict[str, int]) -> Iterator[None]:
    """While open, note the bytes of the distinct storages that each stage's F keeps.

    Where the running rank is handed them: the graph that a step calls is a bound copy of the
    stage's, so that nothing set on `pipe.graphs` is seen by a step.
    """
    keep = Rank.keep

    def noted(self: Rank, stage: str, mb: int, kept: list[Any], state: Any, feed: Any) -> Any:
        if self.now == f"{stage}.{Kind.F}{mb}":
            given = {_storage(value) for value in (*state, *feed) if isinstance(value, Tensor)}
            sizes = {
                _storage(t): t.untyped_storage().nbytes() for t in kept if isinstance(t, Tensor)
            }
            kept_bytes[stage] = sum(size for at, size in sizes.items() if at not in given)
        return keep(self, stage, mb, kept, state, feed)

    Rank.keep = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Rank.keep = keep  # type: ignore[method-assign]


def saved_bytes(
    model: nn.Module, batch: dict[str, Tensor], homes: dict[str, str]
) -> dict[str, int]:
    """Bytes of the distinct storages that eager saves for backward, by stage.

    homes: parameter -> stage. An op belongs to the stage of the last module entered that holds
    a parameter of its own.
    """
    given = {_storage(t) for t in (*model.parameters(), *model.buffers(), *batch.values())}
    saved: dict[str, dict[int, int]] = defaultdict(dict)
    stage = next(iter(homes.values()))

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            nonlocal stage
            stage = name

        return hook

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in given:
            saved[stage][_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = [
        model.get_submodule(parameter.rpartition(".")[0]).register_forward_pre_hook(enter(home))
        for parameter, home in homes.items()
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch)
    for handle in hooks:
        handle.remove()
    del loss
    return {name: sum(storages.values()) for name, storages in saved.items()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def text(given: Any, live: dict[int, dict[str, int]], kept: Iterable[dict[str, Any]]) -> str:
    """What a person reads."""
    lines = [f"{given.schedule}, {given.ranks} ranks, backend local"]
    lines += ["encoder activations held at once: microbatches, units on a rank, bytes, all ranks"]
    lines += [
        f"{count:4d} {row['units']:6d} {row['bytes']:10d} {row['all']:6d}"
        for count, row in live.items()
    ]
    lines += [f"do not grow: {'PASS' if flat(live) else 'FAIL'}"]
    lines += ["bytes kept of one microbatch between F and B: stage, fxpipe, eager, ratio; peak"]
    for row in kept:
        ratio = row["fxpipe"] / row["eager"]
        lines.append(
            f"{row['stage']:10s} {row['fxpipe']:10d} {row['eager']:10d}  {ratio:.3f} x  "
            f"{'PASS' if ratio <= 1 else 'FAIL'}  peak {row['peak']}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
