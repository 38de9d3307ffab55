"""The comparison of two recordings, and the client that makes them, against a small server that misbehaves on demand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from lab.conformance.cases import REQUESTS
from lab.conformance.client import events_of
from lab.conformance.compare import Allowed, beyond, differences, streams, unused
from lab.conformance.metrics import difference, families, numbers
from lab.conformance.phases import end_of, tidied
from lab.conformance.report import block
from lab.conformance.shapes import folded, kind, shape
from tests.each import cases, each

CAPTURE = Path(__file__).parents[1] / "captures" / "vllm-0.32.0-conformance" / "real.json"
GIVEN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("conformance.yaml").read_text(encoding="utf-8"))
ANSWER, PAGE = GIVEN["answer"], GIVEN["page"]


def changed(*keys: Any, to: Any) -> dict[str, Any]:
    """A recording of one answer with one value of it changed."""
    found: dict[str, Any] = {"main": {"one": copy.deepcopy(ANSWER)}}
    place: Any = found["main"]["one"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    return found


REAL = changed("status", to=200)


@each(("place", "to"), cases("lab", "facts that differ"))
def test_facts_are_compared(place: str, to: Any) -> None:
    """A status, a key too many, a kind, a name or a count that differs is found, at its place and nowhere else.

    What no two runs share is none: ids, texts, times and sizes may be what they like.
    """
    keys = [int(key) if key.isdigit() else key for key in place.split("/")]
    assert [one.where for one in differences(REAL, changed(*keys, to=to))] == [f"main/one/{place}"]
    assert [one.where for one in differences(changed(*keys, to=to), REAL)] == [f"main/one/{place}"]
    for free, other in (
        (("json", "id"), "cmpl-2"), (("json", "choices", 0, "text"), "xyz"), (("headers", "date"), "Tue"),
        (("headers", "content-length"), "8"),
    ):  # fmt: skip
        assert differences(REAL, changed(*free, to=other)) == []


def test_what_may_differ_is_named() -> None:
    """A case frees a value of its own, a rule takes away what it matches and none is idle, and a race may end either way."""
    real = {"one": ANSWER | {"free": ["prompt_tokens"]}}
    other = copy.deepcopy(real)
    other["one"]["json"]["usage"]["prompt_tokens"] = 9
    assert differences(real, other) == []
    other["one"]["json"]["usage"]["prompt_tokens"] = "9"
    assert len(differences(real, other)) == 1
    found = differences(REAL, changed("status", to=500))
    rules = (Allowed("main/*/status", "because"), Allowed("nothing/*", "once"))
    assert beyond(found, ()) == found
    assert beyond(found, rules) == []
    assert unused(found, rules) == [rules[1]]
    assert differences({"a": {"seconds": 3.0}}, {"a": {"seconds": 9.0}}) == []
    assert len(differences({"a": {"seconds": 3.0}}, {"a": {"seconds": 300.0}})) == 1
    assert differences({"small": {"at once": {"x": 3.0}}}, {"small": {"at once": {}}}) == []
    assert len(differences({"small": {"at once": {"x": 90.0}}}, {"small": {"at once": {}}})) == 1

    def ended(how: str) -> dict[str, Any]:
        return {"main": {"sigterm": {"ends": {"stream": how}}}}

    assert differences(ended("abort"), ended("error 500")) == []
    assert len(differences(ended("abort"), ended("length"))) == 1
    assert differences({"maybe health": [0, 503]}, {"maybe health": [0]}) == []
    assert len(differences({"maybe health": [0, 503]}, {"maybe health": [0, 200]})) > 0


def event(index: int, text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": f"{text}{index}", "choices": [{"index": index, "text": text, "finish_reason": reason}], **more}


def test_streams_are_compared_choice_by_choice_and_a_recording_is_kept_small() -> None:
    """How tokens are cut into chunks is speed, the end of each choice a fact; a large free value becomes its kind."""
    end = {"choices": [], "usage": {"completion_tokens": 4}}
    one = [event(0, "a"), event(1, "b"), event(0, "c"), event(0, "", "length"), event(1, "", "length"), end, "[DONE]"]
    other = [event(1, "bb"), event(0, "ac"), event(1, "", "length"), event(0, "", "length"), end, "[DONE]"]
    assert streams(one) == streams(other)
    assert streams(one) == streams(folded(one))
    assert streams(one) != streams(one[:-1])
    assert streams(one) != streams([*one[:5], "[DONE]", end])
    assert streams(one) != streams([event(0, "a", "stop") if item is one[3] else item for item in one])
    assert streams([event(0, "a", usage={"n": 1})]) == streams([event(0, "a", usage={"n": 2})])
    assert streams(one)["order"] == ["choice", "rest"]
    going_on, last = event(0, "a"), event(0, "a", "length")
    assert streams([last]) == streams([going_on, going_on, last]) != streams([going_on]), "a late machine sends all at once"
    kept = folded([event(0, str(n)) for n in range(1000)] + ["[DONE]"])
    assert [item["alike"] if isinstance(item, dict) else item for item in kept] == [1000, "[DONE]"]
    assert [kind(value) for value in (None, True, 1, 1.5, "a", [1, "a"], {"k": None}, [])] == [
        "null", "bool", "number", "number", "text", "list of number or text", "object", "list of nothing",
    ]  # fmt: skip
    assert shape({"content": [{"token": "a", "logprob": -1.0}]}) == {"content": [{"token": "<text>", "logprob": "<number>"}]}
    assert shape({"top_logprobs": [{"a": -1.0}]}) == {"top_logprobs": "<list of object>"}
    assert shape({"content": "a", "role": "assistant"}) == {"content": "<text>", "role": "assistant"}
    seen = {"status": 200, "whole": True, "free": ["page"], "page": "x" * 5000, "events": [event(0, str(n)) for n in range(50)]}
    kept = tidied({"one": seen})
    assert kept["one"]["page"] == "kind: text"
    assert len(kept["one"]["events"]) == 1
    assert differences(kept, {"one": seen}) == []


def test_events_and_pages_are_read_as_they_came_and_ends_are_told_apart() -> None:
    """Each event is `data: `, JSON and a blank line; pages are families and numbers; the last word is a reason or an error."""
    assert events_of('data: {"a": 1}\n\ndata: [DONE]\n\n') == [{"a": 1}, "[DONE]"]
    raw = ['data:{"a": 1}', "data: x", "data: {"]
    assert events_of("\n\n".join(raw)) == [{"raw": text} for text in raw]
    found = families(PAGE)
    series = {"h_bucket": {"le": ["1.0", "+Inf"], "pid": []}, "h_count": {"pid": []}}
    assert found["h"] == {"help": "A histogram.", "type": "histogram", "series": series}
    assert found["vllm:prompt_tokens_total"]["type"] == "counter"
    assert found["plain"] == {"series": {"plain": {}}}
    before = numbers(PAGE)
    assert before == {"vllm:prompt_tokens_total": 7.0}
    assert difference(before, {"vllm:prompt_tokens_total": 9.0, "x": 0.0}) == {"vllm:prompt_tokens_total": 2.0}
    aborted = [{"choices": [{"finish_reason": "abort"}]}, "[DONE]"]
    for seen, end in (
        ({"status": 0, "error": "no answer"}, "no answer"), ({"status": 200, "whole": False, "events": []}, "cut"),
        ({"status": 500, "whole": True, "json": {"error": {"code": 500}}}, "error 500"),
        ({"status": 200, "whole": True, "events": aborted}, "abort"), ({"status": 404, "whole": True}, "status 404"),
    ):  # fmt: skip
        assert end_of(seen) == end


def test_the_recording_is_of_these_questions_and_its_table_counts_them() -> None:
    """It answers every question, names no machine and agrees with itself; a difference that nothing allows is named."""
    text = CAPTURE.read_text(encoding="utf-8")
    real = json.loads(text)
    other = copy.deepcopy(real)
    other["main"]["requests"]["GET /version"]["status"] = 500
    made = block(real, differences(real, other), ())
    assert "| answers to questions |" in made
    assert "- main/requests/GET /version/status: real 200, stand-in 500" in made
    assert "not explained" not in block(real, differences(real, real), ())
    assert {case.name for case in REQUESTS} <= set(real["main"]["requests"])
    assert not [path for path in ("/root", "/home") if path in text]
