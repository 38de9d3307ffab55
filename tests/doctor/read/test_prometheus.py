"""A Prometheus server's answers, good and hostile; the real server is asked in tests/real."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import pytest

from plimsoll.doctor.read.prometheus import POINTS_MAX, fetch_range, is_prometheus, span
from plimsoll.errors import BadInput, TooLarge, WorldFailed
from tests.net.page_server import PAGE, SECRET, Handler, serving

NOW = 1_700_000_000.0
BUILD = json.dumps({"status": "success", "data": {"version": "2.42.0"}}).encode()


def _row(name: str, values: object, **labels: str) -> dict[str, object]:
    return {"metric": {"__name__": name, **labels}, "values": values}


def _answering(rows: list[dict[str, object]]) -> Callable[[Handler], None]:
    def act(handler: Handler) -> None:
        asked = urlsplit(handler.path)
        if asked.path.endswith("/buildinfo"):
            handler.answer(BUILD)
            return
        query = parse_qs(asked.query)["query"][0]
        found = [row for row in rows if str(row["metric"]["__name__"]) in query]  # type: ignore[index]
        handler.answer(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": found}}).encode())

    return act


def test_a_range_becomes_series_in_our_units_and_names() -> None:
    """Old and new names are asked for, MiB become bytes, every label is kept."""
    rows = [
        _row("vllm:gpu_cache_usage_perc", [[NOW, "0.5"], [NOW + 15, "NaN"]], engine="0", instance="h:8000", job="vllm"),
        _row("DCGM_FI_DEV_FB_USED", [[NOW, "1024"]], gpu="0", instance="h:9400"),
        _row("process_resident_memory_bytes", [[NOW, "7"]], instance="h:8000", job="vllm"),
        _row("process_resident_memory_bytes", [[NOW, "9"]], instance="h:9090", job="prometheus"),
    ]
    with serving(_answering(rows)) as server:
        assert is_prometheus(f"http://{server.host}/graph?g0.expr=up")
        found = fetch_range(f"http://{server.host}/", clock=lambda: NOW + 20)
        queries = " ".join(parse_qs(urlsplit(path).query).get("query", [""])[0] for path, _ in server.seen)
    by_figure = {one.figure: one for one in found}
    assert by_figure["kv_cache_usage"].labels == {"engine": "0", "instance": "h:8000", "job": "vllm"}
    assert math.isnan(by_figure["kv_cache_usage"].values[1])
    assert by_figure["gpu_used"].values == (float(1 << 30),)
    assert by_figure["host_resident"].values == (7.0,), "the Prometheus server's own memory is not vLLM's"
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "plimsoll_torch_inactive_split_bytes"):
        assert name in queries


def test_memory_of_other_pods_and_hosts_is_left_out() -> None:
    """Containers by their pod, GPUs by their pod, else by their host."""
    rows = [
        _row("vllm:num_requests_running", [[NOW, "1"]], pod="a", instance="10.0.0.1:8000"),
        _row("container_memory_working_set_bytes", [[NOW, "1"]], pod="a", container="vllm"),
        _row("container_memory_working_set_bytes", [[NOW, "2"]], pod="a", container=""),
        _row("container_memory_working_set_bytes", [[NOW, "3"]], pod="b", container="vllm"),
        _row("DCGM_FI_DEV_FB_USED", [[NOW, "4"]], pod="dcgm", exported_pod="a", gpu="0"),
        _row("DCGM_FI_DEV_FB_USED", [[NOW, "5"]], pod="dcgm", exported_pod="b", gpu="1"),
    ]
    with serving(_answering(rows)) as server:
        found = fetch_range(f"http://{server.host}", clock=lambda: NOW)
    assert [one.values[0] for one in found] == [1, 4 << 20, 1]


def test_labels_asked_for_go_into_every_query() -> None:
    """A label narrows the search; its value cannot break out of the query."""
    with serving(_answering([_row("vllm:num_requests_running", [[NOW, "1"]])])) as server:
        fetch_range(f"http://{server.host}/prom", match={"namespace": 'a"} or up{x="'}, clock=lambda: NOW)
        asked = [parse_qs(urlsplit(path).query)["query"][0] for path, _ in server.seen]
        assert all(path.startswith("/prom/api/v1/query_range?") for path, _ in server.seen)
    assert all(query.endswith(',namespace="a\\"} or up{x=\\""}') for query in asked)
    with pytest.raises(BadInput, match="label"):
        fetch_range(f"http://{server.host}", match={"a b": "c"}, clock=lambda: NOW)


def test_the_span_is_bounded() -> None:
    """Never more points than Prometheus gives, and never a step that the user did not want."""
    assert span(now_s=NOW) == (NOW - 3600, NOW, 15)
    week = span(since_s=7 * 86400, now_s=NOW)
    assert (week.end_s - week.start_s) / week.step_s <= 720
    assert span(start_s=NOW - 60, end_s=NOW, step_s=1, now_s=NOW).step_s == 1
    with pytest.raises(BadInput, match="too many"):
        span(since_s=POINTS_MAX * 2.0, step_s=1, now_s=NOW)
    for wrong in ({"start_s": NOW + 1}, {"since_s": -5.0}, {"step_s": 0.0}, {"step_s": math.nan}, {"since_s": math.inf}):
        with pytest.raises(BadInput):
            span(now_s=NOW, **wrong)


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[" * 100_000, b"[]", b'{"status":"success"}', b'{"status":"success","data":{"result":5}}',
     b'{"status":"error","error":"query timed out"}'],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_one_line(body: bytes) -> None:
    """Whatever it says instead of series ends as one line that names the server."""
    with serving(lambda h: h.answer(body)) as server, pytest.raises(WorldFailed, match="query_range"):
        fetch_range(f"http://me:{SECRET}@{server.host}", clock=lambda: NOW)


def test_hostile_rows_are_passed_over_and_floods_refused() -> None:
    """Rows and points of the wrong shape do not matter; too many series do."""
    odd = [
        _row(
            "vllm:num_requests_running", [[NOW, "1"], [NOW, "2"], ["x", "1"], [NOW + 1], None, [NOW - 5, "3"], [NOW + 9, "4"]]
        ),
        {"metric": [], "values": [], "__name__": ""},
    ]
    with serving(lambda h: h.answer(json.dumps({"status": "success", "data": {"result": odd}}).encode())) as server:
        found = fetch_range(f"http://{server.host}", clock=lambda: NOW)
    assert found[0].times == (NOW, NOW + 9)
    flood = [_row("vllm:num_requests_running", [[NOW, "1"]], n=str(i)) for i in range(2001)]
    with serving(_answering(flood)) as server, pytest.raises(TooLarge, match="say whose"):
        fetch_range(f"http://{server.host}", clock=lambda: NOW)
    with serving(_answering([])) as server, pytest.raises(BadInput, match="no metric of vLLM"):
        fetch_range(f"http://{server.host}", clock=lambda: NOW)


def test_an_engine_is_not_taken_for_a_prometheus() -> None:
    """A vLLM page, a 404 and silence are no Prometheus."""
    with serving(lambda h: h.answer(PAGE)) as server:
        assert not is_prometheus(f"http://{server.host}")
    with serving(lambda h: h.answer(b"{}", 404)) as server:
        assert not is_prometheus(f"http://{server.host}")
    assert not is_prometheus(f"http://{server.host}", timeout_s=2)
