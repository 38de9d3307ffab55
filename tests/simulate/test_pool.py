"""The block pool's order: who is evicted first, who is found first. Worked out by hand from vLLM's rules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.simulate import layout as at
from plimsoll.simulate import pool
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.start import start
from plimsoll.simulate.trace import make_trace
from tests.simulate.plain_parts import as_written

BLOCKS = 9
"""Eight of them can be used."""


plain = as_written(pool)


@pytest.fixture(autouse=True)
def _digests_wrap_around() -> Iterator[None]:
    """As they do in compiled code, without a warning."""
    with np.errstate(over="ignore"):
        yield


class Pool:
    """A pool of eight, and its functions without their many arguments."""

    def __init__(self) -> None:
        """All blocks are free and empty."""
        trace = make_trace("t", [0], [1], [1])
        state = start(trace, EngineLimits(num_blocks=BLOCKS), StepTime(), trace.arrival_ns)
        self.counts, self.links, self.keys = state.counts, state.links, state.keys

    def take(self, how_many: int = 1) -> list[int]:
        return [int(plain.take(self.counts, self.links, self.keys)) for _ in range(how_many)]

    def name(self, block: int, key: int) -> None:
        plain.set_key(block, np.uint64(key), self.keys, self.links)

    def find(self, key: int) -> int:
        return int(plain.find(np.uint64(key), self.keys, self.links))

    def touch(self, block: int) -> None:
        plain.touch(block, self.counts, self.links)

    def give_back(self, blocks: list[int]) -> int:
        """A request that held these blocks, in the order of its tokens, ends."""
        table = np.array([len(blocks), 3, 0, 0, *blocks, 99], dtype=np.int32)
        count = plain.release_table(table, self.counts, self.links, self.keys)
        assert table[at.LENGTH] == table[at.HASHED] == 0
        return int(count)

    def queue(self) -> list[int]:
        """The free blocks, next one first."""
        order, block = [], int(self.links[BLOCKS, at.NEXT])
        while block != BLOCKS + 1:
            order.append(block)
            block = int(self.links[block, at.NEXT])
        assert len(order) == self.counts[at.FREE_BLOCKS]
        return order


def test_the_order_of_eviction_by_hand() -> None:
    """Empty blocks go next, the last freed first; then those with content, the longest unused and a request's end first."""
    one = Pool()
    blocks = one.take(3)
    assert (blocks, one.links[blocks, at.REFS].tolist(), one.queue()) == ([1, 2, 3], [1, 1, 1], [4, 5, 6, 7, 8])
    assert one.give_back(blocks) == 3
    assert one.queue() == [3, 2, 1, 4, 5, 6, 7, 8]
    one = Pool()
    first, second = one.take(2), one.take(2)
    for block in (*first, second[0]):
        one.name(block, 100 + block)
    one.give_back(second)
    one.give_back(first)
    assert one.queue() == [4, 5, 6, 7, 8, 3, 2, 1], "the block that is not full goes to the front"
    one.touch(2)
    assert (one.queue(), one.find(102)) == ([4, 5, 6, 7, 8, 3, 1], 2)
    one.give_back([2])
    assert one.queue() == [4, 5, 6, 7, 8, 3, 1, 2], "when it comes back it is the newest"
    assert one.give_back([0, *one.take(1), 0]) == 1, "a table may have holes where a window has passed"
    one.take(8)
    assert (one.find(101), one.keys[1] == at.NO_KEY) == (pool.NULL, True), "who takes a block forgets its content"


def test_a_digest_is_never_the_sign_for_no_content() -> None:
    """And it depends on both numbers and on their order."""
    seen = {int(plain.mix(np.uint64(left), np.uint64(right))) for left in range(60) for right in range(60)}
    assert len(seen) == 3600
    assert int(at.NO_KEY) not in seen


class Model:
    """vLLM's pool in plain words: a list for the queue, a list of blocks for each content."""

    def __init__(self) -> None:
        self.queue = list(range(1, BLOCKS))
        self.refs = dict.fromkeys(range(1, BLOCKS), 0)
        self.holders: dict[int, list[int]] = {}

    def content(self, block: int) -> int | None:
        """Which content the block has."""
        return next((key for key, blocks in self.holders.items() if block in blocks), None)

    def take(self) -> int:
        """Pop the first and forget what it held."""
        block = self.queue.pop(0)
        key = self.content(block)
        if key is not None:
            self.holders[key].remove(block)
        self.refs[block] = 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        """Last first; those without content together to the front, the others to the end."""
        freed = []
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                freed.append(block)
        self.queue = [block for block in freed if self.content(block) is None] + self.queue
        self.queue += [block for block in freed if self.content(block) is not None]


@given(st.data())
def test_any_sequence_goes_as_in_plain_words(data: st.DataObject) -> None:
    """Taking, naming, hitting and giving back in any order: the same queue and the same finds as a list would give."""
    real, model = Pool(), Model()
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        deed = data.draw(st.sampled_from(["take", "take", "name", "hit", "end"]))
        if deed == "take" and model.queue:
            size = data.draw(st.integers(1, min(3, len(model.queue))))
            tables.append([model.take() for _ in range(size)])
            assert real.take(size) == tables[-1]
        elif deed == "name" and tables:
            block = data.draw(st.sampled_from(tables[-1]))
            if model.content(block) is None:
                key = data.draw(st.sampled_from([3, 3 + BLOCKS + 2, 4]))
                model.holders.setdefault(key, []).append(block)
                real.name(block, key)
        elif deed == "hit":
            block = real.find(data.draw(st.sampled_from([3, 4])))
            if block != pool.NULL:
                model.refs[block] += 1
                model.queue = [one for one in model.queue if one != block]
                real.touch(block)
                tables.append([block])
        elif deed == "end" and tables:
            table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            model.give_back(table)
            real.give_back(table)
        assert real.queue() == model.queue
        assert real.links[1:BLOCKS, at.REFS].tolist() == list(model.refs.values())
        for key in (3, 3 + BLOCKS + 2, 4):
            assert real.find(key) == (model.holders.get(key) or [pool.NULL])[0]
