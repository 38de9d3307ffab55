"""Tells systemd how guard is: ready, alive, a line of status, stopping. Without systemd nothing is sent."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """Writes to the socket that systemd names; a message that cannot be sent is lost, and nothing waits for it."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_s = _watchdog_s(environ) if self._address else None
        """How often systemd must hear that guard lives; half of the bound that was set. None: no watchdog."""

    @property
    def is_there(self) -> bool:
        """Whether systemd listens."""
        return bool(self._address)

    def ready(self, status: str) -> None:
        """It has begun."""
        self._send(f"READY=1\nSTATUS={_line(status)}")

    def alive(self, status: str) -> None:
        """It goes on."""
        self._send(f"WATCHDOG=1\nSTATUS={_line(status)}")

    def status(self, status: str) -> None:
        """How things are, for `systemctl status`."""
        self._send(f"STATUS={_line(status)}")

    def stopping(self) -> None:
        """It was told to stop."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
            one.settimeout(0.0)
            one.sendto(text.encode(), self._address)


def _address(name: str) -> str:
    """A path, or a name in the abstract space, which systemd writes with an @."""
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else ""


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    span, who = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not span.isdecimal() or int(span) == 0 or (who and who != str(os.getpid())):
        return None
    return int(span) / 2e6


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
