"""The shapes that alerts are tested with are recordings: the stand-in makes the same ones again."""

from __future__ import annotations

import json

import pytest

from lab.record_shapes import SHAPES, TARGET, recorded


@pytest.mark.parametrize("name", ["wedge", "restart"])
def test_a_shape_is_what_the_stand_in_did(name: str) -> None:
    """Recorded anew, figure for figure the same."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    assert json.loads(TARGET.read_text(encoding="utf-8"))[name] == recorded(shape)


def test_every_shape_is_in_the_file() -> None:
    """None is missing and none is left over."""
    assert list(json.loads(TARGET.read_text(encoding="utf-8"))) == [shape.name for shape in SHAPES]
