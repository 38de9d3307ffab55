"""A real HAProxy before the fleets of the lab, in place of the demo's own balancer, if one is installed."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from plimsoll.demo.balancer import HOST, READY, free_port
from plimsoll.errors import WorldFailed

CONFIG = Path(__file__).with_suffix(".cfg").read_text(encoding="utf-8")


# As docs/balancers.md has it: 60 s is the longest that the openai client waits for.
COME_AGAIN = 'http-error status 503 content-type text/plain string "no engine is in service" hdr Retry-After 60'


class Checks(NamedTuple):
    """How HAProxy checks the engines, how long it waits for an answer, and which failures it retries elsewhere."""

    path: str = READY
    how: str = "inter 500ms fall 2 rise 1"
    within: str = "500ms"
    answers: str = "120s"
    again: str = "conn-failure empty-response"  # failures after which a request goes to another engine
    none_left: str = ""  # how it answers when no engine is in service; its own 503 where nothing is said


# The kernel takes 107 bytes of a socket's path, and HAProxy first binds to it with its process id and ".tmp" appended.
LONGEST_SOCKET_PATH = 90


def find() -> str | None:
    """Returns the path of HAProxy; None where it is not installed."""
    return shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class RunningHAProxy:
    """A HAProxy in front of these engines; guard uses its admin socket."""

    def __init__(self, folder: Path, engines: dict[str, int], checks: Checks | None = None) -> None:
        self.port = 0
        self._engines, self._checks = engines, checks or Checks()
        self._config, self._log = folder / "haproxy.cfg", folder / "haproxy.log"
        self._socket, self._short_folder = folder / "haproxy.sock", ""
        if len(os.fsencode(self._socket)) > LONGEST_SOCKET_PATH:
            self._short_folder = tempfile.mkdtemp(prefix="plimsoll-", dir="/tmp")
            self._socket = Path(self._short_folder, "haproxy.sock")
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        program = find()
        if program is None:
            raise WorldFailed("haproxy is not installed")
        self.port = free_port()
        lines = "\n".join(f"    server {name} {HOST}:{port}" for name, port in self._engines.items())
        text = CONFIG.format(socket=self._socket, host=HOST, port=self.port, servers=lines, **self._checks._asdict())
        self._config.write_text(text, encoding="utf-8")
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                program, "-db", "-f", str(self._config), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        for _ in range(100):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_unix_connection(str(self._socket))
                writer.close()
                return
            if self._process.returncode is not None:
                break
            await asyncio.sleep(0.05)
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = next((line for line in said if "ALERT" in line), said[-1] if said else "no output")
        raise WorldFailed(f"HAProxy did not start: {why[:300]}")

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._short_folder:
            shutil.rmtree(self._short_folder, ignore_errors=True)

    async def count_sent_again(self) -> int | None:
        """Returns HAProxy's count of requests that went to another engine; None where it has none."""
        try:
            return sum(int(row["wredis"]) for row in await self._statistics() if row["svname"] == "BACKEND")
        except (OSError, TimeoutError, KeyError, ValueError):
            return None

    async def takes_work(self) -> dict[str, bool]:
        """Returns whether new requests go to each engine now, by HAProxy; {} if it does not answer."""
        try:
            rows = [row for row in await self._statistics() if row["svname"] in self._engines]
            return {row["svname"]: row["status"].startswith("UP") for row in rows}
        except (OSError, TimeoutError, KeyError):
            return {}

    async def _statistics(self) -> list[dict[str, str]]:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_unix_connection(str(self._socket))
            writer.write(b"show stat\n")
            said = (await reader.read()).decode("utf-8", "replace")
            writer.close()
        return list(csv.DictReader(said.lstrip("# ").splitlines()))

    def table(self, name: str) -> str:
        return f'balancer = {{ haproxy = "{self._socket}", backend = "demo", server = "{name}" }}'
