"""Finds vLLM starts in systemd unit files."""

from __future__ import annotations

import re

from plimsoll.domain.launch import Launch
from plimsoll.errors import BadInput
from plimsoll.sources.interpolate import Growth
from plimsoll.sources.launch_words import find_launch

_SETTING = re.compile(r"([A-Za-z]+)[ \t]*=[ \t]*(.*)", re.DOTALL)
_PREFIX = re.compile(r"[-@:+!|]*")
_WORD_PART = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|((?:[^\s'\"\\]|\\.)+)", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "s": " ", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_BRACED = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
_BARE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_SPECIFIER = re.compile(r"%[A-Za-z]")


def launches_in_unit(text: str, name: str) -> list[Launch]:
    """Every vLLM start under `ExecStart=`, with what `Environment=` sets above or below it."""
    environment: dict[str, str] = {}
    starts: list[tuple[int, str]] = []
    notes: list[str] = []
    for line, logical in _logical_lines(text):
        setting = _SETTING.fullmatch(logical)
        if setting is None:
            continue
        key, value = setting.groups()
        if key == "Environment":
            if not value:
                environment = {}  # an empty assignment resets the list
            for word in _words(value, f"{name}:{line}"):
                variable, _, content = word.partition("=")
                environment[variable] = content
        elif key == "EnvironmentFile" and value:
            notes.append(f"the variables in {value.lstrip('-')} were not read")
        elif key == "ExecStart":
            if not value:
                starts = []
            else:
                starts.append((line, value))
    launches: list[Launch] = []
    growth = Growth()
    for line, value in starts:
        words, missing = _command(_words(_PREFIX.sub("", value, count=1), f"{name}:{line}"), environment, growth)
        if launch := find_launch(words, environment.items(), f"{name}:{line}", missing):
            launches.append(launch._replace(notes=(*launch.notes, *notes)))
    return launches


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Lines with their continuations joined and the number of the first; comments are left out, also in between."""
    lines: list[tuple[int, str]] = []
    first, parts = 0, list[str]()
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if line.lstrip().startswith(("#", ";")):
            continue
        first = first if parts else number
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        lines.append((first, " ".join([*parts, line]).strip()))
        parts = []
    if parts:
        lines.append((first, " ".join(parts).strip()))
    return lines


def _words(text: str, where: str) -> list[str]:
    """Words as systemd cuts them: quotes group, backslashes escape, no shell."""
    words: list[list[str]] = []
    at, ended = 0, True
    while at < len(text):
        if text[at].isspace():
            at, ended = at + 1, True
            continue
        found = _WORD_PART.match(text, at)
        if found is None:
            raise BadInput(f"{where}: a quote that opens here is never closed")
        piece = _ESCAPE.sub(_unescaped, next(group for group in found.groups() if group is not None))
        if ended:
            words.append([])
        words[-1].append(piece)
        at, ended = found.end(), False
    return ["".join(pieces) for pieces in words]


def _unescaped(found: re.Match[str]) -> str:
    letter = found.group(1)
    if len(letter) == 3:
        return chr(int(letter[1:], 16))
    return _LETTERS.get(letter, letter)


def _command(words: list[str], environment: dict[str, str], growth: Growth) -> tuple[list[str], list[str]]:
    """The words with variables filled in: `${A}` in place, `$A` only where it is a whole word, and then split."""
    done: list[str] = []
    missing: list[str] = []

    def fill(found: re.Match[str]) -> str:
        escaped, variable = found.groups()
        if escaped:
            return "$"
        if variable not in environment:
            missing.append(variable)
            return f"${variable}"
        return growth.add(environment[variable])

    for word in words:
        missing += _SPECIFIER.findall(word.replace("%%", ""))
        bare = _BARE.fullmatch(word)
        if bare and bare.group(1) in environment:
            done += growth.add(environment[bare.group(1)]).split()
            continue
        missing += [bare.group(1)] if bare else []
        done.append(_BRACED.sub(fill, word.replace("%%", "%")))
    return done, missing
