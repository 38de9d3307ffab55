"""Sends notifications to a webhook: in order, with retries at growing intervals, and from a bounded queue.

The body is a list of alerts, as for Alertmanager's API v2. Any receiver of JSON will do.
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
    """[notify]: the webhook that gets notifications."""

    webhook: str | None = key.url("where changes are sent, as Alertmanager takes them")
    repeat_s: float = key.duration(3_600.0, 60.0, key.DAY_S, "how often what is still true is sent again")

    def build(self) -> WebhookNotifier | None:
        return None if self.webhook is None else WebhookNotifier(address(self.webhook))


class DeliveryCounts(NamedTuple):
    """Counts of the notifications sent, failed, dropped and waiting so far."""

    sent: int = 0
    failed: int = 0  # tries that were not accepted
    dropped: int = 0  # never delivered: too many waited, refused for good, or tried too often
    waiting: int = 0


class WebhookNotifier:
    """One receiver. Neither the login of its address nor the query is ever shown.

    Alerts have the form of Alertmanager's API: labels, annotations, startsAt, endsAt.
    """

    def __init__(self, where: Address, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._server = HttpClient(where, tls=ssl.create_default_context)  # a new context each time: guard may run for months
        self.label = f"webhook {urlsplit(where.url).hostname or ''}"  # the path of an address is often a secret
        self._first_pause_s = first_pause_s
        self._waiting: deque[bytes] = deque()
        self._woken = asyncio.Event()
        self._sent = self._failed = self._dropped = 0
        self.trouble = ""  # why the last try was not accepted; empty when it was

    @property
    def counts(self) -> DeliveryCounts:
        return DeliveryCounts(self._sent, self._failed, self._dropped, len(self._waiting))

    def put(self, alerts: list[Mapping[str, Any]]) -> None:
        """Queues one notification; drops the oldest if too many wait, since the newest has the current state."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(json.dumps(alerts, ensure_ascii=False).encode())
        self._woken.set()

    async def run(self) -> None:
        """Sends the queued notifications, for ever."""
        while True:
            while not self._waiting:
                self._woken.clear()
                await self._woken.wait()
            await self._deliver(self._waiting[0])

    async def flush(self, seconds: float) -> None:
        """Gives each queued notification one last try, within `seconds` in all."""
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
        """Sends one notification; returns "" if it was accepted, else why not."""
        # Only the status of the answer counts.
        reply = await self._server.call("POST", "", body, deadline_s=TIMEOUT_S, most_bytes=0, cuts=True)
        status = reply.status
        if isinstance(reply, Lost) or 200 <= status < 300:
            return reply.why if isinstance(reply, Lost) else ""
        # A 4xx is final, except 408, 425 and 429; those and 5xx pass.
        return f"refused for good ({status})" if 400 <= status < 500 and status not in (408, 425, 429) else f"answers {status}"
