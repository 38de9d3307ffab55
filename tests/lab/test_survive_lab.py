"""What the proof of containment rests on: faults come when the file says so, and clients notice what is not a whole answer."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.gpu import survive_load
from lab.survive.async_core import expected_tokens
from lab.survive.async_worker import Faults, next_token
from lab.survive.clients import Answer, Choice, differences, mistakes, mixed_asks
from lab.survive.faults.survive_faults import TEXT, Control
from lab.survive.server import CONTAINED, SAMPLE, declared_plugins
from tests.each import each


class OutOfMemoryError(RuntimeError):
    """Stands in for torch's."""


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with torch's error in it: the engine's torch is not there."""
    module = types.ModuleType("torch")
    module.OutOfMemoryError = OutOfMemoryError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", module)


def control_of(tmp_path: Path, *rules: dict[str, Any], **more: Any) -> Control:
    """A control that has read these rules."""
    path = tmp_path / "faults.json"
    path.write_text(json.dumps({"faults": rules, **more}))
    control = Control(str(path))
    control.look()
    return control


def planned(tokens: int, **outputs: int) -> Any:
    """A step with these requests, by the output tokens that each has."""
    names = [name for name, count in outputs.items() if count]
    cached = SimpleNamespace(req_ids=names, num_output_tokens=[outputs[name] for name in names])
    new = [SimpleNamespace(req_id=name) for name, count in outputs.items() if not count]
    return SimpleNamespace(total_num_scheduled_tokens=tokens, scheduled_cached_reqs=cached, scheduled_new_reqs=new)


def fails(control: Control, *sites: str) -> list[bool]:
    """Whether these calls fail, one after the other."""
    found = []
    for site in sites:
        try:
            control.fail_if_due(site)
            found.append(False)
        except OutOfMemoryError as error:
            found.append(str(error) == TEXT)
    return found


FORWARD = "forward"


def test_rules_say_which_calls_fail(tmp_path: Path) -> None:
    """Once, every so many-th, a share, until a time, above a size, with a request; a new file counts anew."""
    once = control_of(tmp_path, {"site": FORWARD, "times": 1})
    assert fails(once, "sampler", FORWARD, FORWARD) == [False, True, False]
    assert fails(control_of(tmp_path, {"site": FORWARD, "every": 3}), *[FORWARD] * 6) == [False, False, True] * 2
    shares = [control_of(tmp_path, {"site": FORWARD, "share": 0.2, "seed": 3}) for _ in range(2)]
    drawn = [fails(one, *[FORWARD] * 500) for one in shares]
    assert drawn[0] == drawn[1]
    assert 60 < sum(drawn[0]) < 140
    for left_s, is_due in ((-1, False), (60, True)):
        assert fails(control_of(tmp_path, {"site": FORWARD, "until": time.time() + left_s}), FORWARD) == [is_due]
    control = control_of(tmp_path, {"site": FORWARD, "above": 100}, {"site": "logits", "request": "doomed"},
                         {"site": "sampler", "request": "subject", "outputs": 0})  # fmt: skip
    control.begin(planned(100, subject_1=0, other=7))
    assert fails(control, FORWARD, "logits", "sampler") == [False, False, True]
    control.begin(planned(101, subject_1=1, doomed_2=0))
    assert fails(control, FORWARD, "logits", "sampler") == [True, True, False]
    raised = [json.loads(line) for line in Path(f"{control.path}.raised").read_text().splitlines()][-3:]
    assert [(fault["site"], fault["tokens"], fault["requests"]) for fault in raised] == [
        ("sampler", 100, 2), ("forward", 101, 2), ("logits", 101, 2),
    ]  # fmt: skip
    control = control_of(tmp_path, {"site": FORWARD, "times": 1})
    assert fails(control, FORWARD) == [True]
    fresh = tmp_path / "new"
    fresh.write_text(json.dumps({"faults": [{"site": "forward", "times": 1}], "keep_cache": True}))
    fresh.rename(control.path)
    control.look()
    assert control.keeps_cache
    assert fails(control, FORWARD, FORWARD) == [True, False]
    Path(control.path).unlink()
    control.look()
    assert not control.rules
    assert not control.keeps_cache


def answer() -> Answer:
    """A whole answer to a plain request."""
    ask = next(ask for ask in mixed_asks(12, 1) if ask.kind == "logprobs")
    count = ask.body["max_tokens"]
    choice = Choice("text", list(range(count)), [-0.5] * count, "length")
    usage = {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": count + 4}
    return Answer(ask, 200, "", {0: choice}, usage, is_done=True)


def undisturbed(it: Answer) -> list[str]:
    return differences(it, answer())


@each(
    ("noticed", "change", "found"),
    [
        (mistakes, lambda it: it.choices[0].token_ids.pop(), "usage"),
        (mistakes, lambda it: it.choices[0].token_ids.insert(3, 2), "usage"),
        (mistakes, lambda it: it.choices[0].logprobs.pop(), "log-probabilities"),
        (mistakes, lambda it: setattr(it, "is_done", False), "broke off"),
        (mistakes, lambda it: setattr(it, "error", "boom"), "boom"),
        (mistakes, lambda it: setattr(it.choices[0], "finish_reason", "stop"), "ended with stop"),
        (mistakes, lambda it: it.choices.clear(), "0 choices"),
        (undisturbed, lambda it: it.choices[0].token_ids.__setitem__(5, 999), "token 5"),
        (undisturbed, lambda it: it.choices[0].token_ids.pop(), "token"),
        (undisturbed, lambda it: it.choices[0].logprobs.__setitem__(2, -0.7), "other log-probabilities"),
        (undisturbed, lambda it: setattr(it.choices[0], "text", "texttext"), "texttext"),
        (undisturbed, lambda it: setattr(it.choices[0], "prompt_logprobs", [None, {"7": {"logprob": -1.0}}]), "of the prompt"),
        (undisturbed, lambda it: it.usage.update(prompt_tokens=5), "usage"),
    ],
)
def test_an_answer_that_is_wrong_by_itself_or_differs_from_the_undisturbed_one_is_noticed(
    noticed: Callable[[Answer], list[str]], change: Any, found: str
) -> None:
    """A token, a text, a log-probability, an end, an error or usage that is not right; a whole one has no mistakes."""
    assert not noticed(answer())
    wrong = answer()
    change(wrong)
    assert any(found in one for one in noticed(wrong))


def test_the_worker_without_a_model_fails_where_it_should_and_what_the_server_says_is_read(tmp_path: Path) -> None:
    """Planned steps fail at their site and once, a token depends on all before it; contained failures, samples and plugins."""
    faults = Faults(planned={2: "sampler"})
    faults.begin()
    faults.fail_if_due("sampler")
    faults.begin()
    faults.fail_if_due("forward")
    with pytest.raises(OutOfMemoryError):
        faults.fail_if_due("sampler")
    faults.fail_if_due("sampler")
    assert faults.raised == ["sampler"]
    assert next_token([5, 6, 7]) != next_token([6, 5, 7])
    assert expected_tokens([5, 6, 7], 2)[1] == next_token([5, 6, 7, next_token([5, 6, 7])])
    line = ("WARNING [contain.py:88] plimsoll: survive: contained failure 3: a step of 8192 tokens in 48 requests ran out of "
            "device memory at forward (asked for 1.95 GiB)")  # fmt: skip
    assert CONTAINED.findall(line) == [("3", "8192", "48", "forward")]
    assert SAMPLE.findall('vllm:num_requests_running{engine="0"} 2.0\nplimsoll_in_flight 0\n') == [
        ("vllm:num_requests_running", "2.0"), ("plimsoll_in_flight", "0"),
    ]  # fmt: skip
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.entry-points."vllm.general_plugins"]\none = "a.b:c"\n')
    assert declared_plugins(project) == "one = a.b:c"


def read_of(raw: bytes) -> survive_load.Answer:
    """An answer to a request for three tokens, read from these bytes."""
    answer = survive_load.Answer(0, is_killer=False, asked=3)
    survive_load.read_answer(raw, answer)
    return answer


def stream_of(*events: str) -> bytes:
    """A stream as vLLM's server sends it."""
    parts = [f"data: {event}\n\n".encode() for event in events]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunks


PIECES = ('{"choices": [{"token_ids": [5, 6]}]}', '{"choices": [{"token_ids": [7]}]}')
USAGE = '{"choices": [], "usage": {"completion_tokens": 3}}'


def test_a_whole_stream_is_served_with_its_tokens() -> None:
    """Every id once, as many as were asked for; chunks that break off give what came."""
    answer = read_of(stream_of(*PIECES, USAGE, "[DONE]") + b"0\r\n\r\n")
    assert (answer.end, answer.ids, answer.wrong) == ("served", [5, 6, 7], "")
    assert survive_load.dechunked(b"3\r\nabc\r\n5\r\nde") == b"abcde"
    assert survive_load.dechunked(b"zz\r\nabc") == b""


@each(
    ("raw", "end"),
    [
        (stream_of(*PIECES), "lost"), (stream_of(*PIECES)[:-30], "lost"), (stream_of(PIECES[0], USAGE, "[DONE]"), "lost"),
        (stream_of(*PIECES, PIECES[1], USAGE, "[DONE]"), "lost"),
        (stream_of(PIECES[0], '{"error": {"message": "EngineCore encountered an issue."}}', "[DONE]"), "lost"),
        (stream_of(PIECES[0], '{"error": {"message": "it ran out of device memory alone"}}', "[DONE]"), "aborted"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n{}", "refused"), (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "refused"),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}", "lost"),
        (b'HTTP/1.1 500 Internal Server Error\r\n\r\n{"error": "plimsoll: aborted"}', "aborted"),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": [{"token_ids": [5, 6, 7]}]}', "served"),
        (b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": [{"token_', "lost"), (b"", "lost"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_not_served(raw: bytes, end: str) -> None:
    """A missing or repeated token, an error in the stream and a connection that breaks are all told apart from success."""
    assert read_of(raw).end == end
