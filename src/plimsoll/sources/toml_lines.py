"""On which line of a TOML text a table or a key stands: tomllib reads the values and forgets the places."""

from __future__ import annotations

import re

Path = tuple[str | int, ...]
_KEY = r"(?:[A-Za-z0-9_-]+|\"(?:[^\"\\]|\\.)*\"|'[^']*')"
_DOTTED = rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY})*"
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_DOTTED})[ \t]*\]\]?[ \t]*(?:#.*)?$")
_PAIR = re.compile(rf"[ \t]*({_DOTTED})[ \t]*=")
_LONGEST_LINE = 4_096


class Lines:
    """The places of one text. What is not found there is where the table around it is."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {(): 1}
        self._counts: dict[Path, int] = {}
        self._read(text)

    def of(self, *path: str | int) -> int:
        """The line of a table or key, else that of the nearest table around it."""
        place: Path = path
        while place not in self._lines:
            place = place[:-1]
        return self._lines[place]

    def _read(self, text: str) -> None:
        table: Path = ()
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

    def _opened(self, is_list: bool, parts: tuple[str, ...], number: int) -> Path:  # noqa: FBT001
        """The path of the table that begins here; a table inside a list belongs to the last one of it."""
        table: Path = ()
        for part in parts[:-1]:
            table = self._into((*table, part))
        last: Path = (*table, parts[-1])
        if is_list:
            self._counts[last] = self._counts.get(last, -1) + 1
            self._note(last, number)
            last = (*last, self._counts[last])
        else:
            last = self._into(last)
        self._note(last, number)
        return last

    def _into(self, path: Path) -> Path:
        return (*path, self._counts[path]) if path in self._counts else path

    def _note(self, path: Path, number: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], number)


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, dotted))


def _left_open(value: str) -> str:
    for quotes in ('"""', "'''"):
        if value.count(quotes) % 2:
            return quotes
    return ""
