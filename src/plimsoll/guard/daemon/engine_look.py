"""Looks at one engine over HTTP: its page, its health, the gate's words where there is one, and a test request now and then.

A look always ends in time and never raises. What could not be had is absent, and `reach` says what became of the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.doctor.rules.contained import read_survival
from plimsoll.errors import BadInput, TooLarge
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.daemon.engine_figures import LabelSets, PageFigures, PageReader
from plimsoll.guard.daemon.engine_http import EngineClient, EngineReply, RequestFailed, RequestTimedOut, invalid_answer
from plimsoll.guard.daemon.host import SameHost
from plimsoll.guard.judge.look import Canary, GateState, Look, Reach, WorkerMemory
from plimsoll.net.cluster import bearer
from plimsoll.vllm.versions import Engine, engine_named

# A test request of one token, now and then: the only thing that shows whether an engine still makes tokens.
#
# It runs beside the looks, over a connection of its own, never more than one at a time. Only an engine that took the
# request
# and said nothing until the deadline has failed it. Whatever else goes wrong says nothing about the engine.

ANSWER_MAX = 1 << 20
ASK_AGAIN_S = 300.0
LINGER_S = 5.0  # by then a server has seen that nobody waits any more
PATH = "/v1/completions"
# What follows is a number, in whatever language a model was taught: never half a letter of another script.
PROMPT = "1, 2, 3, 4, 5,"
NO_LETTER = "\ufffd"
UNKNOWN_TOKENS = ("<unk>", "<UNK>", "[UNK]")  # what a model says whose sums came out as no numbers: its token 0


class CanaryPlan(NamedTuple):
    """How often to ask, and what it takes."""

    every_s: float = 30.0
    deadline_s: float = 20.0
    model: str | None = None  # None: by the name that the page shows
    api_key: str | None = None


class CanarySender:
    """Asks one engine."""

    def __init__(self, url: str, plan: CanaryPlan) -> None:
        self.last: Canary | None = None
        self._plan = plan
        self._auth = {} if plan.api_key is None else bearer(plan.api_key)
        self._shows_key = False
        self._client = EngineClient(url)
        self._task: asyncio.Task[None] | None = None
        self._next_s: float | None = None
        self._given_up_s: float | None = None

    @property
    def is_asking(self) -> bool:
        """Whether one is under way."""
        return self._task is not None and not self._task.done()

    @property
    def may_be_counted(self) -> bool:
        """Whether the server may count one among its requests: it is under way, or was given up a moment ago."""
        return self.is_asking or (self._given_up_s is not None and _now_s() - self._given_up_s < LINGER_S)

    def begin(self, now_s: float, model: str | None) -> None:
        """Send one if it is time; the answer is in `last` at some later look."""
        name = self._plan.model or model
        if self.is_asking or (self._next_s is not None and now_s < self._next_s):
            return
        if name is None:
            self.last = Canary(now_s, None, why="its model is unknown")
            return
        self._next_s = now_s + self._plan.every_s
        self._task = asyncio.get_running_loop().create_task(self._ask(now_s, name))

    async def close(self) -> None:
        """Take back what is under way, and hang up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._client.close()

    async def _ask(self, at_s: float, model: str) -> None:
        plan = self._plan
        asked = {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "skip_special_tokens": False}
        body = json.dumps(asked).encode()
        try:
            reply = await self._sent(body)
        except RequestTimedOut as error:
            self._given_up_s = _now_s()
            if error.was_sent and not error.was_begun:
                self.last = Canary(at_s, False, plan.deadline_s)  # noqa: FBT003 - the field's own value
            else:
                what = "it began to answer and did not end" if error.was_begun else "it could not be reached"
                self.last = Canary(at_s, None, why=f"{what} within {plan.deadline_s:g} s")
        except RequestFailed as error:
            self.last = Canary(at_s, None, why=f"it {error.why}")
        else:
            self._client.close()  # the next one is long after a server has hung up
            self._take(reply, at_s, model)

    async def _sent(self, body: bytes) -> EngineReply:
        """The key is shown only to a server that asks for one: a list of engines may name any server."""
        deadline_s = self._plan.deadline_s
        if not self._shows_key:
            reply = await self._client.post(PATH, body, deadline_s=deadline_s, most_bytes=ANSWER_MAX)
            if reply.status != 401 or not self._auth:
                return reply
            self._shows_key = True
        return await self._client.post(PATH, body, deadline_s=deadline_s, most_bytes=ANSWER_MAX, headers=self._auth)

    def _take(self, reply: EngineReply, at_s: float, model: str) -> None:
        if reply.status != 200:
            self.last = Canary(at_s, None, why=refused(reply, model, has_key=bool(self._auth)), status=reply.status)
            if 400 <= reply.status < 500 and reply.status != 429:  # this server does not take such a request
                self._next_s = at_s + ASK_AGAIN_S
            return
        found = is_garbage(reply.body)
        if found is None:
            self.last = Canary(at_s, None, why=f"it answers {PATH} with something that is no completion")
        else:
            self.last = Canary(at_s, True, reply.seconds, found)  # noqa: FBT003 - the field's own value


def refused(reply: EngineReply, model: str, *, has_key: bool = False) -> str:
    """Why a server did not take the request, in words."""
    if reply.status == 401:
        return "the engine does not take this API key" if has_key else "the engine wants an API key"
    if reply.status == 403:
        return "the engine does not allow it (403)"
    if reply.status == 404:
        if b"model" in reply.body.lower():  # vLLM's words for a name it does not serve; of a path it says "Not Found" alone
            return f"the engine does not serve a model of the name {model[:100]!r}"
        return f"the engine does not serve {PATH}"
    if reply.status == 429:
        return "the engine has too much to do for it (429)"
    return f"the engine answers {PATH} with {reply.status}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def is_garbage(body: bytes) -> bool | None:
    """Whether the token of a completion is no text: nothing at all, half a letter, or letters that nobody prints.

    None if this is no completion: then it says nothing about the model. Log-probabilities would show sums that came out as no
    numbers, but they are not asked for: vLLM would work them out for its whole batch, in memory that it has not set aside.
    """
    try:
        choice = json.loads(body)["choices"][0]
        text, reason = choice["text"], choice.get("finish_reason")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    if not isinstance(text, str):
        return None
    if text == "":  # a first token that ends the answer has no text, and is none the worse for it
        return bool(reason == "length")
    return text.strip() in UNKNOWN_TOKENS or all(letter == NO_LETTER or _is_control(letter) for letter in text)


def _is_control(letter: str) -> bool:
    return not letter.isprintable() and not letter.isspace()


# Which model an engine serves and how long a request may be; and one request to warm it up.

MODELS = "/v1/models"
LARGEST_MODELS_LIST = 4 << 20
DEADLINE_S = 10.0
WARM_S = 120.0  # the first request of a process may compile
LOOK_EVERY_S = 0.1


class ServedModel(NamedTuple):
    """One model."""

    name: str
    context: float | None  # tokens


async def served_model(url: str, api_key: str | None = None, *, deadline_s: float = DEADLINE_S) -> ServedModel | None:
    """The first model that it lists; None where it does not tell."""
    client = EngineClient(url)
    try:
        reply = await client.get(MODELS, deadline_s=deadline_s, most_bytes=LARGEST_MODELS_LIST)
        if reply.status == 401 and api_key is not None:
            reply = await client.get(MODELS, deadline_s=deadline_s, most_bytes=LARGEST_MODELS_LIST, headers=bearer(api_key))
    except RequestFailed:
        return None
    finally:
        client.close()
    if reply.status != 200:
        return None
    try:
        first = json.loads(reply.body)["data"][0]
        name, context = first["id"], first.get("max_model_len")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    is_number = isinstance(context, int) and not isinstance(context, bool) and 0 < context < 2**53
    return ServedModel(name, float(context) if is_number else None) if isinstance(name, str) and 0 < len(name) < 1000 else None


async def warm_up(url: str, api_key: str | None = None, *, deadline_s: float = WARM_S) -> Outcome:
    """One request of one token: answered, or not."""
    model = await served_model(url, api_key)
    if model is None:
        return unsure("its model is unknown: no request was sent")
    asker = CanarySender(url, CanaryPlan(deadline_s=deadline_s, model=model.name, api_key=api_key))
    try:
        asker.begin(0.0, model.name)
        while asker.is_asking:
            await asyncio.sleep(LOOK_EVERY_S)
        answer = asker.last
    finally:
        await asker.close()
    if answer is not None and answer.status == 500:  # it took the request and broke over it; a refusal has another number
        return failed("the first request failed: the engine answered it with 500")
    if answer is None or answer.is_answered is None:
        return unsure(f"the first request could not be made: {'' if answer is None else answer.why}")
    if not answer.is_answered:
        return failed(f"the first request got no answer in {deadline_s:.0f} s")
    if answer.is_garbage:
        return failed("the first request was answered with what is no text")
    return done(f"the first request was answered in {answer.seconds or 0.0:.1f} s")


# When to ask an engine whether it is paused, and what is known of that in between.
#
# vLLM (0.32.0, in its dev mode) hands the question to its engine core and waits without limit. A core that dies meanwhile
# never
# answers, and the server, which must answer before it ends, then never ends: one such question keeps a crashed vLLM from
# being
# started again (measured; docs/guard.md). A crash is over within seconds. So it is asked once of every server, and then
# only of
# one that has had work, or a test request of ours, and made no step for longer than that.

STILL_S = 20.0
AGAIN_S = 60.0  # while it stands still
ABSENT_AGAIN_S = 300.0  # of a server that does not know the question
MOVES = ("steps", "generation_tokens", "prompt_tokens", "success")


class PauseState:
    """What one server process has said, and shown by its steps."""

    def __init__(self) -> None:
        self._is_served = False  # whether it has ever answered the question
        self._is_absent = False  # whether it does not know it
        self._is_paused = False  # as last said, or shown
        self._answered_s = -math.inf
        self._next_s = -math.inf
        self._marks: tuple[float | None, ...] | None = None
        self._moved_s = -math.inf
        self._waits_since_s: float | None = None

    def is_due(self, figures: Mapping[str, float], canary: Canary | None, now_s: float) -> bool:
        """Take this page into account, and say whether to ask now."""
        marks = tuple(figures.get(name) for name in MOVES)
        has_moved = self._marks is not None and marks != self._marks
        if marks != self._marks:
            self._marks, self._moved_s = marks, now_s
        if has_moved:  # it makes steps: tokens come, whatever it was told
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
        """It has said so."""
        self._is_served, self._is_absent, self._is_paused = True, False, is_paused
        self._answered_s, self._next_s = now_s, now_s + AGAIN_S

    def lost(self, now_s: float) -> None:
        """No answer came, or an error on the way."""
        self._is_absent, self._answered_s, self._next_s = False, -math.inf, now_s + AGAIN_S

    def absent(self, now_s: float) -> None:
        """It does not know the question. One that has answered it before may do so again."""
        self._is_absent, self._answered_s, self._next_s = not self._is_served, -math.inf, now_s + ABSENT_AGAIN_S

    def told(self) -> tuple[bool | None, bool]:
        """Whether it is paused, and whether that is not known of an engine that may be."""
        if self._is_absent:
            return None, False
        is_known = self._is_served and (self._waits_since_s is None or self._answered_s >= self._waits_since_s)
        return (self._is_paused, False) if is_known else (None, True)


LOST_AGAIN_S = 30.0  # where no answer came at all
SMALL_MAX = 64 << 10
MEMORY_MAX = 4 << 20  # 3 KiB a worker
WORKERS_MAX = 1024
DEAD = 503


class LookLimits(NamedTuple):
    """What a look may take."""

    look_s: float = 4.0  # all of it
    page_s: float = 3.0
    small_s: float = 1.5  # every other question
    page_bytes: int = 8 << 20  # a page of 64 ranks has 3 MiB


class _Question:
    """Something not every server answers: asked at every look once it was answered, else every five minutes."""

    def __init__(self) -> None:
        self.is_answered = False
        self._next_s = -math.inf

    def is_due(self, now_s: float) -> bool:
        return self.is_answered or now_s >= self._next_s

    def note(self, now_s: float, *, is_answered: bool, again_s: float = ASK_AGAIN_S) -> None:
        self.is_answered = is_answered
        self._next_s = now_s + again_s


class EngineWatcher:
    """Of one engine. Several may share what they know about labels; each has connections of its own."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        canary: CanaryPlan | None = None,
        *,
        gate_url: str | None = None,
        labels: LabelSets | None = None,
        limits: LookLimits | None = None,
        same_host: SameHost | None = None,
    ) -> None:
        """`token` is the gate's; `gate_url` is where it has a port of its own: http://HOST:PORT or unix:/PATH.

        BadInput if an address or the token is none.
        """
        base = url.strip().rstrip("/").removesuffix("/metrics")
        self.limits = limits or LookLimits()
        self.gate_note = ""  # why there are no words of the gate, where that is known
        self._client = EngineClient(base)
        self._gate_client = EngineClient(gate_url) if gate_url else self._client
        self._canary = CanarySender(base, canary) if canary is not None else None
        self._auth = {} if token is None else bearer(token)
        self._labels = labels or LabelSets()
        self._same_host = same_host
        self._started: float | None = None
        self._model: str | None = None
        self._was_paused = self._is_resting = False
        self._version: str | None = None
        self._engine: Engine | None = None
        self._forget()

    @property
    def shown(self) -> str:
        """Its address, without what is secret in it."""
        return self._client.shown

    @property
    def host_note(self) -> str:
        """What of this machine does not answer, where the engine runs on it."""
        return "" if self._same_host is None else self._same_host.note

    async def look(self, now_s: float, unix_s: float) -> Look:
        """One look; what it takes is limited, whatever the server does."""
        look = await self._look(now_s, unix_s)
        return look if self._same_host is None else await self._same_host.add_to(look)

    async def _look(self, now_s: float, unix_s: float) -> Look:
        end_s = asyncio.get_running_loop().time() + self.limits.look_s
        page: PageFigures | None = None
        reach, why, was_asked = Reach.ANSWERS, "", True
        try:
            page = await self._page()
        except RequestFailed as error:
            reach, why, was_asked = error.reach, error.why, error.was_sent
        except TooLarge as error:
            reach, why = Reach.NONSENSE, f"shows {error}"
        except BadInput:
            reach, why = Reach.NONSENSE, "answers /metrics with something that is no page of metrics"
        if reach is Reach.REFUSED:
            self._forget()
            return Look(now_s, unix_s, reach, why, canary=self._last_canary())
        health = await self._health(end_s, is_page=page is not None)
        if page is None:
            # Whoever takes a connection and says nothing may still make tokens; only a test request shows it.
            if reach is Reach.SILENT and was_asked and not self._is_resting and self._canary is not None:
                self._canary.begin(now_s, self._model)
            return Look(now_s, unix_s, reach, why, health, canary=self._last_canary())
        return await self._told(page, health, now_s, unix_s, end_s)

    async def _told(self, page: PageFigures, health: int | None, now_s: float, unix_s: float, end_s: float) -> Look:
        """The look at an engine that shows its page."""
        if page.started_unix_s != self._started:
            self._forget()
            self._started = page.started_unix_s
        await self._ask_version(now_s, end_s)
        gate, workers = await self._ask_gate(now_s, end_s)
        is_paused, is_rest_unknown = await self._ask_paused(page, now_s, end_s)
        self._model = page.model
        # What was last said holds while no answer comes: a stuck engine core does not say, and is just the one to be tested.
        self._was_paused = self._was_paused if is_rest_unknown else bool(is_paused)
        self._is_resting = _rests(page, gate, is_paused=self._was_paused)
        if self._canary is not None and not self._is_resting:
            self._canary.begin(now_s, page.model)
        return Look(
            now_s, unix_s, Reach.ANSWERS, "", health, page.figures, page.started_unix_s, self._version, page.config, gate,
            workers or page.workers, (), self._last_canary(), is_paused, is_rest_unknown, page.ranks, model=page.model,
        )  # fmt: skip

    async def close(self) -> None:
        """Hang up."""
        if self._canary is not None:
            await self._canary.close()
        self._client.close()
        self._gate_client.close()
        if self._same_host is not None:
            self._same_host.close()

    def _forget(self) -> None:
        """Another process may answer now: what the last one could do says nothing about it."""
        self._gate, self._pause, self._asked_version = _Question(), PauseState(), _Question()
        self._version, self._engine = None, None
        self._has_gate = False  # whether something there asked for a token as the gate does
        self._was_paused = self._is_resting = False  # as of the last page
        self._model = None

    def _last_canary(self) -> Canary | None:
        return None if self._canary is None else self._canary.last

    async def _page(self) -> PageFigures:
        reader = PageReader(self._labels)
        reply = await self._client.get(
            "/metrics", deadline_s=self.limits.page_s, most_bytes=self.limits.page_bytes, sink=reader.feed, follows=True
        )
        if reply.status != 200:
            raise invalid_answer(f"answers /metrics with {reply.status}, not with a page")
        page = reader.done(self._engine)
        if page.is_cut:
            raise invalid_answer("shows a page that ends in the middle of a line")
        return page

    async def _health(self, end_s: float, *, is_page: bool) -> int | None:
        """The status of /health. 503 is vLLM's own word only without a body and beside its page: proxies say it, too, as does
        vLLM's supervisor of data parallelism while it stops in good order.
        """
        try:
            reply = await self._client.get("/health", deadline_s=self._left(end_s), most_bytes=SMALL_MAX)
        except RequestFailed:
            return None
        return None if reply.status == DEAD and (reply.body or not is_page) else reply.status

    async def _ask_version(self, now_s: float, end_s: float) -> None:
        if self._version is not None or not self._asked_version.is_due(now_s):
            return
        found = await self._json(self._client, "/version", end_s)
        version = found.get("version")
        if isinstance(version, str) and 0 < len(version) < 100 and version.isprintable():
            self._version = version
            try:
                self._engine = engine_named(version, "/version")
            except BadInput:
                self._engine = None
        self._asked_version.note(now_s, is_answered=False)

    async def _ask_gate(self, now_s: float, end_s: float) -> tuple[GateState | None, tuple[WorkerMemory, ...]]:
        if not self._auth or not self._gate.is_due(now_s):
            return None, ()
        try:
            reply = await self._gate_state(end_s)
        except RequestFailed as error:
            self.gate_note = f"the gate {error.why}"
            if not self._gate.is_answered:
                self._gate.note(now_s, is_answered=False, again_s=LOST_AGAIN_S)
            return None, ()
        found = read_gate(_object(reply.body)) if reply.status == 200 and self._has_gate else None
        self._gate.note(now_s, is_answered=found is not None)
        if found is None:
            self.gate_note = GATE_NOTES.get(reply.status, f"/plimsoll/state answers {reply.status} and not the gate's words")
            return None, ()
        self.gate_note = ""
        if self._canary is not None and self._canary.may_be_counted:
            found = found._replace(ours=1)  # one of its requests may be our own, which is no work
        memory = await self._json(self._gate_client, "/plimsoll/memory", end_s, MEMORY_MAX, self._auth)
        return found, read_workers(memory)

    async def _gate_state(self, end_s: float) -> EngineReply:
        """The token is shown only to what asks for one as the gate does: a list of engines may name any server."""
        if not self._has_gate:
            reply = await self._gate_client.get("/plimsoll/state", deadline_s=self._left(end_s), most_bytes=SMALL_MAX)
            if reply.status != 401 or not reply.headers.get("www-authenticate", "").lower().startswith("bearer"):
                return reply
            self._has_gate = True
        return await self._gate_client.get(
            "/plimsoll/state", deadline_s=self._left(end_s), most_bytes=SMALL_MAX, headers=self._auth
        )

    async def _ask_paused(self, page: PageFigures, now_s: float, end_s: float) -> tuple[bool | None, bool]:
        """Whether it is paused, and whether that is not known of one that may be."""
        if self._pause.is_due(page.figures, self._last_canary(), now_s):
            try:
                reply = await self._client.get("/is_paused", deadline_s=self._left(end_s), most_bytes=SMALL_MAX)
            except RequestFailed:
                self._pause.lost(now_s)
            else:
                found = _object(reply.body).get("is_paused") if reply.status == 200 else None
                if isinstance(found, bool):
                    self._pause.answered(now_s, is_paused=found)
                elif reply.status >= 500:
                    self._pause.lost(now_s)
                else:
                    self._pause.absent(now_s)
        return self._pause.told()

    async def _json(
        self, client: EngineClient, path: str, end_s: float, most: int = SMALL_MAX, headers: Mapping[str, str] | None = None
    ) -> Mapping[str, Any]:
        """The object that a path answers; an empty one for anything else."""
        try:
            reply = await client.get(path, deadline_s=self._left(end_s), most_bytes=most, headers=headers)
        except RequestFailed:
            return {}
        return _object(reply.body) if reply.status == 200 else {}

    def _left(self, end_s: float) -> float:
        return max(0.05, min(self.limits.small_s, end_s - asyncio.get_running_loop().time()))


GATE_NOTES = {
    401: "the gate does not take this token",
    403: "the gate was started without PLIMSOLL_TOKEN",
    404: "there is no gate there",
}


def read_gate(found: Mapping[str, Any]) -> GateState | None:
    """What /plimsoll/state answered; None if it is something else."""
    ready, reason = found.get("ready"), found.get("reason")
    in_flight, requests = _number(found.get("in_flight")), _number(found.get("engine_requests"))
    if not isinstance(ready, bool) or not isinstance(reason, str) or in_flight is None or requests is None:
        return None
    engine, shed, drain = (_table(found.get(name)) for name in ("engine", "shed", "drain"))
    asleep, phase = engine.get("asleep"), drain.get("phase")
    return GateState(
        ready,
        reason[:100],
        int(in_flight),
        int(requests),
        expected_wait_s=_number(shed.get("expected_wait_s")),
        last_step_age_s=_number(engine.get("last_step_age_s")),
        is_wedged=engine.get("is_wedged") is True,
        asleep=asleep[:200] if isinstance(asleep, str) else "",
        drain=phase[:40] if isinstance(phase, str) else "serving",
        survival=read_survival(found.get("survive")),
    )


def read_workers(found: Mapping[str, Any]) -> tuple[WorkerMemory, ...]:
    """What /plimsoll/memory answered, of every worker that lives."""
    listed = found.get("workers")
    workers = []
    for one in map(_table, listed[:WORKERS_MAX] if isinstance(listed, list) else ()):
        age_s = _number(one.get("age_s"))
        if age_s is None or one.get("alive") is False:
            continue
        torch, device, host, budget = (_table(one.get(name)) for name in FIGURES)
        pool = _number(torch.get("private_pool_bytes"))  # what the graphs have taken, where torch tells; else the estimate
        workers.append(
            WorkerMemory(
                f"{_number(one.get('engine')) or 0:.0f}/{_number(one.get('rank')) or 0:.0f}",
                age_s,
                *(_number(torch.get(name)) for name in ALLOCATOR),
                *(_number(device.get(name)) for name in ("total", "free", "by_others")),
                *(_number(host.get(name)) for name in ("resident", "limit")),
                *(_number(budget.get(name)) for name in ("requested", "weights", "kv_cache", "activation_peak")),
            )._replace(graphs=_number(budget.get("graphs")) if pool is None else pool)
        )
    return tuple(workers)


FIGURES = ("allocator", "device_memory", "host_memory", "budget")
ALLOCATOR = ("allocated", "reserved", "releasable", "unreleasable", "alloc_retries", "ooms")


def _rests(page: PageFigures, gate: GateState | None, *, is_paused: bool) -> bool:
    """Whether no token can be expected: then a test request would prove nothing, and would wait there."""
    return is_paused or page.figures.get("asleep", 0.0) > 0 or (gate is not None and bool(gate.asleep))


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return _table(found)


def _table(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _number(found: object) -> float | None:
    """A number that a figure can be."""
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 2**63:
        return None
    return float(found)
