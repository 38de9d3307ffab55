"""What is made for a page stands between its marks, and the rest of the page is as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.marked import placed

PAGE = Path("page.md")


def test_only_what_is_between_the_marks_changes() -> None:
    """Put there twice, it is there once."""
    text = "before <b> old <e> after"
    made = placed(text, "<b>", "<e>", " new ", PAGE)
    assert made == "before <b> new <e> after" == placed(made, "<b>", "<e>", " new ", PAGE)


@pytest.mark.parametrize("text", ["", "before <b> old", "old <e> after", "<e> before <b>"])
def test_a_page_without_its_marks_is_left_alone(text: str) -> None:
    """One line says which page, and nothing is written at its end."""
    with pytest.raises(SystemExit, match=r"page\.md has no place"):
        placed(text, "<b>", "<e>", "new", PAGE)
