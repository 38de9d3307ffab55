"""Block tables of every layout: the same pool, each place used once."""

from __future__ import annotations

import itertools

import pytest

from lab.gpu.measure_blocks import LAYOUTS, table


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_is_used_once(layout: str) -> None:
    """Whatever the layout, the same bytes are read."""
    rows = table(layout, 6, 32)
    assert [len(row) for row in rows] == [32] * 6
    assert sorted(itertools.chain(*rows)) == list(range(6 * 32))


def test_layouts_are_what_they_are_called() -> None:
    """Neighbours lie side by side, a pool's width apart, or anywhere."""
    steps = {name: [b - a for row in table(name, 6, 32) for a, b in itertools.pairwise(row)] for name in LAYOUTS}
    assert set(steps["contiguous"]) == {1}
    assert set(steps["interleaved"]) == {6}
    assert len(set(steps["shuffled"])) > 50
