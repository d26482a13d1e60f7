"""A small multimodal model as hand-made stages, and the same model in eager.

vision (replicated) feeds the first and the last backbone stage; first and last are tied; the first
stage has a loss of its own. Each stage's B and W are autograd's own, split in two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fxpipe import passes
from fxpipe.backends import Backend
from fxpipe.copying import Ends
from fxpipe.cut import Cut, Kind
from fxpipe.program import emit
from fxpipe.runtime import Step, run_step
from fxpipe.schedule import derive
from fxpipe.stageop import ends_of
from fxpipe.table import Table

WIDTH = 6
Stages = Mapping[str, Any]


def cut(ranks: int) -> Cut:
    """One backbone stage per rank."""
    last = ranks - 1
    lines = [f"ranks {ranks}", "region vision encoder replicated", "region llm backbone sharded"]
    lines.append("stage vision of vision: FW, owner, cost 1")
    lines += [f"stage llm{r} of llm: FBW, rank {r}, cost 1" for r in range(ranks)]
    lines += [f"seam vision -> llm{r}: features* mask" for r in sorted({0, last})]
    lines += [f"seam llm{r} -> llm{r + 1}: hidden*" for r in range(last)]
    lines.append("shared vision")
    lines += [f"shared llm0 llm{last}"] * (ranks > 1)
    return Cut.parse("\n".join(lines))


def table(ranks: int, microbatches: int, schedule: str = "nested/1f1b") -> Table:
    """The verified table of the model."""
    return passes.run(derive(cut(ranks), microbatches, schedule))


def parameters(ranks: int) -> dict[str, Tensor]:
    """`tied` is read by the first and the last stage."""
    make = torch.Generator().manual_seed(0)
    names = ["vision.w", "tied", *(f"llm{r}.w" for r in range(ranks))]
    tensors = [torch.randn(WIDTH, WIDTH, generator=make, dtype=torch.float64) for _ in names]
    return {n: (t / 2).requires_grad_() for n, t in zip(names, tensors, strict=True)}


def _vision(state: list[Tensor], feed: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    features = torch.tanh(feed[0] @ state[0])
    return [features, feed[0] > 0], []


def _block(first: bool, last: bool) -> Callable[..., tuple[list[Tensor], list[Tensor]]]:
    def run(state: list[Tensor], feed: list[Tensor], *received: Tensor) -> Any:
        hidden = feed[0] if first else received[-1]
        losses = []
        if first:
            hidden = hidden @ state[1]
            losses.append(hidden.square().mean() / 8)
        if first or last:
            hidden = hidden + torch.where(received[1], received[0], -received[0])
        hidden = torch.tanh(hidden @ state[0])
        if last:
            losses.append((hidden @ state[1].T - feed[0]).square().mean())
            losses.append(hidden.abs().mean())
        return [] if last else [hidden], losses

    return run


@dataclass(frozen=True)
class Opaque:
    """F, B and W of a stage from a function: `function(state, feed, *received)`."""

    stage: str
    function: Callable[..., Any]
    state: tuple[str, ...]
    trained: tuple[str, ...]
    ends: Ends
    copies: int = 1  # of what is sent: one bundle per seam
    others: tuple[int, ...] = ()
    stats: tuple[str, ...] = ()
    moving: tuple[tuple[int, str], ...] = ()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """A B where something gets its gradients, a W where it trains."""
        return (Kind.F, *[Kind.B] * bool(self.ends.returned), *[Kind.W] * bool(self.trained))

    def F(self, state: Any, feed: Any, received: Any) -> Any:  # noqa: N802
        """Keep autograd's graph."""
        flat = [t.detach().requires_grad_(t.is_floating_point()) for b in received for t in b]
        with torch.enable_grad():
            made, losses = self.function(state, feed, *flat)
        kept = [[v for v in flat if v.requires_grad], made, losses]
        bundles = (tuple(t.detach().contiguous() for t in made),) * self.copies if made else ()
        return bundles, tuple(loss.detach() for loss in losses), [*kept[1], *kept[2], kept]

    def _given(self, kept: Any, wanted: Any, weight: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        _, made, losses = kept
        made = [v for v in made if v.requires_grad]
        grads = [sum(parts[1:], start=parts[0]) for parts in zip(*wanted, strict=True)]
        return made + losses, grads + [weight.expand(()) for _ in losses]

    def B(self, state: Any, feed: Any, kept: Any, wanted: Any, weight: Tensor) -> Any:  # noqa: N802
        """Gradients of what was received."""
        inner = kept[-1]
        kept.clear()
        made, given = self._given(inner, wanted, weight)
        found = torch.autograd.grad(made, inner[0], given, retain_graph=True)
        if self.stage != "llm0" and len(found) == 2:
            returned: Any = ((found[0],), (found[1],))
        else:
            returned = ((found[0],),)
        return returned, [inner, made, given]

    def W(self, state: Any, feed: Any, kept: Any, wanted: Any, weight: Tensor) -> Any:  # noqa: N802
        """Gradients of the parameters."""
        if isinstance(kept[-1], list) and len(kept) == 3 and isinstance(kept[0], list):
            _, made, given = kept
        else:
            made, given = self._given(kept[-1], wanted, weight)
        kept.clear()
        wrt = [state[self.state.index(name)] for name in self.trained]
        return tuple(torch.autograd.grad(made, wrt, given)) if wrt else ()


def stages(ranks: int) -> Stages:
    """The stages of one variant."""
    last, laid = ranks - 1, cut(ranks)
    ends = ends_of(laid, "vision")
    names: tuple[str, ...] = ("vision.w",)
    result = {"vision": Opaque("vision", _vision, names, names, ends, len({0, last}))}
    for r in range(ranks):
        names = (f"llm{r}.w", *(["tied"] if r in (0, last) else []))
        ends = ends_of(laid, f"llm{r}")
        result[f"llm{r}"] = Opaque(f"llm{r}", _block(r == 0, r == last), names, names, ends)
    return result


class Microbatch:
    """A bound microbatch of `size` rows, which draws nothing and changes no buffer."""

    updates = None
    draws = ()
    tensors = ()
    size = None

    returns = False

    def __init__(self, index: int, size: int, weight: float) -> None:
        make = torch.Generator().manual_seed(100 + index)
        self.index = index
        self.variant = 0
        self.weight = torch.tensor(weight, dtype=torch.float64)
        self.x = torch.randn(size, WIDTH, generator=make, dtype=torch.float64)

    def fields(self, stages: object) -> frozenset[str]:
        """None has a name."""
        return frozenset()

    def feed(self, graphs: object) -> tuple[Tensor, ...]:
        """Every stage may read the input."""
        return (self.x,)

    def spec(self, source: str, target: str, kind: Kind) -> Any:
        """Features come with a mask; everything else alone."""
        shape = tuple(self.x.shape)
        mask = [(shape, torch.bool)] * (source == "vision" and kind is Kind.F)
        return ((shape, torch.float64), *mask)


def batch(microbatches: int) -> list[Any]:
    """Microbatches of unequal sizes and weights."""
    return [Microbatch(i, 2 + i % 3, 1 / (i + 2)) for i in range(microbatches)]


def run(
    backend: Backend,
    microbatches: int,
    schedule: str = "nested/1f1b",
    change: Callable[[dict[str, Any]], None] = lambda stages: None,
) -> Step:
    """One step of the model on a backend."""
    ranks = backend.ranks
    made = dict(stages(ranks))
    change(made)
    plan = table(ranks, microbatches, schedule)
    backend.connect(plan)
    state = parameters(ranks)
    programs = {rank: emit(plan, rank, [made], state, ahead=backend.ahead) for rank in backend.mine}
    return run_step(backend, programs, batch(microbatches), torch.float64)


def eager(ranks: int, microbatches: int) -> SimpleNamespace:
    """Losses and gradients of the model as autograd accumulates them."""
    state, made = parameters(ranks), stages(ranks)
    losses = []
    for mb in batch(microbatches):
        features, _ = made["vision"].function([state["vision.w"]], [mb.x])
        hidden: list[Tensor] = []
        terms = []
        for r in range(ranks):
            graphs = made[f"llm{r}"]
            received = (features if r in (0, ranks - 1) else []) + hidden
            hidden, found = graphs.function([state[n] for n in graphs.state], [mb.x], *received)
            terms += found
        loss = sum(terms[1:], start=terms[0])
        (mb.weight * loss).backward()
        losses.append(loss.detach())
    gradients = {name: value.grad for name, value in state.items()}
    return SimpleNamespace(losses=torch.stack(losses), gradients=gradients)
