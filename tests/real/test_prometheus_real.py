"""A real Prometheus that scrapes a page and remembers days: doctor judges them, a guard that has just begun knows them."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.doctor.read.prometheus import fetch_range, is_prometheus
from plimsoll.doctor.rules.trends import judge_trends
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.findings import Code
from tests.fakes import eventually
from tests.guard.daemon.guards import guarding
from tests.net.page_server import Handler, Server, serving
from tests.real.watching import remembering

PAGE = (Path(__file__).parents[1] / "captures" / "vllm-0.32.0-cpu" / "metrics.txt").read_bytes()
HOUR_S = 3600
GIB, MIB = 1 << 30, 1 << 20
Sample = tuple[str, float, int]


def history(families: dict[str, tuple[str, list[Sample]]]) -> str:
    """Metrics with their kind and samples (labels, value, second), as promtool reads them."""
    lines = []
    for name, (kind, samples) in families.items():
        end = "_total" if kind == "counter" else ""
        lines += [f"# TYPE {name} {kind}", *(f"{name}{end}{{{labels}}} {value:.10g} {at}" for labels, value, at in samples)]
    return "\n".join([*lines, "# EOF", ""])


# A day, judged by doctor

START_S = int(time.time()) // HOUR_S * HOUR_S - 40 * HOUR_S
END_S = START_S + 30 * HOUR_S


def a_day() -> str:
    """Thirty hours, a point a minute: GPU 0 leaks, GPU 1 climbs stairs to a plateau; the cache is full for the last two."""
    times = range(START_S, END_S, 60)
    own = 'engine="0",instance="gpu-host:8000",job="vllm",model_name="m"'
    leaking, stairs = (f'gpu="{gpu}",instance="gpu-host:9400",job="dcgm"' for gpu in (0, 1))
    late = END_S - 2 * HOUR_S
    used: list[Sample] = [(leaking, 60_000 + (at - START_S) // 60, at) for at in times]
    used += [(stairs, 60_000 + 900 * min((at - START_S) // 14400, 3), at) for at in times]
    return history({
        "vllm:kv_cache_usage_perc": ("gauge", [(own, 0.99 if at > late else 0.4, at) for at in times]),
        "vllm:num_requests_running": ("gauge", [(own, 50, at) for at in times]),
        "vllm:num_requests_waiting": ("gauge", [(own, 40 if at > late else 1, at) for at in times]),
        "vllm:generation_tokens": ("counter", [(own, at - START_S, at) for at in times]),
        "DCGM_FI_DEV_FB_USED": ("gauge", used),
        "DCGM_FI_DEV_FB_FREE": ("gauge", [(leaking, 21_000 - (at - START_S) // 60, at) for at in times]),
    })  # fmt: skip


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    """Where a server with a history is, which has scraped a page at least three times, and that page."""
    with serving(lambda one: one.answer(PAGE, Content_Type="text/plain; version=0.0.4")) as pages:
        scraped = f"scrape_configs:\n  - {{job_name: vllm, static_configs: [{{targets: ['{pages.host}']}}]}}\n"
        with remembering(tmp_path_factory.mktemp("prometheus"), a_day(), "global: {scrape_interval: 1s}\n" + scraped) as url:
            eventually(lambda: is_scraped(url), 90)
            yield url, pages


def is_scraped(url: str) -> bool:
    with contextlib.suppress(BadInput, WorldFailed):
        return any(len(one.times) >= 3 for one in fetch_range(url, since_s=60, step_s=1, timeout_s=5))
    return False


def test_what_it_scraped_comes_back_under_our_names(prometheus: tuple[str, Server]) -> None:
    """Told from an engine, it gives the recorded page's figures with the engine's labels and the target's."""
    url, pages = prometheus
    assert is_prometheus(url + "/graph?g0.expr=up")
    assert not is_prometheus(f"http://{pages.host}")
    found = fetch_range(url, since_s=30, step_s=1)
    by_figure = {one.figure: one for one in found}
    wanted = "running waiting kv_cache_usage preemptions success steps host_resident started_at".split()
    assert set(wanted) <= set(by_figure)
    assert by_figure["steps"].values[-1] == 24
    assert by_figure["host_resident"].values[-1] == 721670144
    assert {"engine": "0", "job": "vllm"}.items() <= by_figure["running"].labels.items()
    assert {one.labels.get("sleep_state") for one in found if one.figure == "sleep_state"} == {
        "awake", "weights_offloaded", "discard_all",
    }  # fmt: skip
    assert judge_trends(found, "prometheus") == ()


def test_a_day_of_history_is_judged(prometheus: tuple[str, Server]) -> None:
    """The leak on GPU 0 and the full cache are found; the staircase on GPU 1 is no growth; an unknown label is one line."""
    found = judge_trends(fetch_range(prometheus[0], start_s=START_S, end_s=END_S - 60), "prometheus")
    by_code = {one.code: one for one in found}
    assert set(by_code) == {Code.GPU_GROWTH, Code.KV_SATURATED}
    assert "gpu 0" in by_code[Code.GPU_GROWTH].because
    assert re.search(r" (59|60)\.\d MiB an hour", by_code[Code.GPU_GROWTH].because)
    assert "more show the same" not in by_code[Code.GPU_GROWTH].because
    assert fetch_range(prometheus[0], start_s=START_S, end_s=END_S, match={"gpu": "1"})
    with pytest.raises(BadInput, match="no metric of vLLM"):
        fetch_range(prometheus[0], start_s=START_S, end_s=END_S, match={"namespace": 'no"such'})


# Ten hours, known to a guard that has just begun

NOW_S = int(time.time())
BEGAN_S = NOW_S - 10 * HOUR_S


def held(at: float, *, is_level: bool) -> float:
    """What a worker holds: some noise, and 120 MiB more every hour where it leaks."""
    return 40 * GIB + (int(at) % 7) * MIB + (0 if is_level else 120 * MIB * (at - BEGAN_S) / HOUR_S)


def engine_page(one: Handler, *, is_level: bool) -> None:
    """A page of metrics with a probe's words on it, of a process that has run all the time; /health, and nothing else."""
    figure = held(time.time(), is_level=is_level)
    bare = {"process_start_time_seconds": BEGAN_S - HOUR_S, "process_resident_memory_bytes": 7e8}
    requests = {"vllm:num_requests_running": 8, "vllm:num_requests_waiting": 0}
    probe = {
        "figures_age_seconds": 1, "torch_allocated_bytes": figure - GIB, "torch_unreleasable_bytes": GIB,
        "torch_reserved_bytes": figure, "torch_releasable_bytes": 0, "device_free_bytes": 3 * GIB,
        "device_total_bytes": 80 * GIB, "worker_resident_bytes": 3 * GIB,
    }  # fmt: skip
    lines = [f"# TYPE {name} gauge" for name in (*bare, *requests)]
    lines += [f"{name} {value}" for name, value in bare.items()]
    lines += [f'{name}{{engine="0",model_name="m"}} {value}' for name, value in requests.items()]
    lines += [f'plimsoll_{name}{{engine="0",worker="0"}} {value:.0f}' for name, value in probe.items()]
    known = {"/metrics": "\n".join([*lines, ""]).encode(), "/health": b""}
    one.answer(known.get(one.path, b""), 200 if one.path in known else 404)


def ten_hours(names: dict[str, bool]) -> str:
    """A point a minute of the engines that are called so there: whether they stay level."""
    families: dict[str, tuple[str, list[Sample]]] = {}
    for instance, is_level in names.items():
        bare = f'instance="{instance}",job="vllm"'
        own = f'engine="0",worker="0",{bare}'
        for at in range(BEGAN_S, NOW_S, 60):
            for name, labels, value in (
                ("plimsoll_torch_allocated_bytes", own, held(at, is_level=is_level) - GIB),
                ("plimsoll_torch_unreleasable_bytes", own, GIB), ("plimsoll_worker_resident_bytes", own, 3 * GIB),
                ("process_start_time_seconds", bare, BEGAN_S - HOUR_S),
            ):  # fmt: skip
                families.setdefault(name, ("gauge", []))[1].append((labels, value, at))
    return history(families)


def configured(folder: Path, prometheus: str, *engines: tuple[str, Server, str]) -> str:
    """The file of a guard that watches these engines and asks this Prometheus."""
    text = f"[api]\nlisten = '127.0.0.1:0'\n[prometheus]\nurl = '{prometheus}'\nlabels = {{job = 'vllm'}}\n"
    rows = (f"[[engine]]\nurl = 'http://{server.host}'\nname = '{name}'\n{more}" for name, server, more in engines)
    (folder / "plimsoll.toml").write_text(text + "".join(rows), encoding="utf-8")
    return str(folder / "plimsoll.toml")


@pytest.mark.timeout(180)
def test_growth_is_found_across_guards_own_restart(tmp_path: Path) -> None:
    """Who grew for ten hours is told of within the first looks, who stayed level is not, and of an unknown one it is said."""
    with (
        serving(lambda one: engine_page(one, is_level=False)) as grows,
        serving(lambda one: engine_page(one, is_level=True)) as stays,
        serving(lambda one: engine_page(one, is_level=True)) as other,
        remembering(tmp_path, ten_hours({grows.host: False, "called-otherwise": True})) as url,
    ):
        rows = (("grows", grows, ""), ("stays", stays, "instance = 'called-otherwise'\n"), ("other", other, ""))
        with guarding(tmp_path, "--config", configured(tmp_path, url, *rows)) as guard:
            line = guard.hears("gpu.growth", 40.0)
            assert "grows: " in line
            assert "an hour" in line
            assert "no series of an engine with these labels" in guard.complains("growth of other")
            found = {row["engine"]: row["status"] for row in guard.json("/conditions?kind=growth")["conditions"]}
            forecast = guard.json("/engines/grows")["engine"]["forecasts"]["device"]
            assert guard.stop() == 0
    assert found == {"grows": "true", "stays": "false", "other": "unknown"}, "ten hours of the same are known at once, too"
    assert forecast["unknown"] is None
    assert 15 * HOUR_S < forecast["likely_s"] < 40 * HOUR_S, "3 GiB at 120 MiB an hour"
    assert len([one for one in guard.said if "gpu.growth" in one]) == 1


@pytest.mark.timeout(120)
def test_a_prometheus_that_is_not_there_costs_nothing_but_a_line(tmp_path: Path) -> None:
    """The engine is watched at once, and the trouble is said once."""
    with (
        serving(lambda one: engine_page(one, is_level=True)) as stays,
        guarding(tmp_path, "--config", configured(tmp_path, "http://127.0.0.1:9", ("stays", stays, ""))) as guard,
    ):
        guard.hears("stays: answers", 10.0)
        assert "growth of stays is judged from guard's own looks alone" in guard.complains("prometheus http://127.0.0.1:9")
        assert guard.stop() == 0
        assert len(guard.complained) == 1
