"""Findings from a page of metrics: recorded pages, and pages written for one rule each."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.doctor.rules.metrics import judge_pages
from plimsoll.findings import Code, Severity
from plimsoll.vllm.metrics_page import Page, parse_page, read_page

CAPTURES = Path(__file__).parents[2] / "captures"
NAMES = {
    "running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting", "kv": "vllm:kv_cache_usage_perc",
    "steps": "vllm:iteration_tokens_total_count", "generated": "vllm:generation_tokens_total",
    "prompt": "vllm:prompt_tokens_total", "cached": "vllm:prompt_tokens_cached_total",
    "preempted": "vllm:num_preemptions_total", "done": "vllm:request_success_total",
}  # fmt: skip
BUSY = {
    "running": 100, "waiting": 0, "kv": 0.5, "steps": 1000, "generated": 90_000, "prompt": 300_000, "preempted": 0,
    "done": 400,
}  # fmt: skip


def page_of(at_s: float | None = None, extra: str = "", **figures: float) -> Page:
    """A page of one busy engine with these figures."""
    return page_of_engines({"0": figures}, at_s, extra)


def page_of_engines(engines: dict[str, dict[str, float]], at_s: float | None = None, extra: str = "") -> Page:
    """A page of several busy engines, each with figures of its own."""
    lines = [extra]
    for engine, own in engines.items():
        labels = f'{{engine="{engine}",model_name="m"}}'
        lines += [f"{NAMES[name]}{labels} {value}" for name, value in (BUSY | own).items()]
    return parse_page("\n".join(lines).encode(), "page", at_s)


def later(gap_s: float = 5, steps: float = 100, **figures: float) -> Page:
    """The same engine's page some seconds after `page_of(0)`, some steps further."""
    moved = {
        "steps": 1000 + steps,
        "generated": 90_000 + 100 * steps,
        "prompt": 300_000 + 300 * steps,
        "done": 400 + steps / 10,
    }
    return page_of_engines({"0": moved | figures}, gap_s)


def codes(first: Page, second: Page | None = None) -> list[Code]:
    return [f.code for f in judge_pages(first, second).findings]


@pytest.mark.parametrize("name", ["steady", "heavy", "tight"])
def test_recorded_pages_of_healthy_runs_give_no_finding(name: str) -> None:
    """Runs on an H200 with no or six preemptions in 524 requests are healthy."""
    verdict = judge_pages(read_page(str(CAPTURES / "vllm-0.25.1-h200-traffic" / f"{name}.metrics.txt.gz")))
    assert verdict.findings == ()
    assert verdict.facts.release_from == "0.20.0"


def test_a_recorded_idle_page_gives_facts_and_no_finding() -> None:
    """Model, engine, cache and the release that shows these names."""
    verdict = judge_pages(read_page(str(CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt")))
    assert verdict.findings == ()
    (engine,) = verdict.facts.engines
    assert (engine.engine, engine.model, engine.asleep) == ("0", "tiny", False)
    assert engine.cache["num_gpu_blocks"] == "4096"
    assert engine.cache["kv_cache_size_tokens"] == "524288"
    assert verdict.facts.release_from == "0.32.0"
    assert engine.figures["prompt_length_mean"] == 61


def test_a_recorded_storm_is_found_from_its_totals() -> None:
    """197 preemptions in 524 requests are a quarter of the work twice; one page says so with half its confidence."""
    verdict = judge_pages(read_page(str(CAPTURES / "vllm-0.25.1-h200-traffic" / "storm.metrics.txt.gz")))
    storm = verdict.findings[0]
    assert (storm.code, storm.confidence) == (Code.KV_PREEMPTION_STORM, 0.5)
    assert "24%" in storm.because
    assert "one look cannot tell when" in storm.because
    assert ("--max-num-seqs", "34") in [(r.flag, r.value) for r in storm.remedy], "32,768 tokens hold 34 of 947"
    assert storm.evidence[0].line == 111


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"kv": 0.99, "waiting": 30}, [Code.KV_SATURATED]),
        ({"kv": 0.99, "waiting": 9}, []),  # a short queue before a full cache is a busy server
        ({"kv": 0.99, "waiting": 4, "running": 3}, []),
        ({"kv": 0.90, "waiting": 500}, []),
        ({"kv": 1.0, "waiting": 0}, []),
    ],
)
def test_a_full_cache_matters_with_a_queue_that_matters(figures: dict[str, float], found: list[Code]) -> None:
    """Full is 95 %, and a queue matters beyond four and beyond a tenth of what runs."""
    assert codes(page_of_engines({"0": figures})) == found


def test_only_those_who_wait_for_room_count_where_the_page_says_why() -> None:
    """Requests that are put off for another reason do not make the cache too small."""
    reason = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="%s"} 30'
    assert codes(page_of(kv=0.99, waiting=30, extra=reason % "deferred" + "\n" + reason.replace("30", "0") % "capacity")) == []
    assert codes(page_of(kv=0.99, waiting=30, extra=reason % "capacity")) == [Code.KV_SATURATED]


def test_two_looks_are_surer_than_one() -> None:
    """A cache that is full at both looks is told with more confidence."""
    one = judge_pages(page_of(kv=0.99, waiting=30)).findings[0]
    two = judge_pages(page_of(0, kv=0.99, waiting=30), later(kv=0.99, waiting=31)).findings[0]
    assert two.confidence > one.confidence


def test_a_storm_that_goes_on_is_told_from_one_that_is_over() -> None:
    """Between two looks the rate is known: high now, or none now though the totals are high."""
    before = page_of(0, preempted=100)
    now = judge_pages(before, later(preempted=130)).findings[0]
    assert (now.code, now.severity) == (Code.KV_PREEMPTION_STORM, Severity.CRITICAL)
    over = judge_pages(before, later(preempted=100)).findings[0]
    assert (over.severity, over.confidence) == (Severity.INFO, 0.4)
    assert codes(page_of(preempted=5)) == []


def test_preemptions_of_each_request_are_told_where_shown() -> None:
    """The histogram of newer releases says how many were thrown out more than once."""
    histogram = "\n".join(
        f'vllm:request_num_preemptions_{end}{{engine="0",model_name="m"{le}}} {value}'
        for end, le, value in (
            ("bucket", ',le="1.0"', 300),
            ("bucket", ',le="+Inf"', 400),
            ("sum", "", 250),
            ("count", "", 400),
        )
    )
    assert (
        "25% of requests were preempted more than once"
        in judge_pages(page_of(preempted=250, extra=histogram)).findings[0].because
    )


def test_no_step_between_two_looks_is_a_hint_and_later_more() -> None:
    """A few seconds are a low-confidence hint, two minutes a finding; never from one look, a sleeper or an idle engine."""
    still = {"steps": 0.0}
    hint = judge_pages(page_of(0), later(5, **still)).findings[0]
    sure = judge_pages(page_of(0), later(150, **still)).findings[0]
    assert [f.code for f in (hint, sure)] == [Code.ENGINE_WEDGED] * 2
    assert (hint.confidence, sure.confidence, sure.severity) == (0.3, 0.7, Severity.CRITICAL)
    assert codes(page_of()) == []
    assert codes(page_of(0, running=0), later(5, running=0, **still)) == []
    awake = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 0'
    assert codes(page_of(0), page_of(150, extra=awake)) == []


def test_a_restart_between_two_looks_is_no_wedge_and_gives_no_rates() -> None:
    """Totals that fell belong to another process."""
    verdict = judge_pages(page_of(0), page_of(5, steps=3, generated=10, prompt=20, done=0))
    assert verdict.findings == ()
    assert verdict.facts.engines[0].restarted
    assert verdict.facts.engines[0].change == {}


def test_a_queue_that_grows_with_room_is_not_memory() -> None:
    """engine.saturated, no memory code, and more cache named as no remedy; a queue that drains is none."""
    (found,) = judge_pages(page_of(0, waiting=50), later(waiting=80)).findings
    assert found.code is Code.ENGINE_SATURATED
    assert not found.code.is_memory
    assert "more KV cache" in found.not_a_remedy[0]
    assert codes(page_of(0, waiting=80), later(waiting=50)) == []
    assert codes(page_of(0, waiting=127), later(waiting=128)) == []


def test_a_low_hit_rate_is_told_only_beside_a_pressed_cache() -> None:
    """Traffic without common beginnings is healthy; and no remedy follows from it."""
    assert codes(page_of(cached=0, prompt=1e7)) == []
    low = judge_pages(page_of(cached=0, prompt=1e7, kv=0.99, waiting=50)).findings[-1]
    assert (low.code, low.severity, low.remedy) == (Code.PREFIX_CACHE_LOW_HIT_RATE, Severity.INFO, ())


def test_each_engine_is_judged_and_the_worst_named() -> None:
    """Of eight data-parallel engines two are full: one finding, which names the worse."""
    engines: dict[str, dict[str, float]] = {str(i): {} for i in range(8)}
    engines["3"] = {"kv": 0.99, "waiting": 30}
    engines["5"] = {"kv": 0.99, "waiting": 90}
    (found,) = judge_pages(page_of_engines(engines)).findings
    assert "2 of 8 engines" in found.because
    assert "the worst is engine 5" in found.because


def test_a_page_of_the_first_engine_is_read_by_its_own_names() -> None:
    """No engine label, the old name of the cache's usage, swapped requests."""
    text = (
        'vllm:num_requests_running{model_name="m"} 50\nvllm:num_requests_waiting{model_name="m"} 20\n'
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.99\nvllm:num_requests_swapped{model_name="m"} 3\n'
    )
    verdict = judge_pages(parse_page(text.encode(), "page", None))
    assert [f.code for f in verdict.findings] == [Code.KV_SATURATED]
    assert verdict.facts.engines[0].engine == ""
    assert verdict.facts.engines[0].figures["swapped"] == 3
    assert verdict.facts.release_to is not None


def test_health_says_dead_and_absent_metrics_do_not() -> None:
    """503 from /health is engine.dead; a page without vLLM's metrics is a note, for a flag hides them too."""
    bare = parse_page(b"process_resident_memory_bytes 1\n", "page", None)
    assert judge_pages(bare).findings == ()
    assert "--disable-log-stats" in judge_pages(bare).facts.notes[0]
    assert [f.code for f in judge_pages(bare, health=503).findings] == [Code.ENGINE_DEAD]
    assert judge_pages(bare, health=200).findings == ()


def test_odd_values_give_no_finding() -> None:
    """NaN, infinities and negative figures are not believed."""
    odd = page_of(kv=float("nan"), waiting=float("inf"), preempted=float("inf"), steps=-1, running=-5)
    assert codes(odd) == []
    assert codes(odd, odd) == []
