"""What vLLM tells at each step reaches the pulse and the recorder, in the words of every release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.inside.faults import FAULTS
from plimsoll.inside.pulse import Listener, Pulse
from plimsoll.inside.recorder import Recorder
from plimsoll.inside.settings import InsideSettings
from tests.inside.vllm_shapes import finished, iteration, scheduler


def listener(engine: int = 0, record: Path | None = None) -> tuple[Listener, Pulse, Recorder]:
    """One that tells a pulse and a recorder of its own."""
    pulse, recorder = Pulse(), Recorder(InsideSettings({"PLIMSOLL_RECORD": str(record)} if record else {}))
    one = Listener()
    one.listen(engine, pulse, recorder)
    return one, pulse, recorder


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), {"scheduler_stats": scheduler(3, 1, gpu_cache_usage=0.25), "iteration_stats": iteration()}),  # 0.8, 0.9
        ((scheduler(3, 1, kv_cache_usage=0.25), iteration(), 0), {}),  # 0.10, 0.11.0
        ((scheduler(3, 1, kv_cache_usage=0.25), iteration()), {"mm_cache_stats": None, "engine_idx": 0}),  # 0.11.1 and later
        ((scheduler(3, 0, num_skipped_waiting_reqs=1, kv_cache_usage=0.25), None), {"engine_idx": 0}),  # 0.32.0
        ((scheduler(3, 1, kv_cache_usage=0.25), iteration(), None, 0, "more"), {"and": "more"}),  # one to come
    ],
)
def test_every_release_is_understood(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Running, waiting with those put off, and the KV usage under both of its names."""
    one, pulse, _ = listener()
    one.record(*args, **named)
    assert (pulse.running, pulse.waiting, pulse.kv_usage, pulse.steps) == (3, 1, 0.25, 1)
    assert pulse.is_fed


def test_engines_are_told_apart_by_what_vllm_says_or_by_whose_logger_it_is() -> None:
    """One logger for all engines is told the number; one of several is known by its own."""
    one, pulse, _ = listener(engine=4)
    one.record(scheduler(3, 0, kv_cache_usage=0.1), None, engine_idx=1)
    one.record(scheduler(5, 0, kv_cache_usage=0.1), None, 2)
    one.record(scheduler(7, 0, kv_cache_usage=0.1), None)
    assert pulse.running == 15
    assert set(pulse._engines) == {1, 2, 4}


def test_finished_requests_are_learned_from_and_recorded(tmp_path: Path) -> None:
    """Each with the engine that served it; an aborted one does not tell how long outputs are."""
    one, pulse, recorder = listener(record=tmp_path)
    cut = finished(finish_reason="abort", num_generation_tokens=900)
    one.record(scheduler(0, 0, kv_cache_usage=0.0), iteration(finished(), cut, prompt=200, generation=2), engine_idx=6)
    recorder.close(limit_s=10)
    assert (pulse.finished, pulse.mean_prompt(), pulse.mean_output()) == (2, 100, 20)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["finish_reason"], line["engine"]) for line in lines] == [("length", 6), ("abort", 6)]


@pytest.mark.parametrize("odd", ["a word", 7, object(), {"num_running_reqs": 1}])
def test_nothing_that_vllm_says_can_stop_it(odd: object) -> None:
    """An exception here would end vLLM's output handler and with it every request: it is counted instead."""
    one, pulse, _ = listener()
    before = FAULTS.counts.get("hearing a step", 0)
    one.record(odd, odd)
    one.record(odd)
    one.record()
    assert FAULTS.counts["hearing a step"] == before + 2
    assert pulse.steps == 0


def test_sleep_is_heard_and_the_rest_does_nothing() -> None:
    """vLLM's base class passes 1 for asleep, whatever it names it; a missing method would be an error in vLLM's own loop."""
    one, pulse, _ = listener()
    levels = []
    for args, named in (((1, 2), {}), ((0, 0), {}), ((), {"sleep": 1, "level": 1}), ((), {})):
        one.record_sleep_state(*args, **named)
        levels.append(pulse.sleep_level)
    assert levels == [2, None, 1, 1]
    one, pulse, _ = listener()
    one.log()
    one.log_engine_initialized()
    one.record_admission_rejection("max_num_queued_reqs")
    assert pulse.steps == 0
