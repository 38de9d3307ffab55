"""Pages of metrics: recorded ones, hand-written corners of both formats, hostile ones, and a live server on loopback."""

from __future__ import annotations

import gzip
import math
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from plimsoll.errors import BadInput, TooLarge, WorldFailed
from plimsoll.vllm import metrics_page
from plimsoll.vllm.metrics_page import Page, escaped_label, fetch_health, fetch_pages, page_address, parse_page, read_page
from tests.each import cases, each, sure
from tests.net.page_server import PAGE, SECRET, Handler, serving

CAPTURES = Path(__file__).parents[1] / "captures"


def _parsed(text: str) -> Page:
    return parse_page(text.encode(), "page", None)


def test_a_recorded_page_is_read_whole() -> None:
    """Every sample of the recorded 0.32.0 page is there, with labels, types and a histogram."""
    page = read_page(str(CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt"))
    assert page.skipped == 0
    assert sum(map(len, page.by_name.values())) == 505
    assert page.types["vllm:num_requests_running"] == "gauge"
    assert page.total("vllm:prompt_tokens_total", {"engine": "0"}) == 183
    lengths = sure(page.histogram("vllm:request_prompt_tokens", {"engine": "0"}))
    assert (lengths.size, lengths.mean) == (3, 61)
    assert page.of("vllm:cache_config_info")[0].labels["num_gpu_blocks"] == "4096"


def test_packed_and_otherwise_saved_pages_are_read(tmp_path: Path) -> None:
    """gzip, as PowerShell saves it, with a mark at its start, and as `curl -i` saves it."""
    page = read_page(str(CAPTURES / "vllm-0.25.1-h200-traffic" / "storm.metrics.txt.gz"))
    assert page.total("vllm:num_preemptions_total") == 197
    for data in (PAGE.decode().encode("utf-16"), b"\xef\xbb\xbf" + PAGE, b"HTTP/1.1 200 OK\r\nDate: today\r\n\r\n" + PAGE):
        (tmp_path / "page").write_bytes(data)
        assert read_page(str(tmp_path / "page"), "named").total("vllm:num_requests_running") == 3
        assert read_page(str(tmp_path / "page"), "named").source == "named"


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    """A folder, a pipe that nobody writes to and a name that is not there."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(BadInput, match=path.name):
            read_page(str(path))


def test_escapes_stamps_odd_numbers_and_exemplars() -> None:
    """Escapes are undone, milliseconds become seconds, NaN is kept; what stands behind # is not read."""
    page = _parsed('a{x="q\\"\\\\\\n{},"} 1 1700000000500\nb NaN\nb +Inf\nc -Inf\nd{} 1e3\ne{x="1",} 2\n')
    assert page.of("a")[0].labels == {"x": 'q"\\\n{},'}
    assert page.of("a")[0].at_s == 1700000000.5
    assert math.isnan(page.of("b")[0].value)
    assert page.total("b") is None
    assert (page.total("d"), page.total("e"), page.skipped) == (1000, 2, 0)
    page = _parsed('# TYPE a counter\na_total{x="1"} 5 1700000000.25 # {trace_id="t} 9"} 0.6 1.0\n# EOF\n')
    (sample,) = page.of("a_total")
    assert (sample.value, sample.at_s) == (5, 1700000000.25)


@each("line", cases("vllm", "a_bad_line_is_skipped_and_counted"))
def test_a_bad_line_is_skipped_and_counted(line: str) -> None:
    """What cannot be read costs one line, not the page."""
    page = _parsed(f"good 1\n{line}\n")
    assert (page.skipped, list(page.by_name)) == (1, ["good"])


@pytest.mark.parametrize("data", [b"", b"# HELP a b\n", b"<html><body>login</body></html>", b"\x00" * 1000])
def test_no_sample_is_bad_input(data: bytes) -> None:
    """A page without one sample is another thing, and one line says so."""
    with pytest.raises(BadInput, match="not a page of metrics"):
        parse_page(data, "page", None)


def test_hostile_pages_end_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lines that nearly match cost no more than reading them; a bomb and too many samples are refused."""
    begun = time.process_time()
    for line in (b"a{" + b'"' * 30000, b"a{" + b'x="' * 10000, b'a{b="' + b'\\"' * 15000, b"a{" + b"," * 30000, b"a" * 30000):
        with pytest.raises(BadInput):
            parse_page(line, "page", None)
    assert time.process_time() - begun < 2
    monkeypatch.setattr(metrics_page, "PAGE_MAX", 1 << 20)
    monkeypatch.setattr(metrics_page, "SAMPLES_MAX", 5_000)
    for page in (gzip.compress(b"\n" * (2 << 20)), b"a 1\n" * 5_001):
        with pytest.raises(TooLarge):
            parse_page(page, "page", None)
    with pytest.raises(BadInput):
        parse_page(gzip.compress(PAGE)[:20] + b"\xff" * 20, "page", None)


def test_spoiled_pages_never_crash() -> None:
    """Random damage to a recorded page gives a page or one clear line."""
    whole = (CAPTURES / "vllm-0.32.0-cpu" / "metrics.txt").read_bytes()
    chance = random.Random(5)
    for _ in range(60):
        data = bytearray(whole[chance.randrange(len(whole)) :][: chance.randrange(1, 4000)])
        for _ in range(20):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            page = parse_page(bytes(data), "page", None)
        except BadInput:
            continue
        page.histogram("vllm:request_prompt_tokens")


def test_histograms_that_make_no_sense_are_none() -> None:
    """Buckets that fall, have no end, or differ between label sets are no histogram."""
    assert _parsed('h_bucket{le="1"} 1\nh_sum 1\n').histogram("h") is None
    assert _parsed('h_bucket{le="1"} 3\nh_bucket{le="+Inf"} 1\nh_sum 1\n').histogram("h") is None
    assert (
        _parsed('h_bucket{e="0",le="+Inf"} 3\nh_bucket{e="1",le="1"} 1\nh_bucket{e="1",le="+Inf"} 1\nh_sum 1\n').histogram("h")
        is None
    )


def test_a_live_page_is_looked_at_twice() -> None:
    """Each look has its time, at /metrics unless another path is named; what was seen before a server went is kept."""
    slept: list[float] = []
    with serving(lambda h: h.answer(PAGE)) as server:
        pages = fetch_pages(f"http://{server.host}", gap_s=3, sleep=slept.append, clock=iter([100.0, 103.0]).__next__)
        assert [p.at_s for p in pages] == [100, 103]
        assert slept == [3]
        assert {path for path, _ in server.seen} == {"/metrics"}
    assert page_address("https://h:1/inference/metrics?x=1").url == "https://h:1/inference/metrics?x=1"
    assert page_address("http://h/?x=1").url == "http://h/metrics"
    answers = iter([PAGE])
    with serving(lambda h: h.answer(next(answers, b""), 200) if not h.server.seen[1:] else h.answer(b"", 503)) as server:  # type: ignore[attr-defined]
        assert len(fetch_pages(f"http://{server.host}", sleep=lambda _: None)) == 1


def test_a_password_in_the_address_is_sent_and_never_shown() -> None:
    """Name and password become a header for that host; no page and no error carries them."""
    with serving(lambda h: h.answer(PAGE)) as server:
        (page,) = fetch_pages(f"http://me:{SECRET}@{server.host}/metrics?token={SECRET}", samples=1)
        assert server.seen[0][1] == "Basic bWU6aHVudGVyMg=="
        assert SECRET not in page.source
    with pytest.raises(WorldFailed) as closed:
        fetch_pages(f"http://me:{SECRET}@{server.host}/", samples=1, timeout_s=2)
    assert SECRET not in str(closed.value)
    for bad in (f"ftp://me:{SECRET}@h", f"http://me:{SECRET}@h:port", f"http://me:{SECRET}@", f"http://me:{SECRET}@h/\nx"):
        with pytest.raises(BadInput) as refused:
            page_address(bad)
        assert SECRET not in str(refused.value)


def test_a_page_behind_a_redirect_is_read_and_a_server_that_misbehaves_gives_one_line() -> None:
    """A redirect on the same host is followed; errors, other hosts and things that are not HTTP are said."""

    def act(handler: Handler) -> None:
        if handler.path == "/metrics":
            handler.answer(b"", 307, Location="/metrics/")
        elif handler.path == "/metrics/":
            handler.answer(gzip.compress(PAGE), Content_Encoding="gzip")
        elif handler.path == "/away":
            handler.answer(b"", 302, Location="http://localhost:9/metrics")
        elif handler.path == "/broken":
            handler.answer(b"no", 500)
        else:
            handler.say(b"SSH-2.0-x\r\n")

    with serving(act) as server:
        assert fetch_pages(f"http://{server.host}", samples=1)[0].total("vllm:num_requests_running") == 3
        for path, says in (("/away", "another host"), ("/broken", "answers 500"), ("/ssh", "not HTTP")):
            with pytest.raises(WorldFailed, match=says):
                fetch_pages(f"http://{server.host}{path}", samples=1)


def test_health_is_a_status_or_unknown() -> None:
    """503 says that the engine is dead; silence says nothing."""
    with serving(lambda h: h.answer(b"", 503)) as server:
        assert fetch_health(f"http://{server.host}/metrics") == 503
    assert fetch_health(f"http://{server.host}", timeout_s=2) is None


@pytest.mark.parametrize("value", ['a "name"', "a\\b", "a\nb", "\\n", '\\"'])
def test_others_read_a_label_as_it_was(value: str) -> None:
    """Quotes, backslashes and line ends do not end a label early, for Prometheus' own reader too."""
    (family,) = text_string_to_metric_families(f'g{{x="{escaped_label(value)}"}} 1\n')
    assert family.samples[0].labels == {"x": value}


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_label_comes_back(value: str) -> None:
    """Whatever a model is called."""
    page = parse_page(f'g{{x="{escaped_label(value)}"}} 1\n'.encode(), "page", None)
    assert [sample.labels for sample in page.of("g")] == [{"x": value}]
