"""`pipe.evaluate`: eager's losses and outputs, in eager's structure, and nothing changed."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxpipe
from fxpipe.cut import Kind
from fxpipe.errors import BatchError, CaptureError, FxpipeError
from fxpipe.trees import take_apart
from tests import models


def same(ours: Any, eager: Any) -> None:
    """Equal structures, and equal leaves."""
    (mine, own), (leaves, tree) = take_apart(ours), take_apart(eager)
    assert own == tree
    for a, b in zip(mine, leaves, strict=True):
        if isinstance(b, Tensor):
            assert not a.requires_grad
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        else:
            assert a == b


@pytest.mark.parametrize(("schedule", "ranks"), [("nested/1f1b", 4), ("stage/zb-h1", 3)])
def test_any_number_of_microbatches(schedule: str, ranks: int) -> None:
    torch.manual_seed(0)
    model = models.AnyRegions((True,), (False,)).double()
    batch = model.batch(3)
    pipe = fxpipe.compile(model, batch[0], schedule=schedule, ranks=ranks, backend="local")
    trained = pipe.step(batch).losses
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for count in (1, 3, 7):
        mbs = (batch * 3)[:count]
        result = pipe.evaluate(mbs, outputs=True, weights=[0.5] * count)
        with torch.no_grad():
            same(list(result.outputs or ()), [model(**mb) for mb in mbs])
        assert result.losses is not None
        assert torch.allclose(result.losses, trained.repeat(3)[:count], rtol=1e-12)
        assert torch.allclose(result.loss, 0.5 * result.losses.sum(), rtol=1e-12)
    assert pipe.evaluate(batch).outputs is None
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    # What trains and what evaluates hold the same tensors on every rank.
    (_, variants, steps) = next(iter(pipe._evaluations._kept.values()))
    assert {op.kind for op in steps.table(3).place} == {Kind.F}
    homes = {stage.name: stage.rank for stage in pipe.cut.stages}
    assert {stage.name: stage.rank for stage in variants.first.cut.stages} == homes
    for stage, graphs in variants.first.graphs.items():
        assert set(graphs.state) <= set(pipe.graphs[stage].state)


@dataclass
class Options:
    """A dataclass that nobody has registered."""

    shift: Tensor
    mode: str = "add"
    other: Tensor | None = None


@dataclass
class Out:
    """What `Nested` returns; not registered either."""

    loss: Tensor | None
    logits: dict[str, Any]
    hidden: tuple[Tensor, ...]
    length: int
    ids: Tensor
    kind: str = "lm"


class Nested(nn.Module):
    """Nested inputs and outputs, labels that may be absent, an output that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 9)

    def forward(
        self, ids: Tensor, images: list[Tensor], options: Options, labels: Tensor | None = None
    ) -> Out:
        x = self.embed(ids) + sum(image.mean() for image in images)
        hidden = []
        for index, block in enumerate(self.blocks):
            x = block(x).tanh()
            if index == 1 and options.mode == "add":
                x = x + options.shift
            hidden.append(x)
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        text = {"text": logits, "image": None}
        return Out(loss, text, tuple(hidden), int(ids.shape[1]), ids)


def nested(labels: bool = True) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    batch: list[dict[str, Any]] = []
    for length in (4, 5, 7):
        ids = torch.randint(0, 9, (2, length), generator=g)
        options = Options(torch.randn(1, 1, 6, generator=g).double())
        images = [torch.randn(3, generator=g).double(), torch.randn(2, generator=g).double()]
        batch.append({"ids": ids, "images": images, "options": options})
        if labels:
            batch[-1]["labels"] = ids
    return batch


def with_metrics(out: Out) -> tuple[Any, dict[str, Tensor]]:
    """A loss, and numbers that are born on two stages."""
    metrics = {"early": out.hidden[0].square().mean(), "late": out.logits["text"].argmax(-1).sum()}
    return out.loss, {**metrics, "same": metrics["early"]}


def test_structures_come_back() -> None:
    model, reference = Nested().double(), Nested().double()
    reference.load_state_dict(model.state_dict())
    pipe = fxpipe.compile(
        model,
        nested()[0],
        ranks=2,
        backend="local",
        schedule="nested/1f1b",
        loss_fn=with_metrics,
    )
    result = pipe.step(nested(), order=[2, 0, 1])
    assert list(result.metrics) == ["early", "late", "same"]
    for i, mb in enumerate(nested()):
        loss, metrics = with_metrics(reference(**mb))
        (loss / 3).backward()
        torch.testing.assert_close(result.losses[i], loss.detach())
        for name, value in metrics.items():
            torch.testing.assert_close(result.metrics[name][i], value.detach().double())
    assert models.worst(model, reference) < 1e-10
    without = pipe.evaluate(nested(labels=False), outputs=True)
    with torch.no_grad():
        same(list(without.outputs or ()), [model(**mb) for mb in nested(labels=False)])
        picked = pipe.evaluate(nested(), outputs=["logits", "kind"], to=1)
        eager = [model(**mb) for mb in nested()]
        same(list(picked.outputs or ()), [{"logits": e.logits, "kind": e.kind} for e in eager])
        best = pipe.evaluate(nested(), outputs=lambda out: out.logits["text"].argmax(-1))
        same(list(best.outputs or ()), [e.logits["text"].argmax(-1) for e in eager])
    assert without.losses is None
    with pytest.raises(FxpipeError, match=r"no loss: loss_fn returned a None.* Out .*labels"):
        print(without.loss)


def test_a_first_evaluation_needs_no_training() -> None:
    model = Nested().double()
    pipe = fxpipe.compile(model, ranks=2, backend="local")
    with torch.no_grad():
        result = pipe.evaluate(nested(labels=False), outputs="logits")
        same(list(result.outputs or ()), [{"logits": model(**mb).logits} for mb in nested(False)])


def test_what_cannot_be_evaluated() -> None:
    pipe = fxpipe.compile(Nested().double(), ranks=2, backend="local")
    with pytest.raises(CaptureError, match=r"returned Out without a loss.*pass the labels"):
        pipe.evaluate(nested(labels=False))
    with pytest.raises(BatchError, match=r"outputs names 'logit'.*it has loss, logits, hidden"):
        pipe.evaluate(nested(), outputs=["logit"])
    with pytest.raises(BatchError, match="to=2 is none of the 2 ranks"):
        pipe.evaluate(nested(), to=2)
    with pytest.raises(CaptureError, match=r"holds a generator at output.*outputs="):
        pipe.evaluate(nested(), outputs=lambda out: (x for x in out.hidden))
