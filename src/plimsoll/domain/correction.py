"""What real starts taught, as numbers under a key, and how that is written down."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.errors import BadInput

SCHEMA = "plimsoll.corrections/"
VERSION = 1
FILE_MAX_BYTES = 8 << 20
STARTS_MAX = 16  # per key; the oldest goes first
KEYS_MAX = 10_000
TERMS = ("weights", "non_torch", "activation", "remainder", "graphs", "graphs_actual", "context")
"""`remainder` is non-torch and activation together, for logs that do not tell them apart."""

_KEY = re.compile(r"[a-z0-9][a-z0-9.=;+_\-]{0,199}")
_LARGEST = 1 << 60


class Learned(NamedTuple):
    """One term of one start, in bytes."""

    predicted: int
    measured: int
    tolerance: int  # how far off the measured figure may be as it was printed or worked out


class Start(NamedTuple):
    """One start: the limits of its batch, and its terms by the names of TERMS."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    terms: tuple[tuple[str, Learned], ...]

    @property
    def conditions(self) -> tuple[int, int, int]:
        """What the profile run's peak depends on beside the key."""
        return self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len

    def term(self, name: str) -> Learned | None:
        """The term of this name, where this start told it."""
        return dict(self.terms).get(name)


class Correction(NamedTuple):
    """All starts known of one release, card, model shape and parallelism; the newest is the last."""

    starts: tuple[Start, ...]

    def joined(self, newer: Correction) -> Correction:
        """Both together; a start that is told twice counts once."""
        kept = tuple(start for start in self.starts if start not in newer.starts)
        return Correction((kept + newer.starts)[-STARTS_MAX:])


def corrections_file(environment: Mapping[str, str], home: str) -> str:
    """Where corrections are kept; XDG wants a relative XDG_STATE_HOME to be ignored."""
    base = environment.get("XDG_STATE_HOME", "")
    return f"{base if base.startswith('/') else home + '/.local/state'}/plimsoll/corrections.json"


def encoded(corrections: Mapping[str, Correction]) -> str:
    """As the file holds it."""
    body = {
        key: [[*start.conditions, {name: list(term) for name, term in start.terms}] for start in correction.starts]
        for key, correction in sorted(corrections.items())
    }
    assert all(_KEY.fullmatch(key) for key in body), "keys are made by plan.learned.key_of"
    return json.dumps({"schema": f"{SCHEMA}{VERSION}", "corrections": body}, indent=1) + "\n"


def decoded(content: bytes, where: str) -> dict[str, Correction]:
    """What the file holds; BadInput in one line for one that is broken, or of a newer plimsoll."""
    broken = BadInput(f"{where}: not a corrections file of plimsoll, or damaged; move it away to start anew")
    if len(content) > FILE_MAX_BYTES:
        raise broken
    try:
        loaded = json.loads(content.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise broken from None
    schema = loaded.get("schema") if isinstance(loaded, dict) else None
    number = re.fullmatch(rf"{SCHEMA}([0-9]{{1,6}})", schema) if isinstance(schema, str) else None
    if number is None:
        raise broken
    if int(number[1]) != VERSION:
        raise BadInput(f"{where}: written by a newer plimsoll ({schema}); this one reads {SCHEMA}{VERSION}")
    try:
        return {_key(key): _correction(starts) for key, starts in _items(loaded["corrections"], KEYS_MAX)}
    except (KeyError, TypeError, ValueError):
        raise broken from None


def _refuse(text: str) -> None:
    raise ValueError(text)


def _items(loaded: object, most: int) -> list[tuple[str, object]]:
    if not isinstance(loaded, dict) or len(loaded) > most:
        raise ValueError
    return list(loaded.items())


def _key(text: str) -> str:
    if _KEY.fullmatch(text) is None:
        raise ValueError(text)
    return text


def _correction(starts: object) -> Correction:
    if not isinstance(starts, list) or not 0 < len(starts) <= STARTS_MAX:
        raise ValueError
    return Correction(tuple(_start(start) for start in starts))


def _start(loaded: object) -> Start:
    if not isinstance(loaded, list):
        raise TypeError
    sequences, tokens, context, terms = loaded
    found = [(name, _learned(term)) for name, term in _items(terms, len(TERMS)) if name in TERMS]
    return Start(_whole(sequences), _whole(tokens), _whole(context), tuple(found))


def _learned(loaded: object) -> Learned:
    if not isinstance(loaded, list):
        raise TypeError
    predicted, measured, tolerance = map(_whole, loaded)
    if predicted < 0 or measured < 0 or tolerance < 0:
        raise ValueError
    return Learned(predicted, measured, tolerance)


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or abs(number) > _LARGEST:
        raise ValueError
    return number
