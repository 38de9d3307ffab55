"""The command with a chosen setting in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.tune.space import FLAGS, Candidate, value_text


def flags_of(candidate: Candidate, own: Candidate) -> dict[str, str]:
    """The flags in which a setting differs from the command's own, with their values."""
    return {FLAGS[name]: value_text(candidate, name) for name in candidate.differences(own)}


def with_flags(words: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """The words of a command with these flags in place of what it said of them; what it did not say comes last."""
    found: list[str] = []
    position = 0
    while position < len(words):
        name, equals, _ = words[position].partition("=")
        if name.replace("_", "-") in flags:
            position += 1 if equals else 2
            continue
        found.append(words[position])
        position += 1
    return [*found, *(word for flag, value in flags.items() for word in (flag, value))]
