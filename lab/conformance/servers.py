"""The two kinds of server under test, started in the same way: the real vLLM, and the stand-in with the same flags."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.engine.install import model_home
from lab.engine.server import EngineServer, serve_command

ROOT = Path(__file__).resolve().parents[2]
# What the real one has by itself: blocks of 128 tokens, as every CPU build, and steps of about this length with a tiny model.
STANDIN = ("--gpu", "L4", "--vllm", "0.32.0", "--base-ns", "3000000", "--block-size", "128")
OOM_AT_S = 15.0  # after the stand-in's start: its faults have times, not switches


class RealServer(EngineServer):
    """The real engine; `may_oom` installs the lab's crash plugin."""

    def __init__(self, flags: Sequence[str], env: Mapping[str, str], *, dev_mode: bool, may_oom: bool) -> None:
        super().__init__(flags, env, dev_mode=dev_mode, oom_on_demand=may_oom)

    def await_oom(self) -> None:
        """Called before the requests that are to see it."""

    def order_oom(self) -> None:
        """Called with those requests in flight: the next step fails."""
        self.arm_oom()


class StandIn(EngineServer):
    """The stand-in in the engine's place: same flags, same environment, another command."""

    def __init__(self, flags: Sequence[str], env: Mapping[str, str], *, dev_mode: bool, may_oom: bool) -> None:
        super().__init__(flags, env, dev_mode=dev_mode)
        own = [*flags, *(("--fault", f"oom@{OOM_AT_S:g}s") if may_oom else ())]
        served = serve_command(self.port, own)
        self.command = [sys.executable, "-m", "plimsoll", "standin", *STANDIN, str(model_home()), *served[3:]]
        self._due_s = 0.0

    def start(self) -> None:
        """Start it and note when its fault is due."""
        self._due_s = time.monotonic() + OOM_AT_S
        super().start()

    def await_oom(self) -> None:
        """Return a second before the fault is due."""
        time.sleep(max(0.0, self._due_s - 1.0 - time.monotonic()))

    def order_oom(self) -> None:
        """It comes by itself."""


Server = RealServer | StandIn
Starter = Callable[..., Server]
KINDS: dict[str, Any] = {"real": RealServer, "standin": StandIn}
