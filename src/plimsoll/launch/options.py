"""Takes our own options out of a command line that is mostly somebody else's.

`plimsoll flags --vllm 0.32.0 vllm serve MODEL --port 8000 --json`: `--vllm` and `--json` are ours, the rest is the user's
vLLM command and must reach us untouched, also where argparse would object. Ours win on an exact match before `--`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.errors import BadInput


class Split(NamedTuple):
    """Our options, and what is left."""

    values: Mapping[str, str]
    switches: frozenset[str]
    rest: tuple[str, ...]  # before `--`, without ours
    verbatim: tuple[str, ...] | None  # after `--`; None if there was no `--`


def split_options(words: Sequence[str], *, with_value: Sequence[str], switches: Sequence[str]) -> Split:
    """Sort the words; an option of ours without its value, or given twice with different values, is BadInput."""
    values: dict[str, str] = {}
    found: set[str] = set()
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            return Split(values, frozenset(found), tuple(rest), tuple(words[position:]))
        name, equals, inline = word.partition("=")
        if word in switches:
            found.add(word)
        elif name in with_value:
            if not equals:
                if position >= len(words):
                    raise BadInput(f"{name} needs a value")
                inline = words[position]
                position += 1
            if values.get(name, inline) != inline:
                raise BadInput(f"{name} is given twice: {values[name]} and {inline}")
            values[name] = inline
        else:
            rest.append(word)
    return Split(values, frozenset(found), tuple(rest), None)
