"""Who may use the endpoints: the token decides, and nothing else."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.answers import ALLOWED, DENIED, OFF, Tokens
from tests.each import each

TOKEN = "correct-horse-battery"
RIGHT = (b"authorization", b"Bearer correct-horse-battery")


@given(
    headers=st.lists(
        st.tuples(st.sampled_from([b"authorization", b"Authorization", b"x-forwarded-for"]), st.binary()), max_size=3
    )
)
def test_no_token_set_means_off_for_everybody(headers: list[tuple[bytes, bytes]]) -> None:
    """Also for one who shows an empty token."""
    assert Tokens("").judge(headers) == OFF


@each(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", TOKEN.encode())],
        [(b"authorization", b"Basic " + TOKEN.encode())],
        [(b"authorization", b"Bearer " + TOKEN.encode() + b"x")],
        [(b"authorization", b"Bearer " + TOKEN[:-1].encode())],
        [(b"authorization", b"Bearer " + TOKEN.upper().encode())],
        [RIGHT, RIGHT],
        [RIGHT, (b"Authorization", b"Bearer wrong")],
        [(b"x-forwarded-for", b"127.0.0.1"), (b"x-real-ip", b"127.0.0.1")],
        [(b"x-authorization", b"Bearer " + TOKEN.encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
    ],
)
def test_missing_wrong_doubled_or_otherwise_worded_is_denied(headers: list[tuple[bytes, bytes]]) -> None:
    """One header, the word Bearer, the whole token."""
    assert Tokens(TOKEN).judge(headers) == DENIED


@pytest.mark.parametrize("name", [b"authorization", b"Authorization", b"AUTHORIZATION"])
@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer"])
def test_the_right_one_is_allowed(name: bytes, scheme: bytes) -> None:
    """However its name and its scheme are spelt."""
    assert Tokens(TOKEN).judge([(b"host", b"x"), (name, scheme + b" " + TOKEN.encode())]) == ALLOWED


@given(shown=st.binary(max_size=40))
def test_only_the_token_itself_opens(shown: bytes) -> None:
    """No other bytes do."""
    expected = ALLOWED if shown.strip() == TOKEN.encode() else DENIED
    assert Tokens(TOKEN).judge([(b"authorization", b"Bearer " + shown)]) == expected


def test_a_token_of_any_bytes_works() -> None:
    """An environment may hold bytes that are no UTF-8: the gate must not fall over them."""
    raw = b"\xff\xfesixteen-bytes-and-more"
    assert Tokens(os.fsdecode(raw)).judge([(b"authorization", b"Bearer " + raw)]) == ALLOWED


def test_short_tokens_are_noticed_and_none_is_kept() -> None:
    """What is kept is a digest."""
    assert Tokens("short").is_short
    assert not Tokens(TOKEN).is_short
    assert not Tokens("").is_short
    assert TOKEN not in repr(vars(Tokens(TOKEN)))
