"""The names of every schedule."""

from itertools import product

from fxpipe.schedule import PLACEMENTS
from fxpipe.skeletons import PATTERNS

EVERY = [*(f"{placement}/{base}" for placement, base in product(PLACEMENTS, PATTERNS)), "auto"]
