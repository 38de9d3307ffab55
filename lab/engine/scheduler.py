"""Asks the real vLLM 0.32.0 how it schedules a small trace: the near end of `ask_scheduler.py`."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.engine.install import engine_home, model_home
from lab.engine.parser import FIRST_LIMIT_S, ParserProcess
from lab.engine.server import clean_environment

ASK_SCHEDULER = Path(__file__).resolve().parent / "ask_scheduler.py"


class SchedulerProcess(ParserProcess):
    """One long-lived process that holds vLLM's scheduler; it ends when this one does, its stdin being closed then."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process; closed in stop()
        self._process = subprocess.Popen(
            [str(engine_home() / "bin" / "python"), str(ASK_SCHEDULER), str(model_home())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            bufsize=0,
            env=clean_environment(),
        )
        self._unread = b""
        self._limit_s = FIRST_LIMIT_S

    def run(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What vLLM does with a case: steps, requests, rejected and summary; or `ok` false with error and message."""
        return self._ask(dict(case))
