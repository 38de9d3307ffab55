"""Findings from a page of metrics: recorded pages, pages written for one rule each, and saved pages of one server compared."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

from plimsoll.doctor.rules.metrics import chains, judge_pages, judge_saved
from plimsoll.findings import Code, Severity
from plimsoll.vllm.metrics_page import Page, parse_page, read_page
from tests.each import each

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


@each("name", ["steady", "heavy", "tight"])
def test_recorded_pages_of_healthy_runs_give_no_finding(name: str) -> None:
    """Runs on an H200 with no or six preemptions in 524 requests are healthy."""
    verdict = judge_pages(read_page(str(CAPTURES / "vllm-0.25.1-h200-traffic" / f"{name}.metrics.txt.gz")))
    assert (verdict.findings, verdict.facts.release_from) == ((), "0.20.0")


def test_recorded_pages_give_facts_and_a_storm() -> None:
    """Model, engine, cache and release of an idle one; 197 preemptions in 524 requests are a quarter of the work twice."""
    idle = judge_pages(read_page(str(CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt")))
    (engine,) = idle.facts.engines
    assert (idle.findings, idle.facts.release_from) == ((), "0.32.0")
    assert (engine.engine, engine.model, engine.asleep, engine.figures["prompt_length_mean"]) == ("0", "tiny", False, 61)
    assert (engine.cache["num_gpu_blocks"], engine.cache["kv_cache_size_tokens"]) == ("4096", "524288")
    storm = judge_pages(read_page(str(CAPTURES / "vllm-0.25.1-h200-traffic" / "storm.metrics.txt.gz"))).findings[0]
    assert (storm.code, storm.confidence, storm.evidence[0].line) == (Code.KV_PREEMPTION_STORM, 0.5, 111)
    assert all(words in storm.because for words in ("24%", "one look cannot tell when"))
    assert ("--max-num-seqs", "34") in [(r.flag, r.value) for r in storm.remedy], "32,768 tokens hold 34 of 947"


FULL, STORM, WEDGED = Code.KV_SATURATED, Code.KV_PREEMPTION_STORM, Code.ENGINE_WEDGED
REASON = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="%s"} %d'
PREEMPTED = "\n".join(
    f'vllm:request_num_preemptions_{end}{{engine="0",model_name="m"{le}}} {value}'
    for end, le, value in (("bucket", ',le="1.0"', 300), ("bucket", ',le="+Inf"', 400), ("sum", "", 250), ("count", "", 400))
)
AWAKE = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 0'
FIRST_ENGINE = (
    b'vllm:num_requests_running{model_name="m"} 50\nvllm:num_requests_waiting{model_name="m"} 20\n'
    b'vllm:gpu_cache_usage_perc{model_name="m"} 0.99\nvllm:num_requests_swapped{model_name="m"} 3\n'
)
EIGHT: dict[str, dict[str, float]] = {str(i): {} for i in range(8)}
EIGHT |= {"3": {"kv": 0.99, "waiting": 30}, "5": {"kv": 0.99, "waiting": 90}}
BARE = parse_page(b"process_resident_memory_bytes 1\n", "page", None)
ODD = page_of(kv=float("nan"), waiting=float("inf"), preempted=float("inf"), steps=-1, running=-5)


@each(("promise", "first", "second", "health", "found", "words"), [
    ("full is 95 %, with a queue beyond four and beyond a tenth of what runs", page_of(kv=0.99, waiting=30), None, None,
     [(FULL, 0.55)], ""),
    *(("a short queue, room or none waiting is a busy server", page_of_engines({"0": figures}), None, None, [], "")
      for figures in (
        {"kv": 0.99, "waiting": 9}, {"kv": 0.99, "waiting": 4, "running": 3}, {"kv": 0.90, "waiting": 500}, {"kv": 1.0})),
    ("put off for another reason", page_of(kv=0.99, waiting=30,
      extra=f"{REASON % ('deferred', 30)}\n{REASON % ('capacity', 0)}"),
     None, None, [], ""),
    ("they wait for room", page_of(kv=0.99, waiting=30, extra=REASON % ("capacity", 30)), None, None, [(FULL, 0.55)], ""),
    ("two looks are surer than one", page_of(0, kv=0.99, waiting=30), later(kv=0.99, waiting=31), None, [(FULL, 0.75)],
     "both looks"),
    ("a storm that goes on", page_of(0, preempted=100), later(preempted=130), None, [(STORM, 0.85)], "between the two looks"),
    ("one that is over", page_of(0, preempted=100), later(preempted=100), None, [(STORM, 0.4)], "none of them between"),
    ("few preemptions are nothing", page_of(preempted=5), None, None, [], ""),
    ("who was thrown out more than once is told where shown", page_of(preempted=250, extra=PREEMPTED), None, None,
     [(STORM, 0.5)],
     "25% of requests were preempted more than once"),
    ("no step in a few seconds is a hint", page_of(0), later(5, steps=0), None, [(WEDGED, 0.3)], "look again"),
    ("in two minutes a finding", page_of(0), later(150, steps=0), None, [(WEDGED, 0.7)], "150 s"),
    ("one look knows nothing of steps", page_of(), None, None, [], ""),
    ("an idle engine makes none", page_of(0, running=0), later(5, steps=0, running=0), None, [], ""),
    ("nor does one asleep", page_of(0), page_of(150, extra=AWAKE), None, [], ""),
    ("totals that fell belong to another process", page_of(0), page_of(5, steps=3, generated=10, prompt=20, done=0), None, [],
     ""),
    ("a queue that grows with room is not memory", page_of(0, waiting=50), later(waiting=80), None,
     [(Code.ENGINE_SATURATED, 0.5)],
     "not memory"),
    ("one that drains is none", page_of(0, waiting=80), later(waiting=50), None, [], ""),
    ("nor one that stands", page_of(0, waiting=127), later(waiting=128), None, [], ""),
    ("traffic without common beginnings is healthy", page_of(cached=0, prompt=1e7), None, None, [], ""),
    ("a low hit rate is told beside a pressed cache", page_of(cached=0, prompt=1e7, kv=0.99, waiting=50), None, None,
     [(FULL, 0.55), (Code.PREFIX_CACHE_LOW_HIT_RATE, 0.3)], ""),
    ("of eight engines the worst is named", page_of_engines(EIGHT), None, None, [(FULL, 0.55)],
     "2 of 8 engines show it; the worst is engine 5"),
    ("the first engine's own names", parse_page(FIRST_ENGINE, "page", None), None, None, [(FULL, 0.55)], ""),
    ("503 from /health is a dead engine", BARE, None, 503, [(Code.ENGINE_DEAD, 0.9)], "503"),
    ("200 is not", BARE, None, 200, [], ""),
    ("odd values are not believed", ODD, None, None, [], ""), ("at two looks neither", ODD, ODD, None, [], ""),
], ids=lambda row: row[0])  # fmt: skip
def test_pages_and_their_findings(
    promise: str, first: Page, second: Page | None, health: int | None, found: list[tuple[Code, float]], words: str
) -> None:
    """One look knows totals and this moment, two know what happens now; a healthy busy server gives none."""
    verdict = judge_pages(first, second, health=health)
    assert [(one.code, one.confidence) for one in verdict.findings] == found, promise
    assert all(words in one.because for one in verdict.findings[:1])


def test_facts_and_severities_beside_them() -> None:
    """Restarts, the first engine's figures, a page without vLLM's metrics, and how grave each finding is."""
    restarted = judge_pages(page_of(0), page_of(5, steps=3, generated=10, prompt=20, done=0)).facts.engines[0]
    assert (restarted.restarted, restarted.change) == (True, {})
    old = judge_pages(parse_page(FIRST_ENGINE, "page", None)).facts
    assert (old.engines[0].engine, old.engines[0].figures["swapped"], old.release_to is not None) == ("", 3, True)
    assert "--disable-log-stats" in judge_pages(BARE).facts.notes[0]
    storm, over, wedge = (
        judge_pages(page_of(0, preempted=100), later(**figures)).findings[0].severity
        for figures in ({"preempted": 130}, {"preempted": 100}, {"preempted": 100, "gap_s": 150, "steps": 0})
    )
    assert (storm, over, wedge) == (Severity.CRITICAL, Severity.INFO, Severity.INFO)
    low = judge_pages(page_of(cached=0, prompt=1e7, kv=0.99, waiting=50)).findings[-1]
    assert (low.severity, low.remedy) == (Severity.INFO, ())


SAVED = [
    read_page(str(CAPTURES / "vllm-0.25.1-h200-failures" / f"preemption-storm.metrics-{when}.txt"), when)
    for when in ("before", "during", "after")
]


def saved(name: str, text: str) -> Page:
    """A page of one engine with this beside its gauges."""
    return parse_page(f'vllm:num_requests_running{{engine="0"}} 1\n{text}\n'.encode(), name, None)


def test_counters_tell_the_order_of_saved_pages() -> None:
    """However the files are named and given; what was counted between them is told, and the first no longer cannot tell."""
    for given in permutations(SAVED):
        assert [[given[place].source for place in chain] for chain in chains(given)] == [["before", "during", "after"]]
    for pair in ((SAVED[0], SAVED[2]), (SAVED[2], SAVED[0])):
        (first, calm), (second, stormy) = judge_saved(pair)
        assert (first.source, calm.findings, second.source) == ("before", (), "after")
        found = stormy.findings[0]
        assert (found.code, found.severity, found.evidence[0].source) == (STORM, Severity.CRITICAL, "after")
        assert "191 preemptions between the two looks" in found.because
    _, (_, verdict) = judge_saved([SAVED[2], SAVED[2]._replace(source="again")])
    assert [one.severity for one in verdict.findings] == [Severity.INFO], "nothing was counted in between"


BEGAN, BORN = "process_start_time_seconds", "vllm:num_preemptions_created"


@each(("one", "other", "order"), [
    (f"{BEGAN} 1", f"{BEGAN} 2", [[0], [1]]), (f"{BORN} 1", f"{BORN} 2", [[0], [1]]), ("", "", [[0], [1]]),
    (f"{BORN} 7\nvllm:num_preemptions_total 5", f"{BORN} 7\nvllm:num_preemptions_total 1", [[1, 0]]),
])  # fmt: skip
def test_only_pages_that_are_surely_of_one_server_are_compared(one: str, other: str, order: list[list[int]]) -> None:
    """Another start, or no word of the start: each page is judged by itself; else the counters order them."""
    assert chains([saved("one", one), saved("other", other)]) == order


def test_a_cache_that_was_full_at_the_first_look_is_not_forgotten() -> None:
    """A hint stays one, where the later page shows an idle server."""
    full = (
        f'{BEGAN} 1\nvllm:num_requests_waiting{{engine="0"}} 50\nvllm:kv_cache_usage_perc{{engine="0"}} 0.99\n'
        'vllm:generation_tokens_total{engine="0"} '
    )
    idle = full.replace("} 50", "} 0").replace("0.99", "0.0")
    (_, first), (_, second) = judge_saved([saved("full", f"{full}1"), saved("idle", f"{idle}9")])
    assert ([one.code for one in first.findings], second.findings) == ([FULL], ())
