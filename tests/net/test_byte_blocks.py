"""Texts in blocks of bytes: whole, cut, spoilt and in another encoding."""

from __future__ import annotations

import gzip
import zlib

import pytest

from plimsoll.net.inputs import BLOCK_BYTES, gunzipped, recoded

TEXT = "".join(f"line {number} of a log\n" for number in range(200_000)).encode()


def test_members_are_one_text_and_no_block_is_large() -> None:
    """Wherever the packed bytes are parted, and with the zeros that tapes leave behind a member."""
    packed = gzip.compress(TEXT[:1000]) + b"\0" * 512 + gzip.compress(TEXT[1000:])
    for size in (7, 4096, len(packed)):
        blocks = list(gunzipped(packed[at : at + size] for at in range(0, len(packed), size)))
        assert b"".join(blocks) == TEXT
        assert max(map(len, blocks)) <= BLOCK_BYTES


def test_what_came_before_the_damage_is_kept_and_nothing_at_all_is_an_error() -> None:
    """A log that is being packed has no end yet; what only looks packed never had a beginning."""
    packed = gzip.compress(TEXT)
    half = b"".join(gunzipped(iter([packed[: len(packed) // 2]])))
    assert half
    assert TEXT.startswith(half)
    assert b"".join(gunzipped(iter([packed, b"spoilt"]))) == TEXT
    with pytest.raises(zlib.error):
        list(gunzipped(iter([b"\x1f\x8b\x08 not packed"])))


def test_a_letter_may_be_parted_between_two_blocks() -> None:
    """UTF-16 of any kind comes out as UTF-8."""
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        data = "Größe 🙂\n".encode(encoding)
        assert b"".join(recoded((data[at : at + 1] for at in range(len(data))), encoding)).decode() == "Größe 🙂\n"
