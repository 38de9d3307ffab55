"""The shapes that alerts are tested with, and series as promtool writes them."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.record_shapes import SHAPES, TARGET, recorded, written


@pytest.mark.parametrize("name", ["wedge", "restart"])
def test_a_shape_is_what_the_stand_in_did(name: str) -> None:
    """Recorded anew, figure for figure the same."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    assert json.loads(TARGET.read_text(encoding="utf-8"))[name] == recorded(shape)


def test_every_shape_is_in_the_file_and_even_series_are_short() -> None:
    """None is missing; a night of nothing is one word, and so is a steady counter."""
    assert list(json.loads(TARGET.read_text(encoding="utf-8"))) == [shape.name for shape in SHAPES]

    assert written([0.0] * 720) == "0x719"
    assert written([2.0 * turn for turn in range(100)]) == "0+2x99"
    assert written([None] * 3 + [5.0]) == "_x3 5"


def read(text: str) -> list[float | None]:
    """What promtool makes of it, by its documentation."""
    found: list[float | None] = []
    for word in text.split():
        whole = re.fullmatch(r"(_|-?[\d.]+(?:e[+-]?\d+)?)(?:([+-])([\d.]+))?(?:x(\d+))?", word)
        assert whole is not None, word
        first, sign, step, times = whole.groups()
        if first == "_":
            found += [None] * int(times or 1)
        else:
            by = float(step or 0) * (-1 if sign == "-" else 1)
            found += [float(first) + by * turn for turn in range(int(times or 0) + 1)]
    return found


@given(st.lists(st.none() | st.integers(0, 50).map(float) | st.sampled_from([0.5, 0.1, 2e9, 1.7e9 + 0.25]), max_size=40))
def test_nothing_is_lost_by_writing_it_short(values: list[float | None]) -> None:
    """Read again it is the same series, holes included."""
    assert read(written(values)) == values
