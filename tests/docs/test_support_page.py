"""docs/support.md says of plimsoll.inside what the table says."""

from __future__ import annotations

from lab.write_inside_docs import PAGE, page


def test_the_table_of_releases_is_in_step_with_what_was_read() -> None:
    """Remade with `python -m lab.write_inside_docs`."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
