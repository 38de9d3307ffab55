"""Puts our stat logger into a running engine client, for servers that did not load it as a plugin.

vLLM knows plugins of this kind from 0.11.1 on, `VLLM_PLUGINS` may leave ours out, and scaling the engines makes vLLM
build its loggers anew without any plugin. The shapes, by release:

    0.8.0 to 0.8.2    engine.stat_loggers: a list of loggers
    0.8.3 to 0.9.2    engine.stat_loggers: for each engine core a list of loggers
    0.10.0 to 0.11.0  engine.logger_manager.per_engine_logger_dict: the same by the number of the engine core
    0.11.1 and later  engine.logger_manager.stat_loggers: a list of loggers, each for all engine cores
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.listener import Listener

WHERE = "attaching to the engine's statistics"
Make = Callable[[Any, int | list[int]], Any]


def attach(engine_client: Any, make: Make | None = None) -> bool:
    """Whether the pulse is fed from here on; safe to be asked again and again. `make` builds a logger for engine cores."""
    try:
        return _attach(engine_client, make or _stat_logger)
    except Exception as error:
        FAULTS.note(WHERE, error)
        return False


def _stat_logger(vllm_config: Any, engines: int | list[int]) -> Any:
    from plimsoll.inside.stat_logger import StatLogger  # needs vLLM

    return StatLogger(vllm_config, engines)


def _attach(client: Any, make: Make) -> bool:
    config = getattr(client, "vllm_config", None)
    if hasattr(client, "logger_manager"):
        manager = client.logger_manager
        if manager is None:
            return _cannot("vLLM keeps no statistics (--disable-log-stats): no rates, and nothing is recorded")
        if isinstance(loggers := getattr(manager, "stat_loggers", None), list):
            _join(loggers, make, config, list(getattr(manager, "engine_indexes", [0])))
            return True
        if isinstance(by_engine := getattr(manager, "per_engine_logger_dict", None), dict) and by_engine:
            for engine, loggers in by_engine.items():
                _join(loggers, make, config, engine)
            return True
        return _cannot("this vLLM keeps its statistics in a way that is not known: no rates, and nothing is recorded")
    loggers = getattr(client, "stat_loggers", None)
    if not isinstance(loggers, list):
        return _cannot("this vLLM keeps its statistics in a way that is not known: no rates, and nothing is recorded")
    if not loggers:
        return _cannot("vLLM keeps no statistics (--disable-log-stats): no rates, and nothing is recorded")
    if isinstance(loggers[0], list):
        for engine, own in enumerate(loggers):
            _join(own, make, config, engine)
    else:
        _join(loggers, make, config, 0)
    return True


def _join(loggers: list[Any], make: Make, config: Any, engines: int | list[int]) -> None:
    """Last in the list: whatever vLLM's own loggers do has been done by then."""
    if not any(isinstance(one, Listener) for one in loggers):
        loggers.append(make(config, engines))


def _cannot(reason: str) -> bool:
    FAULTS.say(WHERE, reason)
    return False
