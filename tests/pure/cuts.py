"""Cuts of small models, laid out as a schedule asks, with the ops that trainability leaves."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from fxpipe.cut import Cut, Kind, Layout, Region, Role, Seam, Stage
from fxpipe.schedule import Plan, layout


@dataclass(frozen=True)
class Shape:
    """encoders and generators: whether each is trained. detached: generators return no gradient.
    taps: encoders feed every backbone stage. tied: first and last backbone stage share."""

    encoders: tuple[bool, ...] = ()
    generators: tuple[bool, ...] = ()
    backbone: bool = True
    detached: bool = False
    taps: bool = False
    tied: bool = False

    @property
    def trained(self) -> bool:
        """Whether anything is trained."""
        return self.backbone or any(self.encoders) or any(self.generators)


def shapes() -> st.SearchStrategy[Shape]:
    """Shapes in which something is trained."""
    flags = st.lists(st.booleans(), max_size=2).map(tuple)
    flag = st.booleans()
    made = st.builds(Shape, flags, flags, flag, flag, flag, flag)
    return made.filter(lambda shape: shape.trained)


def build(schedule: str, ranks: int, shape: Shape) -> Cut:
    """The cut of a shape. A seam carries gradients where a trained parameter lies before it."""
    encoders = {f"enc{i}": trained for i, trained in enumerate(shape.encoders)}
    generators = {f"gen{i}": trained for i, trained in enumerate(shape.generators)}
    plan = layout(schedule, ranks, tuple(encoders), tuple(generators))
    backbone = {f"llm{i}": shape.backbone for i in range(len(plan.backbone))}
    trained = encoders | backbone | generators
    pairs = _pairs(list(encoders), list(backbone), list(generators), shape)
    needs = dict(trained)
    seams = []
    for source, target in pairs:
        back = needs[source] and not (shape.detached and target in generators)
        seams.append(Seam(source, target, ("h", "mask"), ("h",) if back else ()))
        needs[target] = needs[target] or back
    stages = tuple(
        Stage(name, _region(name), _kinds(name, trained, seams), _rank(name, plan))
        for name in trained
    )
    regions = [Region(name, Role.ENCODER, plan.layout) for name in encoders]
    regions += [Region("llm", Role.BACKBONE, Layout.SHARDED)]
    regions += [Region(name, Role.GENERATOR, plan.layout) for name in generators]
    shared = [(s.name,) for s in stages if s.rank is None and trained[s.name]]
    if shape.tied and shape.backbone and len(backbone) > 1:
        shared.append(("llm0", f"llm{len(backbone) - 1}"))
    return Cut(ranks, tuple(regions), stages, tuple(seams), tuple(shared))


def _pairs(
    encoders: list[str], backbone: list[str], generators: list[str], shape: Shape
) -> list[tuple[str, str]]:
    """Sources before their targets: whether a seam needs gradients is known when it is met."""
    fed = backbone if shape.taps else backbone[:1]
    pairs = [(source, target) for source in encoders for target in fed]
    pairs += list(pairwise(backbone))
    return pairs + [(backbone[-1], target) for target in generators]


def _region(name: str) -> str:
    return "llm" if name.startswith("llm") else name


def _rank(name: str, plan: Plan) -> int | None:
    if name in plan.home:
        return plan.home[name]
    return plan.backbone[int(name.removeprefix("llm"))]


def _kinds(name: str, trained: dict[str, bool], seams: list[Seam]) -> tuple[Kind, ...]:
    back = any(seam.target == name and seam.grads for seam in seams)
    return (Kind.F, *[Kind.B] * back, *[Kind.W] * trained[name])
