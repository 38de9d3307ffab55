"""What must hold of a simulation between any two steps, looked up in its arrays the slow and plain way."""

from __future__ import annotations

from plimsoll.simulate import layout as at
from plimsoll.simulate.trace import Trace

NULL = 0
Content = tuple[object, ...]


def check_state(s: at.RunState, trace: Trace, known: dict[int, Content]) -> None:
    """Assert all of it. `known` remembers from call to call which content each key stood for."""
    running = _check_requests(s)
    _check_waiting(s)
    free = _check_free_queue(s)
    _check_holders(s, running, free)
    _check_tables(s, running)
    _check_buckets(s)
    _check_flight(s)
    _check_contents(s, trace, running, known)


def check_end(s: at.RunState) -> None:
    """Everybody has all tokens, and every block is free."""
    for row in s.requests.tolist():
        if row[at.STATUS] != at.REJECTED:
            assert row[at.STATUS] == at.FINISHED
            assert row[at.PRODUCED] == row[at.OUTPUT]
    assert s.counts[at.FREE_BLOCKS] == s.limits[at.NUM_BLOCKS] - 1
    assert s.counts[at.RUNNING_COUNT] == s.counts[at.WAITING_COUNT] == s.counts[at.IN_FLIGHT_BATCHES] == 0


def check_rows(rows: list[list[int]], s: at.RunState) -> None:
    """What a step did keeps to the limits."""
    for row in rows:
        _, start, end, running, _, requests, tokens, new, resumed, _, context, used, table, waste, hits, queries = row
        assert start <= end
        assert running <= s.limits[at.MAX_SEQS]
        assert 0 < requests <= running
        assert new + resumed <= requests
        assert requests <= tokens <= s.limits[at.BUDGET]
        assert tokens <= context
        assert 0 < used <= s.limits[at.NUM_BLOCKS] - 1
        assert used <= table
        assert waste >= 0
        assert 0 <= hits <= queries


def _check_requests(s: at.RunState) -> list[int]:
    """Each request is in one place; who runs."""
    count = s.counts.tolist()
    running: list[int] = s.seats[: count[at.RUNNING_COUNT], at.SEAT_RUNNING].tolist()
    rows = s.requests.tolist()
    status = [row[at.STATUS] for row in rows]
    assert len(set(running)) == len(running) <= s.limits[at.MAX_SEQS]
    assert set(running) == {number for number, one in enumerate(status) if one == at.RUNNING}
    assert status.count(at.FINISHED) == count[at.FINISHED_COUNT]
    assert status.count(at.REJECTED) == count[at.REJECTED_COUNT]
    assert sum(row[at.PREEMPTIONS] for row in rows) == count[at.PREEMPTION_COUNT]
    assert sum(row[at.PREEMPTIONS] > 0 for row in rows) == count[at.PREEMPTED_COUNT]
    for number, row in enumerate(rows):
        arrived = number < count[at.NEXT_ARRIVAL]
        assert row[at.STATUS] == at.REJECTED or arrived == (row[at.STATUS] != at.NOT_ARRIVED)
        assert row[at.TOKENS] == row[at.PROMPT] + row[at.PRODUCED]
        assert row[at.PRODUCED] <= row[at.OUTPUT]
        assert (row[at.SLOT] >= 0) == (row[at.STATUS] == at.RUNNING)
        if row[at.STATUS] in (at.WAITING, at.PREEMPTED):
            assert row[at.COMPUTED] == 0
    slots = int(s.limits[at.HIT_SLOT])
    free_slots = s.seats[: count[at.FREE_SLOTS], at.SEAT_FREE_SLOT].tolist()
    assert sorted(free_slots + [rows[number][at.SLOT] for number in running]) == list(range(slots))
    return running


def _check_waiting(s: at.RunState) -> None:
    """The ring or heap holds exactly those that wait, in vLLM's order."""
    count, size = int(s.counts[at.WAITING_COUNT]), len(s.waiting)
    head = 0 if s.limits[at.BY_PRIORITY] else int(s.counts[at.WAITING_HEAD])
    line = [int(s.waiting[(head + place) % size]) for place in range(count)]
    status = s.requests[:, at.STATUS].tolist()
    assert sorted(line) == [number for number, one in enumerate(status) if one in (at.WAITING, at.PREEMPTED)]
    if s.limits[at.BY_PRIORITY]:
        # A replay compares names as vLLM does; an open run, whose requests nobody named, the order they came in.
        order = [
            (int(s.requests[one, at.PRIORITY]), int(s.stamps[one, at.ARRIVAL]), int(s.requests[one, at.TIE])) for one in line
        ]
        assert all(order[(place - 1) // 2] < order[place] for place in range(1, count))
    else:
        new = [number for number in line if status[number] == at.WAITING]
        assert new == sorted(new)
        assert new == line[len(line) - len(new) :]


def _check_free_queue(s: at.RunState) -> set[int]:
    """Every free block once, the links agree both ways; which blocks are free."""
    blocks = len(s.keys)
    head, tail = blocks, blocks + 1
    forward, backward = s.links[:, at.NEXT].tolist(), s.links[:, at.PREV].tolist()
    refs = s.links[:, at.REFS].tolist()
    free: set[int] = set()
    before, block = head, forward[head]
    while block != tail:
        assert 0 < block < blocks
        assert block not in free
        assert backward[block] == before
        assert refs[block] == 0
        free.add(block)
        before, block = block, forward[block]
    assert backward[tail] == before
    assert len(free) == s.counts[at.FREE_BLOCKS]
    return free


def _check_holders(s: at.RunState, running: list[int], free: set[int]) -> None:
    """A block is free or held; its holders are the tables that name it, each of them once."""
    held = [0] * len(s.keys)
    for number in running:
        for group in range(int(s.limits[at.GROUPS])):
            own = [block for block in _table(s, number, group) if block != NULL]
            assert len(set(own)) == len(own)
            for block in own:
                held[block] += 1
    assert held == s.links[: len(held), at.REFS].tolist()
    assert free == {block for block in range(1, len(held)) if not held[block]}
    assert sum(held) == s.counts[at.TABLE_BLOCKS]


def _check_tables(s: at.RunState, running: list[int]) -> None:
    """Tables have room for what is computed, and the sums over them are right."""
    full_slots = computed_running = 0
    for number in running:
        computed = int(s.requests[number, at.COMPUTED])
        computed_running += computed
        for group in range(int(s.limits[at.GROUPS])):
            table = _table(s, number, group)
            kind, size, window = _group(s, group)
            assert len(table) * size >= computed
            assert int(s.tables[group, s.requests[number, at.SLOT], at.HASHED]) * size <= computed
            if kind == at.FULL:
                assert NULL not in table
                full_slots += len(table) * size
            elif kind == at.SLIDING:
                assert NULL not in table[max(0, computed - window + 1) // size :]
            else:
                assert table[-1] != NULL
        if s.limits[at.SIMPLE]:
            assert s.requests[number, at.HELD] == len(_table(s, number, 0)) * s.limits[at.BLOCK_SIZE]
    assert computed_running == s.counts[at.COMPUTED_RUNNING]
    assert full_slots == s.counts[at.FULL_SLOTS]


def _check_buckets(s: at.RunState) -> None:
    """Every block with a key is in its key's bucket, once; nothing else is in any."""
    keys = s.keys.tolist()
    rows = s.links.tolist()
    seen: list[int] = []
    for bucket, row in enumerate(rows):
        before, block = NULL, row[at.BUCKET_FIRST]
        while block != NULL:
            assert keys[block] != 0
            assert (keys[block] >> 32) * len(rows) >> 32 == bucket
            assert rows[block][at.BUCKET_PREV] == before
            seen.append(block)
            assert len(seen) <= len(keys)
            before, block = block, rows[block][at.BUCKET_NEXT]
        assert row[at.BUCKET_LAST] == before
    assert sorted(seen) == [block for block, key in enumerate(keys) if key]


def _check_flight(s: at.RunState) -> None:
    """What requests have under way is what the batches under way say."""
    under_way = [0] * len(s.requests)
    for nth in range(int(s.counts[at.IN_FLIGHT_BATCHES])):
        batch = (int(s.counts[at.OLDEST_BATCH]) + nth) % (2 if s.limits[at.ASYNC] else 1)
        column = at.SEAT_BATCH + 3 * batch
        for place in range(int(s.counts[at.BATCHES + batch * at.BATCH_FIELDS + at.B_REQUESTS])):
            who, how_many = s.seats[place, column : column + 2].tolist()
            under_way[who] += how_many
    for row, tokens in zip(s.requests.tolist(), under_way, strict=True):
        # With one step at a time nobody but an open run is looked at while it is under way, and none of this is kept.
        if row[at.STATUS] != at.FINISHED and s.limits[at.ASYNC]:
            assert row[at.IN_FLIGHT] == tokens
            assert 0 <= row[at.STALE] <= tokens
            assert 0 <= row[at.PLACEHOLDERS] <= tokens


def _check_contents(s: at.RunState, trace: Trace, running: list[int], known: dict[int, Content]) -> None:
    """Equal keys are equal content and the other way round, and a held block holds what its holder has there."""
    keys = s.keys.tolist()
    for number in running:
        slot = int(s.requests[number, at.SLOT])
        for group in range(int(s.limits[at.GROUPS])):
            hashed = int(s.tables[group, slot, at.HASHED])
            for place, block in enumerate(_table(s, number, group)):
                key = keys[block]
                if not key:
                    assert not s.limits[at.SIMPLE] or not s.limits[at.CACHING] or place >= hashed
                    continue
                content = _content(s, trace, number, place, group)
                assert known.setdefault(key, content) == content
    assert len(set(known.values())) == len(known)


def _content(s: at.RunState, trace: Trace, number: int, place: int, group: int) -> Content:
    """All the tokens up to the end of a block, as far as the trace tells them."""
    end = (place + 1) * _group(s, group)[1]
    ids = trace.ids_of(number).tolist()
    covering = -(-end // trace.prefix_block)
    if end <= trace.prompt[number] and covering <= len(ids):
        return (group, end, tuple(ids[:covering]))
    return (group, end, "own", number)


def _table(s: at.RunState, number: int, group: int) -> list[int]:
    row = s.tables[group, s.requests[number, at.SLOT]]
    return [int(block) for block in row[at.TABLE : at.TABLE + row[at.LENGTH]].tolist()]


def _group(s: at.RunState, group: int) -> tuple[int, int, int]:
    kind, size, window = s.limits[at.G_KIND + at.G_FIELDS * group :][:3].tolist()
    return kind, size, window
