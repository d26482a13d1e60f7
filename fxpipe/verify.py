"""The rules of a table. A rule is a function from a table to what breaks it, in words.

    verify(table)                  every rule: the table runs on every transport
    verify(table, rules=ORDER)     a table of compute ops only, before `communicate` and `reduce`

What a rule says must let a person mend the table, so it shows the row around the op.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from fxpipe.cut import Cut, Kind
from fxpipe.errors import TableError
from fxpipe.rendezvous import stuck
from fxpipe.table import Op, Table, inputs

Rule = Callable[[Table], Iterator[str]]
_SHOWN = 20  # broken rules in one message


def verify(table: Table, rules: Sequence[Rule] | None = None) -> None:
    """Raise TableError with everything in the table that breaks a rule.

    `known` comes first and alone, since the others look names up in the cut; `makes_progress`
    last, since a table with an unmet send is stuck anyway and the reason is the better message.
    """
    for phase in _phases(RULES if rules is None else rules):
        broken = [f"{rule.__name__}: {text}" for rule in phase for text in rule(table)]
        if broken:
            more = [f"... and {len(broken) - _SHOWN} more"] if len(broken) > _SHOWN else []
            raise TableError("\n".join(broken[:_SHOWN] + more))


def _phases(rules: Sequence[Rule]) -> Iterator[list[Rule]]:
    yield [rule for rule in rules if rule is known]
    yield [rule for rule in rules if rule not in (known, makes_progress)]
    yield [rule for rule in rules if rule is makes_progress]


def known(table: Table) -> Iterator[str]:
    """Every token names a stage, a kind, a group and ranks that the cut has."""
    if len(table.rows) != table.cut.ranks:
        yield f"the cut has {table.cut.ranks} ranks, the table {len(table.rows)} rows"
    for rank, at, op in _ops(table):
        for problem in _unknown(op, rank, table.cut):
            yield f"{_near(table, rank, at)}: {problem}"


def _unknown(op: Op, rank: int, cut: Cut) -> Iterator[str]:
    if op.kind is Kind.R:
        if op.stage not in cut.groups:
            groups = ", ".join(cut.groups) or "none"
            yield f"{op} reduces no shared entry of the cut; it has {groups}"
        if op.way:
            yield f"{op} is a transfer, but a reduction makes no value to move"
        return
    stage = cut.stage.get(op.stage)
    if stage is None:
        yield f"{op} names no stage; the cut has {', '.join(cut.stage)}"
    elif op.kind not in stage.kinds:
        yield f"{op} does not exist; {op.stage} has only {''.join(stage.kinds)}"
    if op.peer is not None and (op.peer == rank or op.peer >= cut.ranks):
        yield f"{op} names rank {op.peer}; expected another one of 0..{cut.ranks - 1}"
    if op.way and op.kind is Kind.W:
        yield f"{op} is a transfer, but weight gradients stay on their rank"


def defined_once(table: Table) -> Iterator[str]:
    """Every F, B and W stands in the table once."""
    first: dict[Op, int] = {}
    for rank, at, op in _compute(table):
        if op in first:
            yield f"{_near(table, rank, at)}: {op} runs already on rank {first[op]}; leave one"
        first.setdefault(op, rank)


def placed(table: Table) -> Iterator[str]:
    """Sharded stages run on their rank; F, B and W of a stage and microbatch on one rank."""
    home: dict[tuple[str, int | None], int] = {}
    for rank, at, op in _compute(table):
        fixed = table.cut.stage[op.stage].rank
        expected = home.setdefault((op.stage, op.mb), rank) if fixed is None else fixed
        if rank != expected:
            reason = "its forward is there" if fixed is None else "the stage lives there"
            yield f"{_near(table, rank, at)}: {op} belongs on rank {expected}: {reason}"


def complete(table: Table) -> Iterator[str]:
    """Every kind of every stage runs for every microbatch."""
    for stage in table.cut.stages:
        for mb in range(table.microbatches):
            for kind in stage.kinds:
                if Op(stage.name, kind, mb) not in table.place:
                    where = "its owner" if stage.rank is None else f"rank {stage.rank}"
                    yield f"{Op(stage.name, kind, mb)} is missing; add it to the row of {where}"


def read_after_write(table: Table) -> Iterator[str]:
    """What a rank reads of its own is made earlier in its row; what it sends, too."""
    there: set[Op] = set()
    for rank, at, op in _ops(table):
        reads = {"": inputs(op, table.cut), ">": iter((op.value,))}.get(op.way, iter(()))
        for value in reads:
            if table.place.get(value) == rank and value not in there:
                yield f"{_near(table, rank, at)}: {op} reads {value}, which is made after it"
        if not op.way:
            there.add(op)


def posted(table: Table) -> Iterator[str]:
    """What a rank reads of another rank, it has posted the receive of."""
    there: set[tuple[Op, int]] = set()
    for rank, at, op in _ops(table):
        if op.way == "<":
            there.add((op.value, rank))
        if op.way:
            continue
        for value in inputs(op, table.cut):
            home = table.place.get(value, rank)
            if home != rank and (value, rank) not in there:
                post = value.source(home)
                yield f"{_near(table, rank, at)}: {op} reads {value}; put {post} before it"


def sends_meet_receives(table: Table) -> Iterator[str]:
    """Every send has one receive of the same value at the mirrored rank, and the other way."""
    sends, posts = _transfers(table, ">"), _transfers(table, "<")
    for edge in sorted(set(sends) | set(posts), key=str):
        value, source, target = edge
        if sends[edge] == posts[edge] == 1:
            continue
        yield (
            f"rank {source} has {value.to(target)} {sends[edge]} times, rank {target} has "
            f"{value.source(source)} {posts[edge]} times; expected one of each"
        )


def made_where_sent(table: Table) -> Iterator[str]:
    """A rank sends only what it makes itself."""
    for rank, at, op in _ops(table):
        home = table.place.get(op.value)
        if op.way == ">" and home not in (rank, None):
            yield f"{_near(table, rank, at)}: {op.value} is made on rank {home}; send it from there"


def read_where_received(table: Table) -> Iterator[str]:
    """What a rank receives is read by an op of its row."""
    reads = {
        (value, rank)
        for rank, row in enumerate(table.rows)
        for op in row
        if not op.way
        for value in inputs(op, table.cut)
    }
    for rank, at, op in _ops(table):
        if op.way == "<" and (op.value, rank) not in reads:
            yield f"{_near(table, rank, at)}: no op on rank {rank} reads {op.value}; leave it out"


def channels_in_order(table: Table) -> Iterator[str]:
    """From one rank to another, receives are posted in the order in which they are sent."""
    sends, posts = _channels(table, ">"), _channels(table, "<")
    for (source, target), sent in sorted(sends.items()):
        received = posts[source, target]
        pairs = zip(sent, received, strict=False)
        wrong = next(((a, b) for a, b in pairs if a != b), None)
        if wrong is not None and Counter(sent) == Counter(received):
            yield (
                f"rank {source} sends {wrong[0].to(target)} where rank {target} posts "
                f"{wrong[1].source(source)}; post in the order of the sends: "
                f"{' '.join(str(value.source(source)) for value in sent[:8])}"
            )


def reduced_once(table: Table) -> Iterator[str]:
    """Each shared entry is reduced once on each of its ranks, after the last W of its stages."""
    for name, stages in table.cut.groups.items():
        op = Op(name, Kind.R)
        for rank in table.cut.ranks_of(stages):
            row = table.rows[rank]
            spots = [at for at, found in enumerate(row) if found == op]
            if len(spots) != 1:
                yield f"rank {rank} has {op} {len(spots)} times; expected once"
                continue
            late = [x for x in row[spots[0] :] if x.stage in stages and x.kind is Kind.W]
            if late:
                yield f"{_near(table, rank, spots[0])}: {op} stands before {late[0]}; put it after"
    for rank, at, op in _ops(table):
        if op.kind is Kind.R and rank not in table.cut.ranks_of(table.cut.groups[op.stage]):
            yield f"{_near(table, rank, at)}: rank {rank} holds none of {op.stage}; leave {op} out"


def reduced_in_order(table: Table) -> Iterator[str]:
    """Ranks that share several reductions have them in one order."""
    rows = [[op for op in row if op.kind is Kind.R] for row in table.rows]
    for a, b in combinations(range(len(rows)), 2):
        one, other = ([op for op in rows[x] if op in rows[y]] for x, y in ((a, b), (b, a)))
        if one != other and Counter(one) == Counter(other):
            names = [" ".join(map(str, x)) for x in (one, other)]
            yield f"rank {a} has {names[0]}, rank {b} has {names[1]}; give them one order"


def makes_progress(table: Table) -> Iterator[str]:
    """The table ends under the strictest transport (see `rendezvous`)."""
    for rank, at, reason in stuck(table):
        yield f"{_near(table, rank, at)}: stuck, {reason}"


def _ops(table: Table) -> Iterator[tuple[int, int, Op]]:
    for rank, row in enumerate(table.rows):
        for at, op in enumerate(row):
            yield rank, at, op


def _compute(table: Table) -> Iterator[tuple[int, int, Op]]:
    return (x for x in _ops(table) if not x[2].way and x[2].kind is not Kind.R)


def _transfers(table: Table, way: str) -> Counter[tuple[Op, int, int]]:
    return Counter(
        (op.value, *((rank, op.peer) if way == ">" else (op.peer, rank)))
        for rank, _, op in _ops(table)
        if op.way == way and op.peer is not None
    )


def _channels(table: Table, way: str) -> dict[tuple[int, int], list[Op]]:
    channels: dict[tuple[int, int], list[Op]] = defaultdict(list)
    for rank, _, op in _ops(table):
        if op.way == way and op.peer is not None:
            channels[(rank, op.peer) if way == ">" else (op.peer, rank)].append(op.value)
    return channels


def _near(table: Table, rank: int, at: int) -> str:
    """`rank 1: ... llm0.F0<0 [llm1.F0] llm1.B0 ...`"""
    row = table.rows[rank]
    left, right = max(0, at - 3), at + 4
    words = [f"[{op}]" if left + i == at else str(op) for i, op in enumerate(row[left:right])]
    return " ".join([f"rank {rank}:", *["..."] * (left > 0), *words, *["..."] * (right < len(row))])


ORDER: tuple[Rule, ...] = (
    known,
    defined_once,
    placed,
    complete,
    read_after_write,
    makes_progress,
)
TRANSFERS: tuple[Rule, ...] = (
    posted,
    made_where_sent,
    sends_meet_receives,
    read_where_received,
    channels_in_order,
)
REDUCTIONS: tuple[Rule, ...] = (reduced_once, reduced_in_order)
RULES: tuple[Rule, ...] = (*ORDER, *TRANSFERS, *REDUCTIONS)
