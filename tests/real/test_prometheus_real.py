"""A real Prometheus that scrapes a page and remembers days: doctor judges them."""

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
from tests.net.page_server import Server, serving
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


def test_a_day_of_history_comes_back_under_our_names_and_is_judged(prometheus: tuple[str, Server]) -> None:
    """The recorded page's figures with both labels; the leak and the full cache are found, a staircase is no growth."""
    url, pages = prometheus
    assert is_prometheus(url + "/graph?g0.expr=up")
    assert not is_prometheus(f"http://{pages.host}")
    found = fetch_range(url, since_s=30, step_s=1)
    by_figure = {one.figure: one for one in found}
    wanted = "running waiting kv_cache_usage preemptions success steps host_resident started_at".split()
    assert set(wanted) <= set(by_figure)
    assert (by_figure["steps"].values[-1], by_figure["host_resident"].values[-1]) == (24, 721670144)
    assert {"engine": "0", "job": "vllm"}.items() <= by_figure["running"].labels.items()
    assert {one.labels.get("sleep_state") for one in found if one.figure == "sleep_state"} == {
        "awake", "weights_offloaded", "discard_all",
    }  # fmt: skip
    assert judge_trends(found, "prometheus") == ()
    trends = judge_trends(fetch_range(url, start_s=START_S, end_s=END_S - 60), "prometheus")
    by_code = {one.code: one for one in trends}
    assert set(by_code) == {Code.GPU_GROWTH, Code.KV_SATURATED}
    assert "gpu 0" in by_code[Code.GPU_GROWTH].because
    assert re.search(r" (59|60)\.\d MiB an hour", by_code[Code.GPU_GROWTH].because)
    assert "more show the same" not in by_code[Code.GPU_GROWTH].because
    assert fetch_range(url, start_s=START_S, end_s=END_S, match={"gpu": "1"})
    with pytest.raises(BadInput, match="no metric of vLLM"):
        fetch_range(url, start_s=START_S, end_s=END_S, match={"namespace": 'no"such'})
