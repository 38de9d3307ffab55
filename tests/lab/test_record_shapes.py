"""The shapes that alerts are tested with, and series as promtool writes them."""

from __future__ import annotations

import json

import pytest

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
