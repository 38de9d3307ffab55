"""Findings from a range of time and from the periodic lines of logs, recorded and written for one rule each."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path
from random import Random

import pytest

from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.doctor.rules.trend_growth import MetricSeries
from plimsoll.doctor.rules.trends import EngineId, judge_log_trends, judge_trends, moments_of_log
from plimsoll.findings import Code, Severity
from tests.doctor.trend_makers import GIB, HOUR_S, LEVEL, MIB

CAPTURES = Path(__file__).parents[2] / "captures"
OWN_RUNS = Path(__file__).resolve().parents[4] / "shared" / "data" / "captures" / "vllm-0.25.1-h200"
V1 = (
    "Engine 000: Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {gen} tokens/s, Running: {running} reqs, "
    "Waiting: {waiting} reqs{more}, GPU KV cache usage: {kv}%, Prefix cache hit rate: {hits}%"
)
V0 = (
    "Avg prompt throughput: {prompt} tokens/s, Avg generation throughput: {gen} tokens/s, Running: {running} reqs, "
    "Swapped: {swapped} reqs, Pending: {waiting} reqs, GPU KV cache usage: {kv}%, CPU KV cache usage: 0.0%."
)
USUAL = {"prompt": "100.0", "gen": "900.0", "running": 50, "waiting": 0, "kv": "50.0", "hits": "5.0", "more": "", "swapped": 0}
WARNS = (
    "Sequence group cmpl-1-0 is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache space. "
    "This can affect the end-to-end performance. total_num_cumulative_preemption={total}"
)


def log_of(*figures: dict[str, object], form: str = V1, timed: bool = True, every_s: float = 10) -> Log:
    """A log of periodic lines."""
    lines = [
        LogLine(i + 1, "APIServer pid=1", "INFO", 1000 + i * every_s if timed else None, form.format(**(USUAL | one)))
        for i, one in enumerate(figures)
    ]
    return Log("vllm.log", lines)


def codes(log: Log) -> list[Code]:
    return [f.code for f in judge_log_trends(log)]


FULL: dict[str, object] = {"kv": "99.4", "waiting": 30}


@pytest.mark.parametrize("form", [V1, V0])
@pytest.mark.parametrize("timed", [True, False])
def test_a_full_cache_with_a_queue_for_a_minute_is_saturated(form: str, timed: bool) -> None:
    """Both engines' lines, with and without times; evidence names the lines."""
    (found,) = judge_log_trends(log_of({}, *[FULL] * 8, {}, form=form, timed=timed))
    assert found.code is Code.KV_SATURATED
    assert [e.line for e in found.evidence][:2] == [2, 9]
    assert "70 s" in found.because
    assert "No forecast" in found.because


@pytest.mark.parametrize(
    "figures",
    [
        [FULL] * 4,  # too short
        [{"kv": "99.4", "waiting": 3}] * 30,  # a short queue is a busy server
        [{"kv": "40.0", "waiting": 127, "running": 128}] * 30,  # a steady queue at --max-num-seqs, with room
        [FULL, {}] * 15,  # comes and goes
        [{"waiting": 5000 - 100 * i, "kv": "25.0"} for i in range(40)],  # a queue that drains
        [{"waiting": 104 - 12 * i, "kv": "98.0"} for i in range(8)],  # a burst that drains while the cache is full
        [{}] * 30,
    ],
)
def test_busy_servers_give_no_finding(figures: list[dict[str, object]]) -> None:
    """Short, steady or draining queues are nothing to wake anyone for."""
    assert codes(log_of(*figures)) == []


def test_a_queue_that_grows_with_room_is_the_engine() -> None:
    """Not memory: engine.saturated; lines an hour apart are not one long queue."""
    assert codes(log_of(*[{"waiting": 10 + 5 * i, "kv": "40.0"} for i in range(30)])) == [Code.ENGINE_SATURATED]
    assert codes(log_of(*[FULL] * 5, every_s=3600)) == []


def test_preemptions_in_periodic_lines_are_weighed_by_the_cache() -> None:
    """A few are nothing; without the cache's size the share is not known, and the words say so."""
    size = LogLine(1, "", "INFO", 900.0, "GPU KV cache size: 100,000 tokens")
    storm = log_of(*[FULL | {"more": ", Preemptions: 6"}] * 12)
    (found,) = judge_log_trends(storm._replace(lines=[size, *storm.lines]))
    assert (found.code, found.severity) == (Code.KV_PREEMPTION_STORM, Severity.CRITICAL)
    assert "recomputed" in found.because
    seldom: dict[str, object] = {"more": ", Preemptions: 1", "gen": "9000.0"}
    few = log_of(*[seldom] * 12)
    assert codes(few._replace(lines=[size, *few.lines])) == []
    (found,) = judge_log_trends(log_of(*[FULL | {"more": ", Preemptions: 6"}] * 12))
    assert (found.code, found.confidence) == (Code.KV_PREEMPTION_STORM, 0.55)


def test_the_first_engine_s_warnings_count_by_fifties() -> None:
    """One warning is a word, many in minutes a storm, the same over days a word again; a restart begins anew."""

    def warned(*totals: int, every_s: float = 20) -> Log:
        lines = [LogLine(i + 1, "", "WARNING", i * every_s, WARNS.format(total=total)) for i, total in enumerate(totals)]
        return Log("vllm.log", lines)

    (one,) = judge_log_trends(warned(1))
    assert (one.severity, one.confidence) == (Severity.INFO, 0.35)
    (storm,) = judge_log_trends(warned(1, 51, 101, 151))
    assert (storm.severity, storm.confidence) == (Severity.WARNING, 0.85)
    assert "151 preemptions" in storm.because
    assert [e.line for e in storm.evidence] == [1, 4]
    (slow,) = judge_log_trends(warned(1, 51, 101, every_s=86400))
    assert slow.severity is Severity.INFO
    (cut,) = judge_log_trends(warned(501, 551, 1, 51))
    assert "551 preemptions or more since its start, 102 of them in 60 s" in cut.because
    (late,) = judge_log_trends(warned(3001))
    assert late.severity is Severity.WARNING, "one line, but the count is the server's"
    assert judge_log_trends(log_of({})) == ()


def test_a_storm_of_the_first_engine_says_more_than_its_full_cache() -> None:
    """Saturation is not told beside the storm it comes with."""
    full = log_of(*[FULL] * 12, form=V0)
    warnings = [LogLine(100 + i, "", "WARNING", 1000 + 20 * i, WARNS.format(total=1 + 50 * i)) for i in range(4)]
    assert codes(full._replace(lines=[*full.lines, *warnings])) == [Code.KV_PREEMPTION_STORM]
    assert codes(log_of(*[FULL | {"swapped": 7}] * 12, form=V0)) == [Code.KV_PREEMPTION_STORM]


STILL: dict[str, object] = {"prompt": "0.0", "gen": "0.0"}


def test_running_requests_without_a_token_to_the_end_are_a_wedge() -> None:
    """A minute of such lines, or one and two minutes of silence; not if tokens came again or nothing runs."""
    assert codes(log_of({}, {}, *[STILL] * 8)) == [Code.ENGINE_WEDGED]
    assert codes(log_of(*[STILL] * 8, {})) == []
    assert codes(log_of({}, *[STILL] * 3)) == []
    assert codes(log_of({}, *[STILL | {"running": 0}] * 20)) == []
    quiet = log_of({}, STILL)
    alive = LogLine(9, "APIServer pid=1", "INFO", 1010 + 150, "some other line")
    (found,) = judge_log_trends(quiet._replace(lines=[*quiet.lines, alive]))
    assert (found.code, found.confidence, found.code.is_memory) == (Code.ENGINE_WEDGED, 0.5, False)


def test_periodic_lines_become_moments() -> None:
    """Every figure of the line, in our units, with whose it is."""
    ((whose, found),) = moments_of_log(log_of({"more": ", Preemptions: 2"}, {})).items()
    assert whose == EngineId("", "APIServer pid=1", "0")
    assert [(one.at_s, one.kv, one.preempted, one.hit_rate) for one in found] == [
        (1000, 0.5, 2.0, 0.05),
        (1010, 0.5, None, 0.05),
    ]
    ((external,),) = moments_of_log(log_of({}, form=V1 + ", External prefix cache hit rate: 90.0%")).values()
    assert external.hit_rate == 0.05


def test_engines_and_servers_in_one_file_are_kept_apart() -> None:
    """Two half-minute queues of two engines are not one of a minute."""
    one, two = log_of(*[FULL] * 4), log_of(*[FULL] * 4, form=V1.replace("Engine 000", "Engine 001"))
    other = [line._replace(server="b") for line in one.lines]
    assert codes(one._replace(lines=[*one.lines, *two.lines, *other])) == []


def test_spoiled_lines_are_passed_over() -> None:
    """Random damage gives findings or none, never a crash."""
    random = Random(3)
    whole = log_of({}, *[FULL | {"more": ", Preemptions: 6"}] * 12)
    for _ in range(100):
        lines = [line for line in whole.lines if random.random() < 0.9]
        lines = [line._replace(text=line.text[: random.randrange(1, 250)]) if random.random() < 0.3 else line for line in lines]
        lines = [line._replace(at=None) if random.random() < 0.1 else line for line in lines]
        random.shuffle(lines)
        judge_log_trends(whole._replace(lines=lines))


# Ranges of time.


def series_of(figure: str, times: list[float], values: list[float], **labels: str) -> MetricSeries:
    """One series of a figure."""
    return MetricSeries(figure, {"instance": "h:1"} | labels, tuple(times), tuple(values), figure)


def growing(hours: float = 30, per_hour: float = 200 * MIB) -> tuple[list[float], list[float]]:
    random = Random(1)
    times = [HOUR_S * hours * i / 299 for i in range(300)]
    return times, [LEVEL + per_hour * t / HOUR_S + random.gauss(0, 3) * MIB for t in times]


def test_growth_of_what_torch_cannot_give_back_is_told_with_a_forecast() -> None:
    """Slope, interval and the time to the card's end; with retries it is critical and fragmentation is told beside it."""
    times, values = growing()
    held = series_of("torch_allocated", times, values, gpu="0")
    split = series_of("torch_inactive_split", times, [100 * MIB] * 300, gpu="0")
    card = [series_of("gpu_used", times, [70 * GIB] * 300, gpu="0"), series_of("gpu_total", times, [80 * GIB] * 300, gpu="0")]
    (found,) = judge_trends([held, split, *card], "range")
    assert (found.code, found.severity, found.confidence) == (Code.GPU_GROWTH, Severity.WARNING, 0.85)
    assert "an hour (95 %" in found.because
    assert "limit is reached in 2.1 days" in found.because
    retries = series_of("torch_alloc_retries", times, [float(i // 60) for i in range(300)], gpu="0")
    reserved = series_of("torch_reserved", times, [v + 3 * GIB for v in values], gpu="0")
    both = judge_trends([held, split, *card, retries, reserved], "range")
    assert {f.code: f.severity for f in both} == {
        Code.GPU_GROWTH: Severity.CRITICAL,
        Code.ALLOCATOR_FRAGMENTATION: Severity.CRITICAL,
    }


def test_retries_on_a_card_that_is_really_full_are_not_blamed_on_pieces() -> None:
    """Little held unused: the finding keeps a low confidence and says so."""
    times = [15.0 * i for i in range(100)]
    rows = [
        series_of("torch_alloc_retries", times, [float(i // 20) for i in range(100)]),
        series_of("torch_allocated", times, [LEVEL] * 100),
        series_of("torch_reserved", times, [LEVEL + 50 * MIB] * 100),
    ]
    (found,) = judge_trends(rows, "range")
    assert (found.code, found.confidence) == (Code.ALLOCATOR_FRAGMENTATION, 0.35)
    assert "really full" in found.because
    old = series_of("torch_alloc_retries", times, [float(min(i, 20)) for i in range(100)])
    assert judge_trends([old, *rows[1:]], "range") == ()


def test_the_driver_s_figure_alone_is_less_sure() -> None:
    """nvidia-smi's memory holds what torch could give back; under a day without load it is half a guess."""
    times, values = growing()
    (found,) = judge_trends([series_of("gpu_used", times, values)], "range")
    assert found.confidence == 0.6
    assert "No forecast: the limit is not known." in found.because
    times, values = growing(hours=8)
    (found,) = judge_trends([series_of("gpu_used", times, values)], "range")
    assert found.confidence == 0.5
    assert "daily rhythm" in found.because


def test_a_staircase_to_a_plateau_is_no_growth() -> None:
    """The allocator grew to the longest prompt seen, and stopped."""
    times, _ = growing()
    steps = [LEVEL + min(t // (4 * HOUR_S), 4) * GIB for t in times]
    assert judge_trends([series_of("gpu_used", times, steps)], "range") == ()


def test_host_growth_has_the_container_s_limit() -> None:
    """A process that grows towards its cgroup's limit; the working set alone counts for little."""
    times, values = growing()
    limit = series_of("container_limit", times, [LEVEL + 8 * GIB] * 300)
    (found,) = judge_trends([series_of("host_resident", times, values), limit], "range")
    assert (found.code, found.severity) == (Code.HOST_GROWTH, Severity.CRITICAL)
    assert "limit is reached in" in found.because
    unlimited = series_of("container_limit", times, [float(1 << 63)] * 300)
    (found,) = judge_trends([series_of("container_working_set", times, values), unlimited], "range")
    assert (found.severity, found.confidence) == (Severity.WARNING, 0.4)


def engine_of(**figures: object) -> list[MetricSeries]:
    """An engine's 60 points: a number is constant, a list is as it is, a total moves by 100 each 15 s unless given."""
    count = 60
    times = [1e9 + 15 * i for i in range(count)]
    usual: dict[str, object] = {"running": 50.0, "waiting": 0.0, "kv_cache_usage": 0.5}
    usual |= {name: [100.0 * i for i in range(count)] for name in ("steps", "generation_tokens", "prompt_tokens", "success")}
    usual["preemptions"] = 0.0
    return [
        series_of(name, times, value if isinstance(value, list) else [float(str(value))] * count, engine="0")
        for name, value in (usual | figures).items()
    ]


def test_engines_over_a_range() -> None:
    """Busy is healthy; full with a queue, work done twice, a growing queue and no step are told."""
    assert judge_trends(engine_of(), "range") == ()
    assert [f.code for f in judge_trends(engine_of(kv_cache_usage=0.99, waiting=40), "range")] == [Code.KV_SATURATED]
    storm = judge_trends(engine_of(kv_cache_usage=0.99, waiting=40, preemptions=[40.0 * i for i in range(60)]), "range")
    assert [f.code for f in storm] == [Code.KV_PREEMPTION_STORM]
    queue = judge_trends(engine_of(waiting=[10.0 + 3 * i for i in range(60)]), "range")
    assert [f.code for f in queue] == [Code.ENGINE_SATURATED]


def test_no_step_in_a_range_is_a_wedge_unless_asleep_idle_or_gone() -> None:
    """Two minutes to the end of the range with work and frozen totals."""
    frozen = [100.0 * min(i, 40) for i in range(60)]
    still: dict[str, object] = dict.fromkeys(("steps", "generation_tokens", "prompt_tokens", "success"), frozen)
    (found,) = judge_trends(engine_of(**still), "range")
    assert (found.code, found.severity) == (Code.ENGINE_WEDGED, Severity.CRITICAL)
    assert judge_trends(engine_of(**still, running=0.0), "range") == ()
    awake = MetricSeries(
        "s", {"instance": "h:1", "engine": "0", "sleep_state": "awake"}, (1e9, 1e9 + 885), (1.0, 0.0), "sleep_state"
    )
    assert judge_trends([*engine_of(**still), awake], "range") == ()
    later = series_of("host_resident", [1e9 + 2000], [1.0])
    assert judge_trends([*engine_of(**still), later], "range") == ()


def test_counters_that_begin_anew_are_summed_and_odd_series_give_no_finding() -> None:
    """A restart in the range neither hides nor invents preemptions; nothing at all, NaN and single points."""
    totals = [40.0 * (i % 30) for i in range(60)]
    (found,) = judge_trends(engine_of(preemptions=totals, success=[100.0 * (i % 30) for i in range(60)]), "range")
    assert found.code is Code.KV_PREEMPTION_STORM
    assert "2320 preemptions" in found.because
    assert judge_trends([], "range") == ()
    assert judge_trends(engine_of(running=math.nan, kv_cache_usage=math.inf, preemptions=math.nan), "range") == ()
    assert judge_trends([series_of("gpu_used", [1.0], [math.nan]), series_of("running", [], [])], "range") == ()


def _recorded(name: str) -> list[MetricSeries]:
    """A run as it was recorded: every half second running, waiting, KV usage, preemptions, hits, queries, prompt, output."""
    path = OWN_RUNS / f"{name}.json"
    if not path.exists():
        pytest.skip("the shared data folder is not beside the repository")
    rows = json.loads(path.read_text(encoding="utf-8"))
    figures = (
        "running", "waiting", "kv_cache_usage", "preemptions",
        "prefix_hits", "prefix_queries", "prompt_tokens", "generation_tokens",
    )  # fmt: skip
    return [series_of(f, [row[0] for row in rows], [row[i] for row in rows], engine="0") for i, f in enumerate(figures, 1)]


@pytest.mark.parametrize(("name", "found"), [("thrash.1", [Code.KV_SATURATED]), ("base.1", []), ("seedcfg.1", [])])
def test_recorded_runs_on_an_h200(name: str, found: list[Code]) -> None:
    """A cache full for two minutes before 300 waiting requests; bursts that drain within a minute are nothing."""
    assert [f.code for f in judge_trends(_recorded(name), name)] == found


def test_a_recorded_thrash_is_a_storm_where_requests_are_counted() -> None:
    """232 preemptions of 400 requests."""
    series = _recorded("thrash.1")
    times = list(series[0].times)
    done = series_of("success", times, [400.0 * i / (len(times) - 1) for i in range(len(times))], engine="0")
    (found,) = judge_trends([*series, done], "thrash")
    assert (found.code, found.severity) == (Code.KV_PREEMPTION_STORM, Severity.CRITICAL)


@pytest.mark.parametrize("name", ["steady", "heavy", "tight"])
def test_recorded_traffic_is_healthy(name: str) -> None:
    """Runs with little waiting give no finding."""
    with gzip.open(CAPTURES / "vllm-0.25.1-h200-traffic" / f"{name}.series.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = [float(row["t"]) for row in rows]
    columns = {"running": 1.0, "waiting": 1.0, "kv_cache_pct": 0.01}
    series = [
        series_of(name.replace("kv_cache_pct", "kv_cache_usage"), times, [float(row[name]) * factor for row in rows])
        for name, factor in columns.items()
    ]
    assert judge_trends(series, name) == ()
