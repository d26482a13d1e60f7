"""What torch.distributed.pipelining dumps runs here, and what is written here loads there."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from fxpipe import passes
from fxpipe.actions import read_actions, write_actions
from fxpipe.skeletons import PATTERNS, Base, base, homes
from fxpipe.table import Table
from tests.pure.chains import chained

MULTI = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def theirs(kind: type, base: Base, ranks: int, mbs: int) -> PipelineScheduleMulti:
    """A schedule of torch on rank 0, over stages that hold no module."""
    places = homes(base, ranks)
    mapping = dict(enumerate(places))
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(places),
            group_size=ranks,
            group_rank=0,
            submod=None,
            stage_index_to_group_rank=mapping,
        )
        for stage in range(len(places))
        if places[stage] == 0
    ]
    return kind(stages, mbs, loss_fn=lambda output, target: output)


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", MULTI)
def test_what_torch_dumps_runs(name: str, form: str, tmp_path: Path) -> None:
    ours = chained(base(name), 2, 2, 6)
    file = tmp_path / "actions.csv"
    theirs(get_schedule_class(name), base(name), 2, 6)._dump_csv(file, form)
    table = Table(ours.cut, read_actions(file.read_text(), ours.cut))
    passes.run(table)
    if name == "LoopedBFS":  # runs its backwards from the last microbatch to the first
        assert sorted(table.place) == sorted(ours.place)
    else:
        assert table.rows == ours.rows


@pytest.mark.parametrize("name", PATTERNS)
def test_torch_loads_what_is_written(name: str, tmp_path: Path) -> None:
    table = chained(base(name), 3, base(name).default_chunks, 5)
    text = write_actions(passes.run(table))
    file = tmp_path / "actions.csv"
    file.write_text(text)
    schedule = theirs(_PipelineScheduleRuntime, base(name), 3, 5)
    schedule._load_csv(file)  # which checks the order, and adds transfers or finds none that ends
    again = tmp_path / "again.csv"
    schedule._dump_csv(again, "compute_only")
    assert again.read_text().splitlines() == text.splitlines()
    assert read_actions(again.read_text(), table.cut) == table.rows
