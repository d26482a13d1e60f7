"""Recomputation: the same gradients from less that is kept, and chance is asked only once."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe.cut import Kind
from tests import models

THREE = models.CASES["three"]
BATCH = THREE.batch(True, torch.float64)


@pytest.fixture(scope="module")
def pipe() -> fxpipe.Pipe:
    torch.set_num_threads(1)
    return fxpipe.compile(
        THREE.build(torch.float64), BATCH[0], ranks=2, loss_fn=THREE.loss_fn, backend="local"
    )


@pytest.fixture(scope="module")
def plain(pipe: fxpipe.Pipe) -> Iterator[dict[str, int]]:
    """Bytes that F keeps of each stage where nothing is recomputed."""
    pipe.step(BATCH)
    yield kept(pipe)


def kept(pipe: fxpipe.Pipe) -> dict[str, int]:
    """The most of any microbatch, whichever rank owns it."""
    found: dict[str, int] = {}
    for peak in pipe.timeline.peaks:
        found[peak.stage] = max(peak.forward_bytes, found.get(peak.stage, 0))
    return found


@pytest.mark.parametrize("regions", [("llm",), ("vision", "llm", "generator")])
def test_gradients_stay_and_kept_bytes_fall(
    pipe: fxpipe.Pipe, plain: dict[str, int], regions: tuple[str, ...]
) -> None:
    reference = THREE.build(torch.float64)
    models.eager(THREE, reference, BATCH)
    again = pipe.reschedule("nested/1f1b", recompute=regions)
    pipe.model.zero_grad()
    again.step(BATCH)
    assert models.worst(pipe.model, reference) < 1e-12
    assert [r.name for r in again.cut.regions if r.recompute] == list(regions)
    for stage, size in kept(again).items():
        if again.cut.stage[stage].region in regions:
            assert size * 5 < plain[stage]
        else:
            assert size == plain[stage]


def test_kept_is_what_was_received(pipe: fxpipe.Pipe) -> None:
    again = pipe.reschedule("nested/1f1b", recompute=("vision", "llm", "generator"))
    again.step(BATCH)
    for name, graphs in again.graphs.items():
        assert set(graphs.kept_b) <= set(again.stages[name].received)
    largest = max(mb["input_ids"].numel() + mb["pixel_values"][..., 0].numel() for mb in BATCH)
    # One hidden state of width 16 in float64, and the mean over features of each sample.
    samples = max(len(mb["input_ids"]) for mb in BATCH)
    assert kept(again)["llm1"] <= 8 * 16 * (largest + samples)
    assert kept(again)["vision"] == 0


def test_the_first_op_of_the_backward_runs_the_forward(pipe: fxpipe.Pipe) -> None:
    def products(graph: torch.fx.GraphModule) -> int:
        nodes = (node for node in graph.graph.nodes if node.op == "call_function")
        return sum("mm" in str(node.target) for node in nodes)

    again = pipe.reschedule("nested/1f1b", recompute=("vision", "llm"))
    for name in ("llm1", "vision"):
        once, twice = pipe.graphs[name], again.graphs[name]
        first = "B" if Kind.B in once.kinds else "W"
        more = products(getattr(twice, first)) - products(getattr(once, first))
        # The last product of the forward feeds only what is sent.
        assert products(once.F) - 2 <= more <= products(once.F)
        assert products(twice.F) == products(once.F)
    assert products(again.graphs["llm1"].W) == products(pipe.graphs["llm1"].W)


class Noisy(nn.Module):
    """Dropout, attention with dropout, and noise that is drawn in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(models.Block(8) for _ in range(4))
        self.head = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.dropout(self.embed(ids), 0.2)
        for block in self.blocks:
            x = block(x + 0.1 * torch.rand_like(x))
            y = x.unflatten(-1, (2, -1)).transpose(1, 2)
            y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)
            x = x + F.dropout(y.transpose(1, 2).flatten(2), 0.3)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("ranks", [1, 2])
def test_chance_is_asked_once(ranks: int) -> None:
    torch.manual_seed(0)
    model = Noisy().double()
    batch = [{"ids": torch.randint(0, 9, (2, 5))} for _ in range(3)]
    pipe = fxpipe.compile(model, batch[0], ranks=ranks, backend="local")
    found = []
    for recompute in ((), ("llm",)):
        pipe = pipe.reschedule("nested/1f1b", recompute=recompute)
        model.zero_grad()
        torch.manual_seed(7)
        losses = pipe.step(batch).losses
        found.append([losses, *(p.grad for p in model.parameters()), torch.rand(3)])
        sizes = kept(pipe)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert all(size > 0 for size in sizes.values())
