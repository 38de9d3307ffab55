"""The page of a simulation: well formed, self-contained, whole without its script, and safe whatever a trace is called."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.render.simulate_html import page
from plimsoll.simulate.replay import AtBlockSize, Replay
from plimsoll.simulate.settings import CacheGroup, EngineLimits, StepTime
from plimsoll.simulate.summary import SeriesBuilder, summarise
from plimsoll.simulate.traffic import generate, parse_synthetic
from tests.render.html_page import HtmlPage
from tests.render.test_simulate import MS, REQUESTS, SECRET, STEPS
from tests.simulate.busy_runs import stepped
from tests.simulate.golden_runs import hand_made, step_rows

SIZES = [AtBlockSize(8, 0.3, 0.5, 3, 20.0), AtBlockSize(16, 0.6, 0.4, 2, 10.0), AtBlockSize(32, None, 0.0, 1, 5.0)]
HOSTILE = "\"><script>alert('x')</script><img src=//evil.example/x onerror=alert(1)>]]>--></style>\x1b[31m"


def _drawn(run: Replay, steps: list[list[int]], command: str = "plimsoll simulate t.csv", note: str = "a note") -> str:
    builder = SeriesBuilder()
    builder.add(step_rows(steps))
    return page(summarise(run), run, builder.finish(), SIZES, command=command, notes=[note])


def _whole(name: str = "t.csv", **more: str) -> str:
    return _drawn(hand_made(REQUESTS, STEPS, name=name), STEPS, **more)


def test_page_has_every_chart_and_says_what_each_shows() -> None:
    """Seven pictures, each with its figures for the script and in words."""
    read = HtmlPage(_whole())
    pictures = read.tags("svg")
    assert [attributes["role"] for attributes in pictures] == ["img"] * 7
    drawn = [json.loads(attributes["data-chart"] or "") for attributes in pictures]
    assert [chart.get("scale", "names") for chart in drawn] == ["time"] * 3 + ["log"] * 3 + ["names"]
    assert drawn[0]["marks"][0]["values"][0] > 0
    assert sum(drawn[2]["marks"][0]["values"]) == 1
    assert "running" in (pictures[1]["aria-label"] or "")
    for words in ("Cache use", "Requests at once", "Preemptions", "TTFT", "TPOT", "E2E", "Waste by block size",
                  "Settings", "plimsoll simulate t.csv", "a note"):  # fmt: skip
        assert words in read.text, words


def test_page_loads_nothing() -> None:
    """No address of any kind: pictures are in the page, and the browser is told to fetch nothing."""
    html = _whole()
    read = HtmlPage(html)
    assert not re.search(r"https?:|url\(|@import|\bsrc=|//[a-z]", html.replace(read.script, ""))
    assert not re.search(
        r"https?:|fetch\(|XMLHttp|import|eval|innerHTML", read.script.replace('"http://www.w3.org/2000/svg"', "")
    )
    for _, attributes in read.elements:
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "action", "formaction", "data", "poster"), name
            assert not name.startswith("on"), name
            assert name not in ("href", "xlink:href"), value


def test_policy_allows_this_script_only() -> None:
    """The script's own digest is in the page's policy, and nothing wider."""
    read = HtmlPage(_whole())
    assert len(read.tags("script")) == 1
    digest = base64.b64encode(hashlib.sha256(read.script.encode()).digest()).decode()
    policy = next(a["content"] or "" for a in read.tags("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("where", ["name", "command", "note"])
def test_hostile_words_stay_words(where: str) -> None:
    """Whatever a trace is called, no element, no handler and no secret comes of it."""
    plain, hostile = HtmlPage(_whole()), HtmlPage(_whole(**{where: f"{HOSTILE} token={SECRET}"}))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in plain.elements]
    assert SECRET not in hostile.text
    assert "\x1b" not in hostile.text
    assert "<script>alert" in hostile.text


@given(st.text(max_size=60))
def test_any_name_gives_a_well_formed_page(name: str) -> None:
    """The page parses, tag by tag, for any name of a trace."""
    assert len(HtmlPage(_whole(name)).tags("script")) == 1


def test_a_run_without_a_chart_is_a_page() -> None:
    """Nothing to draw is said; where all requests were turned away, the headline says why."""
    run = hand_made([], [])
    read = HtmlPage(page(summarise(run), run, SeriesBuilder().finish()))
    assert "Nothing was replayed" in read.text
    assert read.tags("svg") == []
    assert "nan" not in read.text
    run = hand_made([], [], rejected=4)
    read = HtmlPage(page(summarise(run), run, SeriesBuilder().finish()))
    assert "Every request was rejected" in read.text
    assert read.tags("svg") == []


@pytest.mark.parametrize("start", [0, 3600 * 10**9])
def test_one_request_is_a_page(start: int) -> None:
    """A single request, of one step, also late in a trace: no division by nothing, no line without a place."""
    request = [0, start, start, start + 10 * MS, start + 10 * MS, 100, 1, 0, 0]
    steps = [[start, start + 10 * MS, 1, 0, 100, 0, 5, 8]]
    html = _drawn(hand_made([request], steps), steps)
    read = HtmlPage(html)
    assert not re.search(r"\bnan\b|\binf\b", html)
    assert "Nothing was preempted" in read.text
    assert "TTFT" in read.text


def test_what_was_not_measured_is_left_out_and_settings_are_shown_whole() -> None:
    """No block sizes and no command: no such section; groups, a table of step times and what a fit said are there."""
    run, builder = hand_made(REQUESTS, STEPS), SeriesBuilder()
    builder.add(step_rows(STEPS))
    read = HtmlPage(page(summarise(run), run, builder.finish()))
    assert "Waste by block size" not in read.text
    assert "Command" not in read.text
    run = hand_made(REQUESTS, STEPS, EngineLimits(num_blocks=11, groups=(CacheGroup("sliding", 16, 4096),), watermark=0.01))
    run = run._replace(step_time=StepTime(by_tokens=np.arange(10, dtype=np.int64)))
    builder = SeriesBuilder()
    builder.add(step_rows(STEPS))
    read = HtmlPage(page(summarise(run, fitted="fitted: 4 % off"), run, builder.finish()))
    for words in ("sliding 16 window 4096", "0.01", "a table, instead of base_ns and token_ns", "fitted: 4 % off"):
        assert words in read.text, words
    assert "rough guide" not in read.text


def test_a_long_run_is_a_small_page() -> None:
    """Two thousand requests stay under 200 KB."""
    traffic = generate(parse_synthetic("synthetic:requests=2000,rate=20,prompt=600,output=100"))
    (run, rows), builder = stepped(traffic, EngineLimits(num_blocks=1025), StepTime()), SeriesBuilder()
    builder.add(rows)
    html = page(summarise(run), run, builder.finish(), SIZES)
    assert len(html) < 200_000
    assert f"{run.totals.finished:,}" in HtmlPage(html).text
