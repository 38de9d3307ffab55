"""What a terminal would obey does not reach it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.redaction import printable


def test_what_a_terminal_would_obey_is_taken_out() -> None:
    """Colours, the cursor, line ends, the letters that turn the direction of writing; all else stays as it is."""
    assert printable("a\x1b[31mb\nc\u202ed\t") == "a [31mb c d "
    assert printable("a\x1b[31mb\n", "?") == "a?[31mb?"
    assert printable("Größe 5 €, \\n") == "Größe 5 €, \\n"


@given(st.text())
def test_any_text_is_printable_then_and_as_long_as_before(text: str) -> None:
    """Nothing is left to obey, and no letter moves."""
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
