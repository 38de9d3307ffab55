"""The pages under docs/findings: one for each code, all of one shape, and no link that leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

from plimsoll.findings import Code
from tests.each import each

FOLDER = Path(__file__).parents[2] / "docs" / "findings"
INDEX = FOLDER / "README.md"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page != INDEX)
HEADINGS = [
    "What you see", "Evidence", "Why it happens", "What fixes it", "What does not help", "How to prevent it", "Versions",
    "How sure can one be", "Sources",
]  # fmt: skip
SECTION_LINES_MAX = 22
LINES_MIN, LINES_MAX = 35, 90  # a page is read at three in the morning
COLUMNS_MAX = 110  # a terminal of that width prints a page without wrapping
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def links(page: Path) -> list[tuple[str, str]]:
    """The (text, target) of each link of a page."""
    return LINK.findall(page.read_text(encoding="utf-8"))


def sections(page: Path) -> dict[str, str]:
    """The text under each second-level heading, in the order of the page."""
    _, *parts = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {heading: body.strip() for heading, _, body in (part.partition("\n") for part in parts)}


def test_each_code_has_a_page_and_each_page_a_code() -> None:
    """A code without a page leaves a person alone at night; a page without a code is never shown."""
    assert {page.name.removesuffix(".md") for page in PAGES} == set(Code)


@each("page", PAGES, ids=lambda page: page.name)
def test_page_says_first_what_happened_and_has_the_shape_of_all(page: Path) -> None:
    """Its code and one sentence; the same headings, filled and short; fixes by their cost; a page it is confused with."""
    text = page.read_text(encoding="utf-8")
    title, sentence, *_ = text.split("\n\n")
    assert title == f"# {page.name.removesuffix('.md')}"
    assert sentence.endswith(".")
    assert ". " not in sentence.replace("\n", " "), "one sentence"
    assert LINES_MIN <= len(text.splitlines()) <= LINES_MAX
    assert re.findall(r"^(#+) (.+)$", text, flags=re.MULTILINE)[1:] == [("##", heading) for heading in HEADINGS]
    found = sections(page)
    assert [heading for heading, body in found.items() if len(body) < 40] == []
    assert {heading: n for heading, body in found.items() if (n := len(body.splitlines())) > SECTION_LINES_MAX} == {}
    assert LINK.search(found["How sure can one be"])
    numbers = re.findall(r"^(\d+)\. ", found["What fixes it"], flags=re.MULTILINE)
    assert numbers == [str(1 + index) for index in range(len(numbers))] != []


@each("page", [*PAGES, INDEX], ids=lambda page: page.name)
def test_lines_fit_a_terminal_and_links_lead_to_the_code_they_name(page: Path) -> None:
    """Pages are printed as they are; no link leads nowhere or to the page it stands on."""
    text = page.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if len(line) > COLUMNS_MAX or line != line.rstrip()] == []
    assert "\t" not in text
    for name, target in links(page):
        assert (FOLDER / target).is_file(), f"{page.name}: {target} does not exist"
        assert target == f"{Code(name)}.md", f"{page.name}: the link says {name} and leads to {target}"
        assert target != page.name, f"{page.name}: links to itself"


def test_index_lists_each_code_once_in_the_order_of_the_enum() -> None:
    """The index is the table of contents: every code once, grouped as the codes are."""
    assert [text for text, _ in links(INDEX)] == list(Code)
