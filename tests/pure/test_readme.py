"""The page that is read first shows what comes out."""

import re
from functools import partial
from pathlib import Path

from fxpipe import passes
from fxpipe.costs import Costs
from fxpipe.passes.communicate import communicate
from fxpipe.passes.reduce import reduce
from fxpipe.schedule import derive
from fxpipe.table import Table

README = Path(__file__).parents[2] / "README.md"


def test_the_table_of_the_quickstart() -> None:
    """If it differs, put in what examples/quickstart_local.py prints."""
    block = re.search(r"^```\n(ranks 2\n.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    shown = Table.parse(re.sub(r"\n {8}", " ", block[1]))
    costs = Costs.from_flops(shown.cut, max(stage.cost for stage in shown.cut.stages))
    base = derive(shown.cut, 4, "nested/1f1b", costs=costs)
    made = passes.run(base, (partial(communicate, costs=costs), reduce))
    assert shown.rows == made.rows, "\n".join(str(made).splitlines()[-2:])
