"""Cuts of small models, laid out as a schedule asks, with the ops that trainability leaves."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from fxpipe.cut import Cut, Kind, Layout, Region, Role, Seam, Stage
from fxpipe.schedule import Plan, layout

QUICK = 0.005  # effort: hardly any search, where any order will do


@dataclass(frozen=True)
class Shape:
    """encoders and generators: whether each is trained. detached: generators return no gradient.
    taps: encoders feed every backbone stage. tied: first and last backbone stage share. spread: the
    first encoder is a pipeline of its own, one stage per rank."""

    encoders: tuple[bool, ...] = ()
    generators: tuple[bool, ...] = ()
    backbone: bool = True
    detached: bool = False
    taps: bool = False
    tied: bool = False
    spread: bool = False

    @property
    def trained(self) -> bool:
        """Whether anything is trained."""
        return self.backbone or any(self.encoders) or any(self.generators)


def shapes() -> st.SearchStrategy[Shape]:
    """Shapes in which something is trained."""
    flags = st.lists(st.booleans(), max_size=2).map(tuple)
    flag = st.booleans()
    made = st.builds(Shape, flags, flags, flag, flag, flag, flag, flag)
    return made.filter(lambda shape: shape.trained)


def build(schedule: str, ranks: int, shape: Shape) -> Cut:
    """The cut of a shape. A seam carries gradients where a trained parameter lies before it."""
    encoders = {f"enc{i}": trained for i, trained in enumerate(shape.encoders)}
    generators = {f"gen{i}": trained for i, trained in enumerate(shape.generators)}
    spread = list(encoders)[: int(shape.spread)]
    plan = layout(schedule, ranks, tuple(encoders), tuple(generators), sharded=spread)
    of = {name: _names(name, plan) for name in (*encoders, "llm", *generators)}
    whole = encoders | {"llm": shape.backbone} | generators
    trained = {stage: whole[name] for name, stages in of.items() for stage in stages}
    pairs = _pairs(of, list(encoders), list(generators), shape)
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
    regions = [
        Region(name, role, _layout(name, plan))
        for role, names in zip(Role, (encoders, ["llm"], generators), strict=True)
        for name in names
    ]
    shared = [(s.name,) for s in stages if s.rank is None and trained[s.name]]
    if shape.tied and shape.backbone and len(of["llm"]) > 1:
        shared.append((of["llm"][0], of["llm"][-1]))
    return Cut(ranks, tuple(regions), stages, tuple(seams), tuple(shared))


def _names(region: str, plan: Plan) -> list[str]:
    """The stages of a region."""
    homes = plan.backbone if region == "llm" else plan.home[region]
    if not isinstance(homes, tuple):
        return [region]
    return [f"{region}{'' if region == 'llm' else 's'}{at}" for at in range(len(homes))]


def _pairs(
    of: dict[str, list[str]], encoders: list[str], generators: list[str], shape: Shape
) -> list[tuple[str, str]]:
    """Sources before their targets: whether a seam needs gradients is known when it is met."""
    backbone = of["llm"]
    fed = backbone if shape.taps else backbone[:1]
    pairs = [pair for name in encoders for pair in pairwise(of[name])]
    pairs += [(of[name][-1], target) for name in encoders for target in fed]
    pairs += list(pairwise(backbone))
    return pairs + [(backbone[-1], of[name][0]) for name in generators]


def _layout(name: str, plan: Plan) -> Layout:
    owned = name != "llm" and plan.home[name] is None
    return Layout.REPLICATED if owned else Layout.SHARDED


def _region(name: str) -> str:
    return "llm" if name.startswith("llm") else name.partition("s")[0]


def _rank(name: str, plan: Plan) -> int | None:
    if name.startswith("llm"):
        return plan.backbone[int(name.removeprefix("llm"))]
    home = plan.home[_region(name)]
    return home[int(name.partition("s")[2])] if isinstance(home, tuple) else home


def _kinds(name: str, trained: dict[str, bool], seams: list[Seam]) -> tuple[Kind, ...]:
    back = any(seam.target == name and seam.grads for seam in seams)
    return (Kind.F, *[Kind.B] * back, *[Kind.W] * trained[name])
