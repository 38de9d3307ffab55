"""What the steps of an action need beside the adapters: evidence with doctor's word on it, the device's memory, progress."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from plimsoll.actuators.evidence import EvidenceKeeper, Wanted
from plimsoll.domain.asking import bearer
from plimsoll.domain.outcome import Outcome, done
from plimsoll.domain.process_table import Mark
from plimsoll.guard.ports import Restarter
from plimsoll.sources.device_memory import DeviceMemory, Holding
from plimsoll.sources.engine_http import Client
from plimsoll.sources.http_answer import Missed
from plimsoll.sources.process_tree import read_process

PAGE_MAX = 16 << 20
PAGE_S = 5.0
DOCTOR_S = 30.0
DOCTOR_MAX = 4 << 20


class EngineEvidence:
    """Of one engine: its log's end, its page, the gate's words, the stacks; and what doctor makes of it."""

    def __init__(
        self, keeper: EvidenceKeeper, url: str, *, log: str | None = None, restarter: Restarter | None = None,
        gate_url: str | None = None, token: str | None = None,
    ) -> None:  # fmt: skip
        self._keeper, self._url, self._log, self._restarter = keeper, url, log, restarter
        self._gate_url, self._token = gate_url or url, token

    async def take(self, engine: str, action: str) -> Outcome:
        """A folder with what could be had, and the codes of what doctor found in it."""
        pids = () if self._restarter is None else await self._restarter.pids()
        pages: dict[str, bytes | Callable[[], Awaitable[bytes]]] = {"metrics.txt": lambda: self._fetch(self._url, "/metrics")}
        if self._token is not None:
            for name in ("state", "memory"):
                pages[f"{name}.json"] = functools.partial(self._fetch, self._gate_url, f"/plimsoll/{name}", self._token)
        outcome = await self._keeper.take(engine, action, Wanted(self._log, pids, pages))
        folder = outcome.facts.get("folder")
        codes = await doctor_on(Path(folder)) if outcome.is_done and isinstance(folder, str) else ""
        if not codes:
            return outcome
        return outcome._replace(says=f"{outcome.says}; doctor: {codes}", facts={**outcome.facts, "doctor": codes})

    async def _fetch(self, url: str, path: str, token: str | None = None) -> bytes:
        client = Client(url.rstrip("/").removesuffix("/metrics"))
        try:
            headers = None if token is None else bearer(token)
            reply = await client.get(path, deadline_s=PAGE_S, most_bytes=PAGE_MAX, headers=headers)
        except Missed as error:
            raise OSError(0, error.why) from None
        finally:
            client.close()
        return reply.body


async def doctor_on(folder: Path, *, limit_s: float = DOCTOR_S) -> str:
    """The codes that doctor finds in a folder, in a process of its own: whatever the logs hold, guard goes on."""
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "plimsoll", "doctor", str(folder), "--json",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        async with asyncio.timeout(limit_s):
            printed, _ = await process.communicate()
        found = json.loads(printed[:DOCTOR_MAX])
        with contextlib.suppress(OSError):
            (folder / "doctor.json").touch(mode=0o600)
            (folder / "doctor.json").write_bytes(printed)
        codes = [str(one["code"]) for one in found["findings"]][:5]
    except (OSError, ValueError, KeyError, TypeError, TimeoutError, RecursionError):
        return ""
    finally:
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return ", ".join(codes)


class EngineMemory:
    """What one engine held on the device when it was stopped, and whether that is free again."""

    def __init__(self, restarter: Restarter, device: DeviceMemory) -> None:
        self._restarter, self._device = restarter, device
        self._old: frozenset[Mark] = frozenset()
        self._before: list[Holding] | None = None

    async def note(self) -> None:
        """Before the stop."""
        pids = await self._restarter.pids()
        found = [process for pid in pids if (process := read_process(pid)) is not None]
        self._old = frozenset((process.pid, process.start_ticks) for process in found)
        look = asyncio.to_thread(self._device.look, [process.pid for process in found])
        with contextlib.suppress(TimeoutError):  # the driver of a sick card may never answer
            self._before = await asyncio.wait_for(look, PAGE_S)

    async def wait_back(self, deadline_s: float) -> Outcome:
        """After it. A guard that took over knows nothing of before: then what is free must have stopped growing."""
        if not self._old and not await self._restarter.pids():
            return done("its processes cannot be seen from here, nor what they held")
        return await self._device.wait_back(self._old, self._before, deadline_s)


def log_progress(path: str) -> Callable[[], Awaitable[object]]:
    """What changes while a start goes on: the size of its log."""

    async def size() -> object:
        try:
            return (await asyncio.to_thread(os.stat, path)).st_size
        except OSError:
            return None

    return size


def environment_of(guards: Mapping[str, str]) -> dict[str, str]:
    """What an engine that guard starts gets of guard's own environment: all but what belongs to guard's own unit."""
    own = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "INVOCATION_ID",
           "PLIMSOLL_GUARD_TOKEN")  # fmt: skip
    return {name: value for name, value in guards.items() if name not in own}
