"""What systemd hears, over a real socket of the kind it gives."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from plimsoll.guard.daemon.run import SystemdNotifier


def test_what_is_said(tmp_path: Path) -> None:
    """Ready, alive, a line of status, stopping: each is one message in systemd's own words."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.settimeout(5)
        notifier = SystemdNotifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())})
        assert notifier.address
        assert notifier.watchdog_s == 15.0
        notifier.send("READY=1", "two engines\nREADY=0")
        notifier.send("WATCHDOG=1", "all well")
        notifier.send("", "x" * 1_000)
        notifier.send("STOPPING=1")
        heard = [systemd.recv(4096).decode() for _ in range(4)]
    assert heard[0] == "READY=1\nSTATUS=two engines READY=0"
    assert heard[1] == "WATCHDOG=1\nSTATUS=all well"
    assert heard[2] == "STATUS=" + "x" * 500
    assert heard[3] == "STOPPING=1"


def test_a_name_in_the_abstract_space() -> None:
    """systemd writes it with an @."""
    name = f"plimsoll-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + name)
        systemd.settimeout(5)
        SystemdNotifier({"NOTIFY_SOCKET": "@" + name}).send("STOPPING=1")
        assert systemd.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize(
    "environ",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "relative"}, {"NOTIFY_SOCKET": "/nowhere/at/all"},
     {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "30000000"}],
)  # fmt: skip
def test_without_systemd_nothing_happens(environ: dict[str, str]) -> None:
    """No socket, or one where nobody listens: nothing is raised, and there is no watchdog."""
    notifier = SystemdNotifier(environ)
    notifier.send("READY=1", "x")
    assert notifier.watchdog_s is None


def test_a_watchdog_meant_for_another_process_is_not_ours() -> None:
    """WATCHDOG_PID says whose it is."""
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    assert SystemdNotifier(environ).watchdog_s is None
