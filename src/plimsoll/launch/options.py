"""Declares options as fields of a frozen dataclass; `cli/main.py` makes the parser, --help and shell completion of them."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.units import parse_vllm_integer

MOST = 2**31 - 2


@dataclass(frozen=True, slots=True)
class OptionInfo:
    metavar: str  # empty: a switch
    help: str  # empty: not listed by --help
    name: str = ""  # as it is typed; empty: from the field's name
    read: Callable[[str, str], object] | None = None  # converts a value, given the option's name; None: the text as it is
    choices: Sequence[str] = ()  # all that it takes
    offers: Callable[[], Sequence[str]] = tuple  # the shell's completions
    heading: str = ""  # of the options from this one on
    may_repeat: bool = False
    bare: str | None = None  # its value if none follows
    short: str = ""  # a second name


def option(metavar: str, help: str = "", *, default: Any = None, **more: Any) -> Any:  # noqa: A002 - click's own word
    """Returns a field for an option with a value; `more` are fields of `OptionInfo`."""
    return dataclasses.field(default=default, metadata={"option": OptionInfo(metavar, help, **more)})


def switch(help: str = "", **more: Any) -> Any:  # noqa: A002
    """Returns a field for an option without a value: False unless it is given."""
    return dataclasses.field(default=False, metadata={"option": OptionInfo("", help, **more)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The words of a command line beside our options."""

    rest: tuple[str, ...] = ()  # before `--`
    verbatim: tuple[str, ...] | None = None  # after `--`; None if there was no `--`
    typed: tuple[str, ...] = ()  # all of them, with our options


def options_of(kind: type[Words] | Words) -> dict[str, OptionInfo]:
    """Returns the options of a command by their fields."""
    found = ((field.name, field.metadata["option"]) for field in dataclasses.fields(kind) if field.metadata)
    return {name: info if info.name else replace(info, name=f"--{name.replace('_', '-')}") for name, info in found}


def first_given(options: Words, *fields: str) -> str | None:
    """Returns the option, as typed, of the first of these fields that the user set; None if none is."""
    known = options_of(options)
    return next((known[field].name for field in fields if getattr(options, field) not in (None, False)), None)


def meant(word: str, kind: type[Words] | Words) -> str:
    """Returns `; did you mean --json?` for a mistyped option; empty if none is near."""
    near = difflib.get_close_matches(word.partition("=")[0], [info.name for info in options_of(kind).values()], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def pid_of(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise BadInput(f"{name} {text!r} is not a process id")
    return int(text)


def whole(text: str, name: str, least: int = 0, most: int = MOST) -> int:
    """Reads a count as vLLM does: 2048, 2k, 1.5k."""
    try:
        number = parse_vllm_integer(text)
    except BadInput:
        raise BadInput(f"{name}: {text[:40]!r} is not a whole number, such as 2048, 2k (2,000) or 2K (2,048)") from None
    if not least <= number <= most:
        raise BadInput(f"{name} must lie between {least} and {most}, not {text[:40]}")
    return number


def count(text: str, name: str, most: int = 10**9) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 0 < int(text) <= most:
        raise BadInput(f"{name} {text[:40]!r} is not a whole number {f'from 1 to {most}' if most < 10**9 else 'above 0'}")
    return int(text)


def decimal(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{name} is not a number: {text[:40]!r}")
    return number
