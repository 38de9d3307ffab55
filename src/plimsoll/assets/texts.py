"""How words become text in each kind of file, and the lines on top that say what made it."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence

# Series in promtool's own notation: `0+2x3` is 0 2 4 6, `5x2` is 5 5 5, `_x3` is nothing three times.


def written(values: Sequence[float | None]) -> str:
    """A series, with what goes on evenly in short. Differences are of whole numbers alone: others do not add up exactly."""
    return " ".join(_runs([None if value is None else float(value) for value in values]))


def _runs(values: Sequence[float | None]) -> Iterator[str]:
    place = 0
    while place < len(values):
        first = values[place]
        step, more = _evenly(values, place)
        place += more + 1
        if first is None:
            yield f"_x{more + 1}" if more else "_"
        elif more == 0:
            yield number(first)
        elif step == 0:
            yield f"{number(first)}x{more}"
        else:
            yield f"{number(first)}{'+' if step > 0 else '-'}{number(abs(step))}x{more}"


def _evenly(values: Sequence[float | None], place: int) -> tuple[float, int]:
    """By how much it goes on from here, and how many times."""
    first, more = values[place], 0
    after = values[place + 1] if place + 1 < len(values) else math.nan
    if first is None or after is None:
        while first is None and place + more + 1 < len(values) and values[place + more + 1] is None:
            more += 1
        return 0.0, more
    step = after - first
    if math.isnan(step) or (step != 0 and not (first.is_integer() and step.is_integer())):
        return 0.0, 0
    while place + more + 1 < len(values) and values[place + more + 1] == first + (more + 1) * step:
        more += 1
    return (step, more) if more > 1 or step == 0 else (0.0, 0)


def number(value: float) -> str:
    """A number as promtool reads it."""
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() else repr(value)


_NO_COMMENTS = (".json", ".whl")
_YAML_WORDS = frozenset("y n yes no on off true false null".split())


def headed(path: str, text: str, lines: Sequence[str]) -> str:
    """The text with comment lines on top, below a `#!`; JSON takes none."""
    if path.endswith(_NO_COMMENTS) or not lines:
        return text
    mark = "//" if path.endswith(".rules") else "#"
    top = "".join(f"{mark} {line}".rstrip() + "\n" for line in lines)
    if text.startswith("#!"):
        first, _, rest = text.partition("\n")
        return f"{first}\n{top}{rest}"
    return f"{top}\n{text}"


def in_shell(word: str) -> str:
    """One word of a POSIX shell; a dollar sign in double quotes and escaped, so that nobody wonders whether it was meant."""
    if "$" in word or "`" in word:
        return '"' + re.sub(r'([$`"\\])', r"\\\1", word) + '"'
    return shlex.quote(word)


def quoted(text: str) -> str:
    """A string in double quotes, as YAML and TOML both read it: what does not print is escaped by its number."""
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    if letter.isprintable():
        return letter
    return f"\\u{ord(letter):04x}" if ord(letter) <= 0xFFFF else f"\\U{ord(letter):08x}"


def for_compose(text: str) -> str:
    """A text in a compose file: a dollar sign that begins no variable is written twice."""
    return text.replace("$", "$$")


def for_pod(text: str) -> str:
    """A text in a pod's command or environment, where `$(NAME)` would be replaced and `$$` is one dollar sign."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def yaml_of(value: object, depth: int = 0) -> str:
    """Plain data as block YAML. A key that begins with `#` is a comment line; `None` is an empty mapping's `{}`."""
    pad = " " * depth
    if isinstance(value, dict):
        return "".join(_entry(key, inner, pad, depth) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return "".join(_item(inner, pad, depth) for inner in value)
    raise TypeError(f"a {type(value).__name__} is no mapping and no list")


def _entry(key: str, value: object, pad: str, depth: int) -> str:
    if key.startswith("#"):
        return f"{pad}{key}\n"
    if isinstance(value, dict | list | tuple) and value:
        return f"{pad}{_scalar(key)}:\n{yaml_of(value, depth + 2)}"
    return f"{pad}{_scalar(key)}: {_scalar(value)}\n"


def _item(value: object, pad: str, depth: int) -> str:
    if isinstance(value, dict | list | tuple) and value:
        inner = yaml_of(value, depth + 2)
        return f"{pad}- {inner[depth + 2 :]}"
    return f"{pad}- {_scalar(value)}\n"


def _scalar(value: object) -> str:
    """Quoted, so that nothing is read as a number, a date or a comment; plain where that is safe."""
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z/.][A-Za-z0-9_./-]*", value) and value.lower() not in _YAML_WORDS and value[-1:] != "."
        return value if plain and not value.startswith((".", "-")) else quoted(value)
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[]"
    return "{}"


def flag_lines(words: Sequence[str]) -> list[list[str]]:
    """The words of a command, a flag and its values in one group."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or re.match(r"--?[A-Za-z]", word):
            groups.append([])
        groups[-1].append(word)
    return groups
