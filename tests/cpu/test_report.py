"""What ranks tell each other when a step ends: how much it is, and what it says."""

import pytest
import torch

from fxpipe.cut import Kind
from fxpipe.report import Report
from fxpipe.table import Table
from tests import handmade

pytestmark = pytest.mark.cpu

TWO = """
ranks 2
region llm backbone sharded
stage llm0 of llm: FW, rank 0, cost 1
stage llm1 of llm: FBW, rank 1, cost 1
seam llm0 -> llm1: hidden*
rank 0: llm0.F0 llm0.F0>1 llm0.F1 llm0.F1>1 llm1.B0<1 llm0.W0 llm1.B1<1 llm0.W1
rank 1: llm0.F0<0 llm1.F0 llm1.B0 llm1.B0>0 llm1.W0 llm0.F1<0 llm1.F1 llm1.B1 llm1.B1>0 llm1.W1
"""


def test_losses_of_all_stages_are_added_under_the_numbers_of_the_caller() -> None:
    report = Report(Table.parse(TWO))
    made = [
        {"llm0.F0": (torch.tensor(1.0), torch.tensor(2.0)), "llm0.F1": ()},
        {"llm1.F0": (torch.tensor(10.0),), "llm1.F1": (torch.tensor(20.0, dtype=torch.float64),)},
    ]
    told = [report.write(rank, {}, losses, {}).tolist() for rank, losses in enumerate(made)]
    assert list(map(len, told)) == report.sizes
    assert report.losses(told, (0, 1)).tolist() == [13.0, 20.0]
    assert report.losses(told, (1, 0)).tolist() == [20.0, 13.0]


def test_a_timeline_has_ops_where_they_ran_and_transfers_from_send_to_receipt() -> None:
    report = Report(Table.parse(TWO))
    times = [
        {"llm0.F0": (1.0, 2.0), "llm0.F0>1": (2.0, 2.0), "llm1.B0<1": (5.0, 6.0)},
        {"llm0.F0<0": (1.5, 3.0), "llm1.F0": (3.0, 4.0), "llm1.B0>0": (5.5, 5.5)},
    ]
    told = [report.write(rank, own, {}, {}).tolist() for rank, own in enumerate(times)]
    line = report.timeline(told, (1, 0))
    spans = {str(span.op): (span.rank, span.start, span.end) for span in line.spans}
    begun = spans["llm0.F1"][1] - 1.0  # the time of day when the processes' clock began
    seen = {name: (rank, start - begun, end - begun) for name, (rank, start, end) in spans.items()}
    assert seen["llm0.F1"] == pytest.approx((0, 1.0, 2.0), abs=1e-5)
    assert seen["llm1.F1"] == pytest.approx((1, 3.0, 4.0), abs=1e-5)
    assert seen["llm0.F1>1"] == pytest.approx((0, 2.0, 3.0), abs=1e-5)
    assert seen["llm1.B1>0"] == pytest.approx((1, 5.5, 6.0), abs=1e-5)
    assert line.peaks == ()


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_report_grows_with_the_ops_alone(ranks: int) -> None:
    """Each rank tells of its own ops: all reports together do not grow with ranks times ops."""
    table = handmade.table(ranks, 4 * ranks)
    report = Report(table)
    forwards = sum(op.kind is Kind.F and not op.way for row in table.rows for op in row)
    ops = sum(map(len, table.rows))
    assert sum(report.sizes) == forwards + 2 * ops + 3 * ranks * len(table.cut.stages)
