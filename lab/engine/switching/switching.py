"""Switches `plimsoll.inside` on and off in a running server, to compare both in one and the same process.

    --worker-extension-cls switching.SwitchedProbe --middleware plimsoll.inside.Gate --middleware switching.Switch

with this folder on PYTHONPATH. POST /switch?on=1 or on=0. Off: requests go past the gate, the gate's
tick stands still, our stat logger is taken off vLLM's list, nothing is recorded, and the probe's thread sleeps. What stays
is what cannot be undone: a wrapper around three methods of the output processor, which then hands on at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from plimsoll.inside.probe import Probe
from plimsoll.inside.recorder import RECORDER

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
ASLEEP_S = 1e6


class SwitchedProbe(Probe):
    """The probe, with a thread that can be put to sleep."""

    def plimsoll_switch(self, is_on: str) -> bool:
        """Sample once a second, or practically never."""
        sampler = self.__dict__["plimsoll_sampler"]
        sampler.settings.sample_s = 1.0 if is_on == "1" else ASLEEP_S
        sampler.wake()
        return is_on == "1"


class Switch:
    """Stands around the gate."""

    def __init__(self, app: Any) -> None:
        self.app = app  # the gate
        self._is_on = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Through the gate or past it."""
        if scope["type"] == "http" and scope["path"] == "/switch":
            await self._switch(scope, is_on=scope["query_string"] == b"on=1")
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        elif self._is_on:
            await self.app(scope, receive, send)
        else:
            await self.app.app(scope, receive, send)

    async def _switch(self, scope: Scope, *, is_on: bool) -> None:
        client = scope["app"].state.engine_client
        self._is_on = RECORDER.is_on = is_on
        if not is_on:
            self.app._tick._task.cancel()  # noqa: SLF001 - the next request through the gate starts it again
            loggers = client.logger_manager.stat_loggers
            loggers[:] = [logger for logger in loggers if not type(logger).__module__.startswith("plimsoll")]
        await client.collective_rpc("plimsoll_switch", args=("1" if is_on else "0",))
