"""Texts to token ids without making others wait: what is long is taken apart in a thread, piece by piece."""

from __future__ import annotations

import asyncio
import re

from plimsoll.standin.text import encode, piece

LONG = 256 * 1024  # letters; so many take some 50 ms
PIECE = 16 * 1024  # a thread holds the interpreter for as long as one of these takes
_BLANK = re.compile(r"\s")


async def encoded(text: str) -> list[int]:
    """The text's tokens."""
    return encode(text) if len(text) <= LONG else await asyncio.to_thread(encoded_in_pieces, text)


async def words_of(ids: list[int]) -> list[str]:
    """What each token reads as."""
    return [piece(one) for one in ids] if len(ids) <= LONG else await asyncio.to_thread(lambda: [piece(one) for one in ids])


def encoded_in_pieces(text: str, size: int = PIECE) -> list[int]:
    """The same tokens: every white letter begins one, so a text may be cut before it."""
    ids: list[int] = []
    begin = 0
    while begin < len(text):
        blank = _BLANK.search(text, begin + size)
        end = len(text) if blank is None else blank.start()
        ids += encode(text[begin:end])
        begin = end
    return ids
