"""Reads a page as strictly as a browser never would, for the tests of those that are written here."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br"}
"""Closed by nothing; all else is closed, by itself or by a tag of its own."""


class HtmlPage(HTMLParser):
    """A page's elements, its text and its script; a tag closed out of order, or an attribute given twice, is an error."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.script = "", ""
        self.feed(page)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it, and wait for its end."""
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute of {tag} is given twice"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """It ends what was opened last."""
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> out of order"

    def handle_data(self, data: str) -> None:
        """What a reader sees, and what runs; a style is neither."""
        if self.open and self.open[-1] == "script":
            self.script += data
        elif not self.open or self.open[-1] != "style":
            self.text += data

    def tags(self, name: str) -> list[dict[str, str | None]]:
        """The attributes of every element of that name."""
        return [attributes for tag, attributes in self.elements if tag == name]
