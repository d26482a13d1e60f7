"""Rules on transfers and reductions: that what a rank reads of another comes, once and in order."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations

from fxpipe.cut import Kind
from fxpipe.rules import near, rows
from fxpipe.table import Op, Table

_Channel = tuple[int, int]  # from one rank to another


def posted(table: Table) -> Iterator[str]:
    """What a rank reads of another rank, it has posted the receive of."""
    numbered = table.numbered
    for rank, row in rows(table):
        there: set[int] = set()
        for at, op, number in row:
            if op.way:
                if op.way == "<":
                    there.add(number)
                continue
            for value in numbered.inputs(number):
                home = numbered.home.get(value, rank)
                if home != rank and value not in there:
                    post = numbered.op(value).source(home)
                    yield f"{near(table, rank, at)}: {op} reads {post.value}; put {post} before it"


def made_where_sent(table: Table) -> Iterator[str]:
    """A rank sends only what it makes itself."""
    for rank, row in rows(table):
        for at, op, number in row:
            if op.way == ">" and (home := table.numbered.home.get(number, rank)) != rank:
                yield (
                    f"{near(table, rank, at)}: {op.value} is made on rank {home}; "
                    "send it from there"
                )


def sends_meet_receives(table: Table) -> Iterator[str]:
    """Every send has one receive of the same value at the mirrored rank, and the other way."""
    sends, posts = _channels(table, ">"), _channels(table, "<")
    for source, target in sorted(set(sends) | set(posts)):
        sent, received = Counter(sends[source, target]), Counter(posts[source, target])
        if sent == received and max(sent.values()) == 1:
            continue
        values = {table.numbered.op(number): number for number in sent | received}
        for value in sorted(values, key=str):
            out, into = sent[values[value]], received[values[value]]
            if not out == into == 1:
                yield (
                    f"rank {source} has {value.to(target)} {out} times, rank {target} has "
                    f"{value.source(source)} {into} times; expected one of each"
                )


def read_where_received(table: Table) -> Iterator[str]:
    """What a rank receives is read by an op of its row."""
    numbered = table.numbered
    for rank, row in rows(table):
        posts, read = [], set[int]()
        for at, op, number in row:
            if op.way == "<":
                posts.append((at, op, number))
            elif not op.way:
                read.update(numbered.inputs(number))
        for at, op, number in posts:
            if number not in read:
                yield (
                    f"{near(table, rank, at)}: no op on rank {rank} reads {op.value}; leave it out"
                )


def channels_in_order(table: Table) -> Iterator[str]:
    """From one rank to another, receives are posted in the order in which they are sent."""
    sends, posts = _channels(table, ">"), _channels(table, "<")
    for (source, target), sent in sorted(sends.items()):
        received = posts[source, target]
        if sent == received or Counter(sent) != Counter(received):
            continue
        wrong = next((a, b) for a, b in zip(sent, received, strict=True) if a != b)
        made, posted = (table.numbered.op(number) for number in wrong)
        order = (str(table.numbered.op(number).source(source)) for number in sent[:8])
        yield (
            f"rank {source} sends {made.to(target)} where rank {target} posts "
            f"{posted.source(source)}; post in the order of the sends: {' '.join(order)}"
        )


def _channels(table: Table, way: str) -> Mapping[_Channel, list[int]]:
    """The values that go from one rank to another, in the order of the one row or the other."""
    channels: dict[_Channel, list[int]] = defaultdict(list)
    for rank, row in rows(table):
        for _, op, number in row:
            if op.way == way and op.peer is not None:
                channels[(rank, op.peer) if way == ">" else (op.peer, rank)].append(number)
    return channels


def reduced_once(table: Table) -> Iterator[str]:
    """Each shared entry is reduced once on each of its ranks, after the last backward op of its
    stages."""
    holders = {name: table.cut.ranks_of(stages) for name, stages in table.cut.groups.items()}
    for rank, row in enumerate(table.rows):
        found = [(at, op) for at, op in enumerate(row) if op.kind is Kind.R]
        for name, stages in table.cut.groups.items():
            spots = [at for at, op in found if op.stage == name]
            if rank not in holders[name]:
                for at in spots:
                    yield (
                        f"{near(table, rank, at)}: rank {rank} holds none of {name}; "
                        f"leave {row[at]} out"
                    )
            elif len(spots) != 1:
                yield f"rank {rank} has {Op(name, Kind.R)} {len(spots)} times; expected once"
            else:
                yield from _reduced_early(table, rank, spots[0], stages)


def _reduced_early(table: Table, rank: int, at: int, stages: tuple[str, ...]) -> Iterator[str]:
    row = table.rows[rank]
    late = [x for x in row[at:] if x.stage in stages and x.kind in (Kind.B, Kind.W) and not x.way]
    if late:
        yield f"{near(table, rank, at)}: {row[at]} stands before {late[0]}; put it after"


def reduced_in_order(table: Table) -> Iterator[str]:
    """Ranks that share several reductions have them in one order."""
    rows = [[op for op in row if op.kind is Kind.R] for row in table.rows]
    for a, b in combinations(range(len(rows)), 2):
        if rows[a] == rows[b]:
            continue
        one, other = ([op for op in rows[x] if op in rows[y]] for x, y in ((a, b), (b, a)))
        if one != other and Counter(one) == Counter(other):
            names = [" ".join(map(str, x)) for x in (one, other)]
            yield f"rank {a} has {names[0]}, rank {b} has {names[1]}; give them one order"
