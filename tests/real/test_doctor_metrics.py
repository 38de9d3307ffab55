"""A live engine with a small KV cache, looked at twice while it throws requests out."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from lab.engine.server import EngineServer
from plimsoll.doctor.read.prometheus import is_prometheus
from plimsoll.doctor.rules.metrics import judge_pages
from plimsoll.findings import Code, Finding, Severity
from plimsoll.vllm.metrics_page import fetch_health, fetch_pages


def test_a_live_storm_is_found_while_it_lasts(small_engine: EngineServer) -> None:
    """Answers of 900 tokens share 17 blocks of 128: a look before and one while it lasts find the storm and how many fit.

    vLLM counts a preemption only when its victim runs again, so the looks must not lie too close together.
    """
    (first,) = fetch_pages(small_engine.url, samples=1)
    with ThreadPoolExecutor(12) as clients:
        replies = [clients.submit(small_engine.complete, f"storm {n}", 900, ignore_eos=True) for n in range(24)]
        found: list[Finding] = []
        done = False
        while not found and not done:
            done = all(reply.done() for reply in replies)
            (second,) = fetch_pages(small_engine.url, samples=1)
            verdict = judge_pages(first, second, health=fetch_health(small_engine.url))
            found = [f for f in verdict.findings if f.code is Code.KV_PREEMPTION_STORM and f.severity is not Severity.INFO]
            time.sleep(0.5)
        assert [reply.result().status for reply in replies] == [200] * 24
    assert found, "no storm was seen"
    assert verdict.facts.engines[0].cache["num_gpu_blocks"] == "18"
    fits = [remedy.value for remedy in found[0].remedy if remedy.flag == "--max-num-seqs"]
    assert fits != [None]


def test_a_live_engine_is_told_from_prometheus_and_shows_both_formats(engine: EngineServer) -> None:
    """Its OpenMetrics page, packed, holds what the plain one holds."""
    assert not is_prometheus(engine.url)
    assert fetch_health(engine.url) == 200
    (plain,) = fetch_pages(engine.url, samples=1)
    (packed,) = fetch_pages(f"{engine.url}/metrics/", samples=1)
    assert plain.skipped == packed.skipped == 0
    assert {n for n in plain.by_name if n.startswith("vllm:")} == {n for n in packed.by_name if n.startswith("vllm:")}
