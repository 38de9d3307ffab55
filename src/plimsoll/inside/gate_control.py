"""The state of one gate, and its decisions: admitted or refused, ready or not, how long the wait is.

No sockets here: gate.py brings the requests, endpoints.py the calls under /plimsoll/, tick.py the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from plimsoll.inside import admission, places
from plimsoll.inside.admission import REFUSING, RETRY_AFTER_S, SERVING
from plimsoll.inside.answers import AskRefused, GateAnswer, Tokens, busy, error, retry_headers
from plimsoll.inside.door import DOOR, PASSAGE, Passage
from plimsoll.inside.engine_view import EngineClientView
from plimsoll.inside.faults import FAULTS, LOG
from plimsoll.inside.figures import read_figures
from plimsoll.inside.knobs import KnobClient
from plimsoll.inside.pulse import PULSE, Pulse
from plimsoll.inside.schedule_ring import ScheduleRings, follow_requests
from plimsoll.inside.settings import InsideSettings
from plimsoll.inside.shared import ASLEEP, NS, PAUSED, Shared
from plimsoll.inside.survive import report

PATIENCE_S = 20.0  # how long a client waits before the answer that the call still runs
MOST_SHAPES = 32  # of requests, in one line of the log
BODY_S = 30.0  # for a request's body while a drain runs, from the later of the request's beginning and the drain's


class Calls:
    """Calls into the workers: one at a time over all API servers (`lock_path`), without a timeout, and never cancelled.

    vLLM reads a reply that comes after a timeout as the result of the next step, and dies of it. So a call runs to its end
    whatever its client does; after a while the client is told that the call still runs.
    """

    def __init__(self, lock_path: str | None, patience_s: float = PATIENCE_S) -> None:
        self._lock_path = lock_path
        self._patience_s = patience_s
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self.last: dict[str, Any] | None = None
        self.done = 0
        self.began = 0.0

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def call(self, client: Any, method: str, arguments: tuple[Any, ...] = ()) -> dict[str, Any]:
        """Runs a method in every worker; returns the outcome, or that it still runs. Raises AskRefused while another runs."""
        busy = AskRefused("another call into the workers runs; one at a time", 409)
        if self.is_running:
            raise busy
        lock = -1
        if self._lock_path is not None:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise busy from None
        self.began = time.monotonic()
        # A local name too: once the task is done another caller may replace `_task` before this one goes on.
        task = self._task = asyncio.get_running_loop().create_task(self._run(client, method, arguments, lock))
        done, _ = await asyncio.wait({task}, timeout=self._patience_s)  # leaves the task alone, whatever happens
        if done:
            return task.result()
        return {"call": method, "is_running": True, "workers": None}

    async def _run(self, client: Any, method: str, arguments: tuple[Any, ...], lock: int) -> dict[str, Any]:
        outcome: dict[str, Any] = {"call": method, "is_running": False, "workers": None, "error": None}
        try:
            outcome["workers"] = list(await client.collective_rpc(method, args=arguments))
        except Exception as error:
            FAULTS.note(f"calling {method}", error)
            outcome["error"] = type(error).__name__
        finally:
            if lock >= 0:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would not: a process forked meanwhile has it open too
                os.close(lock)
        outcome |= {"seconds": round(time.monotonic() - self.began, 6), "at": round(time.time(), 3)}
        self.last = outcome
        self.done += 1
        return outcome


QUEUE_FRESH_NS = NS // 10  # the queue is counted at most ten times a second
AWAKE_STEPS = 3  # steps that prove an engine awake whose flag says it sleeps
AWAKE_AFTER_NS = NS


class Alone(NamedTuple):
    """The objects of a gate whose engine has no processes of its own, so that several gates fit into one process."""

    pulse: Pulse
    figures: Callable[[], list[dict[str, Any]]]
    """The workers' figures, with their ages."""
    registry: Any
    """Of prometheus_client: where its metrics are registered."""
    never_scheduled: Callable[[Sequence[Any]], bool]
    """Whether the engine has begun none of these requests of its own."""


class GateControl:
    """The state of one process's gate. Everything that a request needs is in memory."""

    def __init__(self, settings: InsideSettings, state: Any = None, pulse: Pulse = PULSE, alone: Alone | None = None) -> None:
        self.settings = settings
        self.alone = alone
        self.tokens = Tokens(settings.token, settings.token_file, settings.read_token)
        self.folder = places.run_folder(settings.folder) if alone is None else None
        self.key = places.server_key()
        self.shared = Shared(self.folder, self.key, fellows_expected=self.key != os.getpid())
        if alone is None:
            DOOR.join(self.shared)
        lock = f"call-{self.key}-{places.start_ticks(self.key)}.lock"
        self.calls = Calls(None if self.folder is None else os.path.join(self.folder, lock))  # noqa: PTH118
        self.knobs = KnobClient(self.folder, self.key)
        self.rings = ScheduleRings(self.folder if settings.failover else None, self.key)
        self.is_following = alone is not None
        self.engine = EngineClientView(state)
        self.pulse = pulse if alone is None else alone.pulse
        self._passages: dict[int, Passage] = {}  # requests on their way
        self._is_death_said = False
        self.bodies: dict[asyncio.Timeout, float] = {}  # that are still coming in, with the time each began
        self.in_layer = 0  # requests of work whose bodies are here, and that have not ended
        self.answering = 0  # those whose answer has begun: the engine may be done while the client reads slowly
        self.is_stopping = False  # vLLM was told to end, and finishes its requests
        self._queue_at_ns = 0
        self._asleep_steps = 0

    # In flight

    def enter(self) -> None:
        """Counts a request in flight before it is judged, so that nobody sees none in flight while one slips in."""
        self.shared.own.add("in_flight", 1)

    def begin(self, *, is_new: bool = True) -> None:
        """Counts an admitted request; a follow-up on earlier work (not `is_new`) is no sign that a balancer still sends."""
        own = self.shared.own
        own.add("begun", 1)
        if is_new:
            own["last_admitted_ns"] = time.monotonic_ns()

    def finish(self) -> None:
        self.shared.own.add("in_flight", -1)

    # Draining

    def phase(self) -> str:
        """Returns SERVING, LEAVING or REFUSING. The common case reads only one number."""
        if self.shared.common["until_ns"] == 0:
            return SERVING
        drain = self.shared.drain()
        phase = drain.phase(time.monotonic(), self.shared.latest("last_admitted_ns") / NS)
        if phase == REFUSING and not drain.is_refusing:
            # Phase two stays: a request that another server was just letting in, or a follow-up, does not undo it.
            with contextlib.suppress(TimeoutError), self.shared.common.changing(patience_s=0.0):  # else the next one does it
                now = self.shared.drain()
                if now.since == drain.since and now.until != 0:
                    self.shared.common["is_refusing"] = 1
        return phase

    def refusal(self, phase: str) -> GateAnswer | None:
        if not self.is_stopping and phase != REFUSING:
            return None
        self.shared.own.add("refused_drain", 1)
        if self.is_stopping:  # vLLM itself would answer 500: its tokeniser has ended
            return busy("this server is shutting down; another one will take this", RETRY_AFTER_S)
        retry_s = self.shared.drain().retry_after_s
        return busy("this server is draining and takes no new requests; another one will", retry_s)

    def keep_drain(self, body_limit_s: float = BODY_S) -> None:
        """Clears a drain whose lease has run out; while one runs, ends the wait for bodies that are late."""
        if self.shared.common["until_ns"] == 0:
            return  # the common case is quick
        if self.bodies and self.phase() != SERVING:
            since = self.shared.drain().since
            late = [limit for limit, began in self.bodies.items() if time.monotonic() - max(began, since) > body_limit_s]
            for limit in late:
                limit.reschedule(0.0)
        with contextlib.suppress(TimeoutError), self.shared.common.changing(patience_s=0.0):  # else at the next tick
            drain = self.shared.drain()
            if not drain.is_on(time.monotonic()):
                self.shared.set_drain(drain._replace(until=0.0, is_refusing=False))

    # The engine's death

    def follow(self) -> None:
        """Begins to note each request's engine requests, and looks for the rings of the engine cores."""
        if self.alone is None and self.settings.failover:
            self.is_following = follow_requests(self.engine.client, note_engine_request)
            self.rings.look()

    def passage(self) -> Passage:
        """Returns the record of one request on its way, kept until `forget`."""
        passage = Passage(ring_counts=self.rings.counts(), is_followed=self.is_following)
        self._passages[id(passage)] = passage
        return passage

    def forget(self, passage: Passage) -> None:
        """Drops an answered request. The first one after the engine's death logs which requests had begun by then."""
        if not self._is_death_said and self.engine.is_dead():
            self._is_death_said = True
            begun = [one for one in self._passages.values() if one.shapes and not self._never_began(one)]
            shapes = sorted(shape for one in begun for shape in one.shapes)
            if shapes:
                LOG.error("plimsoll: the engine died with %d requests begun: %s", len(shapes), "; ".join(shapes[:MOST_SHAPES]))
        self._passages.pop(id(passage), None)

    def _never_began(self, passage: Passage) -> bool:
        if self.alone is not None:
            return self.alone.never_scheduled(passage.engine_requests)
        return self.rings.never_scheduled(passage.engine_requests, passage.ring_counts, self.engine.cores())

    @property
    def can_fail_over(self) -> bool:
        """True if it is known of each new request when the engine begins it; then the gate holds back the start of a stream."""
        return self.settings.failover and self.is_following and (self.alone is not None or self.rings.is_active)

    def failover(self, passage: Passage) -> GateAnswer | None:
        """Returns the answer that lets a request go elsewhere; None unless the engine is dead and surely never began it."""
        if not (self.settings.failover and passage.is_followed and self.engine.is_dead() and self._never_began(passage)):
            return None
        self.shared.own.add("refused_dead", 1)
        # A balancer or a client may send it to another server.
        message = "this server's engine has died; it had not begun this request, which may be sent to another server"
        headers = (*retry_headers(1), (b"x-plimsoll-reason", b"engine-died-unscheduled"))
        return error(503, message, headers)

    # Sleep, as seen from the requests that cause it and from the engine's steps

    def note_sleep(self, how: int) -> None:
        """Notes the engine's sleep: 0 (awake), PAUSED or ASLEEP."""
        common = self.shared.common
        common["asleep"] = how
        common["asleep_at_ns"] = time.monotonic_ns()
        self._asleep_steps = self.pulse.steps

    def asleep_words(self) -> str:
        """Returns how the engine sleeps, empty when awake. An engine that makes steps is awake, whatever was noted."""
        how = self.shared.common["asleep"]
        if how == 0:
            return ""
        is_over = self.pulse.steps - self._asleep_steps >= AWAKE_STEPS
        last_ns = self.shared.latest("last_step_ns")
        if is_over and last_ns - self.shared.common["asleep_at_ns"] > AWAKE_AFTER_NS:
            self.shared.common["asleep"] = 0
            return ""
        words = {PAUSED: "paused: requests are taken in and wait", ASLEEP: "asleep: its memory was given back"}
        return words.get(how, "asleep")

    # Readiness

    def readiness(self) -> admission.Readiness:
        return admission.judge(
            has_engine=self.engine.client is not None,
            is_dead=self.engine.is_dead(),
            is_wedged=self.is_wedged(),
            asleep=self.asleep_words(),
            is_stopping=self.is_stopping,
            drain_phase=self.phase(),
        )

    def is_wedged(self) -> bool:
        """True if the engine was proven stuck and has made no step since."""
        proven_ns = self.shared.common["wedged_at_ns"]
        if proven_ns == 0:
            return False
        if self.shared.latest("last_step_ns") > proven_ns:
            self.shared.common["wedged_at_ns"] = 0
            return False
        return True

    # Shedding

    def shed_bound_s(self) -> float | None:
        """Returns the bound in force: the leased one while its lease runs, else the one set at start."""
        common = self.shared.common
        if common["shed_until_ns"] > time.monotonic_ns():
            return common["shed_bound_ns"] / NS
        return self.settings.shed_wait_s

    def publish_queue(self, *, at_once: bool = False) -> None:
        """Puts this server's part of the queue on its page: at most ten times a second, unless `at_once`."""
        now_ns = time.monotonic_ns()
        if now_ns - self._queue_at_ns < QUEUE_FRESH_NS and not at_once:
            return
        self._queue_at_ns = now_ns
        own, pulse = self.shared.own, self.pulse
        output_each = pulse.output_tokens.value
        count = self.engine.request_count()
        own["engine_requests"] = count
        own["background"] = self.engine.background_count()
        own["ended_seen"] = own["begun"] - own["in_flight"]
        own["is_fed"] = int(pulse.is_fed)
        own["running"] = -1 if pulse.running is None else pulse.running
        own["waiting"] = -1 if pulse.waiting is None else pulse.waiting
        own["steps"] = pulse.steps
        own["last_step_ns"] = round((pulse.last_step or 0.0) * NS)
        own["figures_ns"] = round((pulse.figures_at or 0.0) * NS)
        own["longest_step_ns"] = round(pulse.longest_step_s * NS)
        own["queued_requests"], tokens = self.engine.queued(pulse.waiting, output_each)
        own["queued_tokens"] = round(tokens)
        own["coming"] = self._coming(count)
        own["tokens_per_s_milli"] = round((pulse.full_tokens_per_s(now_ns / NS) or 0.0) * 1000)
        own["tokens_each_milli"] = round((pulse.prompt_tokens.value + output_each) * 1000)

    def _coming(self, count: int) -> int:
        # Requests on their way to the engine, which has `count`: neither with it nor being answered.
        return max(0, self.in_layer - max(self.answering, count))

    def queue(self) -> admission.Queue:
        """Returns the queue over all API servers. The engine reports to one of them at a time: the newest report counts."""
        self.publish_queue()
        shared = self.shared
        fed = [page for page in shared.pages() if page["is_fed"] and page["steps"]]
        newest = max(fed, key=lambda page: page["figures_ns"], default=None)
        lengths = [page["tokens_each_milli"] for page in fed if page["tokens_each_milli"]]
        count = self.engine.request_count()
        coming = shared.total("coming") - shared.own["coming"] + self._coming(count)
        # An engine whose last requests were all aborted reports no more: no more can wait or run than there are.
        most = None
        if self.engine.requests() is not None:
            most = shared.total("engine_requests") - shared.own["engine_requests"] + count
        waiting = None if newest is None else _known(newest["waiting"], most)
        # Each server counts as if all waiting requests were its own: together they may count more than there are.
        counted = shared.total("queued_requests")
        return admission.Queue(
            waiting=waiting,
            running=None if newest is None else _known(newest["running"], most),
            places=self.engine.places(),
            queued_tokens=shared.total("queued_tokens") * (min(1.0, (waiting or 0) / counted) if counted else 0.0),
            coming=coming,
            tokens_each=sum(lengths) / len(lengths) / 1000 if lengths else None,
            tokens_per_s=(shared.total("tokens_per_s_milli") / 1000) or None,
        )

    def shed(self, priority: bytes) -> GateAnswer | None:
        """Returns a refusal for a request that would wait too long, else None. vLLM's own valve, where set, decides alone."""
        bound_s = self.shed_bound_s()
        if bound_s is None or self.engine.own_valve() == "set":
            return None
        wait = admission.expected_wait(self.queue())
        bound_s *= admission.PRIORITIES.get(priority.decode("latin-1").strip().lower(), 1.0)
        if wait.seconds is None or wait.seconds <= bound_s:
            return None
        self.shared.own.add("refused_shed", 1)
        retry_s = admission.retry_after(wait.seconds, bound_s)
        return busy(f"this server is full: {wait.because}; come again in {retry_s} s", retry_s)

    def retry_after_own_valve(self) -> int:
        """Returns the Retry-After, in seconds, for a 503 of vLLM's own."""
        wait = admission.expected_wait(self.queue())
        return 1 if wait.seconds is None else admission.retry_after(wait.seconds, 0.0)

    # Figures

    def figures(self) -> list[dict[str, Any]]:
        if self.alone is not None:
            return self.alone.figures()
        return [] if self.folder is None else read_figures(self.folder, self.key, time.monotonic())

    def survive(self) -> dict[str, Any]:
        if not self.settings.survive:
            return report.unknown("PLIMSOLL_SURVIVE is not set")
        return report.told(self.folder, self.key)

    def close(self) -> None:
        DOOR.part(self.shared)
        self.shared.close()


def note_engine_request(request: Any, shape: str = "") -> None:
    """Notes an engine request of the current HTTP request; None marks one whose engine request is not known."""
    passage = PASSAGE.get()
    if passage is not None:
        passage.engine_requests.append(request)
        passage.shapes += [shape] if shape else []
        passage.is_followed = passage.is_followed and request is not None


def _known(count: int, most: int | None) -> int | None:
    if count < 0:
        return None
    return count if most is None else min(count, most)
