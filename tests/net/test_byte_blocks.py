"""Packed bytes and texts in blocks: whole, cut, spoilt and in another encoding."""

from __future__ import annotations

import gzip
import io

import pytest
import zstandard

from plimsoll.errors import BadInput
from plimsoll.net.inputs import BLOCK_BYTES, Budget, text_blocks, unpacked

TEXT = "".join(f"line {number} of a log\n" for number in range(200_000)).encode()


class Trickle(io.BytesIO):
    """Gives a few bytes at a time, as a slow pipe does."""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(min(7, len(buffer)))
        buffer[: len(data)] = data
        return len(data)


def _blocks(data: bytes) -> list[bytes]:
    return list(text_blocks("x", io.BytesIO(data), Budget()))


def test_members_and_frames_are_one_text_and_no_block_is_large() -> None:
    """With the zeros that tapes leave behind a member, and packed twice."""
    members = gzip.compress(TEXT[:1000]) + b"\0" * 512 + gzip.compress(TEXT[1000:])
    frames = zstandard.compress(TEXT[:1000]) + zstandard.compress(TEXT[1000:])
    for packed in (members, frames, gzip.compress(frames), zstandard.compress(members)):
        blocks = _blocks(packed)
        assert b"".join(blocks) == TEXT
        assert max(map(len, blocks)) <= BLOCK_BYTES


def test_little_by_little_it_is_the_same_text() -> None:
    """What is known by its first bytes is known also where they do not come at once."""
    text = TEXT[:5000]
    for packed in (gzip.compress(text), zstandard.compress(text), gzip.compress(text.decode().encode("utf-16"))):
        inner = unpacked("x", Trickle(packed))
        assert b"".join(text_blocks("x", inner, Budget())) == text


def test_what_came_before_the_damage_is_kept_unless_it_must_be_whole() -> None:
    """A log that is being packed has no end yet; what only looks packed never had a beginning."""
    packed = gzip.compress(TEXT)
    half = packed[: len(packed) // 2]
    kept = b"".join(_blocks(half))
    assert len(kept) > len(TEXT) // 4
    assert TEXT.startswith(kept)
    assert b"".join(_blocks(packed + b"spoilt")) == TEXT
    with pytest.raises(BadInput, match="x: cut or damaged gzip data"):
        unpacked("x", io.BytesIO(half), whole=True).read()
    for spoilt in (b"\x1f\x8b not packed", b"\x28\xb5\x2f\xfd" + b"\xff" * 100):
        with pytest.raises(BadInput, match="x: looks like"):
            _blocks(spoilt)


def test_a_letter_may_be_parted_between_two_blocks() -> None:
    """UTF-16 of any kind comes out as UTF-8."""
    text = "Größe 🙂 of what was written\n" * 60_000
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        assert b"".join(_blocks(text.encode(encoding))).decode() == text
