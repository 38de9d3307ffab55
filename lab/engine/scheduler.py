"""Asks the real vLLM 0.32.0 how it schedules a small trace: the near end of `ask_scheduler.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.engine.install import model_home
from lab.engine.parser import ParserProcess

ASK_SCHEDULER = Path(__file__).resolve().parent / "ask_scheduler.py"


class SchedulerProcess(ParserProcess):
    """One long-lived process that holds vLLM's scheduler; it ends when this one does, its stdin being closed then."""

    def __init__(self) -> None:
        super().__init__(ASK_SCHEDULER, str(model_home()))

    def run(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What vLLM does with a case: steps, requests, rejected and summary; or `ok` false with error and message."""
        return self._ask(dict(case))
