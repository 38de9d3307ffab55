"""Guard's page: its files, what a listener is told, how many there may be, and an engine meant by its id."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.look import CardState, Look, Reach
from plimsoll.guard.judge.policy import Policy
from plimsoll.guard.page.engine import EngineState, id_of, sections
from plimsoll.guard.page.page import MOST_LISTENERS, event, page_files, readings, rows_changed, sections_changed
from plimsoll.render.guard import Clock, EngineView
from tests.guard.daemon.guards import Guard, guarding

FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser|createContextualFragment|"
    r"setTimeout\(\s*[\"'`]|\.href\s*=|javascript:|document\.cookie|localStorage|dangerously"
)


def test_every_file_is_there_with_its_kind_no_text_becomes_markup_and_nothing_names_another_host() -> None:
    """Each that page and scripts name; no way from a text to code, no cookie, no address, nothing that the policy refuses."""
    found = page_files()
    assert found["/"][1].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="(/page/[^"]+)"', found["/"][0].decode()))
    scripts = "".join(body.decode() for path, (body, _) in found.items() if path.endswith(".js"))
    named |= {f"/page/{name}" for name in re.findall(r'from "\./([a-z]+\.js)"', scripts)}
    assert named <= found.keys()
    assert {"/page/app.js", "/page/style.css", "/page/icon.svg"} <= named
    for path, (body, _) in page_files().items():
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        wrong = FORBIDDEN.search(text) or re.search(r"https?://|//[a-z]+\.[a-z]", text)
        assert wrong is None, f"{path}: {wrong.group() if wrong else ''}"
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?![^>]*src=)", page_files()["/"][0].decode())


def test_latencies_tokens_a_second_and_gpu_use_are_of_the_last_minute() -> None:
    """Means of vLLM's own histograms over a minute; unknown, with the reason, before it and where nothing came."""

    def figures(looks: int, *, tokens: int, cards: tuple[CardState, ...] = ()) -> dict[str, tuple[float | None, str]]:
        judge = Judge("a", Policy())
        for number in range(looks):
            made, asked = 50.0 + tokens * number, 5.0 + tokens * number / 100
            seen = {
                "generation_tokens": made, "ttft_sum": 0.2 * asked, "ttft_count": asked, "inter_token_sum": 0.02 * made,
                "inter_token_count": made,
            }  # fmt: skip
            judge.see(Look(5.0 * number, 1e9 + 5.0 * number, Reach.ANSWERS, figures=seen, cards=cards))
        view = EngineView("a", "http://a", judge.history.last, 1.0, 0.1, looks, {}, judge.conditions, (), 0.0)
        found = sections(EngineState(view, readings(judge)), Clock(0.0, 1e9))["figures"]
        return {one["says"].partition(",")[0]: (one["value"], one["why"]) for one in found[-4:]}

    cards = (CardState("a", use=0.9), CardState("b", use=0.7), CardState("c"))
    busy = figures(20, tokens=500, cards=cards)
    assert {name: value for name, (value, _) in busy.items()} == {
        "time to first token": 0.2, "time per token": 0.02, "generated tokens a second": 100.0, "GPU use": 0.8
    }  # fmt: skip
    idle = figures(20, tokens=0)
    assert idle["time to first token"] == (None, "unknown: no token came in the last minute")
    assert idle["generated tokens a second"] == (0.0, "")
    assert idle["GPU use"][0] is None
    assert "NVML" in idle["GPU use"][1]
    assert figures(3, tokens=500)["time per token"] == (None, "unknown: inter-token latency: seen for 10 of 60 s")


ROWS = st.dictionaries(st.sampled_from("abcdefgh"), st.fixed_dictionaries({"kv": st.integers(0, 3)}), max_size=8)
LOOKS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 2)), max_size=8)


@given(st.lists(ROWS, max_size=6))
def test_lines_put_together_are_what_there_is(states: list[dict[str, dict[str, int]]]) -> None:
    """Whoever takes every change in turn has the last state, and is never told of what has not changed."""
    before: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for state in states:
        now = {key: {"id": key, **row} for key, row in state.items()}
        changed, gone = rows_changed(before, now)
        assert all(before.get(str(row["id"])) != row for row in changed)
        for row in changed:
            shown[str(row["id"])] = row
        for key in gone:
            del shown[key]
        assert shown == now
        before = now


@given(LOOKS)
def test_sections_put_together_are_what_there_is(looks: list[tuple[int, int, bool, int]]) -> None:
    """The same of one engine: new points are sent once, forgotten ones may stay a while, and a restart begins anew."""
    before: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    times: list[int] = []
    for number, (forgotten, new, is_anew, head) in enumerate(looks):
        times = ([] if is_anew else times[forgotten:]) + [number * 10 + place for place in range(new)]
        now = {"head": head, "series": {"t": list(times), "kv": [at * 2 for at in times]}}
        changed = sections_changed(before, now)
        if "more" in changed:
            more = changed.pop("more")
            assert not set(more["t"]) & set(shown["series"]["t"])
            shown["series"] = {name: shown["series"][name] + more[name] for name in more}
        shown |= changed
        assert shown["head"] == head
        assert shown["series"]["t"][-len(times) :] == times or not times
        before = now


@given(st.dictionaries(st.text(), st.text() | st.none() | st.integers()))
def test_an_event_is_one_line_of_data(data: dict[str, Any]) -> None:
    """No text can end it, whatever it holds; and it can be read back."""
    lines = event("fleet", data).decode("ascii").split("\n")
    assert (lines[0], lines[2:]) == ("event: fleet", ["", ""])
    assert json.loads(lines[1].removeprefix("data: ")) == data


NAME = "127.0.0.1:9"


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guard]:
    """One that watches an address where nobody listens."""
    with guarding(tmp_path_factory.mktemp("guard"), "--engine", f"http://{NAME}") as found:
        found.hears("connection refused")
        yield found


def listen(guard: Guard, path: str = "/events") -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A connection that is told of changes."""
    connection = http.client.HTTPConnection("127.0.0.1", guard.port, timeout=20)
    connection.request("GET", path, headers={"authorization": f"Bearer {guard.token}"})
    return connection, connection.getresponse()


def told(answer: http.client.HTTPResponse) -> tuple[str, Any]:
    name, data = answer.readline().decode(), answer.readline().decode()
    assert answer.readline() == b"\n"
    return name.removeprefix("event: ").strip(), json.loads(data.removeprefix("data: "))


def test_a_listener_is_told_everything_once_and_what_there_is_not(guard: Guard) -> None:
    """The whole fleet and how guard is, then the engine it asked for; a guard that observes has no journal, and no error."""
    connection, answer = listen(guard, f"/events?engine={id_of(NAME)}")
    assert answer.getheader("content-type") == "text/event-stream"
    name, fleet = told(answer)
    assert (name, fleet["all"], fleet["gone"]) == ("fleet", True, [])
    assert [(row["id"], row["name"], row["state"]) for row in fleet["rows"]] == [(id_of(NAME), NAME, "gone")]
    assert fleet["about"]["acting"] is False
    name, engine = told(answer)
    assert (name, engine["id"], engine["head"]["name"]) == ("engine", id_of(NAME), NAME)
    assert engine["ledger"]["bars"] == []
    assert engine["ledger"]["why"].startswith("unknown")
    connection.close()
    connection, answer = listen(guard, "/events?engine=nobody")
    told(answer)
    assert told(answer)[1] == {"id": "nobody", "none": "no engine named nobody"}
    connection.close()
    found = guard.json(f"/journal?engine={id_of(NAME)}")
    assert (found["entries"], "--act" in found["says"]) == ([], True)


def test_listeners_are_bounded_and_the_page_is_there_without_a_token(guard: Guard) -> None:
    """One more than there may be is refused, who hangs up makes room; without a token neither stream nor journal is open."""
    there = [listen(guard) for _ in range(MOST_LISTENERS)]
    for _, answer in there:
        told(answer)
    assert guard.get("/events")[0] == 503
    assert guard.get("/engines")[0] == 200
    for connection, answer in there:
        answer.close()
        connection.close()
    for _ in range(100):
        connection, answer = listen(guard)
        if answer.status == 200:
            break
        connection.close()
    assert answer.status == 200
    connection.close()
    for path in ("/", "/page/app.js", "/page/style.css", "/page/icon.svg"):
        assert guard.get(path, authorization="")[0] == 200
    for path in ("/events", "/journal", "/page/nothing.js"):
        assert guard.get(path, authorization="")[0] == 401
