"""The stat logger that vLLM loads by its entry point; the only module of ours that imports vLLM when it is imported."""

from __future__ import annotations

import importlib
from typing import Any

from plimsoll.inside.pulse import Listener, watch_requests

_LOGGERS: Any = importlib.import_module("vllm.v1.metrics.loggers")
# vLLM's adapter does not pass sleep on to a logger for one engine; a logger for all engines gets it.
_BASE: Any = getattr(_LOGGERS, "AggregateStatLoggerBase", _LOGGERS.StatLoggerBase)


class StatLogger(Listener, _BASE):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The stat logger that passes vLLM's statistics of each step to the pulse and the recorder."""

    def __init__(self, vllm_config: Any = None, engine_index: Any = 0, **named: Any) -> None:
        # `engine_index` is a number, or with vLLM's base for all engines a list of them.
        self.vllm_config = vllm_config
        self.engine_indexes = named.get("engine_indexes", engine_index)
        self.listen(engine_index if isinstance(engine_index, int) else 0)
        watch_requests()


# A new abstract method in a later vLLM must not keep a server from starting: it is simply missing here.
StatLogger.__abstractmethods__ = frozenset()
