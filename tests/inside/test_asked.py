"""What callers send to the endpoints: read strictly, refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.answers import BadAsk, fields_of, number, switch, whole


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5000, b"nul", b'{"a":1}x', b"\x00"])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    """Broken, deep, endless or in no known alphabet: one line each, no traceback."""
    with pytest.raises(BadAsk):
        fields_of(body, ("a",))


@pytest.mark.parametrize("body", [b"1", b"null", b"[]", b'"a"'])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    """Fields have names."""
    with pytest.raises(BadAsk, match="not a JSON object"):
        fields_of(body, ("a",))


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    """A misspelt bound must not be taken for none."""
    with pytest.raises(BadAsk, match="lease_s"):
        fields_of(b'{"leas_s": 1}', ("lease_s",))
    with pytest.raises(BadAsk, match="takes none"):
        fields_of(b'{"a": 1}', ())


@pytest.mark.parametrize("body", [b"", b"  \n", b"{}"])
def test_nothing_asks_for_nothing(body: bytes) -> None:
    """An empty body is an empty object."""
    assert fields_of(body, ()) == {}


wild_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**300, 10**420),
    st.floats(),
    st.text(),
    st.lists(st.integers(), max_size=2),
)


@given(value=wild_values)
def test_a_number_is_within_its_bounds_or_refused(value: Any) -> None:
    """Whatever is handed in, what comes out is the default or a number from low to high; nothing else is raised."""
    try:
        found = number({"x": value}, "x", 0.5, 60.0, 7.0)
    except BadAsk:
        assert isinstance(value, bool) or not isinstance(value, int | float) or not 0.5 <= value <= 60
    else:
        assert found == (7.0 if value is None else value)
        assert type(found) is float


@given(value=wild_values)
def test_a_whole_number_is_within_its_bounds_or_refused(value: Any) -> None:
    """No fraction, no truth value, no text."""
    try:
        found = whole({"x": value}, "x", 0, 100)
    except BadAsk:
        assert type(value) is not int or not 0 <= value <= 100
    else:
        assert found is value


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400", "-1", "true", '"5"', "[1]", "1" + "0" * 400])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    """JSON as Python reads it holds more than numbers."""
    fields = fields_of(f'{{"x": {text}}}'.encode(), ("x",))
    with pytest.raises(BadAsk, match="x is not"):
        number(fields, "x", 0, 10)
    with pytest.raises(BadAsk, match="x is not"):
        whole(fields, "x", 0, 10)


@pytest.mark.parametrize("value", [0, 1, "true", None, []])
def test_a_switch_is_true_or_false(value: Any) -> None:
    """1 is not true."""
    with pytest.raises(BadAsk):
        switch({"x": value}, "x")
    assert switch({"x": True}, "x")
    assert not switch({}, "x")


@given(
    body=st.binary(max_size=200)
    | st.recursive(st.none() | st.integers(), st.lists, max_leaves=5).map(lambda v: json.dumps(v).encode())
)
def test_no_body_breaks_the_reader(body: bytes) -> None:
    """Fields or BadAsk, for any bytes."""
    said = ""
    try:
        assert isinstance(fields_of(body, ("a",)), dict)
    except BadAsk as problem:
        said = str(problem)
    assert len(said) < 200
    assert "\n" not in said
