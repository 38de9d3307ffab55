"""The door in vLLM's output processor: what requests ask for, where they are held and given back, how refusals are answered.

vLLM is a small one of the test's own, with the names and signatures of 0.25 to 0.32.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.inside import door
from plimsoll.inside.door import PASSAGE, Door, Passage, Refusal, asks_of, install, install_into_vllm
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.settings import InsideSettings
from tests.each import each
from tests.inside.test_door import KINDS, ROW, TABLE, config
from tests.inside.vllm_shapes import output_processor

# What a request asks for


def request(name: str = "r", ids: int | None = 10, **more: Any) -> SimpleNamespace:
    known = {"mm_features": None, "lora_request": None, "prompt_embeds": None, "sampling_params": params(), "resumable": False}
    return SimpleNamespace(request_id=name, prompt_token_ids=None if ids is None else [1] * ids, **{**known, **more})


def params(**changed: Any) -> SimpleNamespace:
    known: dict[str, Any] = {
        "n": 1, "logprobs": None, "prompt_logprobs": None, "logprob_token_ids": None, "prompt_logprob_token_ids": None,
    }  # fmt: skip
    known |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    return SimpleNamespace(**{**known, **changed})


def picture(count: int) -> SimpleNamespace:
    return SimpleNamespace(mm_position=SimpleNamespace(get_num_embeds=lambda: count, length=count + 2))


@each(
    ("one", "copies", "asks"),
    [
        (request(), 1, {}), (request(sampling_params=None), 1, {}),
        (request(sampling_params=params(prompt_logprobs=0)), 1, {"prompt_logprobs": 10}),
        (request(sampling_params=params(prompt_logprobs=-1)), 3, {"prompt_logprobs": 30}),
        (request(sampling_params=params(prompt_logprob_token_ids=[[1]])), 1, {"prompt_logprobs": 10}),
        (request(ids=None, prompt_embeds=[0.0] * 7, sampling_params=params(prompt_logprobs=1)), 1, {"prompt_logprobs": 7}),
        (request(sampling_params=params(logprobs=0)), 4, {"logprobs": 1}),
        (request(sampling_params=params(logprobs=5)), 4, {"logprobs": 5}),
        (request(sampling_params=params(logprobs=-1)), 1, {"logprobs": 20}),
        (request(sampling_params=params(logprob_token_ids=[1, 2, 3])), 1, {"logprobs": 3}),
        (request(sampling_params=params(repetition_penalty=1.1)), 1, {"penalties": 64}),
        (request(mm_features=[picture(30), picture(12)], sampling_params=None), 2, {"pictures": 42}),
        (request(mm_features=[]), 1, {}), (request(lora_request=SimpleNamespace(lora_name="a")), 2, {"adapter": 1}),
    ],
)  # fmt: skip
def test_a_request_asks_for_what_vllm_will_compute(one: Any, copies: int, asks: dict[str, float]) -> None:
    """Units as the table counts them; copies read the prompt anew, and share pictures and adapters."""
    assert asks_of(one, KINDS, copies) == asks
    assert asks_of(one, {}, copies) == {}


# In vLLM
class VLLMError(Exception):
    """As from 0.27 on."""


class ClientError(VLLMError):
    """Passes generate()."""


class ValidationError(ClientError):
    """As from 0.27 on; before, a ValueError."""

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter, self.value = parameter, value


class GracefulHTTPError(VLLMError):
    def __init__(self, message: str, http_status: Any) -> None:
        super().__init__(message)
        self.message, self.http_status = message, http_status


class HTTPException(Exception):
    def __init__(self, status_code: int, detail: str | None = None, headers: Any = None) -> None:
        self.status_code, self.detail, self.headers = status_code, detail, headers


def fake_vllm(*, graceful: bool = True) -> dict[str, Any]:
    """The modules that the door asks for, new in each test."""
    processor = output_processor()

    class AsyncLLM:
        def __init__(self, vllm_config: Any, log_stats: bool = True) -> None:
            del log_stats
            self.vllm_config, self.output_processor = vllm_config, processor()

    fields = ("request_id", "prompt_token_ids", "prompt_embeds", "mm_features", "sampling_params", "lora_request")
    sampling = ("n", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty")
    exceptions = SimpleNamespace(VLLMValidationError=ValidationError)
    if graceful:
        exceptions.GracefulHTTPError = GracefulHTTPError
    return {
        "vllm": SimpleNamespace(__version__="0.32.0+cpu"), "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=AsyncLLM),
        "vllm.v1.engine.output_processor": SimpleNamespace(OutputProcessor=processor),
        "vllm.v1.engine": SimpleNamespace(EngineCoreRequest=SimpleNamespace(__struct_fields__=fields)),
        "vllm.sampling_params": SimpleNamespace(SamplingParams=SimpleNamespace(__struct_fields__=sampling)),
        "vllm.exceptions": exceptions, "fastapi": SimpleNamespace(HTTPException=HTTPException),
    }  # fmt: skip


def settings(folder: Path, table: Any = TABLE, mode: str = "certified") -> InsideSettings:
    path = folder / "table.json"
    path.write_text(json.dumps(table))
    return InsideSettings({"PLIMSOLL_ADMIT": mode, "PLIMSOLL_CERTIFICATE": str(path)})


def started(folder: Path, table: Any = TABLE, mode: str = "certified", **how: Any) -> tuple[Door, Any]:
    made, modules = Door(), fake_vllm(**how)
    assert install_into_vllm(made, settings(folder, table, mode), modules.__getitem__)
    return made, modules["vllm.v1.engine.async_llm"].AsyncLLM(config()).output_processor


def special(name: str, ids: int, **more: Any) -> SimpleNamespace:
    return request(name, ids, sampling_params=params(prompt_logprobs=1), **more)


def test_a_request_holds_from_the_moment_it_is_added_until_it_ends_however_that_is(tmp_path: Path) -> None:
    """Finished, aborted, aborted twice, or refused by vLLM itself when it was added."""
    one, processor = started(tmp_path)
    for end in (
        lambda: processor._finish_request(processor.request_states["a"]),
        lambda: processor.abort_requests(["a"], internal=True),
        lambda: [processor.abort_requests(iter(["a", "nobody"]), True) for _ in range(2)],
    ):
        assert processor.add_request(special("a", 20), None, queue=object()) == "added"
        assert one.words()["admitted_bytes"] == 60
        end()
        assert one.words()["admitted_bytes"] == 0
    processor.fails = True
    with pytest.raises(RuntimeError, match="vLLM's own"):
        processor.add_request(special("a", 20), None)
    assert (one.words()["admitted_bytes"], FAULTS.counts) == (0, {})


def test_copies_of_one_request_are_judged_before_the_first_and_end_together(tmp_path: Path) -> None:
    """A refusal comes before any copy is with vLLM; the abort of the whole gives all back, also of copies that never came."""
    one, processor = started(tmp_path)
    parent = SimpleNamespace(request_id="p", sampling_params=params(n=3))
    with pytest.raises(ValidationError, match="prompt_logprobs, 39 prompt tokens"):
        processor.add_request(special("0_p", 13), None, parent, 0, object())
    assert not processor.request_states
    for index in range(2):
        processor.add_request(special(f"{index}_p", 12), None, parent, index, object())
    assert one.words()["admitted_bytes"] == 100
    assert processor.abort_requests(["p"], True) == ["0_p", "1_p"]
    assert one.words()["admitted_bytes"] == 0


@pytest.mark.parametrize("graceful", [True, False])
def test_a_refusal_is_an_exception_that_vllm_answers_with_400_or_503(tmp_path: Path, graceful: bool) -> None:
    """The types that each release lets pass, and the gate is told in the request's own context."""
    one, processor = started(tmp_path, graceful=graceful)
    never, refusal = refused(processor, special("a", 37))
    assert isinstance(never, ValidationError)
    assert (never.parameter, refusal.answer(7).status) == ("prompt_logprobs", 400)
    processor.add_request(special("b", 20), None)
    not_now, refusal = refused(processor, special("c", 20))
    told = refusal.answer(7)
    assert (told.status, told.headers) == (503, ((b"retry-after", b"7"),))
    if graceful:
        assert isinstance(not_now, GracefulHTTPError)
        assert (not_now.http_status, not_now.message) == (503, refusal.message)
    else:
        assert isinstance(not_now, ValidationError)
        assert isinstance(not_now, HTTPException)
        assert (not_now.status_code, not_now.detail, str(not_now)) == (503, refusal.message, refusal.message)
        assert type(not_now).__mro__[1] is HTTPException, "its handler comes first"
    assert one.words()["refused"] == {"never": {"prompt_logprobs": 1}, "not_now": {"prompt_logprobs": 1}}


def refused(processor: Any, one: Any) -> tuple[Exception, Refusal]:
    """What vLLM gets to raise, and what the gate is told."""
    passage = Passage()
    token = PASSAGE.set(passage)
    try:
        with pytest.raises(VLLMError) as error:
            processor.add_request(one, None)
    finally:
        PASSAGE.reset(token)
    assert passage.refusal is not None
    return error.value, passage.refusal


def test_a_session_that_is_given_more_input_is_judged_for_what_is_added(tmp_path: Path) -> None:
    """Each part holds its own until the session ends; the part that ends it holds nothing."""
    one, processor = started(tmp_path)
    processor.add_request(special("s", 10, resumable=True), None)
    processor.add_request(special("s", 10, resumable=True), None)
    processor.add_request(special("s", 10, resumable=False), None)
    assert one.words()["admitted_bytes"] == 60
    with pytest.raises(GracefulHTTPError):
        processor.add_request(special("s", 30, resumable=True), None)
    processor._finish_request(processor.request_states["s"])
    assert one.words()["admitted_bytes"] == 0


def test_a_fault_of_ours_lets_the_request_in(tmp_path: Path) -> None:
    """A request that cannot be measured is vLLM's as before; the fault is counted."""
    one, processor = started(tmp_path)
    assert processor.add_request(SimpleNamespace(request_id="odd"), None) == "added"
    assert FAULTS.counts == {"the door": 1}
    processor.abort_requests(["odd"], True)
    one._holds = None  # type: ignore[assignment]
    assert processor.add_request(special("b", 5), None) == "added"
    assert processor.abort_requests(["b"], True) == ["b"]
    FAULTS.counts.clear()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (TABLE | {"vllm": "0.25.1"}, "for vLLM 0.25.1"),
        (TABLE | {"assumes": TABLE["assumes"] | {"max_num_seqs": 1}}, "max_num_seqs"),
        ({}, "schema"),
    ],
)
def test_a_table_that_is_not_for_this_engine_leaves_vllm_as_it_is(
    tmp_path: Path, table: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is refused, nothing is wrapped, and the reason is in the log and in the state."""
    with caplog.at_level(logging.WARNING, "vllm.plimsoll"):
        one, processor = started(tmp_path, table)
    assert "add_request" not in vars(processor)
    assert says in one.words()["open_because"]
    assert sum("door: open, nothing is refused" in record.getMessage() for record in caplog.records) == 1
    assert processor.add_request(special("a", 10_000), None) == "added"


def test_a_kind_that_cannot_be_judged_is_named(tmp_path: Path) -> None:
    """A full batch is no one request's doing; a closed kind needs no judging."""
    rows = [
        ROW | {"kind": "batch", "unit": "tokens in a step"},
        ROW | {"kind": "logprobs", "unit": "something else"},
        ROW | {"smallest": None},
    ]
    one, processor = started(tmp_path, TABLE | {"kinds": rows})
    assert (one.words()["kinds"], one.words()["not_judged"]) == ([], ["batch", "logprobs"])
    assert processor.add_request(special("a", 10_000), None) == "added"


PROCESSOR, REQUEST = "vllm.v1.engine.output_processor", "vllm.v1.engine"
CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda modules: delattr(modules[PROCESSOR].OutputProcessor, "_finish_request"),
    lambda modules: setattr(modules[PROCESSOR].OutputProcessor, "add_request", lambda *_arguments: None),
    lambda modules: setattr(modules[REQUEST].EngineCoreRequest, "__struct_fields__", ("request_id",)),
    lambda modules: setattr(modules["vllm.exceptions"], "GracefulHTTPError", ValueError),
    lambda modules: modules.pop("vllm.v1.engine.async_llm"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_vllm_that_is_not_known_is_left_alone(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Names, signatures and error types are looked at before anything is wrapped."""
    modules = fake_vllm()
    change(modules)
    client = modules.get("vllm.v1.engine.async_llm")
    before = client and client.AsyncLLM.__init__
    one = Door()
    with caplog.at_level(logging.WARNING, "vllm.plimsoll"):
        assert install_into_vllm(one, settings(tmp_path), modules.__getitem__) is False
    assert (client and client.AsyncLLM.__init__) is before
    assert "unlike those known" in one.words()["open_because"]
    assert "unlike those known" in caplog.text
    FAULTS.counts.clear()


def test_without_the_setting_nothing_is_imported_and_nothing_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point is called in every vLLM process of every user."""

    def fail(*arguments: Any) -> bool:  # noqa: ARG001
        raise AssertionError("installed")

    monkeypatch.setattr(door, "install_into_vllm", fail)
    monkeypatch.delenv("PLIMSOLL_ADMIT", raising=False)
    install()
    monkeypatch.setenv("PLIMSOLL_ADMIT", "everything")
    install()
    assert FAULTS.counts == {"setting PLIMSOLL_ADMIT": 1}
    FAULTS.counts.clear()
