"""What a region is known by from one variant of a model to the next: the parameters of its seeds.

A microbatch of text alone has no image tower; one with audio has another encoder first. Names and
roles must not depend on which of them came first, so what a variant finds is compared with what
the variants before it have called by a name.
"""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

from fxpipe.cut import Role


@dataclass(frozen=True)
class Anchor:
    """The role of a region, and the names of the parameters that its seeds read."""

    role: Role
    parameters: frozenset[str]


Known = Mapping[str, Anchor]


def recognised(
    known: Known, role: Role, parameters: Set[str], taken: Collection[str] = ()
) -> str | None:
    """The known region of a role that has the most of these parameters; None if none has any."""
    shared = {
        name: len(anchor.parameters & parameters)
        for name, anchor in known.items()
        if anchor.role is role and name not in taken
    }
    best = max(shared, key=shared.__getitem__, default=None)
    return best if best is not None and shared[best] else None


def together(known: Known, found: Known) -> dict[str, Anchor]:
    """The regions of all variants so far, in topological order of their roles."""
    merged = dict(known)
    for name, anchor in found.items():
        before = known.get(name, anchor).parameters
        merged[name] = Anchor(anchor.role, before | anchor.parameters)
    return dict(sorted(merged.items(), key=lambda item: list(Role).index(item[1].role)))
