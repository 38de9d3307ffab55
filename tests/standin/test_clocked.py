"""An engine on a clock of its own: days go by in seconds, restarts begin anew, and the page says what a server's would."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from plimsoll.standin import EngineDown, StandIn
from plimsoll.standin.config import edges_of
from tests.standin.engines import SETTINGS, config

CONFIG = replace(config(), edges=edges_of(SETTINGS.max_model_len))


def values(engine: StandIn) -> dict[str, float]:
    """The page's samples without labels that tell them apart."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(engine.page())
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_an_hour_of_traffic_is_on_the_page() -> None:
    """Every request, token and step of it, and the hits of what requests share."""
    engine = StandIn(CONFIG)
    arrivals = [2.0 * number for number in range(1800)]
    engine.send(arrivals, [320] * len(arrivals), [50] * len(arrivals), shared=160)
    engine.until(3700.0)
    shown = values(engine)
    assert shown["vllm:prompt_tokens_total"] == 320 * 1800
    assert shown["vllm:generation_tokens_total"] == 50 * 1800
    assert shown["vllm:e2e_request_latency_seconds_count"] == 1800
    assert shown["vllm:prefix_cache_hits_total"] == 160 * 1799
    assert shown["vllm:num_requests_running"] == 0
    assert engine.figures.success["length"] == 1800


def test_without_readers_it_counts_the_same() -> None:
    """Nobody is woken between the first and the last token; every figure is as with them."""
    from plimsoll.standin.engine import StandinEngine
    from tests.standin.engines import NS, ask

    found = []
    for wants_tokens in (True, False):
        engine = StandinEngine(CONFIG, wants_tokens=wants_tokens)
        requests = [engine.submit(ask(100, 40, seed), seed * NS // 10) for seed in range(1, 30)]
        engine.advance(60 * NS)
        shown = {name: histogram.counts for name, histogram in engine.figures.histograms.items()}
        found.append(({**vars(engine.figures), "histograms": shown}, [request.produced for request in requests]))
    assert found[0] == found[1]


def test_a_restart_begins_anew_and_keeps_the_clock() -> None:
    """Down for its time, then with counters at nothing, a later start, and faults at their own hour."""
    engine = StandIn(CONFIG, ["wedge@500s"])
    engine.ask(100, 10)
    engine.until(100.0)
    first = values(engine)
    engine.restart(takes_s=60.0)
    engine.until(130.0)
    was_up = engine.is_up
    with pytest.raises(EngineDown):
        engine.page()
    with pytest.raises(EngineDown):
        engine.ask(100, 10)
    engine.until(200.0)
    assert (was_up, engine.is_up, engine.restarts) == (False, True, 1)
    second = values(engine)
    assert (first["vllm:generation_tokens_total"], second["vllm:generation_tokens_total"]) == (10, 0)
    assert second["process_start_time_seconds"] - first["process_start_time_seconds"] == 160.0
    engine.ask(100, 10, at_s=200.0)
    engine.until(499.0)
    assert engine.figures.success["length"] == 1
    engine.until(501.0)
    late = engine.ask(100, 10)
    engine.until(600.0)
    assert late.finish is None


def test_a_dead_engine_is_down_until_it_is_started_again() -> None:
    """Who was being served, and who came meanwhile, is not served; who was announced for later is."""
    engine = StandIn(CONFIG, ["oom@10s:1s"])
    engine.until(10.5)
    engine.ask(100, 10)
    engine.until(12.0)
    was_up = engine.is_up
    with pytest.raises(EngineDown, match="CUDA out of memory"):
        engine.page()
    engine.restart(takes_s=30.0)
    engine.until(50.0)
    assert (was_up, engine.is_up) == (False, True)
    engine = StandIn(CONFIG)
    served, lost, later = engine.ask(100, 2000 - 100), engine.ask(100, 10, at_s=12.0), engine.ask(100, 10, at_s=100.0)
    engine.until(10.0)
    engine.restart(takes_s=5.0)
    coming = engine.ask(100, 10, at_s=50.0)
    engine.until(200.0)
    assert [one.finish for one in (served, lost, later, coming)] == ["error", "error", "length", "length"]


def test_a_restart_cures_what_was_wrong_with_the_process() -> None:
    """A wedge ends with it; a neighbour is somebody else and stays."""
    engine = StandIn(CONFIG, ["wedge@10s"])
    engine.add_fault("neighbour@15s=1GiB")
    engine.until(14.0)
    assert engine.workers()[0]["device_memory"]["by_others"] == 0
    engine.until(20.0)
    engine.restart(takes_s=5.0)
    engine.until(30.0)
    request = engine.ask(100, 10)
    engine.until(40.0)
    assert request.finish == "length"
    assert engine.workers()[0]["device_memory"]["by_others"] == 1 << 30


def test_wrong_calls_are_said() -> None:
    """What vLLM would refuse, what is over, what is a server's own, and lists that do not match."""
    engine = StandIn(CONFIG)
    engine.until(10.0)
    for call in (
        lambda: engine.ask(50_000, 10),
        lambda: engine.ask(100, 10, at_s=5.0),
        lambda: engine.send([20.0], [100, 100], [10]),
        lambda: engine.add_fault("lying-page"),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call()
