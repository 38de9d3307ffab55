"""Sends notifications to a webhook: in order, again with growing pauses until they are taken, and only so many may wait.

The body is what Alertmanager's API v2 takes: a list of alerts. Any receiver of JSON will do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from plimsoll.guard import config_fields as key
from plimsoll.net.address import Address, address
from plimsoll.net.client import HttpClient, Lost

MOST_WAITING = 1_000
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
MOST_TRIES = 20
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class NotifyConfig(key.ConfigTable):
    """[notify]: who is told."""

    webhook: str | None = key.url("where changes are sent, as Alertmanager takes them")
    repeat_s: float = key.duration(3_600.0, 60.0, key.DAY_S, "how often what is still true is sent again")

    def build(self) -> WebhookNotifier | None:
        return None if self.webhook is None else WebhookNotifier(address(self.webhook))


class DeliveryCounts(NamedTuple):
    """What became of the notifications so far."""

    sent: int = 0
    failed: int = 0  # tries that were not taken
    dropped: int = 0  # that nobody will get: too many waited, it was refused for good, or it was tried too often
    waiting: int = 0


class WebhookNotifier:
    """One receiver. Neither the login of its address nor the query is ever shown.

    Alerts have the form of Alertmanager's API: labels, annotations, startsAt, endsAt.
    """

    def __init__(self, where: Address, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._server = HttpClient(where, tls=ssl.create_default_context)  # anew each time: it may be months until guard ends
        self.label = f"webhook {urlsplit(where.url).hostname or ''}"  # the path of an address is often a secret
        self._first_pause_s = first_pause_s
        self._waiting: deque[bytes] = deque()
        self._woken = asyncio.Event()
        self._sent = self._failed = self._dropped = 0
        self.trouble = ""  # why the last try was not taken; empty when it was

    @property
    def counts(self) -> DeliveryCounts:
        return DeliveryCounts(self._sent, self._failed, self._dropped, len(self._waiting))

    def put(self, alerts: list[Mapping[str, Any]]) -> None:
        """One notification, without waiting; when too many wait the oldest goes: the newest says how things are."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(json.dumps(alerts, ensure_ascii=False).encode())
        self._woken.set()

    async def run(self) -> None:
        """For ever: send what waits."""
        while True:
            while not self._waiting:
                self._woken.clear()
                await self._woken.wait()
            await self._deliver(self._waiting[0])

    async def flush(self, seconds: float) -> None:
        """At the end: what still waits gets one chance, for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._waiting and await self._try(self._waiting[0]) == "":
                    self._waiting.popleft()
                    self._sent += 1

    async def _deliver(self, body: bytes) -> None:
        for tries in range(MOST_TRIES):
            self.trouble = await self._try(body)
            is_last = tries + 1 == MOST_TRIES or self.trouble.startswith("refused for good")
            self._sent += not self.trouble
            self._failed += bool(self.trouble)
            self._dropped += bool(self.trouble) and is_last
            if self.trouble and not is_last:
                await asyncio.sleep(min(self._first_pause_s * 2**tries, LONGEST_PAUSE_S))
            if not self._waiting or self._waiting[0] is not body:
                return  # it made room for newer ones
            if not self.trouble or is_last:
                self._waiting.popleft()
                return

    async def _try(self, body: bytes) -> str:
        """Empty when it was taken, else why not."""
        # Its status says it all.
        reply = await self._server.call("POST", "", body, deadline_s=TIMEOUT_S, most_bytes=0, cuts=True)
        status = reply.status
        if isinstance(reply, Lost) or 200 <= status < 300:
            return reply.why if isinstance(reply, Lost) else ""
        # What the receiver does not take now it will not take later; too many requests and its own trouble pass.
        return f"refused for good ({status})" if 400 <= status < 500 and status not in (408, 425, 429) else f"answers {status}"
