"""Cuts and costs of regions of which only the seconds are known."""

import pytest

from fxpipe.costs import Costs
from fxpipe.cut import Cut, Kind
from fxpipe.errors import OptionError
from fxpipe.rates import Rates, rate
from fxpipe.sketch import Homes, named, one_each, regions, sketch
from fxpipe.table import Op


def sketched(*options: str, ranks: int = 2, **homes: tuple[int, ...]) -> tuple[Cut, Costs]:
    """The cut of some options, `llm` on ranks 0..P-1 unless said, and its costs."""
    found = regions(options)
    backbone = {x.name: tuple(range(ranks)) for x in found if x.role == "backbone"}
    cut = sketch(found, Homes(ranks, backbone | homes))
    return cut, rate(cut, found, Rates(), 4)


def stages(cut: Cut) -> dict[str, str]:
    return {stage.name: "".join(stage.kinds) for stage in cut.stages}


def seconds(costs: Costs) -> dict[str, float]:
    """`llm0.B` to seconds."""
    return {f"{stage}.{kind}": costs.compute(Op(stage, kind, 0)) for stage, kind in costs.seconds}


def test_a_whole_cut() -> None:
    cut, costs = sketched("llm=backbone:1,1,2", "image=generator:1,2", "vision=encoder:0.5,1")
    assert str(cut) == (
        "ranks 2\n"
        "region vision encoder replicated\n"
        "region llm backbone sharded\n"
        "region image generator replicated\n"
        "stage vision of vision: FW, owner, cost 0.5\n"
        "stage llm0 of llm: FBW, rank 0, cost 1\n"
        "stage llm1 of llm: FBW, rank 1, cost 1\n"
        "stage image of image: FB, owner, cost 1\n"
        "seam vision -> llm0: features*\n"
        "seam llm0 -> llm1: hidden*\n"
        "seam llm1 -> image: hidden*\n"
        "shared vision\n"
        "shared image"
    )
    assert Cut.parse(str(cut)) == cut
    assert seconds(costs) == {
        "vision.F": 0.5,
        "vision.W": 1,
        "llm0.F": 1,
        "llm0.B": 1,
        "llm0.W": 2,
        "llm1.F": 1,
        "llm1.B": 1,
        "llm1.W": 2,
        "image.F": 1,
        "image.B": 2,
    }


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ("llm=backbone:1", {"llm0": "F", "llm1": "F"}),
        ("llm=backbone:1,2", {"llm0": "FW", "llm1": "FB"}),
        ("llm=backbone:1,1,1", {"llm0": "FW", "llm1": "FBW"}),
        ("llm=backbone:1,1,0", {"llm0": "FW", "llm1": "FB"}),
        ("v=encoder:1 llm=backbone:1,2", {"v": "F", "llm0": "FW", "llm1": "FB"}),
        ("v=encoder:1,2 llm=backbone:1,2", {"v": "FW", "llm0": "FB", "llm1": "FB"}),
        ("v=encoder:1,1,1 llm=backbone:1,1,1", {"v": "FW", "llm0": "FBW", "llm1": "FBW"}),
        ("llm=backbone:1 i=generator:1,1,1", {"llm0": "F", "llm1": "F", "i": "FW"}),
        ("llm=backbone:1,1,1 i=generator:1", {"llm0": "FW", "llm1": "FBW", "i": "F"}),
        ("llm=backbone:1,1,1 i=generator:1,1,1", {"llm0": "FW", "llm1": "FBW", "i": "FBW"}),
        ("v=encoder:1,2 i=generator:1,2", {"v": "FW", "i": "FB"}),
        ("v=encoder:1,2", {"v": "FW"}),
        ("i=generator:1,1,1", {"i": "FW"}),
    ],
)
def test_ops_follow_from_what_is_trained(options: str, kinds: dict[str, str]) -> None:
    cut, costs = sketched(*options.split())
    assert stages(cut) == kinds
    for stage in cut.stages:  # a backward of one op has the seconds of all of it
        backward = sum(costs.compute(Op(stage.name, kind, 0)) for kind in stage.kinds[1:])
        assert backward in (0, 1, 2)
        assert Kind.F not in stage.kinds[1:]


def test_several_regions_of_a_role() -> None:
    cut, _ = sketched("v=encoder:1,2", "a=encoder:1", "llm=backbone:1,2", "i=generator:1", ranks=1)
    assert [str(seam) for seam in cut.seams] == [
        "seam v -> llm0: features*",
        "seam a -> llm0: features",
        "seam llm0 -> i: hidden",
    ]
    assert cut.shared == (("v",),)


def test_a_sharded_encoder_is_a_chain_that_shares_its_seconds() -> None:
    cut, costs = sketched("v=encoder:1,1,1", "llm=backbone:1,2", v=(0, 1))
    assert stages(cut) == {"v0": "FW", "v1": "FBW", "llm0": "FB", "llm1": "FB"}
    assert [str(seam) for seam in cut.seams][:2] == [
        "seam v0 -> v1: features*",
        "seam v1 -> llm0: features*",
    ]
    found = seconds(costs)
    assert [found[x] for x in ("v0.F", "v0.W", "v1.B", "v1.W")] == [0.5, 1, 0.5, 0.5]
    assert cut.shared == ()


def test_the_backbone_has_its_work_on_any_number_of_stages() -> None:
    for homes in ((0, 1, 2), (1, 2), (0, 1, 2, 0, 1, 2)):
        _, costs = sketched("llm=backbone:1,2", ranks=3, llm=homes)
        assert sum(seconds(costs).values()) == pytest.approx(9)


def test_seconds_per_microbatch_bytes_and_what_is_kept() -> None:
    found = regions(["v=encoder:2,4", "llm=backbone:1,1,1"])
    cut = sketch(found, Homes(2, {"llm": (0, 1, 0, 1)}))
    scale = named("--scale", ["v=1,0,40"], found)
    sent = one_each("--bytes", ["v=100", "llm=10"], found)
    kept = one_each("--keep", ["llm=8"], found)
    costs = rate(cut, found, Rates(latency=1, bandwidth=10, scale=scale, sent=sent, kept=kept), 4)
    assert [costs.compute(Op("v", Kind.F, mb)) for mb in range(4)] == [2, 0, 80, 2]
    assert costs.transfer(Op("v", Kind.F, 0)) == 11
    assert costs.transfer(Op("llm0", Kind.B, 0)) == 11  # the gradient of the features
    assert costs.transfer(Op("llm1", Kind.B, 0)) == costs.transfer(Op("llm1", Kind.F, 0)) == 2
    assert costs.transfer(Op("llm3", Kind.F, 0)) == 1  # nobody reads it
    assert [costs.kept["llm0", kind] for kind in (Kind.F, Kind.B)] == [4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["vision"], "'vision' cannot be read; write NAME=ROLE:F"),
        (["vision=encoder"], "cannot be read"),
        (["vi.sion=encoder:1"], "'vi.sion' is no name"),
        (["vision=encode:1"], "role 'encode' is unknown; there are encoder, backbone, generator"),
        (["vision=encoder:"], "'' are no numbers"),
        (["vision=encoder:1,x"], "'1,x' are no numbers"),
        (["vision=encoder:-1"], "finite and not negative"),
        (["vision=encoder:inf"], "finite and not negative"),
        (["vision=encoder:1,1,1,1"], "has over three numbers"),
        (["v=encoder:1", "v=generator:1"], "--region v is given twice"),
        (["a=backbone:1", "b=backbone:1"], "a and b are both backbones"),
        (["llm0=encoder:1", "llm=backbone:1"], "two stages would be called llm0"),
        (["v=encoder:1,2", "llm=backbone:1"], "v is trained, but llm has no backward"),
        (["v=encoder:1,2", "i=generator:1"], "v is trained, but i has no backward"),
    ],
)
def test_wrong_regions(options: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        sketched(*options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("x=1", "'x=1' names no region; there are v, llm"),
        ("v", "'' are no numbers"),
        ("v=1,2", "--keep v takes one number"),
    ],
)
def test_wrong_numbers_of_regions(option: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        one_each("--keep", [option], regions(["v=encoder:1", "llm=backbone:1"]))


def test_costs_need_what_the_cut_has() -> None:
    found = regions(["llm=backbone:1,2"])
    split = "ranks 1\nregion llm backbone sharded\nstage llm of llm: FBW, rank 0, cost 1"
    with pytest.raises(OptionError, match="llm has B and W; give --region llm both"):
        rate(Cut.parse(split), found, Rates(), 1)
    with pytest.raises(OptionError, match="has a region llm; say what it takes"):
        rate(Cut.parse(split), regions(["v=encoder:1"]), Rates(), 1)
    with pytest.raises(OptionError, match="2 factors for 1 microbatches"):
        rate(Cut.parse(split), regions(["llm=backbone:1,1,1"]), Rates(scale={"llm": (1, 2)}), 1)
