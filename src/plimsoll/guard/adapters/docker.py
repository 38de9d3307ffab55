"""An engine in a Docker container: inspected, stopped and started through the Engine's API on its Unix socket.

Docker signals the container's first process alone, as an API server needs it. But if that first process is a shell that did
not `exec` the server, the shell ignores the signal, and at the deadline everything is killed; the outcome says so. Request
paths carry no API version: the daemon then uses its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.net.client import HttpClient, Lost, Reply, table

SOCKET = "/var/run/docker.sock"
ASK_LIMIT_S = 10.0
START_LIMIT_S = 60.0
GRACE_S = 15.0  # for the daemon itself, past the container's deadline
INSPECT_BYTES = 4 << 20
MOST_PIDS = 4096
STOPPED = (0, 143)  # exit codes of a server that was told to stop
KILLED = 137
KEPT_UP = ("always", "unless-stopped")  # restart policies by which Docker starts every container that nobody stopped
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,250}"
_SHELLS = frozenset("sh bash dash ash zsh ksh busybox su sudo".split())


@dataclass(frozen=True, slots=True)
class DockerConfig(key.ConfigTable):
    """restart = {docker = ...}."""

    container: str = key.word(
        None, "a container by its name", key="docker", example='"vllm"', pattern=_NAME, pattern_name="the name of a container"
    )
    socket: str = key.other("socket", "where Docker listens", SOCKET)

    def build(self) -> DockerContainer:
        return DockerContainer(self)


class DockerContainer:
    """One container by its name or id. Experimental: tested on recorded bytes only, without a Docker engine."""

    replaces = False
    grace_s = GRACE_S

    def __init__(self, config: DockerConfig) -> None:
        self._container = config.container
        self._server = HttpClient(f"unix:{config.socket}")
        self.label = f"the container {config.container}"

    async def is_running(self) -> bool | None:
        """True if it has processes, also while paused; None where unknown, or while Docker is about to start it again."""
        details = await self._inspect()
        if isinstance(details, Outcome):
            return None
        state = table(details.get("State"))
        if state.get("Restarting") is True:
            return None
        return state["Running"] if isinstance(state.get("Running"), bool) else None

    async def last_exit(self) -> Outcome:
        """Returns how it ended: failed if it has not, done with `by_hand` where somebody stopped it, else unknown.

        A server that was told to stop ends with 0, or with 143 by the signal itself. One that did not end in time was killed;
        that counts as somebody's stop if Docker would have restarted it after any other end.
        """
        details = await self._inspect()
        if isinstance(details, Outcome):
            return details if details.is_done is None else unsure(details.message)
        state, facts = table(details.get("State")), _facts(details)
        if state.get("Running") is not False or state.get("Restarting") is True:
            return failed("it has not ended")
        policy = table(table(details.get("HostConfig")).get("RestartPolicy")).get("Name")
        codes = (*STOPPED, KILLED) if policy in KEPT_UP else STOPPED
        if facts.get("oom_killed") is False and facts.get("exit_code") in codes:
            return done("somebody stopped its container", by_hand=True, inferred=True, **facts)
        return unsure("it has ended, and whether somebody stopped it is not known", **facts)

    async def pids(self) -> tuple[int, ...]:
        """Returns the host's process ids: the first process, then the others that Docker's `top` shows."""
        details = await self._inspect()
        if isinstance(details, Outcome):
            return ()
        first = _pid(table(details.get("State")).get("Pid"))
        reply = await self._ask("GET", "top", ASK_LIMIT_S)
        top = reply.table() if reply.status == 200 else {}
        titles, rows = top.get("Titles"), top.get("Processes")
        others: list[int] = []
        if isinstance(titles, list) and "PID" in titles and isinstance(rows, list):
            at = titles.index("PID")
            others = [_pid(row[at]) for row in rows[:MOST_PIDS] if isinstance(row, list) and len(row) > at]
        return tuple(dict.fromkeys(pid for pid in (first, *others) if pid > 1))

    async def stop(self, deadline_s: float) -> Outcome:
        """Stops it by Docker's own stop, which kills a container that still runs after the deadline."""
        details = await self._inspect()
        if isinstance(details, Outcome):
            return details
        if table(details.get("State")).get("Running") is False:
            return done("the container was not running", was_running=False)
        wait_s = max(1, round(deadline_s))
        reply = await self._ask("POST", f"stop?t={wait_s}", wait_s + self.grace_s)
        if isinstance(reply, Lost) or reply.status not in (204, 304):
            if isinstance(reply, Reply) and reply.status in (400, 404, 409):
                return failed(f"Docker did not stop it: {_reason(reply)}", status=reply.status)
            if isinstance(reply, Lost) and not reply.was_sent:
                return failed(f"Docker cannot be asked: {reply.why}", unreachable=True)
            await self._ask("POST", "kill?signal=SIGKILL", ASK_LIMIT_S)
        details = await self._inspect()
        if isinstance(details, Outcome):
            return unsure(f"it was told to stop, but whether it has is not known: {details.message}")
        facts = _facts(details)
        if table(details.get("State")).get("Running") is not False:
            return unsure("it was told to stop, but runs still")
        was_killed = facts.get("exit_code") == KILLED
        facts |= {"how": "kill" if was_killed else "term", "was_running": True}
        if not was_killed:
            return done("the container has ended", **facts)
        why = ": its first process is a shell, which does not pass signals on" if _is_deaf_shell(details) else ""
        return done(f"the container did not end within {wait_s} s and was killed{why}", **facts)

    async def start(self) -> Outcome:
        """Starts the same container again; refused while it runs."""
        details = await self._inspect()
        if isinstance(details, Outcome):
            return details
        state = table(details.get("State"))
        if state.get("Running") is not False or state.get("Restarting") is True:
            return failed("the container runs already")
        reply = await self._ask("POST", "start", START_LIMIT_S)
        if isinstance(reply, Lost):
            return unsure(f"whether it was started is not known: {reply.why}")
        if reply.status not in (204, 304):
            return failed(f"Docker did not start it: {_reason(reply)}", status=reply.status)
        return done("the container was started")

    async def _inspect(self) -> Mapping[str, Any] | Outcome:
        reply = await self._ask("GET", "json", ASK_LIMIT_S)
        if isinstance(reply, Lost):
            return unsure(f"Docker cannot be asked: {reply.why}")
        if reply.status == 404:
            return failed("Docker has no such container", status=404)
        details = reply.table()
        if reply.status != 200 or not isinstance(details.get("State"), dict):
            return unsure(f"Docker does not say how the container is: {_reason(reply)}", status=reply.status)
        return details

    async def _ask(self, method: str, what: str, limit_s: float) -> Reply | Lost:
        path = f"/containers/{quote(self._container, safe='')}/{what}"
        return await self._server.call(method, path, deadline_s=limit_s, most_bytes=INSPECT_BYTES)


def _facts(details: Mapping[str, Any]) -> dict[str, str | float | bool]:
    """Returns its exit code and how it ended, as facts."""
    state = table(details.get("State"))
    code = state.get("ExitCode")
    facts: dict[str, str | float | bool] = {"exit_code": code} if isinstance(code, int) else {}
    return facts | ({"oom_killed": state["OOMKilled"]} if isinstance(state.get("OOMKilled"), bool) else {})


def _is_deaf_shell(details: Mapping[str, Any]) -> bool:
    """True if its first process is a shell that did not `exec` the server, and so passes no signal on."""
    program, words = str(details.get("Path")), [str(word) for word in details.get("Args") or ()]
    execs = any(re.search(r"(?:^|[\s;&])exec\s", word) for word in words)
    has_init = table(details.get("HostConfig")).get("Init") is True
    return program.rpartition("/")[2] in _SHELLS and not execs and not has_init


def _pid(details: object) -> int:
    text = str(details) if isinstance(details, int | str) and not isinstance(details, bool) else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 else 0


def _reason(reply: Reply) -> str:
    message = reply.table().get("message")
    words = shown_line(message)[:200] if isinstance(message, str) else ""
    return f"it answers {reply.status}" + (f": {words}" if words else "")
