"""What the proof of containment rests on: faults come when the file says so, and clients notice a wrong answer."""

from __future__ import annotations

import json
import sys
import time
import types
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.survive.async_core import expected_tokens
from lab.survive.async_worker import Faults, next_token
from lab.survive.clients import Answer, Choice, differences, mistakes, mixed_asks
from lab.survive.faults.survive_faults import TEXT, Control
from lab.survive.server import CONTAINED, SAMPLE, declared_plugins


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


def fails(control: Control, site: str = "forward") -> bool:
    """Whether this call of the site fails."""
    try:
        control.fail_if_due(site)
    except OutOfMemoryError as error:
        return str(error) == TEXT
    return False


def test_rules_say_which_calls_fail(tmp_path: Path) -> None:
    """Once, every so many-th, a share, until a time, above a size, with a request; a new file counts anew."""
    once = control_of(tmp_path, {"site": "forward", "times": 1})
    assert [fails(once, "sampler"), fails(once), fails(once)] == [False, True, False]
    third = control_of(tmp_path, {"site": "forward", "every": 3})
    assert [fails(third) for _ in range(6)] == [False, False, True] * 2
    shares = [control_of(tmp_path, {"site": "forward", "share": 0.2, "seed": 3}) for _ in range(2)]
    drawn = [[fails(each) for _ in range(500)] for each in shares]
    assert drawn[0] == drawn[1]
    assert 60 < sum(drawn[0]) < 140
    assert not fails(control_of(tmp_path, {"site": "forward", "until": time.time() - 1}))
    assert fails(control_of(tmp_path, {"site": "forward", "until": time.time() + 60}))

    control = control_of(tmp_path, {"site": "forward", "above": 100}, {"site": "logits", "request": "doomed"},
                         {"site": "sampler", "request": "subject", "outputs": 0})  # fmt: skip
    control.begin(planned(100, subject_1=0, other=7))
    assert [fails(control), fails(control, "logits"), fails(control, "sampler")] == [False, False, True]
    control.begin(planned(101, subject_1=1, doomed_2=0))
    assert [fails(control), fails(control, "logits"), fails(control, "sampler")] == [True, True, False]
    raised = [json.loads(line) for line in Path(f"{control.path}.raised").read_text().splitlines()][-3:]
    assert [(fault["site"], fault["tokens"], fault["requests"]) for fault in raised] == [
        ("sampler", 100, 2), ("forward", 101, 2), ("logits", 101, 2),
    ]  # fmt: skip

    control = control_of(tmp_path, {"site": "forward", "times": 1})
    assert fails(control)
    fresh = tmp_path / "new"
    fresh.write_text(json.dumps({"faults": [{"site": "forward", "times": 1}], "keep_cache": True}))
    fresh.rename(control.path)
    control.look()
    assert control.keeps_cache
    assert [fails(control), fails(control)] == [True, False]
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


def test_a_whole_answer_has_no_mistakes_and_no_differences() -> None:
    """Neither by itself nor beside its like."""
    assert not mistakes(answer())
    assert not differences(answer(), answer())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda it: it.choices[0].token_ids.pop(), "usage"),
        (lambda it: it.choices[0].token_ids.insert(3, 2), "usage"),
        (lambda it: it.choices[0].logprobs.pop(), "log-probabilities"),
        (lambda it: setattr(it, "is_done", False), "broke off"),
        (lambda it: setattr(it, "error", "boom"), "boom"),
        (lambda it: setattr(it.choices[0], "finish_reason", "stop"), "ended with stop"),
        (lambda it: it.choices.clear(), "0 choices"),
    ],
)
def test_an_answer_that_is_wrong_by_itself_is_noticed(change: Any, found: str) -> None:
    """A lost or repeated token, a missing end, another end, an error, no usage for its tokens."""
    wrong = answer()
    change(wrong)
    assert any(found in each for each in mistakes(wrong))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda it: it.choices[0].token_ids.__setitem__(5, 999), "token 5"),
        (lambda it: it.choices[0].token_ids.pop(), "token"),
        (lambda it: it.choices[0].logprobs.__setitem__(2, -0.7), "other log-probabilities"),
        (lambda it: setattr(it.choices[0], "text", "texttext"), "texttext"),
        (lambda it: setattr(it.choices[0], "prompt_logprobs", [None, {"7": {"logprob": -1.0}}]), "of the prompt"),
        (lambda it: it.usage.update(prompt_tokens=5), "usage"),
    ],
)
def test_an_answer_that_differs_from_the_undisturbed_one_is_noticed(change: Any, found: str) -> None:
    """Another token, text, log-probability or usage."""
    other = deepcopy(answer())
    change(other)
    assert any(found in each for each in differences(other, answer()))


def test_the_worker_without_a_model_fails_where_it_should() -> None:
    """Planned steps fail at their site and once; a token depends on every one before it."""
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


def test_what_the_server_says_is_read(tmp_path: Path) -> None:
    """The line of a contained failure, samples of a metrics page, and the plugins that the package declares."""
    line = ("WARNING [contain.py:88] plimsoll: survive: contained failure 3: a step of 8192 tokens in 48 requests ran out of "
            "device memory at forward (asked for 1.95 GiB)")  # fmt: skip
    assert CONTAINED.findall(line) == [("3", "8192", "48", "forward")]
    assert SAMPLE.findall('vllm:num_requests_running{engine="0"} 2.0\nplimsoll_in_flight 0\n') == [
        ("vllm:num_requests_running", "2.0"), ("plimsoll_in_flight", "0"),
    ]  # fmt: skip
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.entry-points."vllm.general_plugins"]\none = "a.b:c"\n')
    assert declared_plugins(project) == "one = a.b:c"
