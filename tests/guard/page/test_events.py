"""What is told to a page that listens: put together, it is always what guard knows."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.page.page import event, rows_changed, sections_changed

ROWS = st.dictionaries(st.sampled_from("abcdefgh"), st.fixed_dictionaries({"kv": st.integers(0, 3)}), max_size=8)
LOOKS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 2)), max_size=8)


@given(st.lists(ROWS, max_size=6))
def test_lines_put_together_are_what_there_is(states: list[dict[str, dict[str, int]]]) -> None:
    """Whoever takes every change in turn has the last state, and is never told of what has not changed."""
    before: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for state in states:
        now = {key: {"id": key, **row} for key, row in state.items()}
        changed, gone = rows_changed(before, now)
        assert all(before.get(str(row["id"])) != row for row in changed)
        for row in changed:
            shown[str(row["id"])] = row
        for key in gone:
            del shown[key]
        assert shown == now
        before = now


@given(LOOKS)
def test_sections_put_together_are_what_there_is(looks: list[tuple[int, int, bool, int]]) -> None:
    """The same of one engine: new points are sent once, forgotten ones may stay a while, and a restart begins anew."""
    before: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    times: list[int] = []
    for number, (forgotten, new, is_anew, head) in enumerate(looks):
        times = ([] if is_anew else times[forgotten:]) + [number * 10 + place for place in range(new)]
        now = {"head": head, "series": {"t": list(times), "kv": [at * 2 for at in times]}}
        changed = sections_changed(before, now)
        if "more" in changed:
            more = changed.pop("more")
            assert not set(more["t"]) & set(shown["series"]["t"])
            shown["series"] = {name: shown["series"][name] + more[name] for name in more}
        shown |= changed
        assert shown["head"] == head
        assert shown["series"]["t"][-len(times) :] == times or not times
        before = now


@given(st.dictionaries(st.text(), st.text() | st.none() | st.integers()))
def test_an_event_is_one_line_of_data(data: dict[str, Any]) -> None:
    """No text can end it, whatever it holds; and it can be read back."""
    lines = event("fleet", data).decode("ascii").split("\n")
    assert lines[0] == "event: fleet"
    assert lines[2:] == ["", ""]
    assert json.loads(lines[1].removeprefix("data: ")) == data
