"""Launches as `plimsoll standin` reads them, and their logs as text; for the tests of the stand-in."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.doctor.rules.log_text import Log
from plimsoll.standin.config import Launchable
from plimsoll.standin.launch_log import StartLogLine, written
from tests.log_bytes import log_of_bytes
from tests.options import standin_options

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
STAMP = "11-15 12:00:00"
PID = 100


def launchable(*words: str, **environ: str) -> Launchable:
    return standin_options(words, environ).launches[0]


def text_of(lines: Iterable[StartLogLine], release: str) -> str:
    return "".join(written(line, STAMP, PID, release) + "\n" for line in lines)


def log_of(lines: Iterable[StartLogLine], release: str) -> Log:
    return log_of_bytes("standin.log", text_of(lines, release).encode())
