"""Words and token ids: a small tokeniser of our own, so that equal text is equal content and answers can be read back.

No model's tokeniser: a word of up to eight letters is one token, a longer one several, and so is every mark. It counts about
as many tokens as Llama's does for English prose, and nothing here claims more.
"""

from __future__ import annotations

import re
import zlib

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

VOCABULARY = 32_000
RESERVED = 1_000  # the ids below are the words that answers are made of
_PIECES = re.compile(r" ?[^\W_]{1,8}| ?[^\w\s]| ?_|\s")
_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu")
_SPLIT = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _word(token: int) -> str:
    """The word of one of the reserved ids: three syllables, one for each digit."""
    digits = f"{token:03d}"
    return " " + "".join(_SYLLABLES[int(digit)] for digit in digits)


_WORDS = tuple(_word(token) for token in range(RESERVED))
_IDS = {word: token for token, word in enumerate(_WORDS)}


def encode(text: str) -> list[int]:
    """The text as token ids; equal pieces have equal ids in every process."""
    return [_id_of(piece) for piece in _PIECES.findall(text)]


def _id_of(piece: str) -> int:
    known = _IDS.get(piece)
    if known is not None:
        return known
    return RESERVED + zlib.crc32(piece.encode("utf-8", "surrogatepass")) % (VOCABULARY - RESERVED)


def piece(token: int) -> str:
    """What a token reads as. Ids that are not words of ours read as their number: what they stood for is not kept."""
    return _WORDS[token] if 0 <= token < RESERVED else f" t{token}"


def decode(tokens: list[int]) -> str:
    """The text of several tokens."""
    return "".join(piece(token) for token in tokens)


def draw(seed: int, count: int) -> Ids:
    """As many ids of words, the same for the same seed."""
    with np.errstate(over="ignore"):
        number = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed & 0xFFFFFFFF)) * _SPLIT
        return (mixed(number) % np.uint64(RESERVED)).astype(np.int64)


def mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number's digest: one bit changed changes half of the others."""
    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX1
        numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX2
        return numbers ^ (numbers >> np.uint64(31))


def content_ids(tokens: Ids, block: int) -> Ids:
    """One number for each whole block of tokens, by what is in it."""
    blocks = tokens[: len(tokens) // block * block].reshape(-1, block).astype(np.uint64)
    with np.errstate(over="ignore"):
        # Each place weighs differently, so that the order counts.
        weights = mixed(np.arange(1, block + 1, dtype=np.uint64) * _SPLIT) | np.uint64(1)
        return mixed((blocks * weights).sum(axis=1, dtype=np.uint64)).view(np.int64)
