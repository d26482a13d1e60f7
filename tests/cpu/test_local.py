"""The local backend: eager's numbers, the same each time, and an end to every step."""

import threading
from dataclasses import fields
from typing import Any

import pytest
import torch

from fxpipe.backends import choose
from fxpipe.backends.wire import pack, unpack
from fxpipe.errors import BackendError, RankError
from fxpipe.program import emit
from fxpipe.runtime import run_step
from fxpipe.table import Table
from tests import handmade

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("schedule", ["nested/1f1b", "upfront/gpipe", "upfront/1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_a_step_gives_what_eager_gives(ranks: int, microbatches: int, schedule: str) -> None:
    eager = handmade.eager(ranks, microbatches)
    step = handmade.run(choose("local", ranks), microbatches, schedule)
    torch.testing.assert_close(step.losses, eager.losses, rtol=1e-12, atol=0)
    assert step.gradients.keys() == eager.gradients.keys()
    for name, grad in step.gradients.items():
        torch.testing.assert_close(grad, eager.gradients[name], rtol=1e-12, atol=1e-15)


def test_the_timeline_has_every_op_and_transfer_in_order() -> None:
    step = handmade.run(choose("local", 3), 4)
    ops = {(span.rank, span.op) for span in step.timeline.spans}
    expected = {(r, op) for r, row in enumerate(step.table.rows) for op in row if op.way != "<"}
    assert ops == expected
    assert all(span.end >= span.start > 0 for span in step.timeline.spans)


def test_one_rank_runs_in_the_thread_of_the_caller() -> None:
    seen = []

    def change(stages: dict[str, Any]) -> None:
        stages["vision"] = _calling("vision", lambda: seen.append(threading.current_thread()))

    handmade.run(choose("local", 1), 1, change=change)
    assert seen == [threading.current_thread()]


def _calling(stage: str, call: Any, ranks: int = 1) -> Any:
    class Calling(handmade.Opaque):
        def F(self, *args: Any) -> Any:  # noqa: N802
            call()
            return super().F(*args)

    made = handmade.stages(ranks)[stage]
    return Calling(*(getattr(made, field.name) for field in fields(made)))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_failing_rank_is_named_with_its_op(ranks: int) -> None:
    def fail() -> None:
        raise ArithmeticError("no such luck")

    last = f"llm{ranks - 1}"

    def change(stages: dict[str, Any]) -> None:
        stages[last] = _calling(last, fail, ranks)

    before = set(threading.enumerate())
    with pytest.raises(RankError, match=rf"rank {ranks - 1} failed in {last}\.F0: Arith") as error:
        handmade.run(choose("local", ranks), 4, change=change)
    assert isinstance(error.value.__cause__, ArithmeticError)
    assert set(threading.enumerate()) <= before


def test_ranks_that_wait_for_each_other_are_named() -> None:
    good, backend = handmade.table(2, 1), choose("local", 2)
    late = [op for op in good.rows[0] if str(op) == "llm0.F0>1"]
    rows = (tuple([op for op in good.rows[0] if op not in late] + late), good.rows[1])
    table = Table(good.cut, rows)
    stages, state = [dict(handmade.stages(2))], handmade.parameters(2)
    programs = {rank: emit(table, rank, stages, state) for rank in range(2)}
    expected = r"rank 0 waits for llm1\.B0<1; rank 1 waits for llm0\.F0<0"
    with pytest.raises(RankError, match=expected):
        run_step(backend, programs, handmade.batch(1), torch.float64)


def test_a_bundle_of_the_wrong_shape_is_refused() -> None:
    def change(stages: dict[str, Any]) -> None:
        made = stages["llm0"]
        stages["llm0"] = handmade.Opaque(
            "llm0",
            lambda *args: ([made.function(*args)[0][0][:1]], []),
            made.state,
            ("llm0.w",),
            made.ends,
        )

    with pytest.raises(RankError, match=r"rank 1 failed in llm0\.F0<0: ValueError: .* expected"):
        handmade.run(choose("local", 2), 1, change=change)


def test_a_packed_bundle_is_what_it_was() -> None:
    dtypes = [torch.bool, torch.bfloat16, torch.complex128, torch.float64, torch.int64]
    tensors = [torch.arange(n).to(dtype) for n, dtype in enumerate(dtypes)]
    tensors.append(torch.tensor(3.5))
    specs = [(tuple(t.shape), t.dtype) for t in tensors]
    found = list(unpack(pack(tensors, torch.device("cpu")), specs))
    assert all(torch.equal(a, b) for a, b in zip(tensors, found, strict=True))
    assert len({t.untyped_storage().data_ptr() for t in found if t.numel()}) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mpi"}, "unknown backend 'mpi'; there are 'local', 'gloo', 'nccl', 'hccl'"),
        ({"name": "gloo", "ranks": 2}, "backend 'gloo' needs torch.distributed: start the script"),
        ({"name": "local", "ranks": 0}, "ranks=0; expected an integer of at least 1"),
    ],
)
def test_a_backend_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        choose(**arguments)


def test_local_is_the_default_without_torch_distributed() -> None:
    assert (choose().name, choose().ranks, choose(ranks=3).mine) == ("local", 1, (0, 1, 2))
