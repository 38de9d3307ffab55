"""What all pages share: text that is safe, a document that may load nothing, tables and lists."""

from __future__ import annotations

from html.parser import HTMLParser

from plimsoll.render.charts import POLICY, bullets, document, row, table, text, tiles


def test_text_of_anybodys_is_safe() -> None:
    """Markup is shown and not obeyed, a secret is hidden, a line break is a blank."""
    assert text('<b onclick="x">\n&') == "&lt;b onclick=&quot;x&quot;&gt; &amp;"
    assert "hf_abcdefghijklmnopqrstuv" not in text("token hf_abcdefghijklmnopqrstuv")


def test_a_document_may_load_nothing() -> None:
    """Its policy forbids everything but its own style, unless a script is handed over with a policy of its own."""
    plain = document("a < b", "p{}", ["<p>x</p>"], footer="made by us")
    assert f'content="{POLICY}"' in plain
    assert "<title>a &lt; b</title>" in plain
    assert "<script" not in plain
    assert "made by us" in plain
    scripted = document("t", "", [], policy="script-src 'sha256-x'", script="go()")
    assert "<script>go()</script>" in scripted
    assert "sha256-x" in scripted


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.open += [tag] if tag != "meta" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_tag_that_opens_is_closed() -> None:
    """A page of all parts is well formed."""
    reader = _Tags()
    parts = [
        *tiles([("one", "1", "of two")]),
        *table("caption", ("a", "b"), [row("x", ["1"]), row("y", ["2"], "now")], ends_in_text=True),
        *bullets(["<em>z</em>"], "Notes"),
    ]
    reader.feed(document("t", "", parts, footer="f", script="go()"))
    assert reader.open == []


def test_a_table_without_names_has_no_head() -> None:
    """A column that has no name is not announced; one whose last column is text keeps its sizes in one line."""
    assert "<thead>" not in "".join(table("c", ("", ""), []))
    assert 'class="scroll sizes"' in table("c", ("size", "whose"), [], ends_in_text=True)[0]


def test_no_items_make_no_list() -> None:
    """Neither a heading nor an empty list is shown."""
    assert bullets([], "Notes") == []
