"""Reads guard's TOML file into the classes that declare it; every mistake is one message with the file and the line."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import re
import stat
import tomllib
import zoneinfo
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from plimsoll.errors import BadInput
from plimsoll.guard.config_fields import SHORTEST_TOKEN, ConfigTable, Key, WrongKey, declared
from plimsoll.guard.judge.policy import amount
from plimsoll.inside.knobs import HEADROOM, KNOBS
from plimsoll.net.address import address
from plimsoll.net.client import FileToken

MOST_BYTES = 4 << 20
MOST_TOKEN_BYTES = 4_096
MOST_WORDS = 200  # of a command
LONGEST_SOCKET = 107  # bytes: the longest path that the kernel accepts
USUAL_CANARY_S = 30.0

KeyPath = tuple[str | int, ...]


class KeyLines:
    """Finds the line of every table and key of a TOML text, since tomllib returns only the values."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    def of(self, *path: str | int) -> int:
        """Returns the line on which a table or key begins, else that of the nearest table around it."""
        before, until = 0, len(self._lines)  # not in the first `before` lines, and in the first `until` lines
        while path and not _is_in(self._whole_until(until)[1], path):
            path = path[:-1]
        while path and until - before > 1:
            middle = (before + until) // 2
            before, until = (before, middle) if _is_in(self._whole_until(middle)[1], path) else (middle, until)
        return self._whole_until(until - 1)[0] + 1 if path else 1

    def _whole_until(self, count: int) -> tuple[int, Mapping[str, Any]]:
        """Returns the most first lines, up to `count`, that are TOML by themselves, so that no multi-line text is cut."""
        while count > 0:
            try:
                return count, tomllib.loads("\n".join(self._lines[:count]))
            except (ValueError, RecursionError):
                count -= 1
        return 0, {}


def _is_in(tree: Any, path: KeyPath) -> bool:
    for part in path:
        try:
            tree = tree[part]
        except (LookupError, TypeError):
            return False
    return True


T = TypeVar("T", bound=ConfigTable)


class ConfigReader:
    """Reads one file; `warnings` collects remarks on settings that are allowed and questionable."""

    def __init__(self, name: str, text: str) -> None:
        """Raises BadInput where the text is no TOML; paths in it are relative to the folder of `name`."""
        self.name, self.lines = name, KeyLines(text)
        self.warnings: dict[str, None] = {}
        self._folder = Path(name).parent
        try:
            self.tables = tomllib.loads(text)
        except ValueError as error:  # TOMLDecodeError, and Python's own for a number of thousands of digits
            at = re.search(r"\(at line (\d+), column \d+\)", str(error))
            line = int(at[1]) if at else text.count("\n") + 1
            reason = re.sub(r"\s*\(at [^()]*\)$", "", str(error))
            raise BadInput(f"{name}, line {line}: not TOML: {reason[:200]}") from None
        except RecursionError:
            raise BadInput(f"{name}, line 1: nested too deeply") from None

    def wrong(self, place: Sequence[str | int], message: str) -> BadInput:
        return BadInput(f"{self.name}, line {self.lines.of(*place)}: {message}")

    def read(self, place: KeyPath, value: Any, *classes: type[T]) -> T:
        """Returns the table at this place, as the one of these classes whose first key it has."""
        for table in classes:
            if table.word and value == table.word:
                return table()
            if isinstance(value, str) and table.short_key:
                value = {table.short_key: value}
        tags = {keys[0][1].name: table for table in classes if (keys := declared(table))}
        if not isinstance(value, dict):
            words = "".join(f'"{table.word}", or ' for table in classes if table.word)
            tables = f"{place[-1]} is {words}a table with {', '.join(tags)}" if len(classes) > 1 else f"[{place[0]}] is a table"
            raise self.wrong(place, tables)
        known = list(dict.fromkeys(key.name for table in classes for _, key in declared(table)))
        if strange := [name for name in value if name not in known]:
            where = f"{_shown(place)} has" if place else "there is"
            near = "".join(f"did you mean {match}? " for match in difflib.get_close_matches(strange[0][:40], known, 1))
            raise self.wrong((*place, strange[0]), f"{where} no {strange[0][:40]!r}; {near}known: {', '.join(known)}")
        if len(classes) == 1:
            return self._build(place, value, classes[0])
        present = [tag for tag in tags if tag in value]
        if len(present) != 1:
            raise self.wrong(place, f"{place[-1]} is exactly one of: {', '.join(tags)}")
        own = {key.name for _, key in declared(tags[present[0]])}
        if strange := [name for name in value if name not in own]:
            raise self.wrong((*place, strange[0]), f"{strange[0]} does not go with {present[0]}")
        return self._build(place, value, tags[present[0]])

    def _build(self, place: KeyPath, row: dict[str, Any], table: type[T]) -> T:
        values = {}
        for field, key in declared(table):
            if key.name in row:
                values[field] = self._value((*place, key.name), key, row[key.name])
            elif key.example:
                raise self.wrong(place, f"{_shown(place)} needs its {key.name} = {key.example}")
            else:
                values[field] = key.default
        try:
            return table(**values).checked(row)
        except WrongKey as error:
            raise self.wrong((*place, error.key) if error.key else place, error.message) from None

    def _value(self, place: KeyPath, key: Key, value: Any) -> Any:
        if key.kind == "tables" and isinstance(value, list):
            return tuple(self.read((*place, number), row, *key.classes) for number, row in enumerate(value))
        if key.kind == "table" and key.classes:
            return self.read(place, value, *key.classes)
        try:
            plain = self._plain(key, value)
            return plain if key.convert is None else key.convert(plain)
        except (ValueError, BadInput) as error:
            raise self.wrong(place, str(error)) from None

    def _plain(self, key: Key, value: Any) -> Any:
        """Converts the value by its kind; ValueError or BadInput for one that it cannot be."""
        name = key.name
        match key.kind:
            case "tables":
                raise ValueError(f"write [[{name}]], once for each")
            case "table" if not isinstance(value, dict):
                raise ValueError(f"[{name}] is a table")
            case "canary" if isinstance(value, bool):
                return USUAL_CANARY_S if value else None
            case "time" | "canary":
                return amount(name, value, "s", key.low, key.high)
            case "share":
                return amount(name, value, "share", key.low, key.high)
            case "count" if isinstance(value, bool) or not isinstance(value, int) or not key.low <= value <= key.high:
                raise ValueError(f"{name} is a whole number from {key.low:g} to {key.high:g}")
            case "switch" if not isinstance(value, bool):
                raise ValueError(f"{name} is true or false")
            case "table" | "count" | "switch":
                return value
            case "words":
                return _command(name, value)
            case "texts" | "urls" | "files":
                values = [value] if isinstance(value, str) else value
                if not isinstance(values, list):
                    raise ValueError(f"{name} is a text or a list of texts")
                return tuple(dict.fromkeys(self._one(key, _text(name, each)) for each in values))
            case _:
                return self._one(key, _text(name, value))

    def _one(self, key: Key, text: str) -> Any:
        if key.choices and text not in key.choices:
            raise ValueError(f"{key.name} has no {text[:40]!r}; there is: {', '.join(key.choices)}")
        if key.pattern and not re.fullmatch(key.pattern, text):
            raise ValueError(f"{text[:70]!r} is not {key.pattern_name}")
        match key.kind:
            case "url" | "urls":
                address(text)
                return text.strip()
            case "gate":
                return _gate(text)
            case "files":
                return str(self._folder / text)
            case "path" | "socket":
                return self._path(key, text)
            case "secret":
                path = self._path(key, text)
                self.warnings |= {warning: None} if (warning := open_secret(path)) else {}
                return FileToken(path, functools.partial(read_token, shortest=int(key.low)))
            case "plan":
                return _planned_tokens(self._folder / text)
            case "timezone" if text != "UTC":  # UTC needs no list of time zones on the machine
                try:
                    zoneinfo.ZoneInfo(text)
                except (KeyError, ValueError, OSError):
                    raise ValueError(f"{text[:60]!r} is no time zone that this machine knows; such as Europe/Berlin") from None
        return text

    def _path(self, key: Key, text: str) -> str:
        if not text:
            raise ValueError(f"{key.name} is the path of a file or folder")
        try:
            path = str((self._folder / Path(text).expanduser()).absolute())
        except RuntimeError:
            raise ValueError(f"{text[:100]!r}: there is no such user") from None
        if key.kind == "socket" and len(path.encode("utf-8", "replace")) > LONGEST_SOCKET:
            raise ValueError(f"the path of a socket has {LONGEST_SOCKET} letters at most")
        return path


def _shown(place: KeyPath) -> str:
    return f"[{'.'.join(part for part in place if isinstance(part, str))}]"


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1_000 or not value.isprintable():
        raise ValueError(f"{name} is a text on one line")
    return value


def _command(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or len(value) > MOST_WORDS:
        raise ValueError(f'{name} is a command as a list of words: ["/usr/local/bin/it", "now"]')
    words = tuple(_text(name, word) for word in value)
    if not words[0].strip():
        raise ValueError(f"{name}: the first word is the program")
    return words


def _gate(text: str) -> str:
    """Returns a gate's address: a URL, or a socket of this machine."""
    if not text.startswith("unix:"):
        address(text)
        return text.strip()
    path = text.removeprefix("unix:")
    if not path.startswith("/") or not path.isascii() or len(path) > LONGEST_SOCKET:
        raise ValueError(f"a socket is unix:/PATH, of {LONGEST_SOCKET} letters at most")
    return text


def _planned_tokens(path: Path) -> tuple[float, float, float]:
    """Reads the KV cache tokens, and the band around them, from the output of `plimsoll plan --json`."""
    try:
        body = json.loads(path.read_bytes()[:MOST_BYTES])
        kv, band = body["kv"], body["ledger"]["kv"]
        tokens_per_byte = float(kv["tokens"]) / float(kv["num_blocks"]) / float(kv["bytes_per_block"])
        return float(kv["tokens"]), float(band["low"]) * tokens_per_byte, float(band["high"]) * tokens_per_byte
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or 'cannot be read'}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
        raise ValueError(f"{path}: not a plan with a KV cache, as plimsoll plan --json prints it") from None


def read_token(path: str, shortest: int = SHORTEST_TOKEN) -> str:
    """Reads the token in a file: one word, at least `shortest` letters; BadInput never shows any of it."""
    try:
        with Path(path).open("rb") as file:
            token = file.read(MOST_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror or type(error).__name__})") from None
    # No colon after the path: redaction would hide the text after "x.token:" as a token.
    if len(token) > MOST_TOKEN_BYTES or not re.fullmatch(rb"[\x21-\x7e]+", token):
        raise BadInput(f"{path} holds no token (one word of printable letters)")
    if len(token) < shortest:
        raise BadInput(f"{path} holds a token of fewer than {shortest} letters")
    return token.decode("ascii")


def open_secret(path: str) -> str:
    """Returns a warning if every user of this machine can read the secret; else ""."""
    with contextlib.suppress(OSError):
        if Path(path).stat().st_mode & stat.S_IROTH:
            return f"{path} is a secret that every user of this machine can read; chmod 600, or systemd's LoadCredential="
    return ""


def knob_values(asked: Mapping[str, str]) -> dict[str, float]:
    """Returns the knobs among these words, as numbers; BadInput for a value that is no number."""
    values: dict[str, float] = {}
    for name in (name for name in KNOBS if name in asked):
        word = asked[name]
        is_share = name == HEADROOM
        if not re.fullmatch(r"0?\.[0-9]{1,6}|0" if is_share else r"[1-9][0-9]{0,8}", word):
            raise BadInput(f"{name}={word[:40]}: {'a share below 1, such as 0.05' if is_share else 'a whole number from 1'}")
        values[name] = float(word) if is_share else int(word)
    return values
