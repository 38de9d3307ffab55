"""Attaching to engine clients shaped as those of each release, read from their sources."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.pulse import Listener, Pulse
from plimsoll.inside.recorder import Recorder
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.tick import WHERE, attach
from tests.inside.vllm_shapes import iteration, scheduler

OFF = Recorder(InsideSettings({}))


class Own:
    def record(self, *args: Any, **named: Any) -> None:
        """Whatever it does with it."""


class Maker:
    """Builds loggers that tell one pulse, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.asked: list[tuple[Any, int | list[int]]] = []

    def __call__(self, config: Any, engines: int | list[int]) -> Listener:
        self.asked.append((config, engines))
        one = Listener()
        one.listen(engines if isinstance(engines, int) else 0, self.pulse, OFF)
        return one


def ours(loggers: list[Any]) -> int:
    """How many of them are ours."""
    return sum(isinstance(one, Listener) for one in loggers)


def test_one_flat_list() -> None:
    """0.8.0 to 0.8.2: one list of loggers, for one engine."""
    client, make = SimpleNamespace(stat_loggers=[Own()], vllm_config="config"), Maker()
    assert [attach(client, make) for _ in range(3)] == [True] * 3
    assert ours(client.stat_loggers) == 1
    assert make.asked == [("config", 0)]


def test_a_list_for_each_engine() -> None:
    """0.8.3 to 0.9.2: the output handler holds the outer list, so the inner ones are joined where they are."""
    client, make = SimpleNamespace(stat_loggers=[[Own()], [Own(), Own()]], vllm_config=None), Maker()
    held = client.stat_loggers
    assert attach(client, make)
    assert attach(client, make)
    assert [ours(loggers) for loggers in held] == [1, 1]
    for engine, running in ((0, 3), (1, 4)):
        for logger in held[engine]:
            logger.record(scheduler_stats=scheduler(running, 0, gpu_cache_usage=0.1), iteration_stats=iteration())
    assert make.pulse.running == 7


def test_a_manager_with_a_list_by_engine() -> None:
    """0.10.0 to 0.11.0: a dictionary by the engine's number, beside one logger for Prometheus."""
    manager = SimpleNamespace(per_engine_logger_dict={0: [Own()], 1: []}, prometheus_logger=Own(), engine_idxs=[0, 1])
    client, make = SimpleNamespace(logger_manager=manager, vllm_config=None), Maker()
    assert attach(client, make)
    assert attach(client, make)
    assert [ours(loggers) for loggers in manager.per_engine_logger_dict.values()] == [1, 1]
    for engine, running in ((0, 3), (1, 4)):
        for logger in manager.per_engine_logger_dict[engine]:
            logger.record(scheduler(running, 0, kv_cache_usage=0.1), iteration(), engine)
    assert make.pulse.running == 7


def test_a_manager_with_loggers_for_all_engines() -> None:
    """0.11.1 and later: one list; ours is for all engines and told each one's number."""
    manager = SimpleNamespace(stat_loggers=[Own(), Own()], engine_indexes=[0, 1])
    client, make = SimpleNamespace(logger_manager=manager, vllm_config="config"), Maker()
    assert attach(client, make)
    assert attach(client, make)
    assert make.asked == [("config", [0, 1])]
    for engine, running in ((0, 3), (1, 4)):
        for logger in manager.stat_loggers:
            logger.record(scheduler(running, 0, kv_cache_usage=0.1), iteration(), mm_cache_stats=None, engine_idx=engine)
    assert make.pulse.running == 7


def test_a_manager_has_one_logger_of_ours() -> None:
    """One that the plugin put there is enough; one that vLLM built anew, as elastic scaling does, is joined again."""
    make = Maker()
    manager = SimpleNamespace(stat_loggers=[make(None, [0]), Own()], engine_indexes=[0])
    assert attach(SimpleNamespace(logger_manager=manager), make)
    assert ours(manager.stat_loggers) == 1
    client, make = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[Own()], engine_indexes=[0])), Maker()
    assert attach(client, make)
    client.logger_manager = SimpleNamespace(stat_loggers=[Own()], engine_indexes=[0, 1])
    assert attach(client, make)
    assert ours(client.logger_manager.stat_loggers) == 1


@pytest.mark.parametrize(
    "client",
    [
        SimpleNamespace(logger_manager=None),  # --disable-log-stats from 0.10 on
        SimpleNamespace(stat_loggers=[]),  # and before
        SimpleNamespace(),  # a client of the engine before V1
        SimpleNamespace(logger_manager=SimpleNamespace()),  # a shape to come
        SimpleNamespace(stat_loggers="odd"),
        SimpleNamespace(logger_manager=SimpleNamespace(per_engine_logger_dict={})),
        SimpleNamespace(logger_manager=SimpleNamespace(per_engine_logger_dict={0: None})),
        None,
    ],
)
def test_what_cannot_be_joined_is_said_and_counted(client: Any) -> None:
    """No error reaches the server, and nothing claims that figures will come."""
    before = FAULTS.counts.get(WHERE, 0)
    assert attach(client, Maker()) is False
    assert FAULTS.counts[WHERE] == before + 1


def test_without_vllm_nothing_is_attached() -> None:
    """Our own logger needs vLLM's base class; where that cannot be had the answer is no."""
    manager = SimpleNamespace(stat_loggers=[], engine_indexes=[0])
    assert attach(SimpleNamespace(logger_manager=manager)) is False
    assert manager.stat_loggers == []
