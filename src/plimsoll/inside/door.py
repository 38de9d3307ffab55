"""The door: refuses requests that the certificate cannot cover, or only counts them. Off unless PLIMSOLL_ADMIT is set.

    PLIMSOLL_ADMIT=certified|shadow PLIMSOLL_CERTIFICATE=FILE vllm serve MODEL --middleware plimsoll.inside.Gate

Here are the accounts: the memory that the admitted requests of this API server may need in one step, kind by kind. The
server's own page has them too, and the sum over all API servers is judged. The code that knows vLLM is below `install`.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import inspect
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from plimsoll.inside.answers import GateAnswer, error, retry_headers
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.figures import misfit
from plimsoll.inside.settings import InsideSettings, data_table

if TYPE_CHECKING:
    from plimsoll.inside.shared import Shared


# The certificate's table, as `plimsoll plan --certify --table FILE` writes it: the memory left beside weights, KV cache, graphs
# and the worst plain step, and how much of it each kind of special request takes. A table of another release, model or batch
# size says nothing about this server and is not used.

SCHEMA = "plimsoll.certificate/1"
LARGEST_FILE = 1 << 20
LARGEST_NUMBER = 2.0**62  # that a shared page can hold
MOST_KINDS = 64
_TABLE = data_table("door")
# Where vLLM keeps the settings that a table may assume. Other names are the card's or the allocator's: nothing to compare with.
HOMES: dict[str, list[str]] = _TABLE["homes"]


class BadTable(Exception):
    """The table cannot be used; the message says why."""


class RequestKind(NamedTuple):
    """One kind of request, and the spare memory that its phase of a step takes. Phases run in turn: each can use all of it."""

    kind: str
    unit: str
    fixed_bytes: float
    bytes_per_unit: float
    most_units: float  # that one step can hold
    scope: str  # "step": memory that the requests of one step need together; "process": memory that the first one needs
    is_open: bool  # True if a request of this kind can exceed the spare memory

    def cost(self, units: float) -> float:
        """Returns the bytes of so many units in one step, whoever asks for them."""
        return self.fixed_bytes + self.bytes_per_unit * min(units, self.most_units) if units > 0 else 0.0


def _is_word(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1000


def _is_amount(value: object, least: float = 0.0) -> bool:
    """True if the value is a number of bytes or units from `least` on; False for NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= LARGEST_NUMBER


KIND = {
    "kind": _is_word, "unit": _is_word, "fixed_bytes": _is_amount, "bytes_per_unit": _is_amount, "most_units": _is_amount,
    "scope": ("step", "process"),
}  # fmt: skip
SHAPE = {
    "schema": SCHEMA, "kinds": lambda rows: isinstance(rows, list) and len(rows) <= MOST_KINDS,
    "assumes": {"max_num_batched_tokens": _is_amount, "max_num_seqs": _is_amount}, "vllm": _is_word, "model": _is_word,
    "spare_bytes": lambda value: _is_amount(value, -LARGEST_NUMBER),  # below 0 where not even a plain step is covered
}  # fmt: skip


class CertificateTable(NamedTuple):
    """The parts of a certificate's table that the door uses."""

    vllm: str
    model: str
    spare_bytes: float
    assumes: Mapping[str, Any]
    kinds: tuple[RequestKind, ...]


def read_certificate(path: str) -> CertificateTable:
    """Returns the table in this file. Raises BadTable, which says in one sentence why the file is none."""
    if not path:
        raise BadTable("PLIMSOLL_CERTIFICATE is not set")
    try:
        # Not blocking: a pipe that nobody writes to would hold up the server's start.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadTable(f"{path} is not a plain file")
            text = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise BadTable(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None
    if len(text) > LARGEST_FILE:
        raise BadTable(f"{path} is larger than {LARGEST_FILE} bytes")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise BadTable(f"{path} is not JSON") from None
    if wrong := misfit(content, SHAPE) or misfit(content["kinds"], [KIND], "a kind"):
        raise BadTable(f"{path}: {wrong} is missing, or its value cannot be")
    rows = content["kinds"]
    kinds = tuple(RequestKind(**{name: row[name] for name in KIND}, is_open=row.get("smallest", 1) is not None) for row in rows)
    if len({kind.kind for kind in kinds}) != len(kinds):
        raise BadTable(f"{path}: a kind appears twice")
    return CertificateTable(content["vllm"], content["model"], float(content["spare_bytes"]), content["assumes"], kinds)


def why_foreign(table: CertificateTable, vllm_version: str, config: Any) -> str:
    """Returns why the table is for another engine than the one with this config; empty where it is for this one."""
    if _release(vllm_version) != _release(table.vllm):
        return f"the certificate is for vLLM {table.vllm[:40]}, and this is {vllm_version}"
    model_config = getattr(config, "model_config", None)
    names = [getattr(model_config, name, None) for name in ("model", "model_weights")]
    # vLLM may have fetched it to a folder of its own: the same repository or folder at the end of a path will do.
    ends = {_repository(name) for name in names if isinstance(name, str) and name}
    if _repository(table.model) not in ends:
        return f"the certificate is for the model {table.model[:80]}, and this is {names[0]}"
    for name, (home, attribute) in HOMES.items():
        if name not in table.assumes:
            continue
        part = getattr(config, home, None) if home else config
        assumed, real = table.assumes[name], getattr(part, attribute, None)
        is_close = isinstance(assumed, float) and isinstance(real, int | float) and math.isclose(assumed, real, rel_tol=1e-6)
        if not is_close and assumed != real:
            return f"the certificate assumes {name} {str(assumed)[:40]}, and here it is {str(real)[:40]}"
    return ""


def _release(version: str) -> str:
    return version.partition("+")[0].removeprefix("v")


def _repository(name: str) -> str:
    """Returns the last part of a model's name, its path, or its folder in the Hugging Face cache (`models--ORG--NAME`)."""
    cached = [part for part in name.split("/") if part.startswith("models--")]
    whole = "/".join(cached[-1].split("--")[1:]) if cached else name.rstrip("/")
    return whole.rpartition("/")[2]


OFF, CERTIFIED, SHADOW = "off", "certified", "shadow"
NEVER, NOT_NOW = "never", "not_now"
WHYS = (NEVER, NOT_NOW)
REFUSED, WOULD = "refused", "would"
# The kinds that one request makes; each has its fields on every API server's page.
UNITS: dict[str, str] = _TABLE["units"]  # a kind that the certificate counts in another unit is not judged
KINDS = tuple(UNITS)
ADD_UP = ("prompt_logprobs", "pictures")  # the requests of one step need these together
FIELDS = tuple(
    f"door_{kind}_{count}"
    for kind in KINDS
    for count in ("units", *(f"{does}_{why}" for does in (REFUSED, WOULD) for why in WHYS))
)
PARAMETERS = {"prompt_logprobs": "prompt_logprobs", "logprobs": "logprobs", "adapter": "model"}  # as a 400 names them
GIB = 2.0**30


class Refusal(NamedTuple):
    """The reason why a request is not let in."""

    why: str
    kind: str
    message: str

    def answer(self, retry_after_s: int) -> GateAnswer:
        """Returns a 400 or 503 in the form of vLLM's own errors."""
        if self.why == NEVER:
            return error(400, self.message, param=PARAMETERS.get(self.kind))
        return error(503, self.message, retry_headers(retry_after_s)[:1], kind="Service Unavailable")


@dataclass
class Passage:
    """One HTTP request on its way through the gate: the door's refusal, if any, and the engine requests made of it."""

    refusal: Refusal | None = None
    ring_counts: Mapping[str, int] = field(default_factory=dict)  # of the engine cores when it came
    engine_requests: list[Any] = field(default_factory=list)  # their ids; in a stand-in, the requests themselves
    shapes: list[str] = field(default_factory=list)  # of those requests, without any text of theirs
    is_followed: bool = False  # True if every engine request made of it is noted here


PASSAGE: contextvars.ContextVar[Passage | None] = contextvars.ContextVar("plimsoll_passage", default=None)


@dataclass
class _Hold:
    """The units that an admitted request holds, by kind, until all its copies have ended."""

    units: Mapping[str, int]
    to_come: int
    living: set[str] = field(default_factory=set)


class Door:
    """The accounts of one process, and the verdict on each request that comes."""

    def __init__(self) -> None:
        self.mode = OFF
        self.open_because = ""
        self.certificate: CertificateTable | None = None
        self.not_judged: tuple[str, ...] = ()
        self.kinds: Mapping[str, RequestKind] = {}  # the judged ones, by name
        self.is_running: Callable[[str], bool] = lambda name: True  # noqa: ARG005 - until an engine is known
        self._shared: Shared | None = None
        self.own = dict.fromkeys(FIELDS, 0)  # this server's part; its page shows the same
        self._holds: dict[str, _Hold] = {}

    # Setting up

    def use(self, mode: str, certificate: CertificateTable, judged: Mapping[str, RequestKind]) -> None:
        """Judges requests of these kinds from here on."""
        self.mode, self.certificate, self.open_because, self.kinds = mode, certificate, "", dict(judged)
        self.not_judged = tuple(kind.kind for kind in certificate.kinds if kind.is_open and kind.kind not in judged)

    def stay_open(self, mode: str, because: str) -> None:
        self.mode, self.certificate, self.open_because, self.kinds, self.not_judged = mode, None, because, {}, ()

    def join(self, shared: Shared) -> None:
        """Shows the accounts on this API server's page from here on, and adds those of its fellows."""
        self._shared = shared
        for name, value in self.own.items():
            self._write(name, value)

    def part(self, shared: Shared) -> None:
        if self._shared is shared:
            self._shared = None

    @property
    def refuses(self) -> bool:
        return self.mode == CERTIFIED and bool(self.kinds)

    # Admitting

    def admit(self, name: str, key: str, asks: Mapping[str, float], copies: int = 1) -> Refusal | None:
        """Holds the units of a request and all its copies, or returns the refusal and holds nothing.

        `name` is the first copy's own name, `key` that of the whole; `asks` are the units of each kind.
        """
        if self.certificate is None or not asks:
            return None
        spare = self.certificate.spare_bytes
        costs = {kind: self.kinds[kind].cost(units) for kind, units in asks.items()}
        largest = max(costs, key=lambda kind: costs[kind])
        if costs[largest] > spare:
            return self._refuse(NEVER, largest, asks[largest], costs[largest])
        held = {kind: int(units) for kind, units in asks.items() if kind in ADD_UP and self.kinds[kind].scope == "step"}
        full = self._take(held, spare)
        lost = [key for key, hold in self._holds.items() if not any(map(self.is_running, hold.living))] if full else []
        if lost:  # vLLM has them no longer: give back what they hold
            for lost_key in lost:
                self._change(self._holds.pop(lost_key).units, -1)
            full = self._take(held, spare)
        if full:
            return self._refuse(NOT_NOW, full, asks[full], costs[full])
        if held:
            if key in self._holds:
                self._change(self._holds[key].units, -1)
            self._holds[key] = _Hold(held, copies - 1, {name})
        return None

    def join_copy(self, name: str, key: str) -> None:
        """Notes that another copy of an admitted request has come."""
        if (hold := self._holds.get(key)) is not None:
            hold.to_come -= 1
            hold.living.add(name)

    def _take(self, units: Mapping[str, int], spare: float) -> str:
        """Puts units on the account, then looks at the sum: when two servers do so at once, neither sees too little.

        Returns "", or the kind whose sum is too large; then the account is as before.
        """
        self._change(units, 1)
        full = next((kind for kind in units if self.admitted_bytes(kind) > spare), "")
        if full:
            self._change(units, -1)
        return full

    def _refuse(self, why: str, kind: str, units: float, cost: float) -> Refusal:
        assert self.certificate is not None
        count = f"door_{kind}_{REFUSED if self.mode == CERTIFIED else WOULD}_{why}"
        self._write(count, self.own[count] + 1)
        spare = self.certificate.spare_bytes / GIB
        unit = self.kinds[kind].unit
        what = f"{kind}, {units:.0f} {unit.removesuffix('s') if units == 1 else unit}, may take {cost / GIB:.2f} GiB"
        if why == NEVER:
            message = (
                f"this server cannot run this request within its GPU memory: {what} beside a full batch, and {spare:.2f} GiB "
                "are spare; ask for less"
            )
        else:
            message = (
                f"this server has no GPU memory for this request now: {what}, and requests that are here may need "
                f"{self.admitted_bytes(kind) / GIB:.2f} of {spare:.2f} GiB; try again later or on a different instance"
            )
        return Refusal(why, kind, message)

    # Giving back

    def leave(self, name: str) -> None:
        """Notes that a request, or a copy of one, has ended in any way; a second call does nothing."""
        for key in [key for key, hold in self._holds.items() if name in hold.living]:
            self._let_go(key, name)

    def undo(self, name: str, key: str) -> None:
        """Gives back what a request holds that was admitted here and not taken by vLLM."""
        if (hold := self._holds.get(key)) is not None and name in hold.living:
            hold.to_come = 0
            self._let_go(key, name)

    def end_whole(self, key: str) -> None:
        """Notes that no further copy of this request comes."""
        hold = self._holds.get(key)
        if hold is not None:
            hold.to_come = 0
            self._let_go(key, "")

    def _let_go(self, key: str, name: str) -> None:
        hold = self._holds.get(key)
        if hold is None:
            return
        hold.living.discard(name)
        if not hold.living and hold.to_come <= 0:
            del self._holds[key]
            self._change(hold.units, -1)

    # Accounts

    def _change(self, units: Mapping[str, int], sign: int) -> None:
        for kind, count in units.items():
            name = f"door_{kind}_units"
            self._write(name, max(0, self.own[name] + sign * count))

    def _write(self, name: str, value: int) -> None:
        self.own[name] = value
        if self._shared is not None:
            try:
                self._shared.own[name] = value
            except ValueError:  # closed: this server ends
                self._shared = None

    def _total(self, name: str) -> int:
        fellows = [] if self._shared is None else self._shared.pages()[1:]
        return self.own[name] + sum(page[name] for page in fellows)

    def admitted_bytes(self, kind: str) -> float:
        """Returns the most bytes that one step may take for all admitted requests of a kind, over all API servers."""
        return self.kinds[kind].cost(self._total(f"door_{kind}_units"))

    # Reporting

    def words(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "open_because": self.open_because,
            "spare_bytes": None if self.certificate is None else int(self.certificate.spare_bytes),
            "admitted_bytes": int(max((self.admitted_bytes(kind) for kind in self.kinds), default=0)),
            "refused": self._counts(REFUSED),
            "would_refuse": self._counts(WOULD),
            "kinds": list(self.kinds),
            "not_judged": list(self.not_judged),
        }

    def _counts(self, does: str) -> dict[str, dict[str, int]]:
        tables = {why: {kind: self._total(f"door_{kind}_{does}_{why}") for kind in KINDS} for why in WHYS}
        return {why: {kind: count for kind, count in counts.items() if count} for why, counts in tables.items()}


DOOR = Door()  # one for each process


def install() -> None:
    """Puts the door into every engine client of this process if PLIMSOLL_ADMIT is set; vLLM calls it in each process."""
    with FAULTS.noting("installing the door"):
        settings = InsideSettings()
        if settings.admit:
            install_into_vllm(DOOR, settings)


# The part of the door that knows vLLM: where requests begin and end, what makes one special, and how a refusal is answered.
#
# A request is judged where vLLM's output processor takes it in, in the API server: its input is processed by then, so that
# prompt tokens, encoder tokens, adapter and log-probabilities are known, and the engine has nothing of it yet. The methods
# are put onto each engine client's own output processor, so that vLLM's offline engine is left alone. The names and
# signatures are those of 0.25 to 0.32; a vLLM that has others is left alone, and the log says so.
#
# a refusal becomes    up to 0.28                                            from 0.29 on
# 400, never           VLLMValidationError                                   VLLMValidationError
# 503, not now         an HTTPException that is a VLLMValidationError too,   GracefulHTTPError, as of vLLM's own
#                      since generate() lets only those pass                 admission control

IS_WRAPPED = "plimsoll_door"
ACCOUNTS = "the door's accounts"


def install_into_vllm(door: Door, settings: InsideSettings, modules: Callable[[str], Any] = importlib.import_module) -> bool:
    """Puts the door into every engine client that is made in this process; returns False where this vLLM is not a known one."""
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
    own_init = client.__init__

    @functools.wraps(own_init)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        own_init(self, *args, **kwargs)
        try:
            if set_up(door, self, settings, version):
                put_into(self.output_processor, door, refuse)
        except Exception as error:
            door.stay_open(settings.admit, "it could not be set up")
            FAULTS.note("setting up the door", error)

    client.__init__ = make
    setattr(client, IS_WRAPPED, True)
    return True


def _check(client: Any, modules: Callable[[str], Any]) -> None:
    """Raises TypeError or AttributeError, with the name, where this vLLM differs from the known ones."""
    if tuple(inspect.signature(client.__init__).parameters)[:2] != ("self", "vllm_config"):
        raise TypeError("AsyncLLM.__init__")
    processor = modules("vllm.v1.engine.output_processor").OutputProcessor
    for name, expected in _TABLE["processor"].items():
        if list(inspect.signature(getattr(processor, name)).parameters) != expected:
            raise TypeError(f"OutputProcessor.{name}")
    request, params = modules("vllm.v1.engine").EngineCoreRequest, modules("vllm.sampling_params").SamplingParams
    for title, kind, names in (("EngineCoreRequest", request, "request"), ("SamplingParams", params, "params")):
        if missing := [name for name in _TABLE[names] if name not in kind.__struct_fields__]:
            raise TypeError(f"{title} has no {missing[0]}")


def set_up(door: Door, client: Any, settings: InsideSettings, version: str) -> bool:
    """Reads the table and compares it with this engine; True if it is used. Logs either outcome in one line."""
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
    """Wraps the three methods by which requests come and go, on this one output processor."""
    # The class's methods are looked up at each call: the recorder may wrap the class later.
    kind = type(processor)
    chunks = 0

    @functools.wraps(processor.add_request)
    def add_request(
        request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None, **named: Any
    ) -> Any:
        nonlocal chunks
        refusal, name, key = None, "", ""
        with FAULTS.noting("the door"):
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
        if refusal is not None and door.refuses:
            raise refuse(refusal)
        try:
            return kind.add_request(processor, request, prompt, parent_req, request_index, queue, **named)
        except BaseException:
            with FAULTS.noting(ACCOUNTS):
                door.undo(name, key)
            raise

    @functools.wraps(processor._finish_request)  # noqa: SLF001
    def finish_request(req_state: Any, *rest: Any, **named: Any) -> Any:
        result = kind._finish_request(processor, req_state, *rest, **named)  # noqa: SLF001
        with FAULTS.noting(ACCOUNTS):
            door.leave(req_state.request_id)
        return result

    @functools.wraps(processor.abort_requests)
    def abort_requests(request_ids: Any, *rest: Any, **named: Any) -> Any:
        asked = list(request_ids)
        gone = kind.abort_requests(processor, asked, *rest, **named)
        for name in gone:
            with FAULTS.noting(ACCOUNTS):
                door.leave(name)
        for name in asked:
            with FAULTS.noting(ACCOUNTS):
                door.end_whole(name)
        return gone

    processor.add_request, processor._finish_request = add_request, finish_request  # noqa: SLF001
    processor.abort_requests = abort_requests


def admit(door: Door, request: Any, key: str, copies: int) -> Refusal | None:
    """Returns the door's refusal of this request, if any, and notes it for the gate that the request came through."""
    if not door.kinds:
        return None
    refusal = door.admit(request.request_id, key, asks_of(request, door.kinds, copies), copies)
    passage = PASSAGE.get()
    if refusal is not None and door.refuses and passage is not None and passage.refusal is None:
        passage.refusal = refusal
    return refusal


def asks_of(request: Any, kinds: Mapping[str, RequestKind], copies: int = 1) -> dict[str, float]:
    """Returns the units that a request with all its copies asks of each kind of the table."""
    params = request.sampling_params  # None where it pools
    asks: dict[str, float] = {}

    def is_given(*names: str) -> bool:
        return any(getattr(params, name, None) is not None for name in names)  # 0 is computed like 1

    if "prompt_logprobs" in kinds and is_given("prompt_logprobs", "prompt_logprob_token_ids"):
        tokens = max((len(part) for part in (request.prompt_token_ids, request.prompt_embeds) if part is not None), default=0)
        asks["prompt_logprobs"] = tokens * copies
    if "logprobs" in kinds and is_given("logprobs", "logprob_token_ids"):
        # A step computes as many for every request as the greediest one asks for; -1 is the whole vocabulary.
        count = len(getattr(params, "logprob_token_ids", None) or ()) if params.logprobs is None else params.logprobs
        asks["logprobs"] = kinds["logprobs"].most_units if count < 0 else max(1, count)
    penalties = () if params is None else (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
    if "penalties" in kinds and any(penalties):
        # One request with a penalty makes vLLM count the tokens of every row of its step.
        asks["penalties"] = kinds["penalties"].most_units
    if "pictures" in kinds and request.mm_features:
        # Copies share the encoder's output. What it has cached from earlier requests is not known here.
        asks["pictures"] = sum(int(feature.mm_position.get_num_embeds()) for feature in request.mm_features)
    if "adapter" in kinds and request.lora_request is not None:
        asks["adapter"] = 1
    return {kind: units for kind, units in asks.items() if units > 0}


def _refusals(modules: Callable[[str], Any]) -> Callable[[Refusal], Exception]:
    """Returns a function that makes a refusal's exception, which this vLLM's front end turns into 400 or 503."""
    exceptions = modules("vllm.exceptions")
    invalid = exceptions.VLLMValidationError
    graceful = getattr(exceptions, "GracefulHTTPError", None)
    if graceful is None:

        def start(self: Any, message: str) -> None:
            invalid.__init__(self, message)
            self.status_code, self.detail, self.headers = 503, message, None

        # No admission control here: this exception passes generate() as a bad request does, and its own status is answered.
        bases = (modules("fastapi").HTTPException, invalid)
        not_now: Any = type("NotNow", bases, {"__init__": start, "__str__": lambda self: self.detail})
    else:
        not_now = functools.partial(graceful, http_status=HTTPStatus(503))

    def refuse(refusal: Refusal) -> Exception:
        parameter = PARAMETERS.get(refusal.kind)
        made = invalid(refusal.message, parameter=parameter) if refusal.why == NEVER else not_now(refusal.message)
        assert isinstance(made, Exception)
        return made

    for why in WHYS:
        refuse(Refusal(why, KINDS[0], "a trial"))
    return refuse
