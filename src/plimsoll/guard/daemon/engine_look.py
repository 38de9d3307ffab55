"""Looks at one engine over HTTP: its metrics, its health, its gate's state, and canary requests at intervals.

A look always ends in time and never raises. Figures that could not be read are absent; `reach` has the outcome for the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from plimsoll.doctor.rules.contained import read_survival
from plimsoll.errors import BadInput, TooLarge
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.daemon.engine_figures import PageFigures, PageReader
from plimsoll.guard.daemon.host import SameHost
from plimsoll.guard.judge.look import Canary, GateState, Look, Reach, WorkerMemory
from plimsoll.net.address import address
from plimsoll.net.client import HttpClient, Loss, Lost, Reply, bearer, number, same_server, table
from plimsoll.vllm.versions import Engine, engine_named

ANSWER_MAX = 1 << 20
ASK_AGAIN_S = 300.0
LINGER_S = 5.0  # by then a server has seen that the client is gone
PATH = "/v1/completions"
# A number follows, whatever language the model speaks: never half a character of another script.
PROMPT = "1, 2, 3, 4, 5,"
NO_LETTER = "\ufffd"
UNKNOWN_TOKENS = ("<unk>", "<UNK>", "[UNK]")  # token 0, which a model with NaN logits returns


class KeyedClient:
    """Shows a key only to a server that asks for one: a list of engines may name any server."""

    def __init__(
        self, client: HttpClient, auth: Mapping[str, str], asks: Callable[[Reply], bool] = lambda reply: reply.status == 401
    ) -> None:
        self._client, self._auth, self._asks = client, auth, asks
        self.is_shown = False

    async def call(self, method: str, path: str, body: bytes = b"", *, deadline_s: float, most_bytes: int) -> Reply | Lost:
        if not self.is_shown:
            reply = await self._client.call(method, path, body, deadline_s=deadline_s, most_bytes=most_bytes)
            if isinstance(reply, Lost) or not self._auth or not self._asks(reply):
                return reply
            self.is_shown = True
        return await self._client.call(method, path, body, self._auth, deadline_s=deadline_s, most_bytes=most_bytes)


class CanaryPlan(NamedTuple):
    """How often to send a canary request, and its deadline."""

    every_s: float = 30.0
    deadline_s: float = 20.0
    api_key: str | None = None


class CanarySender:
    """Sends canary requests of one token to one engine: only they show whether it still makes tokens.

    They run beside the looks, over their own connection, one at a time. An engine fails one only if it took the request and
    sent nothing until the deadline. Any other error says nothing about the engine.
    """

    def __init__(self, url: str, plan: CanaryPlan) -> None:
        self.last: Canary | None = None
        self._plan = plan
        self._client = KeyedClient(HttpClient(address(url)), {} if plan.api_key is None else bearer(plan.api_key))
        self._task: asyncio.Task[None] | None = None
        self._next_s: float | None = None
        self._given_up_s: float | None = None

    @property
    def is_asking(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def may_be_counted(self) -> bool:
        """True if the server may count the canary among its requests: it is in flight, or was given up a moment ago."""
        return self.is_asking or (self._given_up_s is not None and _now_s() - self._given_up_s < LINGER_S)

    def begin(self, now_s: float, model: str | None) -> None:
        """Sends a request if it is due; the answer is in `last` at a later look."""
        if self.is_asking or (self._next_s is not None and now_s < self._next_s):
            return
        if model is None:
            self.last = Canary(now_s, None, why="unknown which model it serves")
            return
        self._next_s = now_s + self._plan.every_s
        self._task = asyncio.get_running_loop().create_task(self.ask(now_s, model))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def ask(self, at_s: float, model: str) -> None:
        """Sends one request now and puts its outcome into `last`."""
        plan = self._plan
        asked = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "skip_special_tokens": False}
        body = json.dumps(asked).encode()
        reply = await self._client.call("POST", PATH, body, deadline_s=plan.deadline_s, most_bytes=ANSWER_MAX)
        if isinstance(reply, Reply) and reply.status != 200:
            self.last = Canary(at_s, None, why=refused(reply, model, has_key=plan.api_key is not None), status=reply.status)
            if 400 <= reply.status < 500 and reply.status != 429:  # this server does not take such a request
                self._next_s = at_s + ASK_AGAIN_S
        elif isinstance(reply, Reply):
            found = is_garbage(reply.body)
            if found is None:
                self.last = Canary(at_s, None, why=f"it answers {PATH} with something that is not a completion")
            else:
                self.last = Canary(at_s, True, reply.seconds, found)  # noqa: FBT003 - the field's own value
        elif reply.loss is not Loss.LATE:
            self.last = Canary(at_s, None, why=f"it {reply.why}")
        else:
            self._given_up_s = _now_s()
            if reply.was_sent and not reply.was_begun:
                self.last = Canary(at_s, False, plan.deadline_s)  # noqa: FBT003 - the field's own value
            else:
                what = "the answer began and did not finish" if reply.was_begun else "it could not be reached"
                self.last = Canary(at_s, None, why=f"{what} within {plan.deadline_s:g} s")


def refused(reply: Reply, model: str, *, has_key: bool = False) -> str:
    if reply.status == 401:
        return "the engine rejects this API key" if has_key else "the engine requires an API key"
    if reply.status == 404 and b"model" in reply.body.lower():  # vLLM's words; for an unknown path they are "Not Found"
        return f"the engine does not serve a model named {model[:100]!r}"
    known = {403: "does not allow it (403)", 404: f"does not serve {PATH}", 429: "is too busy for it (429)"}
    return f"the engine {known.get(reply.status, f'answers {PATH} with {reply.status}')}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def is_garbage(body: bytes) -> bool | None:
    """True if the token of a completion is garbage: empty, half a character, or unprintable.

    None if this is no completion. Log-probabilities would show NaN logits, but they are not requested: vLLM would compute them
    for its whole batch, in memory that it has not reserved.
    """
    try:
        choice = json.loads(body)["choices"][0]
        text, reason = choice["text"], choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    if not isinstance(text, str):
        return None
    if text == "":  # a first token that is the end token rightly has no text
        return bool(reason == "length")
    is_control = all(letter == NO_LETTER or not (letter.isprintable() or letter.isspace()) for letter in text)
    return is_control or text.strip() in UNKNOWN_TOKENS


MODELS = "/v1/models"
LARGEST_MODELS_LIST = 4 << 20
DEADLINE_S = 10.0
WARM_S = 120.0  # the first request of a process may compile


class ServedModel(NamedTuple):
    """A model that an engine serves."""

    name: str
    context: float | None  # tokens


async def served_model(url: str, api_key: str | None = None, *, deadline_s: float = DEADLINE_S) -> ServedModel | None:
    """Returns the first model that an engine lists; None if it lists none."""
    client = KeyedClient(HttpClient(address(url)), {} if api_key is None else bearer(api_key))
    reply = await client.call("GET", MODELS, deadline_s=deadline_s, most_bytes=LARGEST_MODELS_LIST)
    if isinstance(reply, Lost) or reply.status != 200:
        return None
    try:
        first = json.loads(reply.body)["data"][0]
        name, context = first["id"], first.get("max_model_len")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    is_number = isinstance(context, int) and not isinstance(context, bool) and 0 < context < 2**53
    return ServedModel(name, float(context) if is_number else None) if isinstance(name, str) and 0 < len(name) < 1000 else None


async def warm_up(url: str, api_key: str | None = None, *, deadline_s: float = WARM_S) -> Outcome:
    model = await served_model(url, api_key)
    if model is None:
        return unsure("unknown which model it serves: no request sent")
    canary = CanarySender(url, CanaryPlan(deadline_s=deadline_s, api_key=api_key))
    await canary.ask(0.0, model.name)
    answer = canary.last
    if answer is not None and answer.status == 500:  # it accepted the request and failed; a refusal has another status
        return failed("warm-up request failed: the engine answered 500")
    if answer is None or answer.is_answered is None:
        return unsure(f"warm-up request inconclusive: {'' if answer is None else answer.why}")
    if not answer.is_answered:
        return failed(f"warm-up request: no answer in {deadline_s:.0f} s")
    if answer.is_garbage:
        return failed("warm-up request: the answer is garbage")
    return done(f"warm-up request answered in {answer.seconds or 0.0:.1f} s")


# vLLM (0.32.0, in dev mode) passes /is_paused to its engine core and waits without limit. A core that dies meanwhile never
# answers, and the server, which must answer before it ends, never ends: one such request keeps a crashed vLLM from being
# restarted (measured; docs/guard.md). A crash is over within seconds. So guard asks every server once, and again only one that
# has had work, or a canary request of guard's, and made no step for longer than that.
STILL_S = 20.0
AGAIN_S = 60.0  # while it stands still
ABSENT_AGAIN_S = 300.0  # for a server without /is_paused
MOVES = ("steps", "generation_tokens", "prompt_tokens", "success")


class PauseState:
    """Tracks whether one server process is paused, by its answers and its steps; and when to ask."""

    def __init__(self) -> None:
        self._is_served = False  # it has answered /is_paused before
        self._is_absent = False  # it has no /is_paused
        self._is_paused = False  # as last answered, or shown by steps
        self._answered_s = -math.inf
        self._next_s = -math.inf
        self._marks: tuple[float | None, ...] | None = None
        self._moved_s = -math.inf
        self._waits_since_s: float | None = None

    def is_due(self, figures: Mapping[str, float], canary: Canary | None, now_s: float) -> bool:
        """Takes these metrics into account; returns whether to ask now."""
        marks = tuple(figures.get(name) for name in MOVES)
        has_moved = self._marks is not None and marks != self._marks
        if marks != self._marks:
            self._marks, self._moved_s = marks, now_s
        if has_moved:  # it makes steps, so it is not paused
            self._is_paused, self._waits_since_s = False, None
        elif figures.get("running", 0.0) + figures.get("waiting", 0.0) > 0:
            self._waits_since_s = now_s if self._waits_since_s is None else self._waits_since_s
        elif canary is not None and canary.is_answered is False and canary.at_s >= self._moved_s:
            self._waits_since_s = canary.at_s
        else:
            self._waits_since_s = None
        if now_s < self._next_s:
            return False
        return not self._is_served or (self._waits_since_s is not None and now_s - self._waits_since_s >= STILL_S)

    def answered(self, now_s: float, *, is_paused: bool) -> None:
        self._is_served, self._is_absent, self._is_paused = True, False, is_paused
        self._answered_s, self._next_s = now_s, now_s + AGAIN_S

    def lost(self, now_s: float) -> None:
        self._is_absent, self._answered_s, self._next_s = False, -math.inf, now_s + AGAIN_S

    def absent(self, now_s: float) -> None:
        """Records that it has no /is_paused; a server that has answered before may do so again."""
        self._is_absent, self._answered_s, self._next_s = not self._is_served, -math.inf, now_s + ABSENT_AGAIN_S

    def state(self) -> tuple[bool | None, bool]:
        """Returns whether it is paused (None: unknown), and True if it may be paused without guard knowing."""
        if self._is_absent:
            return None, False
        is_known = self._is_served and (self._waits_since_s is None or self._answered_s >= self._waits_since_s)
        return (self._is_paused, False) if is_known else (None, True)


LOST_AGAIN_S = 30.0  # after no answer at all
SMALL_MAX = 64 << 10
MEMORY_MAX = 4 << 20  # 3 KiB a worker
WORKERS_MAX = 1024
DEAD = 503


class LookLimits(NamedTuple):
    """Time and size limits of a look."""

    look_s: float = 4.0  # all of it
    page_s: float = 3.0
    small_s: float = 1.5  # every other question
    page_bytes: int = 8 << 20  # a page of 64 ranks has 3 MiB


class EngineWatcher:
    """Looks at one engine, over connections of its own."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        canary: CanaryPlan | None = None,
        *,
        gate_url: str | None = None,
        limits: LookLimits | None = None,
        same_host: SameHost | None = None,
    ) -> None:
        """`token` is the gate's; `gate_url` its own address: http://HOST:PORT or unix:/PATH. BadInput for a bad one."""
        base = url.strip().rstrip("/").removesuffix("/metrics")
        self.limits = limits or LookLimits()
        self.gate_note = ""  # why the gate's state is missing
        self._client = HttpClient(address(base), keeps=True)
        self._gate_client = HttpClient(gate_url, keeps=True) if gate_url else self._client
        self._canary = CanarySender(base, canary) if canary is not None else None
        self._auth = {} if token is None else bearer(token)
        self._same_host = same_host
        self._started: float | None = None
        self._forget()

    def _forget(self) -> None:
        """Forgets what the last process could do: another one may answer now."""
        self._pause = PauseState()
        self._gate = KeyedClient(self._gate_client, self._auth, lambda reply: reply.asks_for_token)
        self._has_gate_answered = False  # if so, the gate is asked at every look, else every five minutes
        self._gate_next_s = self._version_next_s = -math.inf
        self._version: str | None = None
        self._engine: Engine | None = None
        self._was_paused = self._is_resting = False  # as of the last page
        self._model: str | None = None

    @property
    def host_note(self) -> str:
        """The part of this machine that does not answer, if the engine runs on it; empty if all do."""
        return "" if self._same_host is None else self._same_host.note

    async def look(self, now_s: float, unix_s: float) -> Look:
        look = await self._look(now_s, unix_s)
        return look if self._same_host is None else await self._same_host.add_to(look)

    async def _look(self, now_s: float, unix_s: float) -> Look:
        end_s = asyncio.get_running_loop().time() + self.limits.look_s
        page, reach, why, was_asked = await self._page()
        if reach is Reach.REFUSED:
            self._forget()
            return Look(now_s, unix_s, reach, why, canary=self._last_canary())
        health = await self._health(end_s, is_page=page is not None)
        if page is None:
            # A server that accepts connections and stays silent may still make tokens; only a canary request shows it.
            if reach is Reach.SILENT and was_asked and not self._is_resting and self._canary is not None:
                self._canary.begin(now_s, self._model)
            return Look(now_s, unix_s, reach, why, health, canary=self._last_canary())
        if page.started_unix_s != self._started:
            self._forget()
            self._started = page.started_unix_s
        if self._version is None and now_s >= self._version_next_s:
            version = (await self._json(self._client, "/version", end_s)).get("version")
            if isinstance(version, str) and 0 < len(version) < 100 and version.isprintable():
                self._version = version
                with contextlib.suppress(BadInput):
                    self._engine = engine_named(version, "/version")
            self._version_next_s = now_s + ASK_AGAIN_S
        gate, workers = await self._ask_gate(now_s, end_s)
        if self._pause.is_due(page.figures, self._last_canary(), now_s):
            reply = await self._client.call("GET", "/is_paused", deadline_s=self._left(end_s), most_bytes=SMALL_MAX)
            found = reply.table().get("is_paused") if reply.status == 200 else None
            if isinstance(found, bool):
                self._pause.answered(now_s, is_paused=found)
            elif isinstance(reply, Lost) or reply.status >= 500:
                self._pause.lost(now_s)
            else:
                self._pause.absent(now_s)
        is_paused, is_rest_unknown = self._pause.state()
        self._model = page.model
        # The last answer counts until the next: a stuck engine core does not answer, and must still get canary requests.
        self._was_paused = self._was_paused if is_rest_unknown else bool(is_paused)
        is_asleep = page.figures.get("asleep", 0.0) > 0 or (gate is not None and bool(gate.asleep))
        self._is_resting = self._was_paused or is_asleep  # a canary request would prove nothing, and would queue there
        if self._canary is not None and not self._is_resting:
            self._canary.begin(now_s, page.model)
        return Look(
            now_s, unix_s, Reach.ANSWERS, "", health, page.figures, page.started_unix_s, self._version, page.config, gate,
            workers or page.workers, (), self._last_canary(), is_paused, is_rest_unknown, page.ranks, model=page.model,
        )  # fmt: skip

    async def close(self) -> None:
        if self._canary is not None:
            await self._canary.close()
        await self._client.close()
        await self._gate_client.close()
        if self._same_host is not None:
            self._same_host.close()

    def _last_canary(self) -> Canary | None:
        return None if self._canary is None else self._canary.last

    async def _page(self) -> tuple[PageFigures | None, Reach, str, bool]:
        """Returns the metrics page, the outcome of the request, why there is none, and whether the request was sent."""
        reader = PageReader()
        try:
            reply = await self._client.call(
                "GET", "/metrics", deadline_s=self.limits.page_s, most_bytes=self.limits.page_bytes, sink=reader.feed,
                follow=same_server,
            )  # fmt: skip
            if isinstance(reply, Lost):
                return None, REACHES[reply.loss], reply.why, reply.was_sent
            if reply.status != 200:
                return None, Reach.NONSENSE, f"answers /metrics with {reply.status}, not with a page", True
            page = reader.done(self._engine)
        except TooLarge as error:
            return None, Reach.NONSENSE, f"shows {error}", True
        except BadInput:
            return None, Reach.NONSENSE, "answers /metrics with something other than metrics", True
        return (
            (None, Reach.NONSENSE, "sends a truncated metrics page", True) if page.is_cut else (page, Reach.ANSWERS, "", True)
        )

    async def _health(self, end_s: float, *, is_page: bool) -> int | None:
        """Returns the status of /health. A 503 is vLLM's own only without a body and beside its metrics: proxies send it too,
        and so does vLLM's data-parallel supervisor while it shuts down.
        """
        reply = await self._client.call("GET", "/health", deadline_s=self._left(end_s), most_bytes=SMALL_MAX)
        if isinstance(reply, Lost):
            return None
        return None if reply.status == DEAD and (reply.body or not is_page) else reply.status

    async def _ask_gate(self, now_s: float, end_s: float) -> tuple[GateState | None, tuple[WorkerMemory, ...]]:
        if not self._auth or not (self._has_gate_answered or now_s >= self._gate_next_s):
            return None, ()
        reply = await self._gate.call("GET", "/plimsoll/state", deadline_s=self._left(end_s), most_bytes=SMALL_MAX)
        if isinstance(reply, Lost):
            self.gate_note, self._gate_next_s = f"the gate {reply.why}", now_s + LOST_AGAIN_S
            return None, ()
        found = read_gate(reply.table()) if reply.status == 200 and self._gate.is_shown else None
        self._has_gate_answered, self._gate_next_s = found is not None, now_s + ASK_AGAIN_S
        if found is None:
            self.gate_note = GATE_NOTES.get(reply.status, f"/plimsoll/state answers {reply.status} and not the gate's words")
            return None, ()
        self.gate_note = ""
        if self._canary is not None and self._canary.may_be_counted:
            found = found._replace(ours=1)  # one of its requests may be guard's canary, which is no work
        memory = await self._json(self._gate_client, "/plimsoll/memory", end_s, MEMORY_MAX, self._auth)
        return found, read_workers(memory)

    async def _json(
        self, client: HttpClient, path: str, end_s: float, most: int = SMALL_MAX, headers: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        reply = await client.call("GET", path, b"", headers, deadline_s=self._left(end_s), most_bytes=most)
        return reply.table() if reply.status == 200 else {}

    def _left(self, end_s: float) -> float:
        return max(0.05, min(self.limits.small_s, end_s - asyncio.get_running_loop().time()))


REACHES = {
    Loss.REFUSED: Reach.REFUSED, Loss.LATE: Reach.SILENT, Loss.SILENT: Reach.SILENT, Loss.NONSENSE: Reach.NONSENSE,
    Loss.TOO_LARGE: Reach.NONSENSE,
}  # fmt: skip
GATE_NOTES = {
    401: "the gate rejects this token",
    403: "the gate was started without PLIMSOLL_TOKEN",
    404: "no gate at this address",
}


def read_gate(found: Mapping[str, Any]) -> GateState | None:
    """Reads the answer of /plimsoll/state; None if it is something else."""
    ready, reason = found.get("ready"), found.get("reason")
    in_flight, requests = number(found.get("in_flight")), number(found.get("engine_requests"))
    if not isinstance(ready, bool) or not isinstance(reason, str) or in_flight is None or requests is None:
        return None
    engine, shed, drain, knobs = (table(found.get(name)) for name in ("engine", "shed", "drain", "knobs"))
    asleep, phase = engine.get("asleep"), drain.get("phase")
    return GateState(
        ready,
        reason[:100],
        int(in_flight),
        int(requests),
        expected_wait_s=number(shed.get("expected_wait_s")),
        last_step_age_s=number(engine.get("last_step_age_s")),
        is_wedged=engine.get("is_wedged") is True,
        asleep=asleep[:200] if isinstance(asleep, str) else "",
        drain=phase[:40] if isinstance(phase, str) else "serving",
        epoch=int(max(number(drain.get("epoch")) or 0, number(knobs.get("epoch")) or 0)),
        started=number(found.get("started")),
        survival=read_survival(found.get("survive")),
    )


def read_workers(found: Mapping[str, Any]) -> tuple[WorkerMemory, ...]:
    """Reads the answer of /plimsoll/memory: every live worker."""
    listed = found.get("workers")
    workers = []
    for one in map(table, listed[:WORKERS_MAX] if isinstance(listed, list) else ()):
        age_s = number(one.get("age_s"))
        if age_s is None or one.get("alive") is False:
            continue
        torch, device, host, budget = (table(one.get(name)) for name in FIGURES)
        pool = number(torch.get("private_pool_bytes"))  # the memory of the graphs by torch, else by the estimate
        workers.append(
            WorkerMemory(
                f"{number(one.get('engine')) or 0:.0f}/{number(one.get('rank')) or 0:.0f}",
                age_s,
                *(number(torch.get(name)) for name in ALLOCATOR),
                *(number(device.get(name)) for name in ("total", "free", "by_others")),
                *(number(host.get(name)) for name in ("resident", "limit")),
                *(number(budget.get(name)) for name in ("requested", "weights", "kv_cache", "activation_peak")),
            )._replace(graphs=number(budget.get("graphs")) if pool is None else pool)
        )
    return tuple(workers)


FIGURES = ("allocator", "device_memory", "host_memory", "budget")
ALLOCATOR = ("allocated", "reserved", "releasable", "unreleasable", "alloc_retries", "ooms")
