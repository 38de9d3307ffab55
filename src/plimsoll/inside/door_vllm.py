"""What the door knows of vLLM: where requests come in and end, what is special about one, and how a refusal is answered.

A request is judged where vLLM's output processor takes it in, in the API server: its input is processed by then, so that
prompt tokens, encoder tokens, adapter and log-probabilities are known, and nothing of it is with the engine yet. The
methods are put onto each engine client's own output processor, so that vLLM's offline engine is left alone. The names and
signatures are those of 0.25 to 0.32; a vLLM that has others is left alone, and that is said.

    a refusal becomes    up to 0.28                                            from 0.29 on
    400, never           VLLMValidationError                                   VLLMValidationError
    503, not now         one that is an HTTPException and a                    GracefulHTTPError, as of vLLM's own
                         VLLMValidationError: generate() lets only those pass  admission control
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from plimsoll.inside.certificate import BadTable, Kind, read_certificate, why_foreign
from plimsoll.inside.door import CERTIFIED, KINDS, NEVER, PARAMETERS, PASSAGE, WHYS, Ask, Door, Refusal
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.settings import Settings

IS_WRAPPED = "plimsoll_door"
PROCESSOR = {
    "add_request": ("self", "request", "prompt", "parent_req", "request_index", "queue"),
    "_finish_request": ("self", "req_state"),
    "abort_requests": ("self", "request_ids", "internal"),
}
REQUEST_FIELDS = ("request_id", "prompt_token_ids", "prompt_embeds", "mm_features", "sampling_params", "lora_request")


PARAMS_FIELDS = ("n", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty")
# What each kind is counted in; a table that counts it in something else is not understood.
UNITS = {
    "prompt_logprobs": "prompt tokens",
    "logprobs": "log-probabilities",
    "penalties": "sequences",
    "pictures": "encoder tokens",
    "adapter": "adapters",
}


def install_into_vllm(door: Door, settings: Settings, modules: Callable[[str], Any] = importlib.import_module) -> bool:
    """Let every engine client that is made in this process have the door; False where this vLLM is not one that is known."""
    try:
        client = modules("vllm.v1.engine.async_llm").AsyncLLM
        if IS_WRAPPED in client.__dict__:
            return True
        _check(client, modules)
        refuse = _refusals(modules)
        version = str(modules("vllm").__version__)
    except Exception as error:
        reason = f"this vLLM looks unlike those known ({type(error).__name__}: {str(error)[:80]})"
        door.stay_open(settings.admit, reason)
        FAULTS.say("the door", f"door: open, nothing is refused: {reason}")
        return False
    made = client.__init__

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        try:
            attach(door, self, settings, version, refuse)
        except Exception as error:
            door.stay_open(settings.admit, "it could not be set up")
            FAULTS.note("setting up the door", error)

    client.__init__ = make
    setattr(client, IS_WRAPPED, True)
    return True


def _check(client: Any, modules: Callable[[str], Any]) -> None:
    """TypeError or AttributeError, with the name, where something is not what it is known to be."""
    if tuple(inspect.signature(client.__init__).parameters)[:2] != ("self", "vllm_config"):
        raise TypeError("AsyncLLM.__init__")
    processor = modules("vllm.v1.engine.output_processor").OutputProcessor
    for name, expected in PROCESSOR.items():
        if tuple(inspect.signature(getattr(processor, name)).parameters) != expected:
            raise TypeError(f"OutputProcessor.{name}")
    fields = modules("vllm.v1.engine").EngineCoreRequest.__struct_fields__
    if missing := [name for name in REQUEST_FIELDS if name not in fields]:
        raise TypeError(f"EngineCoreRequest has no {missing[0]}")
    params = modules("vllm.sampling_params").SamplingParams.__struct_fields__
    if missing := [name for name in PARAMS_FIELDS if name not in params]:
        raise TypeError(f"SamplingParams has no {missing[0]}")


def attach(door: Door, client: Any, settings: Settings, version: str, refuse: Callable[[Refusal], Exception]) -> None:
    """Put the door into the client's output processor, if its table is for this engine."""
    if set_up(door, client, settings, version):
        put_into(client.output_processor, door, refuse)


def set_up(door: Door, client: Any, settings: Settings, version: str) -> bool:
    """Read the table and hold it against this engine; whether it is used. Either way is said in one line."""
    try:
        table = read_certificate(settings.certificate)
        reason = why_foreign(table, version, client.vllm_config)
    except BadTable as problem:
        reason = str(problem)
    if reason:
        door.stay_open(settings.admit, reason)
        LOG.warning("plimsoll: door: open, nothing is refused: %s", reason)
        return False
    judged = {kind.kind: kind for kind in table.kinds if kind.is_open and UNITS.get(kind.kind) == kind.unit}
    states = client.output_processor.request_states
    door.is_running = lambda name: name in states
    door.use(settings.admit, table, judged)
    verb = "refuses" if settings.admit == CERTIFIED else "counts, and refuses nothing of,"
    unseen = f"; not judged: {', '.join(door.not_judged)}" if door.not_judged else ""
    names, spare = ", ".join(judged) or "no kind of request", table.spare_bytes / 2**30
    LOG.info("plimsoll: door: %s what %.2f GiB of spare memory do not cover: %s%s", verb, spare, names, unseen)
    return True


def put_into(processor: Any, door: Door, refuse: Callable[[Refusal], Exception]) -> None:
    """Wrap the three methods by which requests come and go, on this one output processor."""
    # Asked for anew each time: the recorder may wrap the class later.
    kind = type(processor)
    chunks = 0

    @functools.wraps(processor.add_request)
    def add_request(
        request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None, **named: Any
    ) -> Any:
        nonlocal chunks
        refusal, name, key = None, "", ""
        try:
            name = request.request_id
            key = name if parent_req is None else parent_req.request_id
            if name in processor.request_states:  # more input of a session, or its end
                chunks += 1
                key = f"{name}\0{chunks}"
                refusal = admit(door, request, key, 1) if getattr(request, "resumable", False) else None
            elif request_index > 0:
                door.join_copy(name, key)
            else:
                refusal = admit(door, request, key, 1 if parent_req is None else parent_req.sampling_params.n)
        except Exception as error:
            FAULTS.note("the door", error)
        if refusal is not None and door.refuses:
            raise refuse(refusal)
        try:
            return kind.add_request(processor, request, prompt, parent_req, request_index, queue, **named)
        except BaseException:
            _quietly(door.undo, name, key)
            raise

    @functools.wraps(processor._finish_request)  # noqa: SLF001
    def finish_request(req_state: Any, *rest: Any, **named: Any) -> Any:
        result = kind._finish_request(processor, req_state, *rest, **named)  # noqa: SLF001
        _quietly(lambda: door.leave(req_state.request_id))
        return result

    @functools.wraps(processor.abort_requests)
    def abort_requests(request_ids: Any, *rest: Any, **named: Any) -> Any:
        asked = list(request_ids)
        gone = kind.abort_requests(processor, asked, *rest, **named)
        for name in gone:
            _quietly(door.leave, name)
        for name in asked:
            _quietly(door.end_whole, name)
        return gone

    processor.add_request, processor._finish_request = add_request, finish_request  # noqa: SLF001
    processor.abort_requests = abort_requests


def admit(door: Door, request: Any, key: str, copies: int) -> Refusal | None:
    """The door's verdict on this request, also told to the gate that the request came through."""
    if not door.kinds:
        return None
    refusal = door.admit(request.request_id, key, asks_of(request, door.kinds, copies), copies)
    passage = PASSAGE.get()
    if refusal is not None and door.refuses and passage is not None and passage.refusal is None:
        passage.refusal = refusal
    return refusal


def asks_of(request: Any, kinds: Mapping[str, Kind], copies: int = 1) -> dict[str, Ask]:
    """What a request with all its copies asks of each kind of the table."""
    params = request.sampling_params  # None where it pools
    asks: dict[str, Ask] = {}
    if "prompt_logprobs" in kinds and _has(params, "prompt_logprobs", "prompt_logprob_token_ids"):
        asks["prompt_logprobs"] = Ask(_prompt_tokens(request) * copies, adds_up=True)
    if "logprobs" in kinds and _has(params, "logprobs", "logprob_token_ids"):
        # The most that any request asks for is chosen for all; -1 is the whole vocabulary.
        count = len(getattr(params, "logprob_token_ids", None) or ()) if params.logprobs is None else params.logprobs
        asks["logprobs"] = Ask(kinds["logprobs"].most_units if count < 0 else max(1, count), adds_up=False)
    if "penalties" in kinds and _has_penalties(params):
        # One request with a penalty has the tokens of every row of its step counted.
        asks["penalties"] = Ask(kinds["penalties"].most_units, adds_up=False)
    if "pictures" in kinds and request.mm_features:
        # Copies share what the encoder made of them. What it has cached of earlier requests is not known here.
        units = sum(int(feature.mm_position.get_num_embeds()) for feature in request.mm_features)
        asks["pictures"] = Ask(units, adds_up=True)
    if "adapter" in kinds and request.lora_request is not None:
        asks["adapter"] = Ask(1, adds_up=False)
    return {kind: ask for kind, ask in asks.items() if ask.units > 0}


def _has(params: Any, *names: str) -> bool:
    return params is not None and any(getattr(params, name, None) is not None for name in names)  # 0 is computed like 1


def _has_penalties(params: Any) -> bool:
    return params is not None and (
        params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
    )


def _prompt_tokens(request: Any) -> int:
    return max((len(part) for part in (request.prompt_token_ids, request.prompt_embeds) if part is not None), default=0)


def _quietly(call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception as error:
        FAULTS.note("the door's accounts", error)


def _refusals(modules: Callable[[str], Any]) -> Callable[[Refusal], Exception]:
    """What makes the exception of a refusal that this vLLM's front end turns into 400 or 503."""
    exceptions = modules("vllm.exceptions")
    invalid = exceptions.VLLMValidationError
    graceful = getattr(exceptions, "GracefulHTTPError", None)
    not_now = _unavailable(invalid, modules) if graceful is None else functools.partial(graceful, http_status=HTTPStatus(503))

    def refuse(refusal: Refusal) -> Exception:
        made = (
            invalid(refusal.message, parameter=PARAMETERS.get(refusal.kind))
            if refusal.why == NEVER
            else not_now(refusal.message)
        )
        assert isinstance(made, Exception)
        return made

    for why in WHYS:
        refuse(Refusal(why, KINDS[0], "a trial"))
    return refuse


def _unavailable(invalid: Any, modules: Callable[[str], Any]) -> Callable[[str], Exception]:
    """For releases without admission control: passes generate() as a bad request does, and is answered by its own status."""
    base: Any = modules("fastapi").HTTPException

    def start(self: Any, message: str) -> None:
        invalid.__init__(self, message)
        self.status_code, self.detail, self.headers = 503, message, None

    made: Any = type("NotNow", (base, invalid), {"__init__": start, "__str__": lambda self: self.detail})
    unavailable: Callable[[str], Exception] = made
    return unavailable
