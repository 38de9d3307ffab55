"""Finds the vLLM start in a Dockerfile."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.domain.launch import Launch
from plimsoll.errors import TooLarge
from plimsoll.sources.containers import Container
from plimsoll.sources.interpolate import Growth, interpolate
from plimsoll.sources.launch_words import find_in_container
from plimsoll.sources.plain_words import plain_words

_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+(.*)", re.DOTALL)
_FROM = re.compile(r"(?:--\S+\s+)*(\S+)(?:\s+[aA][sS]\s+(\S+))?")

_STAGES_MAX = 100


class _Stage(NamedTuple):
    """One build stage: what it starts and the variables it sets."""

    image: str
    environment: dict[str, str]
    entry: tuple[str, ...] | None = None
    command: tuple[str, ...] = ()
    line: int = 0


def launches_in_dockerfile(text: str, name: str) -> list[Launch]:
    """The vLLM start of the last stage, which is what the built image runs; empty where it starts something else."""
    stages: dict[str, _Stage] = {}
    stage: _Stage | None = None
    arguments: dict[str, str] = {}
    alias: str | None = None
    growth = Growth()
    for line, keyword, rest in _instructions(text):
        known = ChainMap(stage.environment if stage else {}, arguments)
        if keyword == "FROM" and (found := _FROM.match(rest)):
            image = interpolate(found.group(1), known, growth)[0]
            if stage is not None and alias:
                stages[alias] = stage
            if len(stages) > _STAGES_MAX:
                raise TooLarge(f"{name}:{line}: more than {_STAGES_MAX} stages")
            alias = found.group(2)
            stage = stages.get(image, _Stage(image, {}))
            stage = stage._replace(environment=dict(stage.environment))
        elif keyword == "ARG":
            arguments.update(_pairs(rest, known, f"{name}:{line}", growth))
        elif stage is None:
            continue
        elif keyword == "ENV":
            stage.environment.update(_pairs(rest, known, f"{name}:{line}", growth))
        elif keyword == "ENTRYPOINT":
            stage = stage._replace(entry=_command(rest), command=(), line=line)  # a new entry point resets CMD
        elif keyword == "CMD":
            stage = stage._replace(command=_command(rest), line=line)
    if stage is None or (stage.entry is None and not stage.command):
        return []
    container = Container(stage.image, stage.entry, stage.command, tuple(stage.environment.items()))
    launch = find_in_container(container, f"{name}:{stage.line}")
    return [launch] if launch else []


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Each instruction with its line and its text, continuations joined, comments left out."""
    instructions: list[tuple[int, str, str]] = []
    first, parts = 0, list[str]()
    for number, line in enumerate([*text.replace("\r\n", "\n").split("\n"), ""], 1):
        if line.lstrip().startswith("#"):
            continue
        first = first if parts else number
        stripped = line.rstrip(" \t")
        if stripped.endswith("\\"):
            parts.append(stripped[:-1])
            continue
        found = _INSTRUCTION.fullmatch(" ".join([*parts, line]).strip())
        parts = []
        if found:
            instructions.append((first, found.group(1).upper(), found.group(2)))
    return instructions


def _command(rest: str) -> tuple[str, ...]:
    """JSON form as it stands; anything else is given to a shell, as Docker does."""
    if rest.startswith("["):
        import json

        try:
            words = json.loads(rest)
        except (ValueError, RecursionError):
            words = None
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return tuple(words)
    return ("/bin/sh", "-c", rest)


def _pairs(rest: str, known: Mapping[str, str], where: str, growth: Growth) -> dict[str, str]:
    """`A=1 B="two words"`, or the old `A two words`."""
    first = rest.split(None, 1)[0]
    if "=" not in first:
        value = rest.partition(" ")[2].strip()
        return {first: interpolate(value, known, growth)[0]} if value else {}
    pairs = (word.partition("=") for word in plain_words(rest, where))
    return {name: interpolate(value, known, growth)[0] for name, given, value in pairs if given}
