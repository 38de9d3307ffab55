"""`plimsoll guard --act` and `guardctl` as processes, for tests: what is typed, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.engine.server import free_port
from lab.guard.farm import TOKEN
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OUTCOME, Entry
from plimsoll.guard.daemon.journal import read_journal

API_TOKEN = "a-token-for-the-api-of-the-guard-itself"
CONFIG = """
[policy]
every = "2s"
{policy}

[api]
listen = "127.0.0.1:{port}"
token_file = "api.token"
{api}

[act]
journal = "state/journal"
evidence = "state/evidence"
backoff = "30s"
longest_backoff = "1m"
restarts_per_hour = 8
restarts_per_day = 20
fleet_restarts_per_hour = 16
fleet_restarts_per_day = 40
probation = "10s"
{act}
"""


class Guard:
    """One guard and its files; it can be killed and started again."""

    def __init__(
        self, folder: Path, engines: Sequence[str], *, act: str = "", policy: str = "", api: str = "", words: Sequence[str] = ()
    ) -> None:
        """`engines`: further tables of the configuration; `act`, `policy`, `api`: further keys; `words`: of the command."""
        self.folder, self.port, self._words = folder, free_port(), words
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, token in (("api.token", API_TOKEN), ("gate.token", TOKEN)):
            (folder / name).write_text(token, encoding="ascii")
            (folder / name).chmod(0o600)
        text = CONFIG.format(port=self.port, act=act, policy=policy, api=api) + "".join(engines)
        self._config = folder / "plimsoll.toml"
        self._config.write_text(text, encoding="utf-8")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PLIMSOLL_GUARD_TOKEN": API_TOKEN}

    async def start(self) -> None:
        with (self.folder / "guard.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "plimsoll", "guard", "--config", str(self._config), "--act", *self._words,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        for _ in range(300):
            assert self._process.returncode is None, self.log()
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"guard did not start: {self.log()}")

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None, "it was never started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of that process; None while it runs, below 0 for a signal."""
        return None if self._process is None else self._process.returncode

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            await asyncio.wait_for(self._process.wait(), 30)

    def log(self) -> str:
        path = self.folder / "guard.log"
        return path.read_text(encoding="utf-8", errors="replace")[-6000:] if path.exists() else ""

    async def ctl(self, *words: str) -> tuple[int, str]:
        """`plimsoll guardctl`: its exit code, and what it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "plimsoll", "guardctl", *words, "--at", f"http://127.0.0.1:{self.port}",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
        )  # fmt: skip
        printed, _ = await process.communicate()
        return process.returncode or 0, printed.decode("utf-8", "replace")

    def journal(self) -> list[Entry]:
        path = self.folder / "state" / "journal"
        return list(read_journal(path, 10_000).entries) if path.exists() else []

    async def until(self, holds: Callable[[list[Entry]], Any], within_s: float) -> list[Entry]:
        """Wait for something in the journal."""
        end_s = time.monotonic() + within_s
        while not holds(entries := self.journal()):
            assert time.monotonic() < end_s, f"not in time; the journal: {told(entries)}\n{self.log()}"
            await asyncio.sleep(0.2)
        return entries


def closed(entries: Sequence[Entry], end: str | None = None, grade: str = "restart") -> int:
    """How many actions of this kind are over, so or at all."""
    mine = [one for one in entries if one.kind == CLOSED and one.fields.get("grade") == grade]
    return sum(end is None or one.fields.get("end") == end for one in mine)


def begun(entries: Sequence[Entry], step: str) -> bool:
    last = next((one for one in reversed(entries) if one.kind in (INTENT, OUTCOME)), None)
    return last is not None and last.kind == INTENT and last.step == step


def told(entries: Sequence[Entry]) -> str:
    lines = [f"{one.engine} {one.step}: {one.fields.get('says')}" for one in entries if one.kind == OUTCOME]
    return "\n".join(lines[-40:])
