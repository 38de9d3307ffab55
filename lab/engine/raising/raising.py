"""A middleware whose handler fails on demand: `--middleware raising.Raiser` with this folder on PYTHONPATH.

A request with the header `x-raise: before` ends in an exception before any answer, `after` in one amid the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Raiser:
    """Passes on what does not ask for trouble."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise, or hand on."""
        wish = dict(scope.get("headers", ())).get(b"x-raise", b"")
        if wish == b"after":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if wish in (b"before", b"after"):
            raise RuntimeError("asked for")
        await self.app(scope, receive, send)
