"""What a systemd unit of a vLLM server says of its stop, and a stop as systemd would do it by that, without a systemd."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import os
import re
import signal
from typing import NamedTuple

from lab.engine.server import EngineServer
from plimsoll.launch.files import launches_in_unit

TO_ALL, TO_MAIN = ("control-group",), ("mixed", "process")
STOP_S = 90.0  # systemd's own default
_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0}


class Unit(NamedTuple):
    """The settings that decide what becomes of a request in flight."""

    kill_mode: str  # control-group where nothing is said: systemd's default
    stop_s: float  # from SIGTERM until SIGKILL
    flags: tuple[str, ...]  # vLLM's, but for the model and the address

    def flag(self, name: str) -> str | None:
        return self.flags[self.flags.index(name) + 1] if name in self.flags else None


def unit_on(page: str, name: str) -> str:
    """The text of a unit that a page of the documentation prints under its name."""
    found = re.search(rf"^`{re.escape(name)}`:\n\n```ini\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the page prints no {name}"
    return found[1]


def read_unit(text: str) -> Unit:
    """Any unit with one vLLM server in it."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their capital letters
    parser.read_string(re.sub(r"\\\n\s*(?:[#;].*\n\s*)*", " ", text))
    service = parser["Service"]
    (launch,) = launches_in_unit(text, "the unit")
    words = list(launch.arguments[1:])  # the model comes first
    for name in ("--port", "--host"):
        if name in words:
            place = words.index(name)
            del words[place : place + 2]
    return Unit(service.get("KillMode", "control-group"), _seconds(service.get("TimeoutStopSec", "")), tuple(words))


def _seconds(text: str) -> float:
    if text == "infinity":
        return float("inf")
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else STOP_S


def signalled(unit: Unit, server: EngineServer) -> list[int]:
    assert unit.kill_mode in (*TO_ALL, *TO_MAIN), unit.kill_mode
    others = [child.pid for child in server.children()] if unit.kill_mode in TO_ALL else []
    return [server.pid, *others]


async def stop(unit: Unit, server: EngineServer) -> int:
    """SIGTERM to whom the unit says, and SIGKILL to all of them when its time is over; how many got the first."""
    pids, everybody = signalled(unit, server), [server.pid, *(child.pid for child in server.children())]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(unit.stop_s):
            while server.exit_code() is None:
                await asyncio.sleep(0.2)
    for pid in everybody:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)
