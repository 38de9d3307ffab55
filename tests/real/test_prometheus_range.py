"""A real Prometheus: it scrapes a recorded vLLM page, and remembers a day that was written into it beforehand."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from plimsoll.doctor.read.prometheus import fetch_range, is_prometheus
from plimsoll.doctor.rules.trends import judge_trends
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.findings import Code
from tests.fakes import eventually
from tests.real.watching import remembering

PAGE = (Path(__file__).parents[1] / "captures" / "vllm-0.32.0-cpu" / "metrics.txt").read_bytes()
HOUR_S = 3600
START_S = int(time.time()) // HOUR_S * HOUR_S - 40 * HOUR_S
END_S = START_S + 30 * HOUR_S


class Running(NamedTuple):
    """Where the server is, and where the page that it scrapes."""

    url: str
    page_url: str


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _history() -> str:
    """Thirty hours, a point a minute: GPU 0 leaks, GPU 1 climbs stairs to a plateau; the cache is full for the last two."""
    times = range(START_S, END_S, 60)
    labels = 'engine="0",instance="gpu-host:8000",job="vllm",model_name="m"'
    families: dict[str, tuple[str, list[str]]] = {
        "vllm:kv_cache_usage_perc": ("gauge", [f"{{{labels}}} {0.99 if t > END_S - 7200 else 0.4} {t}" for t in times]),
        "vllm:num_requests_running": ("gauge", [f"{{{labels}}} 50 {t}" for t in times]),
        "vllm:num_requests_waiting": ("gauge", [f"{{{labels}}} {40 if t > END_S - 7200 else 1} {t}" for t in times]),
        "vllm:generation_tokens": ("counter", [f"_total{{{labels}}} {t - START_S} {t}" for t in times]),
        "DCGM_FI_DEV_FB_USED": (
            "gauge",
            [f'{{gpu="0",instance="gpu-host:9400",job="dcgm"}} {60_000 + (t - START_S) // 60} {t}' for t in times]
            + [
                f'{{gpu="1",instance="gpu-host:9400",job="dcgm"}} {60_000 + 900 * min((t - START_S) // 14400, 3)} {t}'
                for t in times
            ],
        ),
        "DCGM_FI_DEV_FB_FREE": (
            "gauge",
            [f'{{gpu="0",instance="gpu-host:9400",job="dcgm"}} {21_000 - (t - START_S) // 60} {t}' for t in times],
        ),
    }
    lines = []
    for name, (kind, samples) in families.items():
        lines += [f"# TYPE {name} {kind}", *(name + sample for sample in samples)]
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a history, which has scraped the page at least three times."""
    pages = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=pages.serve_forever, daemon=True).start()
    target = f"127.0.0.1:{pages.server_address[1]}"
    scraped = f"scrape_configs:\n  - {{job_name: vllm, static_configs: [{{targets: ['{target}']}}]}}\n"
    with remembering(tmp_path_factory.mktemp("prometheus"), _history(), "global: {scrape_interval: 1s}\n" + scraped) as url:
        eventually(lambda: _is_scraped(url), 90)
        yield Running(url, f"http://{target}")
    pages.shutdown()
    pages.server_close()


def _is_scraped(url: str) -> bool:
    with contextlib.suppress(BadInput, WorldFailed):
        return any(len(one.times) >= 3 for one in fetch_range(url, since_s=60, step_s=1, timeout_s=5))
    return False


def test_what_it_scraped_comes_back_under_our_names(prometheus: Running) -> None:
    """Told from an engine, it gives the recorded page's figures with the engine's labels and the target's."""
    assert is_prometheus(prometheus.url + "/graph?g0.expr=up")
    assert not is_prometheus(prometheus.page_url)
    found = fetch_range(prometheus.url, since_s=30, step_s=1)
    by_figure = {one.figure: one for one in found}
    for name in ("running", "waiting", "kv_cache_usage", "preemptions", "success", "steps", "host_resident", "started_at"):
        assert name in by_figure, name
    assert by_figure["steps"].values[-1] == 24
    assert by_figure["host_resident"].values[-1] == 721670144
    assert by_figure["running"].labels["engine"] == "0"
    assert by_figure["running"].labels["job"] == "vllm"
    assert {one.labels.get("sleep_state") for one in found if one.figure == "sleep_state"} == {
        "awake", "weights_offloaded", "discard_all",
    }  # fmt: skip
    assert judge_trends(found, "prometheus") == ()


def test_a_day_of_history_is_judged(prometheus: Running) -> None:
    """The leak on GPU 0 and the full cache are found; the staircase on GPU 1 is no growth; an unknown label is one line."""
    found = judge_trends(fetch_range(prometheus.url, start_s=START_S, end_s=END_S - 60), "prometheus")
    by_code = {one.code: one for one in found}
    assert set(by_code) == {Code.GPU_GROWTH, Code.KV_SATURATED}
    assert "gpu 0" in by_code[Code.GPU_GROWTH].because
    assert re.search(r" (59|60)\.\d MiB an hour", by_code[Code.GPU_GROWTH].because)
    assert "more show the same" not in by_code[Code.GPU_GROWTH].because
    assert fetch_range(prometheus.url, start_s=START_S, end_s=END_S, match={"gpu": "1"})
    with pytest.raises(BadInput, match="no metric of vLLM"):
        fetch_range(prometheus.url, start_s=START_S, end_s=END_S, match={"namespace": 'no"such'})
