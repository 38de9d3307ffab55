"""Declares guard's configuration: each table is one frozen dataclass, each key is one field made by a function of this module.

The reader (config_reader.py) takes names, defaults and bounds from these declarations, and docs/guard-config.md is generated
from them. A field has the key's name, but for two endings: a time `backoff_s` is the key `backoff`, a secret `token` is
read from the file that the key `token_file` names. Where the two differ otherwise, `key` says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Self

DAY_S = 86_400.0
SHORTEST_TOKEN = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the configuration."""

    kind: str  # how the reader reads it, and how the documentation describes its values
    text: str  # its line in the documentation
    table: str = ""  # "act"; "engine.balancer" is a table inside an [[engine]]
    name: str = ""
    default: Any = None
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()
    pattern: str = ""
    pattern_name: str = ""  # "the name of a pod"
    example: str = ""  # for a required key
    shown_default: str = ""  # where the default itself is None
    convert: Callable[[Any], Any] | None = None  # the last step; a ValueError's message follows the file and the line
    classes: tuple[type[ConfigTable], ...] = ()  # of a table: the classes that it may be


class WrongKey(Exception):
    """A value that contradicts others of its table; `key` is the place, empty for the table itself."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key, self.message = key, message


class ConfigTable:
    """A table of the configuration."""

    __slots__ = ()
    word: ClassVar[str] = ""  # the text that may stand in place of the whole table
    short_key: ClassVar[str] = ""  # the key whose value may stand in place of the whole table

    def checked(self, given: Collection[str]) -> Self:
        """Returns the table, with defaults that depend on other keys filled in; WrongKey where keys contradict each other."""
        del given
        return self


def declared(table: type) -> list[tuple[str, Key]]:
    """Returns the fields of a table that are keys, each with its key."""
    pairs = []
    for field in dataclasses.fields(table):
        key = field.metadata.get("key")
        if key is not None:
            ending = {"time": "_s", "canary": "_s"}.get(key.kind, "")
            derived = field.name.removesuffix(ending) + ("_file" if key.kind == "secret" else "")
            pairs.append((field.name, key if key.name else dataclasses.replace(key, name=derived)))
    return pairs


def _field(kind: str, text: str, default: Any = None, *, key: str = "", **more: Any) -> Any:
    about = Key(kind=kind, text=text, name=key, default=None if default is dataclasses.MISSING else default, **more)
    shape: dict[str, Any] = {"metadata": {"key": about}, "repr": kind not in ("secret", "url")}
    if default == {}:
        return dataclasses.field(default_factory=dict, **shape)
    return dataclasses.field(default=dataclasses.MISSING if about.example else default, **shape)


# A kind that the reader knows by name: "gate", "plan", "socket", "timezone", "urls", "files".
other = _field
path = functools.partial(_field, "path")  # a file or folder, relative to the configuration's own folder
url = functools.partial(_field, "url")  # an address: http://HOST:PORT
canary = functools.partial(_field, "canary", low=5.0, high=60.0)  # the interval of canary requests: a time, or true for 30 s
switch = functools.partial(_field, "switch", default=False)  # true or false; false unless set
command = functools.partial(_field, "words", default=())  # a program and its arguments as a list: no shell splits it


def duration(default: float | None, low: float, high: float, text: str, **more: Any) -> Any:
    """A time: seconds, or "30s", "5m", "2h", "1d"."""
    return _field("time", text, default, low=low, high=high, **more)


def count(default: int | None, low: int, high: int, text: str) -> Any:
    """A whole number."""
    return _field("count", text, default, low=low, high=high)


def share(default: float, low: float, high: float, text: str) -> Any:
    """A share: 0.8, or "80%"."""
    return _field("share", text, default, low=low, high=high)


def word(default: Any, text: str, **more: Any) -> Any:
    """A text on one line; `choices`, `pattern` and `convert` narrow it."""
    return _field("text", text, default, **more)


def choice(default: str, choices: tuple[str, ...], text: str) -> Any:
    """One word of several."""
    return _field("one of", text, default, choices=choices)


def words(default: tuple[str, ...], text: str, **more: Any) -> Any:
    """A text, or a list of texts."""
    return _field("texts", text, default, **more)


def secret(text: str, *, shortest: int = SHORTEST_TOKEN) -> Any:
    """The path of a file that holds one secret word, which is never printed."""
    return _field("secret", text, low=shortest)


def table(text: str, *classes: type[ConfigTable], default: Any = None, is_list: bool = False, key: str = "") -> Any:
    """A table of one of these classes, recognised by the first key of each."""
    return _field("tables" if is_list else "table", text, default, classes=classes, key=key)
