"""The object that compile returns: its levels, its step, its parameters."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import fxpipe
from benchmarks.memory import saved_bytes
from fxpipe.cut import Kind
from fxpipe.schedule import base_rows
from fxpipe.verify import verify
from tests import models

THREE = models.CASES["three"]


@pytest.fixture(scope="module")
def pipe() -> fxpipe.Pipe:
    torch.set_num_threads(1)
    example = THREE.batch(False, torch.float64)[0]
    return fxpipe.compile(
        THREE.build(torch.float64),
        example,
        schedule="nested/1f1b",
        ranks=4,
        microbatches=8,
        loss_fn=THREE.loss_fn,
    )


@pytest.fixture(autouse=True)
def _fresh(pipe: fxpipe.Pipe) -> Iterator[None]:
    pipe.model.zero_grad()
    yield


def test_table_prints_parses_and_verifies(pipe: fxpipe.Pipe) -> None:
    table = pipe.table
    assert table.microbatches == 8
    assert fxpipe.Table.parse(str(table)) == table
    verify(table)
    assert table.only(["llm"]) == base_rows(pipe.cut, 8, "nested/1f1b")


def test_regions_and_stages(pipe: fxpipe.Pipe) -> None:
    assert list(pipe.regions.roles) == ["vision", "llm", "generator"]
    assert list(pipe.stages) == ["vision", "llm0", "llm1", "llm2", "llm3", "generator"]
    pairs = {(seam.source, seam.target) for seam in pipe.cut.seams}
    assert {("vision", "llm0"), ("vision", "llm2"), ("llm3", "generator")} <= pairs
    assert ("llm0", "llm3") in pipe.cut.shared
    assert ("vision", "generator") in pipe.cut.shared


def test_graphs_split_the_backward(pipe: fxpipe.Pipe) -> None:
    graphs = pipe.graphs["llm1"]
    products = [
        sum(n.op == "call_function" and "mm" in str(n.target) for n in graph.graph.nodes)
        for graph in (graphs.B, graphs.W)
    ]
    # One block: two batched products of attention have two gradients each; four linears one each.
    assert products == [4 + 4, 4]
    assert pipe.graphs["vision"].kinds == (Kind.F, Kind.W)


def test_explain_names_every_module(pipe: fxpipe.Pipe) -> None:
    text = pipe.explain()
    for name, module in pipe.model.named_modules():
        if list(module.parameters(recurse=False)):
            assert name in text
    assert "loose node" in text
    assert "on rank 3" in text


def test_program_is_straight_line_python(pipe: fxpipe.Pipe) -> None:
    code = pipe.program(3).code
    assert "llm3_F0 = self.llm3_F(" in code
    assert [line for line in code.splitlines() if line.lstrip().startswith(("for ", "if "))] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_live_encoder_activations_do_not_grow(pipe: fxpipe.Pipe, ranks: int) -> None:
    pipe = pipe.reschedule("nested/1f1b", ranks)
    most = []
    for count in (16, 64):
        pipe.step(_double(models.three_regions(count=count)))
        peaks = [peak for peak in pipe.timeline.peaks if peak.stage == "vision"]
        most.append([(peak.units, peak.bytes) for peak in peaks])
    assert most[0] == most[1]
    assert max(units for units, _ in most[0]) <= 3


def _double(batch: list[models.Microbatch]) -> list[models.Microbatch]:
    return [{k: v.double() if v.is_floating_point() else v for k, v in mb.items()} for mb in batch]


def test_keeps_no_more_than_eager(pipe: fxpipe.Pipe) -> None:
    batch = THREE.batch(False, torch.float64)[:1]
    pipe.step(batch)
    ours = {peak.stage: peak.forward_bytes for peak in pipe.timeline.peaks}

    class Loss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **mb: torch.Tensor) -> torch.Tensor:
            return models.both_losses(self.model(**mb))

    homes = {f"model.{n}": "all" for graphs in pipe.graphs.values() for n in graphs.trained}
    eager = saved_bytes(Loss(pipe.model), batch[0], homes)
    assert sum(ours.values()) <= eager["all"]


def test_gradients_add_to_what_is_there(pipe: fxpipe.Pipe) -> None:
    reference = THREE.build(torch.float64)
    batch = THREE.batch(False, torch.float64)
    weights = [0.5, 0.0, 2.0, 1.0, 0.25]
    for _ in range(2):
        result = pipe.step(batch, weights)
        loss = models.eager(THREE, reference, batch, weights)
    assert models.worst(pipe.model, reference) < 1e-10
    assert torch.allclose(result.loss, loss, rtol=1e-12)
    assert result.losses.shape == (5,)


def test_a_batch_in_one_dict(pipe: fxpipe.Pipe) -> None:
    mb = THREE.batch(False, torch.float64)[0]
    whole = {name: torch.cat([tensor] * 8) for name, tensor in mb.items()}
    pipe.step(whole)
    reference = THREE.build(torch.float64)
    models.eager(THREE, reference, [mb] * 8)
    assert models.worst(pipe.model, reference) < 1e-10


def test_names_are_the_models_own(pipe: fxpipe.Pipe) -> None:
    assert dict(pipe.named_parameters()).keys() == dict(pipe.model.named_parameters()).keys()
    assert pipe.state_dict().keys() == pipe.model.state_dict().keys()
    assert len(list(pipe.parameters())) == len(list(pipe.model.parameters()))


def test_follows_requires_grad(pipe: fxpipe.Pipe) -> None:
    model, reference = pipe.model, THREE.build(torch.float64)
    batch = THREE.batch(False, torch.float64)
    for part in (model, reference):
        part.get_submodule("vision").requires_grad_(False)
        part.get_submodule("bridge").requires_grad_(False)
    try:
        pipe.step(batch)
        models.eager(THREE, reference, batch)
        assert models.worst(model, reference) < 1e-10
        assert pipe.cut.stage["vision"].kinds == (Kind.F,)
        assert pipe.cut.stage["llm0"].kinds == (Kind.F, Kind.W)
        assert not any(op.stage == "vision" and op.kind is Kind.W for op in pipe.table.place)
    finally:
        model.requires_grad_(True)


class Skip(nn.Module):
    """Four blocks; two parameters are used by none, one only without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.unused = nn.Linear(6, 6)
        self.shadow = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        first = x
        for layer in self.layers:
            x = layer(x).tanh() + first
        with torch.no_grad():
            target = self.shadow(first) + self.layers[0](x)
        return F.mse_loss(x, target if y is None else y)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_no_grad_parts_and_unused_parameters(ranks: int) -> None:
    torch.manual_seed(0)
    model, reference = Skip().double(), Skip().double()
    reference.load_state_dict(model.state_dict())
    batch = [torch.randn(3, 6).double() for _ in range(3)]
    pipe = fxpipe.compile(model, (batch[0],), ranks=ranks)
    pipe.step([(x,) for x in batch])
    for x in batch:
        (reference(x) / 3).backward()
    assert models.worst(model, reference) < 1e-10
    assert model.unused.weight.grad is None
    assert model.shadow.weight.grad is None


def test_regions_by_name() -> None:
    model = THREE.build(torch.float64)
    given = {"encoder": ["vision"], "backbone": ["embed", "blocks"], "generator": ["generator"]}
    batch = THREE.batch(False, torch.float64)
    pipe = fxpipe.compile(model, batch[0], ranks=2, regions=given, loss_fn=THREE.loss_fn)
    assert list(pipe.regions.roles) == ["encoder", "backbone", "generator"]
    pipe.step(batch)
    reference = THREE.build(torch.float64)
    models.eager(THREE, reference, batch)
    assert models.worst(model, reference) < 1e-10


def test_inductor_engine() -> None:
    torch.manual_seed(0)
    model, reference = Skip().double(), Skip().double()
    reference.load_state_dict(model.state_dict())
    batch = [torch.randn(n, 6).double() for n in (3, 5)]
    pipe = fxpipe.compile(model, (batch[0],), ranks=2, engine="inductor")
    pipe.step([(x,) for x in batch])
    for x in batch:
        (reference(x) / 2).backward()
    assert models.worst(model, reference) < 1e-10


def test_a_model_without_any_region_but_one() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    pipe = fxpipe.compile(model, loss_fn=lambda out: out.square().mean(), ranks=3, backend="local")
    batch = [(torch.randn(n, 6),) for n in (2, 4, 3)]
    result = pipe.step(batch)
    reference = nn.Sequential(
        *[type(m)(6, m.out_features) if isinstance(m, nn.Linear) else m for m in model]
    )
    reference.load_state_dict(model.state_dict())
    loss = sum((reference(x).square().mean() / 3 for (x,) in batch), start=torch.zeros(()))
    loss.backward()
    assert torch.allclose(result.loss, loss.detach(), rtol=1e-5)
    assert models.worst(model, reference) < 1e-5


@torch.library.custom_op("fxpipe_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.register_fake(torch.empty_like)
square.register_autograd(
    lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_a_custom_op_keeps_its_registered_backward() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = square(block(x))
            return x.mean()

    model, x = Squares(), torch.randn(3, 4)
    fxpipe.compile(model, (x,), ranks=2, backend="local").step([(x,)])
    ours = [parameter.grad for parameter in model.parameters()]
    for own, eager in zip(
        ours, torch.autograd.grad(model(x), list(model.parameters())), strict=True
    ):
        assert own is not None
        torch.testing.assert_close(own, eager)
