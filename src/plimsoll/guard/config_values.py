"""Takes values out of a TOML file: every question knows the value's place, and whatever is wrong is one line with it."""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.net.http_get import address

# On which line of a TOML text a table or a key stands: tomllib reads the values and forgets the places.

KeyPath = tuple[str | int, ...]
_KEY = r"(?:[A-Za-z0-9_-]+|\"(?:[^\"\\]|\\.)*\"|'[^']*')"
_DOTTED = rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY})*"
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_DOTTED})[ \t]*\]\]?[ \t]*(?:#.*)?$")
_PAIR = re.compile(rf"[ \t]*({_DOTTED})[ \t]*=")
_LONGEST_LINE = 4_096


class Lines:
    """The places of one text. What is not found there is where the table around it is."""

    def __init__(self, text: str) -> None:
        self._lines: dict[KeyPath, int] = {(): 1}
        self._counts: dict[KeyPath, int] = {}
        self._read(text)

    def of(self, *path: str | int) -> int:
        """The line of a table or key, else that of the nearest table around it."""
        place: KeyPath = path
        while place not in self._lines:
            place = place[:-1]
        return self._lines[place]

    def _read(self, text: str) -> None:
        table: KeyPath = ()
        closes = ""  # the quotes that end the text of several lines that we are in
        for number, line in enumerate(text.split("\n"), 1):
            if closes:
                closes = "" if closes in line else closes
                continue
            short = line[:_LONGEST_LINE].rstrip("\r")
            if (header := _HEADER.match(short)) is not None:
                table = self._opened(header[1] == "[[", _parts(header[2]), number)
            elif (pair := _PAIR.match(short)) is not None:
                self._note((*table, *_parts(pair[1])), number)
                closes = _left_open(line[pair.end() :])

    def _opened(self, is_list: bool, parts: tuple[str, ...], number: int) -> KeyPath:  # noqa: FBT001
        """The path of the table that begins here; a table inside a list belongs to the last one of it."""
        table: KeyPath = ()
        for part in parts[:-1]:
            table = self._into((*table, part))
        last: KeyPath = (*table, parts[-1])
        if is_list:
            self._counts[last] = self._counts.get(last, -1) + 1
            self._note(last, number)
            last = (*last, self._counts[last])
        else:
            last = self._into(last)
        self._note(last, number)
        return last

    def _into(self, path: KeyPath) -> KeyPath:
        return (*path, self._counts[path]) if path in self._counts else path

    def _note(self, path: KeyPath, number: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], number)


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, dotted))


def _left_open(value: str) -> str:
    for quotes in ('"""', "'''"):
        if value.count(quotes) % 2:
            return quotes
    return ""


MOST_TOKEN_BYTES = 4_096
SHORTEST_TOKEN = 16
MOST_WORDS = 200  # of a command
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Values:
    """Of one file; `warnings` is filled with what is not wrong and still should be said."""

    def __init__(self, name: str, tables: dict[str, Any], lines: Lines, warnings: dict[str, None] | None = None) -> None:
        self._name, self._tables, self._lines = name, tables, lines
        self._folder = Path(name).parent
        self._warnings: dict[str, None] = {} if warnings is None else warnings

    def _wrong(self, place: Sequence[str | int], message: str) -> BadInput:
        return BadInput(f"{self._name}, line {self._lines.of(*place)}: {message}")

    def _known(self, place: tuple[str | int, ...], table: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                where = f"[{'.'.join(str(part) for part in place if isinstance(part, str))}] has" if place else "there is"
                raise self._wrong((*place, key), f"{where} no {key[:40]!r}; known: {', '.join(known)}")

    def _table(self, place: tuple[str | int, ...], value: Any, known: Sequence[str] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(place, f"[{place[0]}] is a table")
        if known is not None:
            self._known(place, value, known)
        return value

    def _list(self, place: tuple[str | int, ...], value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(place, f"write [[{place[0]}]], once for each")
        return value

    def _text(self, place: tuple[str | int, ...], value: Any) -> str:
        if not isinstance(value, str) or len(value) > 1_000 or not value.isprintable():
            raise self._wrong(place, f"{place[-1]} is a text on one line")
        return value

    def _texts(self, place: tuple[str | int, ...], value: Any) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise self._wrong(place, f"{place[-1]} is a text or a list of texts")
        return tuple(self._text(place, one) for one in values)

    def _url(self, place: tuple[str | int, ...], value: Any) -> str:
        text = self._text(place, value)
        try:
            address(text)
        except BadInput as error:
            raise self._wrong(place, str(error)) from None
        return text.strip()

    def _seconds(self, place: tuple[str | int, ...], value: Any, low: float, high: float) -> float:
        try:
            seconds = seconds_in(value)
        except BadInput as error:
            raise self._wrong(place, f"{place[-1]}: {error}") from None
        if not low <= seconds <= high:
            raise self._wrong(place, f"{place[-1]} must lie between {low:g} and {high:g} s, not {seconds:g}")
        return seconds

    def _path(self, place: tuple[str | int, ...], value: Any) -> str:
        """Relative to the folder of the file."""
        text = self._text(place, value)
        try:
            found = self._folder / Path(text).expanduser()
        except RuntimeError:
            raise self._wrong(place, f"{text[:100]!r}: there is no such user") from None
        if not text:
            raise self._wrong(place, f"{place[-1]} is the path of a file or folder")
        return str(found.absolute())

    def _switch(self, place: tuple[str | int, ...], value: Any) -> bool:
        if not isinstance(value, bool):
            raise self._wrong(place, f"{place[-1]} is true or false")
        return value

    def _count(self, place: tuple[str | int, ...], value: Any, low: float, high: float) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(place, f"{place[-1]} is a whole number from {low:g} to {high:g}")
        return value

    def _share(self, place: tuple[str | int, ...], value: Any, low: float, high: float) -> float:
        found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", value) if isinstance(value, str) else None
        share = float(found[1]) / 100 if found else value
        if isinstance(share, bool) or not isinstance(share, int | float) or not low <= share <= high:
            raise self._wrong(place, f"{place[-1]} is a share from {low:g} to {high:g}, or in percent")
        return float(share)

    def _words(self, place: tuple[str | int, ...], value: Any) -> tuple[str, ...]:
        """A command: a list, since no shell takes a line apart."""
        if not isinstance(value, list) or not value or len(value) > MOST_WORDS:
            raise self._wrong(place, f'{place[-1]} is a command as a list of words: ["/usr/local/bin/it", "now"]')
        words = tuple(self._text(place, one) for one in value)
        if not words[0].strip():
            raise self._wrong(place, f"{place[-1]}: the first word is the program")
        return words

    def _token(self, place: tuple[str | int, ...], value: Any, shortest: int = SHORTEST_TOKEN) -> str | None:
        if value is None:
            return None
        path = self._path(place, value)
        try:
            token = read_token(path, shortest)
        except BadInput as error:
            raise self._wrong(place, str(error)) from None
        if is_open_to_all(path):
            self._warnings[open_to_all(path)] = None
        return token


def read_token(path: str, shortest: int = SHORTEST_TOKEN) -> str:
    """The token in a file: one word, not short; BadInput never shows any of it."""
    try:
        with Path(path).open("rb") as file:
            token = file.read(MOST_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or 'cannot be read'}") from None
    if len(token) > MOST_TOKEN_BYTES or not re.fullmatch(rb"[\x21-\x7e]+", token):
        raise BadInput(f"{path}: holds no token (one word of printable letters)")
    if len(token) < shortest:
        raise BadInput(f"{path}: a token has {shortest} letters at least")
    return token.decode("ascii")


def is_open_to_all(path: str) -> bool:
    """Whether every user of this machine can read it."""
    try:
        return bool(Path(path).stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def open_to_all(path: str) -> str:
    """What is said of such a file."""
    return f"{path}: every user of this machine can read this secret; chmod 600, or systemd's LoadCredential="


def seconds_in(value: Any) -> float:
    """5, "5s", "2m" or "1h" in seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e15 else math.inf  # a whole number of TOML may be longer than a float is
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]{0,2})\s*", value) if isinstance(value, str) else None
    factor = None if found is None else {**_SECONDS, "": 1.0}.get(found[2])
    if found is None or factor is None:
        raise BadInput(f"{str(value)[:40]!r} is no time; write 30s, 5m or 2h")
    return float(found[1]) * factor
