"""What the readers of the trace formats have in common: columns of numbers, checked, and ids of any kind made numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.domain.arrivals import LATEST_NS
from plimsoll.domain.trace import Integers
from plimsoll.sources.trace_shapes import TOKENS_MAX, BadRow

NO_STAMP = -(1 << 63)
"""A stamp that a row does not have, before the stamps are counted from the trace's zero."""
NOTHING = np.zeros(0, dtype=np.int64)


class Columns(NamedTuple):
    """Rows of a trace as numbers."""

    arrival: Integers
    """Empty where the format has no stamps."""
    prompt: Integers
    output: Integers
    priority: Integers
    ids: Integers
    id_counts: Integers
    stamps: Integers
    """(rows, 4): scheduled, first token, finished, cached tokens; no rows where the format has none."""
    prefix_block: int = 0
    """Tokens for each id, where the rows themselves say it."""
    failed: int = 0
    """Rows that are well formed and say that nothing was answered."""


NO_STAMPS = np.zeros((0, 4), dtype=np.int64)


def plain_columns(arrival: Integers, prompt: Integers, output: Integers) -> Columns:
    """Columns of a format that has neither ids nor priorities nor stamps."""
    zeros = np.zeros(len(prompt), dtype=np.int64)
    return Columns(arrival, prompt, output, zeros, NOTHING, zeros, NO_STAMPS)


def whole_numbers(values: Sequence[object], name: str, most: int = TOKENS_MAX, least: int = 0) -> Integers:
    """The values as integers; BadRow if one is not a whole number from `least` to `most`. True is not 1 here."""
    if set(map(type, values)) - {int}:
        raise BadRow(f"{name} is not a whole number")
    try:
        found = np.array(values, dtype=np.int64)
    except OverflowError:
        raise BadRow(f"{name} is out of range") from None
    if len(found) and (found.min() < least or found.max() > most):
        raise BadRow(f"{name} is {'negative' if len(found) == 1 and found[0] < 0 <= least else 'out of range'}")
    return found


def arrivals_ns(values: list[int]) -> Integers:
    """Arrivals in ns; BadRow if one lies beyond all time."""
    return whole_numbers(values, "arrival", LATEST_NS, -LATEST_NS)


def ids_as_numbers(ids: list[object], name: str) -> Integers:
    """Each id as an int64, equal ids as equal numbers: small integers as they are, all else by 63 bits of its digest."""
    if not set(map(type, ids)) - {int}:
        try:
            return np.array(ids, dtype=np.int64)
        except OverflowError:
            pass
    if set(map(type, ids)) - {int, str}:
        raise BadRow(f"{name} holds something that is neither a whole number nor text")
    return np.fromiter(map(_id_number, ids), dtype=np.int64, count=len(ids))


def _id_number(one: object) -> int:
    if isinstance(one, int) and -(1 << 63) <= one < 1 << 63:
        return one
    # A plain number and a digest of text can only meet by chance, one in 2^63.
    text = f"{one:x}" if isinstance(one, int) else str(one)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 1


def joined(parts: Iterable[Columns]) -> Columns:
    """All rows, one part after the other."""
    parts = list(parts)
    return Columns(
        np.concatenate([part.arrival for part in parts]),
        np.concatenate([part.prompt for part in parts]),
        np.concatenate([part.output for part in parts]),
        np.concatenate([part.priority for part in parts]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.id_counts for part in parts]),
        np.concatenate([part.stamps for part in parts]),
        next((part.prefix_block for part in parts if part.prefix_block), 0),
        sum(part.failed for part in parts),
    )
