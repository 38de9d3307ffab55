"""A traceback of one request that vLLM or plimsoll's door turned away is never taken for the end of a server."""

from __future__ import annotations

from plimsoll.findings import Code
from plimsoll.inside.door import CertificateTable, Door, RequestKind
from tests.doctor.log_maker import ARGS, ENGINE_DEAD, STARTED, VERSION, traceback
from tests.doctor.rules.test_root_cause import symptoms
from tests.each import each

API = "(APIServer pid=1) "
INVALID = "vllm.exceptions.VLLMValidationError: max_tokens must be at least 1 (parameter=max_tokens)"
TAKEN_IN = ("v1/engine/async_llm.py:generate", "v1/engine/async_llm.py:add_request", "v1/engine/async_llm.py:_add_request")
STREAMS = {
    "completion": "entrypoints/openai/completion/serving.py:completion_stream_generator",
    "chat": "entrypoints/openai/chat_completion/serving.py:chat_completion_stream_generator",
}


def refusals() -> list[str]:
    """What the door says of a request that never fits, and of one that does not fit beside another."""
    kind = RequestKind("pictures", "encoder tokens", 0, 1, 100, "step", is_open=True)
    door = Door()
    door.use("certified", CertificateTable("0.25.1", "m", 50, {}, (kind,)), {kind.kind: kind})
    found = [door.admit(name, name, {kind.kind: units}) for name, units in (("a", 51), ("b", 30), ("c", 30))]
    return [refusal.message for refusal in found if refusal is not None]


START = ("entrypoints/openai/api_server.py:run_server", "engine/arg_utils.py:create_engine_config")
LOOP = ("v1/engine/core.py:run_engine_core", "v1/engine/core.py:run_busy_loop")
ENGINE = "(EngineCore pid=2) "


@each(("promise", "before", "raised", "codes"), [
    *(("vLLM serves on after a request that it finds invalid", STARTED, (frames, INVALID, API), [])
      for frames in ((STREAMS["completion"], *TAKEN_IN), (STREAMS["chat"], *TAKEN_IN), TAKEN_IN)),
    ("the engine core's input thread answers for a request it cannot prepare", STARTED,
     (("v1/engine/core.py:process_input_sockets", "v1/engine/core.py:preprocess_add_request"), INVALID, ENGINE), []),
    *((f"the door's sentence tells of one request: {message}", before, (TAKEN_IN[-1:], f"{kind}: {message}", API), [])
      for before in (STARTED, []) for message in refusals()
      for kind in ("vllm.exceptions.VLLMValidationError", "plimsoll.inside.door.NotNow")),
    ("raised in the engine's own loop it ended more than a request", STARTED, (LOOP, INVALID, ENGINE), [Code.OTHER_BAD_CONFIG]),
    *(("below the functions that start an engine it refused the start", before, (START, INVALID, API), [Code.OTHER_BAD_CONFIG])
      for before in ([VERSION, ARGS], [*STARTED, VERSION, ARGS])),
    ("before the server serves there is no request", [VERSION, ARGS], (("config/model.py:__post_init__",), INVALID, API),
     [Code.OTHER_BAD_CONFIG]),
], ids=lambda row: row[0])  # fmt: skip
def test_a_refused_request_is_no_complaint_and_a_refused_start_is_one(
    promise: str, before: list[str], raised: tuple[tuple[str, ...], str, str], codes: list[Code]
) -> None:
    """Whatever is left of the log and of the traceback, also as the last word; where the engine died of it, it is one."""
    frames, error, who = raised
    end = [ENGINE_DEAD] if frames is LOOP else []
    assert [code for code, _ in symptoms(before, traceback(*frames, error=error, who=who), end)] == codes, promise


def test_the_door_has_two_sentences() -> None:
    """One for a request that never fits, one for a request that does not fit now."""
    assert len(set(refusals())) == 2
