"""In the API server: a request that containment aborted is answered with the reason instead of "Internal server error"."""

from __future__ import annotations

import importlib
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.places import run_folder, server_key
from plimsoll.inside.settings import Settings
from plimsoll.inside.survive import report

SERVING = "vllm.entrypoints.generate.base.serving"  # 0.25 to 0.32


def install() -> None:
    """Give vLLM's check for failed requests our reason; the second time does nothing. Never raises."""
    try:
        base = importlib.import_module(SERVING).GenerateBaseServing
        own = base._raise_if_error  # noqa: SLF001
        if not getattr(own, "is_plimsoll", False):
            base._raise_if_error = _with_reason(own)  # noqa: SLF001
    except Exception as error:
        FAULTS.note("naming the reason of aborted requests", error)


def _with_reason(own: Any) -> Any:
    folder = run_folder(Settings().folder)

    def _raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        if finish_reason != "error":
            return
        try:
            own(self, finish_reason, request_id)
        except Exception as error:
            why = _reason(folder, request_id)
            if why is not None and error.args:
                error.args = (f"this request was aborted: {why}. Other requests go on; send it smaller", *error.args[1:])
            raise

    _raise_if_error.is_plimsoll = True  # type: ignore[attr-defined]
    return _raise_if_error


def _reason(folder: str | None, request_id: str) -> str | None:
    try:
        return report.why_aborted(folder, server_key(), request_id)
    except Exception as error:
        FAULTS.note("naming the reason of an aborted request", error)
        return None
