"""Times as they are written, to whole nanoseconds without a float on the way."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

import numpy as np

from plimsoll.domain.arrivals import LATEST_NS
from plimsoll.domain.trace import Integers

_SECOND = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)", re.ASCII)
_REST = re.compile(r"(?:\.(\d+))?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)
_SCALE = [10 ** (9 - digits) for digits in range(10)]
_BEYOND = LATEST_NS // 10**9


def dates_ns(texts: Iterable[str]) -> list[int]:
    """ns since 1970 of dates like 2023-11-16 18:15:46.6805900 or 2024-05-10 00:00:00+00:00; ValueError if one is not a date."""
    seconds: dict[str, int] = {}
    found = []
    for text in texts:
        second = text[:19]
        at = seconds.get(second)
        if at is None:
            at = seconds[second] = _second_ns(second)
        if len(text) > 19:
            digits = text[20:]
            if text[19] == "." and len(digits) < 10 and digits.isdecimal():
                at += int(digits) * _SCALE[len(digits)]
            else:
                at += _rest_ns(text[19:])
        found.append(at)
    return found


def alike_dates_ns(texts: list[str]) -> Integers | None:
    """The same for dates that are all written alike, at a fraction of the cost; None where one needs a closer look."""
    width = len(texts[0]) if texts else 0
    joined = "".join(texts)
    if not 21 <= width <= 29 or len(joined) != width * len(texts) or not joined.isascii() or set(map(len, texts)) != {width}:
        return None
    letters = np.frombuffer(joined.encode("ascii"), dtype=np.uint8).reshape(-1, width)
    marks = [4, 7, 10, 13, 16, 19]
    digits = np.delete(letters, marks, axis=1).astype(np.int64) - ord("0")
    if (letters[:, marks] != np.frombuffer(b"-- ::.", dtype=np.uint8)).any() or digits.min() < 0 or digits.max() > 9:
        return None
    year, month, day, hour, minute, second, fraction = (
        digits[:, begin:end] @ 10 ** np.arange(end - begin)[::-1]
        for begin, end in ((0, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 14), (14, width - 6))
    )
    months = (year - 1970) * 12 + month - 1
    first, following = (at.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) for at in (months, months + 1))
    exists = (
        (month >= 1) & (month <= 12) & (day >= 1) & (day <= following - first) & (hour < 24) & (minute < 60) & (second < 60)
    )
    if not (exists & (year >= 1900) & (year < 2090)).all():
        return None
    seconds = (((first + day - 1) * 24 + hour) * 60 + minute) * 60 + second
    found: Integers = seconds * 10**9 + fraction * _SCALE[width - 20]
    return found


def _second_ns(text: str) -> int:
    match = _SECOND.fullmatch(text)
    if match is None:
        raise ValueError("not a date")
    at = datetime.datetime(*(int(part) for part in match.groups()), tzinfo=datetime.UTC)  # type: ignore[misc,arg-type]
    since = at - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (since.days * 86400 + since.seconds) * 10**9


def _rest_ns(text: str) -> int:
    """What follows the second: a fraction (digits after the ninth are dropped), an offset from UTC, or both."""
    match = _REST.fullmatch(text)
    if match is None:
        raise ValueError("not a date")
    fraction, sign, hours, minutes = match.groups()
    offset = (int(hours) * 60 + int(minutes)) * 60 * 10**9 if sign else 0
    return int((fraction or "0").ljust(9, "0")[:9]) - (-offset if sign == "-" else offset)


def seconds_ns(values: Iterable[str | int | Decimal]) -> list[int]:
    """ns of seconds written as decimal numbers; ValueError if one is not a number or lies beyond all time."""
    found = []
    for value in values:
        if isinstance(value, str) and "_" in value:  # Decimal would take 1_000
            raise ValueError("not a number")
        try:
            number = Decimal(value)
            if not -_BEYOND <= number <= _BEYOND:
                raise ValueError("out of range")
        except InvalidOperation:
            raise ValueError("not a number") from None
        found.append(int((number * 10**9).to_integral_value()))
    return found
