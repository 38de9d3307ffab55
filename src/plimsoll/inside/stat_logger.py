"""The stat logger that vLLM loads by its entry point; the only module of ours that imports vLLM when it is imported."""

from __future__ import annotations

import importlib
from typing import Any

from plimsoll.inside.pulse import Listener, watch_requests

_LOGGERS: Any = importlib.import_module("vllm.v1.metrics.loggers")
# vLLM tells a logger of one engine nothing of sleep: its adapter does not hand that on. One for all engines hears it.
_BASE: Any = getattr(_LOGGERS, "AggregateStatLoggerBase", _LOGGERS.StatLoggerBase)


class StatLogger(Listener, _BASE):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Tells the pulse and the recorder what vLLM says at each step."""

    def __init__(self, vllm_config: Any = None, engine_index: Any = 0, **named: Any) -> None:
        # `engine_index` is a number, or with vLLM's base for all engines a list of them.
        self.vllm_config = vllm_config
        self.engine_indexes = named.get("engine_indexes", engine_index)
        self.listen(engine_index if isinstance(engine_index, int) else 0)
        watch_requests()


# A method that a later vLLM asks every logger to have must not keep a server from starting: it is not there, and that is all.
StatLogger.__abstractmethods__ = frozenset()
