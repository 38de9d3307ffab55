"""The screen and the JSON of `plimsoll simulate`: the contract's names, plain words, nothing made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from plimsoll.render.simulate import as_json, as_text, counted, duration, headline, percent, reading, seconds
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.summary import Summary, summarise
from tests.each import each
from tests.simulate.golden_runs import hand_made

MS = 1_000_000
REQUESTS = [[0, 0, 0, 10 * MS, 30 * MS, 100, 3, 0, 0], [1, 0, 10 * MS, 20 * MS, 20 * MS, 100, 1, 1, 0]]
STEPS = [[0, 10 * MS, 1, 1, 100, 0, 5, 8], [10 * MS, 20 * MS, 2, 0, 101, 1, 10, 16], [20 * MS, 40 * MS, 1, 0, 1, 0, 2, 4]]
QUIET = [[0, 10 * MS, 1, 0, 100, 0, 5, 8]]
SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"


def _busy() -> Summary:
    return summarise(hand_made(REQUESTS, STEPS))


def test_unknown_is_null_and_a_single_request_is_no_percentile() -> None:
    """A run without a finished request has no latency, not a latency of 0."""
    body = json.loads(as_json(summarise(hand_made([], [], rejected=3))))
    assert body.keys() == json.loads(as_json(_busy())).keys()
    assert body["ttft"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert body["kv_usage"]["mean"] is None
    assert (body["requests"], body["rejected"]) == (3, 3)
    text = str(as_text(summarise(hand_made(REQUESTS[:1], QUIET))))
    assert "one in a hundred" not in text
    assert "1 request over" in text


def test_times_are_labelled_a_rough_guide_unless_fitted_and_a_cache_that_is_off_has_no_hits() -> None:
    """Nobody mistakes assumed step times for measured ones; a hit rate of a cache that is off is not a hit rate."""
    off = hand_made(REQUESTS, STEPS, EngineLimits(num_blocks=11, prefix_caching=False))
    assert "prefix caching is off" in str(as_text(summarise(off)))
    run = hand_made(REQUESTS, STEPS)
    assert "rough guide: not fitted" in str(as_text(summarise(run)))
    fitted = str(as_text(summarise(run, fitted="fitted: 4 % off on average")))
    assert "fitted: 4 % off on average" in fitted
    assert "rough guide" not in fitted


def test_headline_states_the_finding() -> None:
    """Preempted, full, at ease, rejected and empty runs each get their own sentence; a last long answer is no backlog."""
    full = _busy()._replace(preemptions=0)
    calm = summarise(hand_made(REQUESTS[:1], QUIET))
    assert headline(_busy()) == "The cache was nearly full 25 % of the time, and 1 preemption recomputed 5.0 % of all tokens."
    assert headline(full) == "The cache was nearly full 25 % of the time, but nothing was preempted."
    assert headline(calm) == "The cache was never short: it peaked at 50 % and nothing was preempted."
    assert headline(calm._replace(preemptions=2)) == "2 preemptions recomputed 10 % of all tokens."
    assert headline(summarise(hand_made([], [], rejected=2))).startswith("Every request was rejected")
    assert headline(summarise(hand_made([], []))) == "Nothing was replayed: the trace has no requests."
    busy = _busy()._replace(requests=30, finished=30, sim_seconds=58.0, arrival_seconds=10.0, longest_service_seconds=40.0)
    assert not any("keep up" in sentence for sentence in reading(busy))
    assert json.loads(as_json(busy))["servers_to_keep_up"] == 1
    assert json.loads(as_json(summarise(hand_made([], []))))["servers_to_keep_up"] is None


def test_reading_says_what_limits() -> None:
    """Rejections, rows left out, a full batch and the wait are each a sentence, only where they happened."""
    settings = EngineLimits(num_blocks=11, max_num_seqs=2)
    said = reading(_busy()._replace(rejected=1, requests=3, bad_rows=1, settings=settings))
    assert said[0] == "1 request of 3 was rejected: longer than --max-model-len 16384 or than the whole cache."
    assert said[1] == "1 row of the trace was left out: unreadable, or without an answer."
    assert said[2] == "At times --max-num-seqs 2 was what requests waited for."
    assert reading(summarise(hand_made([], []))) == []


def test_a_server_that_does_not_keep_up_is_said_first() -> None:
    """Requests of 10 s, worked off in 58 s: how many such servers it takes, in words and in JSON, and how to try one."""
    late = _busy()._replace(
        requests=30, finished=30, rejected=0, sim_seconds=58.0, arrival_seconds=10.0, longest_service_seconds=4.0
    )
    said = reading(late)
    assert said[0].startswith("It does not keep up: 3 requests came a second and 0.517 were done")
    assert said[0].endswith("the last answer came 48.0 s after the last request.")
    assert "At least 6 such servers are needed" in said[1]
    assert "--replicas 6 replays them" in said[1]
    assert "30 requests over 10.0 s, done after 58.0 s" in str(as_text(late))
    assert json.loads(as_json(late))["servers_to_keep_up"] == 6


def test_a_server_that_would_not_start_is_said_before_what_it_did() -> None:
    """The plan's objection stands above the findings, once; other notes stay at the end."""
    text = str(
        as_text(_busy(), notes=["the plan says that this server does not start: x; it is replayed as if it did", "mind this"])
    )
    lines = text.splitlines()
    assert lines[2] == "  The plan says that this server does not start: x; it is replayed as if it did."
    assert text.count("does not start") == 1
    assert lines[-1] == "  note: mind this"


def test_nothing_of_the_trace_s_name_reaches_the_terminal_raw() -> None:
    """Control characters are made visible and secrets hidden, in text and in JSON."""
    summary = summarise(hand_made(REQUESTS, STEPS, name=f"a\x1b[31mred\x07 token={SECRET}"))
    for output in (str(as_text(summary, notes=[f"\x1b]0;x {SECRET}"])), as_json(summary, notes=[f"\x1b]0;x {SECRET}"])):
        assert "\x1b" not in output
        assert "\x07" not in output
        assert SECRET not in output


@each(
    ("say", "value", "words"),
    [
        *((percent, *pair) for pair in (
            (None, "-"), (0, "0 %"), (0.0001, "under 0.1 %"), (0.026, "2.6 %"), (0.37, "37 %"), (0.9951, "99.5 %"),
            (0.99999, "99.9 %"), (1, "100 %"),
        )),
        *((seconds, *pair) for pair in (
            (None, "-"), (0, "0 s"), (5e-6, "5.00 us"), (0.00769, "7.69 ms"), (0.168, "168 ms"), (4.2, "4.20 s"),
            (66.04, "66.0 s"), (599, "599 s"), (750, "12.5 min"), (7200, "2.00 h"),
        )),
        *((duration, *pair) for pair in (
            (0, "0 s"), (12.3, "12.3 s"), (425.9, "7 min 6 s"), (59.7, "1 min 0 s"), (7500, "2 h 5 min"),
        )),
        *((lambda n: counted(n, "request"), *pair) for pair in ((0, "0 requests"), (1, "1 request"), (2000, "2,000 requests"))),
    ],
)  # fmt: skip
def test_figures_are_said_as_people_say_them(say: Callable[[Any], str], value: float | None, words: str) -> None:
    """Only nothing is 0 % and only all is 100 %; times in the unit that suits them; spans in two; one is singular."""
    assert say(value) == words
