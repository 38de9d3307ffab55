"""Texts for the page: whatever they hold, they are short, printable and without secrets."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.page.engine import LONGEST, MORE, shown, tidy

ANY = st.text(st.characters(exclude_categories=()), max_size=2_000)  # with lone surrogates, controls and marks


@given(ANY)
def test_any_text_is_short_and_printable(text: str) -> None:
    """No control, no mark that turns letters around, no surrogate, and at most 300 letters."""
    found = shown(text)
    assert len(found) <= LONGEST
    assert found.isprintable()
    found.encode("utf-8")


def test_what_cannot_be_seen_is_named() -> None:
    """A mark that would turn the rest around is shown by its number; breaks are space; markup stays what it is: text."""
    assert shown("a\u202eb\u200fc\nd") == "a[U+202E]b[U+200F]c d"
    assert shown("<script>alert(1)</script>") == "<script>alert(1)</script>"


def test_a_megabyte_is_cut_and_says_so() -> None:
    """Of a text of a million letters the first are left, with a sign that there was more."""
    found = shown("long " * 200_000)
    assert found.startswith("long long")
    assert found.endswith(MORE)
    assert len(found) <= LONGEST
    assert shown("\n" * 1_000_000 + "x") == MORE


def test_secrets_do_not_pass() -> None:
    """A key in a message is taken out, as everywhere."""
    assert "sk-abcdefghijklmnopqrstuvwxyz123456" not in shown("key sk-abcdefghijklmnopqrstuvwxyz123456 was refused")


NESTED: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(ANY, inner, max_size=5),
    max_leaves=20,
)


def texts_in(value: object) -> list[str]:
    """Every text of plain data, names too."""
    if isinstance(value, dict):
        return [text for name, inner in value.items() for text in (name, *texts_in(inner))]
    if isinstance(value, list):
        return [text for inner in value for text in texts_in(inner)]
    return [value] if isinstance(value, str) else []


@given(NESTED)
def test_so_is_every_text_in_plain_data(value: object) -> None:
    """Names and values at any depth; and what comes out is JSON that every browser reads."""
    import json

    found = tidy(value)
    assert all(text.isprintable() and len(text) <= LONGEST for text in texts_in(found))
    json.dumps(found, allow_nan=False)


def test_what_is_too_deep_or_too_many_is_cut() -> None:
    """Both end with the sign that there was more."""
    deep: object = "end"
    for _ in range(50):
        deep = [deep]
    assert MORE in str(tidy(deep))
    many = tidy(list(range(1_000)))
    assert isinstance(many, list)
    assert many[-1] == MORE
