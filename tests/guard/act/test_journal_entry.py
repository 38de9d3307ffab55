"""An entry of the journal: nothing secret gets in, its size is bounded; and which entries are still needed."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act import journal_entry as journal
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, RESTART, SWITCH, WINDOW_S, Entry, cleaned, needed
from tests.each import each

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.builds(
    Entry, st.just(1), st.floats(0, 4e9).map(lambda at: round(at, 3)), st.text(min_size=1, max_size=20), st.text(max_size=30),
    st.text(max_size=30), st.text(max_size=30), st.dictionaries(st.text(max_size=10), VALUES, max_size=4),
)  # fmt: skip


@given(ENTRIES)
def test_any_entry_can_be_written(entry: Entry) -> None:
    """Whatever it was given: what is left is JSON of bounded size, in printable names."""
    found = cleaned(entry)
    assert len(json.dumps(found.fields, allow_nan=False)) <= journal.FIELDS_MAX
    assert all(len(name) <= journal.NAME_MAX and name.isprintable() for name in found[2:6])
    assert cleaned(found) == found


@each(
    "fields",
    [
        {"token": "s3cretvalue"},
        {"says": "Authorization: Bearer s3cretvalue123"},
        {"url": "http://admin:s3cretvalue@lb.internal/x"},
        {"command": ["vllm", "serve", "m", "--api-key", "s3cretvalue"]},
        {"env": {"HF_TOKEN": "s3cretvalue"}},
        {"env": [{"name": "HF_TOKEN", "value": "s3cretvalue"}]},
        {"deep": {"a": {"b": {"password": "s3cretvalue"}}}},
        {"log": "INFO: prompt: 's3cretvalue tell me', params"},
        {"http://u:s3cretvalue@h": 1},
    ],
)
def test_nothing_secret_is_written(fields: dict[str, object]) -> None:
    """Tokens, keys, logins in addresses and what users wrote are hidden wherever they stand."""
    assert "s3cretvalue" not in json.dumps(cleaned(Entry(1, 1.0, "note", fields=fields)))


def test_names_are_cleaned_and_an_action_that_never_ends_is_bounded() -> None:
    """An address may hold a login; the first entry and the newest are kept."""
    assert "s3cretvalue" not in str(cleaned(Entry(1, 1.0, "note", engine="http://u:s3cretvalue@h:1/\n")))
    most = journal.ENTRIES_PER_ACTION
    kept = needed([entry(1, OPENED, "a"), *(entry(number, INTENT, "a") for number in range(2, 3 * most))], 0.0)
    assert (kept[0].number, kept[-1].number, len(kept)) == (1, 3 * most - 1, most + 1)


def test_what_is_too_large_is_cut() -> None:
    """Hostile sizes and depths end in an entry of bounded length."""
    deep: object = "x"
    for _ in range(2_000):
        deep = {"a": deep}
    many = {str(number): "y" * 1000 for number in range(5000)}
    for fields in ({"a": "x" * 10**6}, {"a": 10**9999}, many, {"a": deep}, {"a": [["z"] * 999] * 999}):
        assert len(json.dumps(cleaned(Entry(1, 1.0, "k" * 10**5, fields=fields)))) < journal.FIELDS_MAX + 4_000


def entry(number: int, kind: str, action: str = "", *, at: float = 0.0, step: str = "", engine: str = "") -> Entry:
    return Entry(number, at, kind, engine, action, step)


def test_what_is_needed() -> None:
    """Open actions whole, what budgets count for two days, the last of each switch; and nothing else."""
    entries = [
        entry(1, OPENED, "old", at=0.0),
        entry(2, CLOSED, "old", at=1.0),
        entry(3, OPENED, "a", at=10.0),
        entry(4, INTENT, "a", at=11.0),
        entry(5, SWITCH, step="pause", at=12.0),
        entry(6, SWITCH, step="pause", at=13.0),
        entry(7, SWITCH, step="pause", engine="e", at=14.0),
        entry(8, RESTART, at=15.0),
        entry(9, "note", at=16.0),
        entry(10, OPENED, "b", at=WINDOW_S),
        entry(11, INTENT, "b", at=WINDOW_S),
        entry(12, CLOSED, "b", at=WINDOW_S),
        entry(13, OUTCOME, "b", at=WINDOW_S),  # late: it does not open the action again
        entry(14, "whatever", "a", at=WINDOW_S),
    ]
    assert [one.number for one in needed(entries, WINDOW_S + 5)] == [3, 4, 6, 7, 8, 10, 12, 14]
    assert [one.number for one in needed(entries, 9 * WINDOW_S)] == [3, 4, 6, 7, 14]


@given(st.lists(ENTRIES, max_size=30))
def test_what_is_needed_of_what_is_needed_is_the_same(entries: list[Entry]) -> None:
    """So the rest may be forgotten at any time."""
    kinds = [OPENED, INTENT, CLOSED, SWITCH]
    rows = [one._replace(number=n, kind=kinds[n % 4], action=one.action[:1]) for n, one in enumerate(entries, 1)]
    kept = needed(rows, 0.0)
    assert needed(kept, 0.0) == kept
