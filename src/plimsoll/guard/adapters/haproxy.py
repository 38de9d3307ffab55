"""HAProxy's runtime API over its Unix socket: one server taken out of its backends and put back, each time read back.

Guard sets the state `drain`: no new work by balancing, running work and health checks go on. It also undoes only that.
A server in `maint` is an operator's: it is out, taking it out is refused, and putting back does not end it. A drain that an
operator set looks exactly like guard's own; to have a server left alone, use `maint`.

HAProxy forgets runtime states when it is reloaded (unless it saves them to a state file). `is_out` reads the state of now, so
a drain asks again and again, and takes the server out again. After a reload `connections` counts those of the new process
alone: only the gate's own count shows that nothing is left.
"""

from __future__ import annotations

import asyncio
import csv
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, ServerHealth, done, failed, unsure
from plimsoll.guard.adapters.gate import quoted_words

DEADLINE_S = 10.0
MOST_BYTES = 4 << 20  # bytes of one answer; each server takes a line of 100
_NAME = r"[A-Za-z0-9_.:-]{1,200}"

# srv_admin_state, by HAProxy's own numbers
FORCED_MAINT = 0x01
INHERITED_MAINT = 0x02
FORCED_DRAIN = 0x08
INHERITED_DRAIN = 0x10
NO_ADDRESS = 0x20  # its name does not resolve; it comes back by itself
MAINT = FORCED_MAINT | INHERITED_MAINT
OUT = MAINT | FORCED_DRAIN | INHERITED_DRAIN
UP = ("1", "2")  # srv_op_state: starting, running


class ServerLine(NamedTuple):
    """One server line of HAProxy's configuration."""

    backend: str
    server: str

    def __str__(self) -> str:
        return f"{self.backend}/{self.server}"


class _ServerState(NamedTuple):
    """HAProxy's state of one server."""

    admin: int
    is_up: bool  # it would get work now


class _HaproxyError(Exception):
    """HAProxy could not be asked, or answered something else; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class HaproxyConfig(key.ConfigTable):
    """balancer = {haproxy = ...}."""

    socket: str = key.other("socket", "the path of HAProxy's admin socket", key="haproxy", example='"/run/haproxy/admin.sock"')
    backends: tuple[str, ...] = key.words(
        (), "HAProxy's backend; needed with haproxy; several in a list",
        key="backend", example='"llm"', pattern=_NAME, pattern_name="the name of a backend",
    )  # fmt: skip
    server: str = key.word(
        None, "this engine's server line there; needed with haproxy",
        example='"a"', pattern=_NAME, pattern_name="the name of a server",
    )  # fmt: skip
    may_be_last: bool = key.switch("it is taken out also where no other server of the backend is up")

    def checked(self, given: Collection[str]) -> Self:
        """Returns itself; raises WrongKey for an empty list of backends."""
        del given
        if not self.backends:
            raise key.WrongKey("backend", "backend is one at least")
        return self

    def build(self, engine: str) -> HAProxy:
        del engine
        places = tuple(ServerLine(each, self.server) for each in self.backends)
        return HAProxy(self.socket, places, may_be_last=self.may_be_last)


class HAProxy:
    """One engine behind HAProxy: its server lines, which are taken out and put back together."""

    def __init__(
        self, socket_path: str, places: tuple[ServerLine, ...], *, may_be_last: bool = False, deadline_s: float = DEADLINE_S
    ) -> None:
        """`may_be_last`: take it out even if no other server of a backend is up."""
        assert all(re.fullmatch(_NAME, name) for place in places for name in place), "they are words of a line of commands"
        self._socket = socket_path
        self._places = tuple(dict.fromkeys(places))
        self._may_be_last = may_be_last
        self._deadline_s = deadline_s
        self.label = f"HAProxy at {socket_path}, {', '.join(map(str, self._places))}"

    async def take_out(self) -> Outcome:
        """Takes all its server lines out of rotation, or none if it is the last one up in any backend.

        Refused, with `maint`, if an operator has it in maintenance in any of them. A server that is down is never the last
        one up, so call this before the gate reports not ready: a health check may see that.
        """
        begun: list[ServerLine] = []
        try:
            async with asyncio.timeout(self._deadline_s):
                states = await self._servers()
                if maint := [str(place) for place in self._places if states[place].admin & MAINT]:
                    return failed(f"an operator has it in maintenance in {_names(maint)}: it is left alone", maint=True)
                last = [str(place) for place in self._places if self._is_last(place, states)]
                if last and not self._may_be_last:
                    return failed(f"nobody else is up in {_names(last)}: it stays in", last=True)
                todo = [place for place in self._places if not states[place].admin & FORCED_DRAIN]
                for place in todo:
                    await self._set(place, "drain", begun)
                states = await self._servers()
        except (_HaproxyError, TimeoutError) as problem:
            return self._no(problem, begun)
        still_in = [str(place) for place in self._places if not states[place].admin & OUT]
        if still_in:
            return unsure(f"HAProxy took it, and still has it in: {_names(still_in)}")
        return done(f"out of {_names(list(map(str, self._places)))}", already=not todo)

    async def put_back(self) -> Outcome:
        """Ends guard's drain, and nothing else that keeps it out."""
        begun: list[ServerLine] = []
        try:
            async with asyncio.timeout(self._deadline_s):
                states = await self._servers()
                maint = [str(place) for place in self._places if states[place].admin & FORCED_MAINT]
                for place in self._places:
                    # `ready` ends a maintenance too, so it is never sent for a server that is in one.
                    if states[place].admin & FORCED_DRAIN and not states[place].admin & FORCED_MAINT:
                        await self._set(place, "ready", begun)
                states = await self._servers()
        except (_HaproxyError, TimeoutError) as problem:
            return self._no(problem, begun)
        still_out = [str(place) for place in self._places if states[place].admin & FORCED_DRAIN]
        if still_out:
            return unsure(f"HAProxy took it, and still drains {_names(still_out)}")
        if maint:
            return done(f"no drain of ours is left; an operator has it in maintenance in {_names(maint)}", maint=True)
        return done(f"back in {_names(list(map(str, self._places)))}", maint=False)

    async def is_out(self) -> bool | None:
        """True if it is out of rotation everywhere; None where HAProxy cannot be asked or does not know the server."""
        try:
            async with asyncio.timeout(self._deadline_s):
                states = await self._servers()
        except (_HaproxyError, TimeoutError):
            return None
        return all(states[place].admin & OUT for place in self._places)

    async def connections(self) -> int | None:
        """Returns HAProxy's current and queued connections of this server; None where they cannot be read."""
        rows = await self._statistics()
        return None if rows is None else _sum(row.get(name) or "0" for row in rows for name in ("scur", "qcur"))

    async def health(self) -> ServerHealth | None:
        """Returns HAProxy's own check (down only if down in all backends), `maint`, and its traffic; None where unreadable."""
        rows = await self._statistics()
        if rows is None:
            return None
        # A drained server whose check fails is DOWN, too: DRAIN says that the check passes. `UP 1/2` and `DOWN 1/2` say that
        # the last checks went the other way: neither up nor down.
        states = {row.get("status") if row.get("check_status") else None for row in rows}
        is_down = True if states == {"DOWN"} else False if states & {"UP", "DRAIN"} else None
        is_maintained = any((row.get("status") or "").startswith("MAINT") for row in rows)
        bytes_out, begun, busy = (_sum(row.get(name) or "" for row in rows) for name in ("bout", "stot", "scur"))
        return ServerHealth(is_down, bytes_out, is_maintained, busy or 0, None if begun is None else begun - (busy or 0))

    def _no(self, problem: Exception, begun: list[ServerLine]) -> Outcome:
        why = str(problem) if isinstance(problem, _HaproxyError) else f"no answer within {self._deadline_s:g} s"
        return unsure(f"HAProxy: {why}") if begun else failed(f"HAProxy: {why}")

    def _is_last(self, place: ServerLine, states: Mapping[ServerLine, _ServerState]) -> bool:
        """True if it is up and no other server of its backend is."""
        others = [state for other, state in states.items() if other.backend == place.backend and other not in self._places]
        return states[place].is_up and not any(state.is_up for state in others)

    async def _servers(self) -> dict[ServerLine, _ServerState]:
        """Returns every server of its backends, its own among them; the heading names the columns."""
        states = {}
        for backend in dict.fromkeys(place.backend for place in self._places):
            lines = (await self._say(f"show servers state {backend}")).splitlines()
            heading = next((line[1:].split() for line in lines if line.startswith("# ")), [])
            if not {"be_name", "srv_name", "srv_op_state", "srv_admin_state", "srv_uweight"} <= set(heading):
                raise _HaproxyError(_complaint(lines) or "its list of servers cannot be read")
            listed = [line.split() for line in lines if not line.startswith("#")]
            for row in (dict(zip(heading, words, strict=True)) for words in listed if len(words) == len(heading)):
                if row["be_name"] != backend:
                    continue
                if not row["srv_admin_state"].isdecimal() or len(row["srv_admin_state"]) > 6:
                    raise _HaproxyError("its list of servers cannot be read")
                admin = int(row["srv_admin_state"])
                is_up = row["srv_op_state"] in UP and not admin & (OUT | NO_ADDRESS) and row["srv_uweight"] != "0"
                states[ServerLine(backend, row["srv_name"])] = _ServerState(admin, is_up)
        for place in self._places:
            if place not in states:
                raise _HaproxyError(f"there is no server {place}")
        return states

    async def _statistics(self) -> list[dict[str, str]] | None:
        """Returns the row of each of its server lines; None where they cannot be read."""
        found: dict[ServerLine, dict[str, str]] = {}
        try:
            async with asyncio.timeout(self._deadline_s):
                for backend in dict.fromkeys(place.backend for place in self._places):
                    lines = (await self._say(f"show stat {backend} 4 -1")).splitlines()
                    if not lines or not lines[0].startswith("# pxname,svname,"):
                        return None
                    for row in csv.DictReader([lines[0][2:], *(line for line in lines[1:] if line)]):
                        found.setdefault(ServerLine(row.get("pxname") or "", row.get("svname") or ""), row)
        except (_HaproxyError, TimeoutError, csv.Error):
            return None
        return [found[place] for place in self._places] if all(place in found for place in self._places) else None

    async def _set(self, place: ServerLine, state: str, begun: list[ServerLine]) -> None:
        """Sets the state of one server line, and keeps it in `begun` unless HAProxy says that it did nothing."""
        begun.append(place)
        answer = await self._say(f"set server {place} state {state}")
        if complaint := _complaint(answer.splitlines()):
            begun.remove(place)
            raise _HaproxyError(complaint)

    async def _say(self, command: str) -> str:
        """Sends one command and returns its whole answer; HAProxy ends the connection after it."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError as problem:
            raise _HaproxyError(f"its socket cannot be opened ({problem.strerror or type(problem).__name__})") from None
        try:
            writer.write(f"{command}\n".encode())
            answer = b""
            while part := await reader.read(65_536):
                answer += part
                if len(answer) > MOST_BYTES:
                    raise _HaproxyError("its answer does not end")
        except OSError as problem:
            raise _HaproxyError(f"its answer was cut off ({problem.strerror or type(problem).__name__})") from None
        finally:
            writer.transport.abort()
        return answer.decode("utf-8", "replace")


def _complaint(lines: list[str]) -> str:
    words = next((line for line in lines if line.strip()), "")
    return f"it says {quoted_words(words, 120)!r}" if words else ""


def _sum(texts: Iterable[str]) -> int | None:
    """Returns the sum of the counts; None where one of them is no number."""
    found = list(texts)
    return sum(map(int, found)) if all(text.isdecimal() and len(text) < 20 for text in found) else None


def _names(places: list[str]) -> str:
    return ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
