"""The metrics page of a stand-in, held against pages of real servers and against what others make of the format."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from plimsoll.errors import BadInput
from plimsoll.standin import metrics_page
from plimsoll.standin.config import ServerFlags, edges_of
from plimsoll.standin.metrics_page import EnginePage, metrics_shown
from plimsoll.standin.request import ENDS, VALVES, BucketCounts, Figures
from plimsoll.standin.serve.metrics import FINE_EDGES, ProcessFigures
from plimsoll.vllm.metrics import metrics_of
from plimsoll.vllm.metrics_page import Page as Read
from plimsoll.vllm.metrics_page import parse_page
from plimsoll.vllm.versions import Coverage, wheels
from tests.standin.engines import GIB, engine
from tests.standin.servers import standin
from tests.standin.test_api_admin import DEV

CAPTURES = Path(__file__).parents[1] / "captures"
CPU = "vllm-0.32.0-cpu/metrics.txt"
PAGES = (
    ("0.32.0", CPU),
    *(("0.32.0", f"vllm-0.32.0-failures/{case}.txt.gz") for case in ("queue.metrics-after", "preemption-storm.metrics-during")),
    *(("0.25.1", f"vllm-0.25.1-h200-failures/{case}.txt") for case in ("healthy.metrics-after", "neighbour.metrics-after")),
    ("0.25.1", "vllm-0.25.1-h200-failures/preemption-storm.metrics-during.txt"),
    *(("0.25.1", f"vllm-0.25.1-h200-traffic/{case}.metrics.txt.gz") for case in ("heavy", "steady", "storm", "tight")),
)  # fmt: skip
CONDITIONAL = ("vllm:kv_block_", "vllm:estimated_", "plimsoll_")  # shown, or moved, by flags that the stand-in does not have
LEFT_OUT = {"vllm:prompt_tokens_recomputed_total"}  # the last token of a prompt that was cached whole: nobody here counts it
RELEASES = tuple(r for r in wheels() if not Coverage.CACHE_LABELS.begins_after(r))
# Which figure an attribute, or a histogram, is read back from.
PLAIN = {
    "running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting", "kv_usage": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total", "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total", "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total", "prompt_cached": "vllm:prompt_tokens_cached_total",
}  # fmt: skip
HISTOGRAMS = {row.histogram: row.name for row in metrics_page.ROWS if row.histogram}


def _captured(name: str) -> str:
    data = (CAPTURES / name).read_bytes()
    return (gzip.decompress(data) if name.endswith(".gz") else data).decode()


def _read(text: str) -> Read:
    page = parse_page(text.encode(), "page", None)
    assert page.skipped == 0
    return page


def _edges(page: Read, family: str) -> tuple[float, ...]:
    return tuple(float(s.labels["le"]) for s in page.of(f"{family}_bucket") if s.labels["le"] != "+Inf")


def _fill(histogram: BucketCounts, page: Read, family: str, **labels: str) -> None:
    rising = [int(s.value) for s in page.of(f"{family}_bucket", labels)]
    histogram.counts = [high - low for low, high in zip([0, *rising], rising, strict=False)]
    histogram.total = page.of(f"{family}_sum", labels)[0].value


def _figures(page: Read) -> Figures:
    figures = Figures(edges_of(int(max(_edges(page, "vllm:request_prompt_tokens")))))
    for name, metric in PLAIN.items():
        setattr(figures, name, page.of(metric)[0].value)
    figures.prompt_computed = int(page.of("vllm:prompt_tokens_by_source_total", {"source": "local_compute"})[0].value)
    figures.success = {end: int(page.of("vllm:request_success_total", {"finished_reason": end})[0].value) for end in ENDS}
    figures.rejected = {v: int(page.total("vllm:admission_rejections_total", {"reason": v}) or 0) for v in VALVES}
    figures.sleep_state = next(s.labels["sleep_state"] for s in page.of("vllm:engine_sleep_state") if s.value)
    for key, family in HISTOGRAMS.items():
        if page.of(f"{family}_bucket"):
            assert figures.histograms[key].edges == _edges(page, family), key
            _fill(figures.histograms[key], page, family)
    return figures


def _page(read: Read, release: str) -> EnginePage:
    labels = {**read.of("vllm:cache_config_info")[0].labels}
    engine = labels.pop("engine")
    model = read.of("vllm:num_requests_running")[0].labels["model_name"]
    return EnginePage(release, model, engine, cache_labels=labels, created=1.79e9)


def _lines(text: str) -> list[str]:
    """The lines of vLLM's own that can be told: without those of flags, and without the moment at which a sample came to be."""
    own = [line for line in text.splitlines() if re.match(r"(?:# (?:HELP|TYPE) )?vllm:", line)]
    kept = [line for line in own if not re.match(r"(?:# (?:HELP|TYPE) )?(?:" + "|".join(CONDITIONAL) + ")", line)]
    return [re.sub(r"(_created(?:\{.*\})?) [-+.0-9e]+$", r"\1", line) for line in kept]


@pytest.mark.parametrize(("release", "name"), PAGES)
def test_the_numbers_of_a_real_page_give_that_very_page(release: str, name: str) -> None:
    """Order, names, types, help, labels, edges and the way numbers are written are those of the real server, line for line."""
    real = _captured(name)
    read = _read(real)
    assert _lines(_page(read, release).text(_figures(read))) == _lines(real)
    assert _edges(read, "http_request_duration_highr_seconds") == FINE_EDGES


def test_every_row_of_the_table_is_shown_by_some_release() -> None:
    """Also a counter that a flag moves, on a server without the flag."""
    read = _read(_captured("vllm-0.25.1-h200-traffic/steady.metrics.txt.gz"))
    ours = _read(EnginePage("0.25.1", "m", cache_labels={}, created=0).text(_empty()))
    for name in metrics_page.ALWAYS_THERE:
        assert read.total(name) == ours.total(name) == 0
    assert {row for release in RELEASES for row in (m.row for m in metrics_shown(release))} == set(metrics_page.ROWS)


def _empty(max_model_len: int = 4096) -> Figures:
    return Figures(edges_of(max_model_len))


@pytest.mark.parametrize("release", RELEASES)
def test_a_page_has_all_that_its_release_always_shows_and_nothing_else(release: str) -> None:
    """The catalogue of a release and its page agree on names, types and labels."""
    always = {
        name.removesuffix("_total") if entry["type"] == "counter" else name: entry
        for name, entry in metrics_of(release).items()
        if (entry["shown"] == "always" and entry["engine"] != "V0" and name not in LEFT_OUT)
        or name in metrics_page.ALWAYS_THERE
    }
    text = EnginePage(release, "m", cache_labels={"block_size": "16"}, created=1.0).text(_empty())
    families = {f.name: f for f in text_string_to_metric_families(text) if f.name.startswith("vllm:")}
    assert {name for name in families if not name.endswith("_created")} == set(always)
    for name, entry in always.items():
        if name in families and "labels" in entry:
            family = families[name]
            assert family.type == entry["type"]
            assert all(set(s.labels) - {"le"} == set(entry["labels"]) for s in family.samples)  # type: ignore[call-overload]


def test_edges_go_up_to_the_context_and_reasons_grew_with_the_releases() -> None:
    """What changed from release to release is where the sources say it changed."""
    assert edges_of(1000)["prompt"] == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert edges_of(1)["prompt"] == (1,)

    def reasons(release: str) -> int:
        return len(next(m.values for m in metrics_shown(release) if m.row.name == "vllm:request_success_total"))

    assert [reasons(r) for r in ("0.12.0", "0.13.0", "0.17.0")] == [3, 4, 5]


@pytest.mark.parametrize("release", ["0.10.2", "9.9.9"])
def test_a_release_without_a_known_page_is_refused(release: str) -> None:
    """Nothing is made up about releases before the first or after the newest one known."""
    with pytest.raises(BadInput, match="no page of vLLM"):
        EnginePage(release, "m", cache_labels={}, created=0)


def test_what_is_in_a_name_stays_there() -> None:
    """Marks that the format escapes, and those that the lines are made with, come back unchanged through our reader."""
    for name in ("100%s", 'a "b" }', "back\\slash", "two\nlines", '\u00e9 {le="1"} 5'):
        read = _read(EnginePage("0.32.0", name, cache_labels={"cache_dtype": "%d"}, created=0).text(_empty()))
        assert read.of("vllm:num_requests_running")[0].labels["model_name"] == name
        assert read.of("vllm:cache_config_info")[0].labels["cache_dtype"] == "%d"


def test_requests_are_told_apart_as_the_real_server_tells_them() -> None:
    """By route, method and class of status; by none for a path that is no route; not at all for the server's own paths."""
    with standin(ServerFlags()) as server:
        body = {"prompt": "a", "max_tokens": 1}
        for path, sent in (("/v1/completions", body), ("/v1/completions", {}), ("/v1/load_lora_adapter", {}), ("/health", {})):
            server.ask("POST", path, sent)
        server.ask("GET", "/nothing%s")
        server.ask("GET", "/v1/completions")  # no method of it
        read = _read(server.ask("GET", "/metrics").body.decode())
    told = {tuple(s.labels[key] for key in ("handler", "method", "status")): s.value for s in read.of("http_requests_total")}
    assert told == {("/v1/completions", "POST", "2xx"): 1, ("/v1/completions", "POST", "4xx"): 1, ("none", "GET", "4xx"): 2}
    assert read.total("http_request_size_bytes_sum", {"handler": "/v1/completions"}) == len(json.dumps(body)) + len("{}")
    assert read.total("http_request_duration_highr_seconds_count") == 4


def test_the_page_of_a_server_has_the_real_ones_metrics_in_its_order() -> None:
    """Of the process, the engine and the requests: names, types and help, line for line."""
    with standin(ServerFlags()) as server:
        server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
        ours = server.ask("GET", "/metrics").body.decode()
    heads = [
        [line for line in text.splitlines() if line.startswith("#") and not any(name in line for name in CONDITIONAL)]
        for text in (ours, _captured(CPU))
    ]
    assert heads[0] == heads[1]


def test_pages_share_what_does_not_change() -> None:
    """Five hundred engines of one model hold one text between them."""
    pages = [EnginePage("0.32.0", "m", cache_labels={}, created=float(n)) for n in range(3)]
    texts = [page.text(_empty()) for page in pages]
    assert len({id(page._template) for page in pages}) == 1
    assert len(set(texts)) == 3


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel tells nothing of a process here")


def value_of(page: bytes, name: str) -> float:
    return next(float(line.split()[1]) for line in page.decode().splitlines() if line.startswith(f"{name} "))


def test_host_memory_is_the_process_own_and_what_a_fault_has_added() -> None:
    """One of a fleet leaves out processor time, files and address space, which cannot be told apart."""
    found = ProcessFigures(lambda: 5, is_alone=False, registry=CollectorRegistry()).collect()
    assert [metric.name for metric in found] == ["process_resident_memory_bytes", "process_start_time_seconds"]
    one = engine("host-growth@0s=1GiB")
    with standin(DEV, one=one) as server:
        before = value_of(server.ask("GET", "/metrics").body, "process_resident_memory_bytes")
        server.do(lambda: one.memory.grow_host(20 * GIB))
        assert value_of(server.ask("GET", "/metrics").body, "process_resident_memory_bytes") - before > 19 * GIB
