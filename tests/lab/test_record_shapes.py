"""The shapes that alerts are tested with, and series as promtool writes them."""

from __future__ import annotations

import json

from lab.record_shapes import SHAPES, TARGET, recorded, written


def test_every_shape_is_in_the_file_as_the_stand_in_did_it() -> None:
    """Recorded anew two are the same, and none is missing; a night of nothing is one word, and so is a steady counter."""
    kept = json.loads(TARGET.read_text(encoding="utf-8"))
    assert list(kept) == [shape.name for shape in SHAPES]
    for shape in SHAPES:
        if shape.name in ("wedge", "restart"):
            assert kept[shape.name] == recorded(shape)
    assert written([0.0] * 720) == "0x719"
    assert written([2.0 * turn for turn in range(100)]) == "0+2x99"
    assert written([None] * 3 + [5.0]) == "_x3 5"
