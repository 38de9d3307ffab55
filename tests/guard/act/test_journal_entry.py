"""A line of the journal: what is written is read again, whatever is changed is noticed, and nothing secret gets in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.act.journal_entry import (
    CLOSED,
    ENTRIES_PER_ACTION,
    FIELDS_MAX,
    INTENT,
    LINE_MAX,
    OPENED,
    OUTCOME,
    RESTART,
    SEED,
    SWITCH,
    WINDOW_S,
    CarryOver,
    Entry,
    LineReader,
    cleaned,
    encode,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.builds(
    Entry,
    number=st.just(1),
    at=st.floats(0, 4e9).map(lambda at: round(at, 3)),
    kind=st.text(min_size=1, max_size=20),
    engine=st.text(max_size=30),
    action=st.text(max_size=30),
    step=st.text(max_size=30),
    fields=st.dictionaries(st.text(max_size=10), VALUES, max_size=4),
    was=st.just(0),
    more=st.just({}),
)


def lines_of(entries: list[Entry]) -> list[bytes]:
    """As a file would hold them."""
    lines, checksum = [], SEED
    for number, entry in enumerate(entries, 1):
        line, checksum = encode(entry._replace(number=number), checksum)
        lines.append(line)
    return lines


@given(st.lists(ENTRIES, min_size=1, max_size=4))
def test_what_is_written_is_read(entries: list[Entry]) -> None:
    """Any entry comes back as it was cleaned, in one line of printable ASCII."""
    reader = LineReader()
    wanted = [cleaned(entry) for entry in entries]
    for number, (line, entry) in enumerate(zip(lines_of(wanted), wanted, strict=True), 1):
        assert line.endswith(b"\n")
        assert line.isascii()
        assert line[:-1].decode().isprintable()
        assert len(line) < LINE_MAX
        assert reader.read(line[:-1]) == entry._replace(number=number)


@given(st.lists(ENTRIES, min_size=1, max_size=3), st.data())
def test_any_other_byte_is_noticed(entries: list[Entry], data: st.DataObject) -> None:
    """One byte that is not as it was, anywhere in a line: the line is refused."""
    line = lines_of([cleaned(entry) for entry in entries])[0][:-1]
    at = data.draw(st.integers(0, len(line) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda value: value != line[at]))
    assert isinstance(LineReader().read(line[:at] + bytes([other]) + line[at + 1 :]), str)


def test_a_line_that_is_missing_is_noticed() -> None:
    """Neither the first, nor one in the middle, nor two in another order go unseen."""
    one, two, three = (line[:-1] for line in lines_of([Entry(0, 1.0, "note", step=name) for name in "abc"]))
    assert isinstance(LineReader().read(two), str)
    reader = LineReader()
    assert isinstance(reader.read(one), Entry)
    assert isinstance(reader.read(three), str)


def test_a_line_that_was_made_by_hand() -> None:
    """With the right sum and the wrong number, or with something that is no entry, it is refused as well."""
    reader = LineReader()
    line, checksum = encode(Entry(7, 1.0, "note"), SEED)
    assert isinstance(reader.read(line[:-1]), Entry)
    assert reader.read(encode(Entry(9, 1.0, "note"), checksum)[0][:-1]) == "its number is 9 and should be 8"
    assert reader.read(encode(Entry(8, 10**400, "note"), checksum)[0][:-1]) == "it is no entry"
    assert reader.read(encode(Entry(8, 1.0, "note", was=-1), checksum)[0][:-1]) == "it is no entry"


def test_a_newer_version_wrote_it() -> None:
    """Kinds and members that are not known are kept, and written again as they were."""
    line, _ = encode(Entry(1, 2.0, "transmogrified", more={"colour": {"deep": [1]}}), SEED)
    found = LineReader().read(line[:-1])
    assert isinstance(found, Entry)
    assert (found.kind, found.more) == ("transmogrified", {"colour": {"deep": [1]}})
    assert encode(found, SEED)[0] == line


@pytest.mark.parametrize(
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
    line, _ = encode(cleaned(Entry(1, 1.0, "note", fields=fields)), SEED)
    assert b"s3cretvalue" not in line
    json.loads(line)


def test_names_are_cleaned_too() -> None:
    """An engine's address may hold a login."""
    assert "s3cretvalue" not in str(cleaned(Entry(1, 1.0, "note", engine="http://u:s3cretvalue@h:1/\n")))


def test_what_is_too_large_is_cut() -> None:
    """Hostile sizes and depths end in a line of bounded length."""
    deep: object = "x"
    for _ in range(2_000):
        deep = {"a": deep}
    for fields in (
        {"a": "x" * 10**6},
        {"a": 10**9999},
        {str(n): "y" * 1000 for n in range(5000)},
        {"a": deep},
        {"a": [["z"] * 999] * 999},
    ):
        line, _ = encode(cleaned(Entry(1, 1.0, "k" * 10**5, fields=fields)), SEED)
        assert len(line) < FIELDS_MAX + 4_000


def entry(number: int, kind: str, action: str = "", *, at: float = 0.0, step: str = "", engine: str = "") -> Entry:
    """A short one."""
    return Entry(number, at, kind, engine, action, step)


def test_what_is_carried_over() -> None:
    """Open actions whole, what budgets count for two days, the last of each switch; and nothing else."""
    carry = CarryOver()
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
    for one in entries:
        carry.note(one)
    assert [one.number for one in carry.entries(WINDOW_S + 5)] == [3, 4, 6, 7, 8, 10, 12, 14]
    assert [one.number for one in carry.entries(9 * WINDOW_S)] == [3, 4, 6, 7, 14]


def test_an_action_that_never_ends_is_bounded() -> None:
    """Its first entry and the newest are kept."""
    carry = CarryOver()
    for number in range(1, 3 * ENTRIES_PER_ACTION):
        carry.note(entry(number, INTENT, "a"))
    kept = carry.entries(0.0)
    assert (kept[0].number, kept[-1].number, len(kept)) == (1, 3 * ENTRIES_PER_ACTION - 1, ENTRIES_PER_ACTION + 1)


@given(st.lists(ENTRIES, max_size=30))
def test_carrying_twice_is_carrying_once(entries: list[Entry]) -> None:
    """What a file begins with, carried on to the next one, is the same again."""
    first, second = CarryOver(), CarryOver()
    for number, one in enumerate(entries, 1):
        first.note(one._replace(number=number, kind=[OPENED, INTENT, CLOSED, SWITCH][number % 4], action=one.action[:1]))
    kept = first.entries(0.0)
    for number, one in enumerate(kept, 1000):
        second.note(one._replace(number=number, was=one.first_number))
    again = second.entries(0.0)
    assert [one.first_number for one in again] == [one.first_number for one in kept]
