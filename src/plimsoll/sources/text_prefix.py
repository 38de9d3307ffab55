"""What a line says of itself before its message: which process speaks, at what level, and when.

    (EngineCore_DP0 pid=12) ERROR 11-15 08:00:00 [core.py:700] text         vLLM 0.10 and later
    (VllmWorker rank=0 pid=1) ERROR 05-20 12:00:00 [file.py:1] text         0.8 to 0.10
    ERROR 12-16 21:40:15 engine.py:135] text                                the first engine (V0)
    (RayWorkerWrapper pid=1, ip=10.0.0.1) text                              Ray
    [rank0]: text                                                           torch

vLLM's own prefix is cut off; the level of somebody else's format is only read, and the text left whole.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

LEVELS = {"TRACE": "DEBUG", "DEBUG": "DEBUG", "INFO": "INFO", "NOTICE": "INFO", "WARN": "WARNING", "WARNING": "WARNING",
          "ERROR": "ERROR", "CRITICAL": "CRITICAL", "FATAL": "CRITICAL"}  # fmt: skip

MOST_PARTS = 1000  # of one line: a traceback posted without its line ends has one a frame

_PROCESS = r"\((?P<process>(?:[A-Za-z_][\w.:\-]{0,60}(?: [\w.=:,\-]{1,40}){0,3} )?pid=\d{1,10}(?:, ip=[0-9A-Fa-f.:]{1,45})?)\)"
_STAMP = r"(?P<stamp>(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?)"
_OWN = (
    rf"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) {_STAMP} (?:\[[^\]\s]{{1,200}}:\d{{1,6}}\]|[\w./\-]{{1,100}}:\d{{1,6}}\]) ?"
)


class Said(NamedTuple):
    """A line taken apart."""

    process: str
    level: str
    stamp: str  # "11-15 08:00:00", as written; "" where the line does not say
    text: str


@cache
def _process() -> re.Pattern[str]:
    return re.compile(_PROCESS)


@cache
def _own() -> re.Pattern[str]:
    return re.compile(_OWN)


@cache
def _rank() -> re.Pattern[str]:
    return re.compile(r"\[rank(\d{1,5})\]: ?")


@cache
def _collision() -> re.Pattern[str]:
    # A process that names itself, or a whole prefix, right after what somebody else was writing.
    process, own = (re.sub(r"\?P<\w+>", "?:", one) for one in (_PROCESS, _OWN))
    return re.compile(rf"(?<![\s(]){process} (?:{own})?|(?<![(\"'`])(?:{process} )?{own}")


_OWN_WORDS = ("DEBUG ", "INFO ", "WARNING ", "ERROR ", "CRITICAL ")


@cache
def _foreign() -> re.Pattern[str]:
    names = "|".join(LEVELS)
    return re.compile(rf"[\s|\-\[(]{{0,6}}(?P<level>{names})\b(?:[\])]? ?[:|\-]|[\])]|\s{{1,8}}[|\[])")


def said(text: str) -> Said:
    """Take a line apart; what is not a prefix stays in the text, with its indentation."""
    process = ""
    if text[:1] == " " and (bare := text.lstrip(" "))[:1] in "(DIWEC" and is_prefixed(bare):
        text = bare  # the whole log was indented to post it
    for _ in range(3):  # Ray's prefix may stand before the process's own, which says more
        if not text.startswith("(") or (match := _process().match(text)) is None:
            break
        found = match["process"]
        if not process or not found.startswith("pid="):
            process = found
        text = text[match.end() + 1 :] if text.startswith(" ", match.end()) else text[match.end() :]
    if text.startswith("[rank") and (match := _rank().match(text)):
        process = process or f"rank{match[1]}"
        text = text[match.end() :]
    if text[:1] in "DIWEC" and (match := _own().match(text)):
        return Said(process, match["level"], match["stamp"], text[match.end() :])
    return Said(process, foreign_level(text), "", text)


def is_prefixed(text: str) -> bool:
    """Whether the line begins as vLLM's own do."""
    return _process().match(text) is not None or _own().match(text) is not None


def foreign_level(text: str) -> str:
    """The level where another logger (uvicorn, Python's own, loguru, torch) puts it: at the start of the line."""
    first = text[:1]
    if first == "[" and text[1:2] in "IWEF" and text[2:5].isdigit() and text[5:7].strip("0123456789") in ("", " "):
        return {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}[text[1]]  # torch: [W1115 08:00:00.0 file.cpp:1]
    if first not in "TDINWECF|-[( " or first == "":
        return ""
    match = _foreign().match(text)
    return LEVELS[match["level"]] if match else ""


def apart(text: str) -> list[str]:
    """The text cut where another process's message begins in the middle of it: two writers shared one terminal."""
    if "pid=" not in text and not any(word in text for word in _OWN_WORDS):
        return [text]
    cuts = [match.start() for match in _collision().finditer(text) if match.start() > 0][:MOST_PARTS]
    if not cuts:
        return [text]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
