"""`plimsoll doctor` against servers that run, die in between, or never were."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from urllib.parse import unquote_plus

import pytest

from plimsoll.vllm.metrics_page import fetch_pages
from tests.cli.answers import H200, ask
from tests.net.page_server import SECRET, Handler, serving

BEFORE, DURING = ((H200 / f"preemption-storm.metrics-{when}.txt").read_bytes() for when in ("before", "during"))
WELL = (H200 / "healthy.metrics-after.txt").read_bytes()


class Pages:
    """Shows one page after another, and stays with the last; None: nobody is there."""

    def __init__(self, *pages: bytes | None, health: int = 200) -> None:
        self.pages, self.health, self.looks = pages, health, 0

    def __call__(self, handler: Handler) -> None:
        if handler.path.startswith("/health"):
            handler.answer(b"", self.health)
        elif handler.path.startswith("/metrics"):
            page = self.pages[min(self.looks, len(self.pages) - 1)]
            self.looks += 1
            if page is None:
                handler.close_connection = True  # hangs up without a word, as a process does that was killed
                return
            handler.answer(page)
        else:
            handler.answer(b"{}", 404)


@pytest.fixture(autouse=True)
def looks_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds pass between two looks, by a clock that nobody waits for."""
    usual = fetch_pages.__kwdefaults__ or {}
    monkeypatch.setitem(usual, "sleep", lambda _: None)
    monkeypatch.setitem(usual, "clock", itertools.count(1_700_000_000.0, 5.0).__next__)


def test_a_running_server_is_looked_at_twice() -> None:
    """Two looks a few seconds apart find the storm that one page cannot show as a rate; the answer names the address."""
    pages = Pages(BEFORE, DURING)
    with serving(pages) as server:
        answer = ask(f"doctor http://{server.host} --json --timeout 5", code=1)
        assert "/health" in [path for path, _ in server.seen]
    assert pages.looks == 2
    assert (answer.codes[0], answer.body["memory_failure"]) == ("kv.preemption-storm", True)
    (given,) = answer.body["facts"]["inputs"]
    assert (given["source"], given["is"]) == (f"http://{server.host}", "metrics")


def test_a_page_is_judged_for_what_it_shows() -> None:
    """Also where the server dies between two looks; an idle one is not said to answer, since its page looks the same."""
    with serving(Pages(DURING, None)) as server:
        body = ask(f"doctor http://{server.host}/metrics --json --timeout 2", code=None).body
    assert body["facts"]["inputs"][0]["is"] == "metrics"
    assert "answered the first look and not the second" in body["facts"]["notes"][0]
    with serving(Pages(WELL, health=503)) as server:
        assert "engine.dead" in ask(f"doctor http://{server.host} --json --timeout 5", code=1).codes
    with serving(Pages(WELL)) as server:
        text = ask(f"doctor http://{server.host} --timeout 5").text
    assert "whether it would answer one is not known (plimsoll guard --engine" in text


def test_what_is_no_page_is_the_worlds_fault() -> None:
    """404, nobody, or a range asked of a server that keeps none: exit 3 and one line, without the password that was given."""
    with serving(lambda handler: handler.answer(b"", 404)) as server:
        assert SECRET not in ask(f"doctor http://me:{SECRET}@{server.host} --timeout 2", code=3).line
        gone = f"http://{server.host}"
    assert ask(f"doctor {gone} --timeout 2", code=3).line
    with serving(Pages(WELL)) as server:
        line = ask(f"doctor http://{server.host} --since 1h --timeout 3", code=3).line
    assert "no Prometheus is there; without --since the server itself is looked at" in line


def prometheus(asked: list[str]) -> Callable[[Handler], None]:
    """A Prometheus server that knows one figure of one engine, and remembers what it was asked."""

    def act(handler: Handler) -> None:
        path, _, query = handler.path.partition("?")
        if path.endswith("/buildinfo"):
            handler.answer(json.dumps({"status": "success", "data": {"version": "2.42.0"}}).encode())
            return
        asked.append(unquote_plus(query))
        rows = []
        if "kv_cache_usage_perc" in query:
            points = [[1_700_000_000 + 15 * n, "0.2"] for n in range(40)]
            rows = [{"metric": {"__name__": "vllm:kv_cache_usage_perc", "engine": "0", "instance": "h:8000"}, "values": points}]
        handler.answer(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}}).encode())

    return act


def test_a_prometheus_server_is_asked_for_the_range() -> None:
    """Known by what it answers; start, end, step and labels go into the question, and the range is judged."""
    asked: list[str] = []
    with serving(prometheus(asked)) as server:
        url = f"http://{server.host}"
        span = "--start 1700000000 --end 1700000600 --step 15 --match"
        (given,) = ask(f"doctor {url} {span}", "namespace=prod,job='vllm'", "--json").body["facts"]["inputs"]
        assert (given["source"], given["is"]) == (url, "range")
        assert ask(f"doctor {url} --json --since 2h").body["facts"]["inputs"][0]["is"] == "range"
    for part in ("start=1700000000", "end=1700000600", "step=15", 'namespace="prod"', 'job="vllm"'):
        assert part in asked[0]
