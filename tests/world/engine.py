"""A simulated vLLM server with its gate: what it truly does, and what it says of itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from plimsoll.inside import admission as gate
from plimsoll.net.client import Reply, Request

STEP_S = 0.05
GATE_WEDGE_S = 60.0  # PLIMSOLL_WEDGE_S of these servers
MODEL = "m"
TOKEN = "a-token-that-is-long-enough"
UNIX_S = 1_700_000_000.0


class Core(StrEnum):
    """The truth about an engine core."""

    WORKS = "works"
    HANGS = "hangs"  # for good
    CALLS = "is in a long call"  # such as an update of its weights: requests wait, and it works again by itself
    DEAD = "is dead"


class Engine:
    """One server: down, starting or up. Times are the world's."""

    def __init__(self, name: str, now: Callable[[], float], later: Callable[..., Any], note: Callable[[str], None]) -> None:
        self.name, self.url = name, f"http://{name}:8000"
        self.now, self.later, self._note = now, later, note
        self.when_it_crashes: Callable[[], None] = lambda: None
        self.has_gate = True
        self.start_s = 20.0
        self.version = "0.32.0"
        self.is_up = False  # there is a process
        self.is_ending = False  # it was told to end, and takes nothing new
        self.life = 0  # of how many processes this is the current one
        self.ready_at = math.inf
        self.core = Core.WORKS
        self.is_paused = False  # by an operator, as /pause does
        self.was_paused = False  # when its core hung: nobody can ask it any more whether it still is
        self.ended_how = ""  # "crash", "by hand" or "asked"; of the last process
        self.changed_at = -math.inf  # when it last became able or unable to serve
        self.healthy_since = math.inf  # it serves
        self.alive_since = math.inf  # it serves, or will by itself
        self.hangs_since = math.inf  # with requests there
        self.broken_since = math.inf
        self.called_until = -math.inf  # when its last long call ended
        self.starts_fail = 0  # so many starts from now on end in a crash
        # What stands between it and those who ask
        self.says_503_until = -math.inf  # a sidecar answers /health with an empty 503
        self.old_page_until = -math.inf  # a proxy shows an old page, and lets requests hang
        self.old_page_s = 0.0  # for so long
        self.lied_until = -math.inf  # when that was over
        self.overload_until = -math.inf  # its API is too slow for those who ask, and its streams flow
        self._old_page = b""
        self._reset()

    def _reset(self) -> None:
        self.requests: dict[int, float] = {}  # by number: when each came
        self._steps, self._steps_at = 0.0, self.now()
        self._idle_since = self._stepped_at = self.now()
        self.drain = gate.Drain()
        self.admitted_at, self.begun, self.served = 0.0, 0, 0
        self.last_byte_at = -math.inf
        self.shed_until = 0.0
        self.calls_s: list[float] = []  # how long each call took that it came back from
        self._worked_at = self.now()

    # The truth

    @property
    def is_ready(self) -> bool:
        return self.is_up and self.now() >= self.ready_at

    @property
    def is_alive(self) -> bool:
        """It serves, or will by itself: whoever stops it does harm."""
        return self.is_up and self.core in (Core.WORKS, Core.CALLS)

    @property
    def serves(self) -> bool:
        return self.is_ready and self.core is Core.WORKS and not self.is_paused and not self.is_ending

    @property
    def is_hidden(self) -> bool:
        """It hangs with nothing to do: only a canary request could show that."""
        return self.is_up and self.core is Core.HANGS and not self.requests

    @property
    def phase(self) -> str:
        return self.drain.phase(self.now(), self.admitted_at)

    def start(self, who: str) -> None:
        if self.is_up:
            return
        self.is_up, self.is_ending, self.core, self.is_paused, self.ended_how = True, False, Core.WORKS, False, ""
        self.life += 1
        self.ready_at = self.now() + self.start_s
        self._reset()
        self._changed()
        self._note(f"{self.name}: process {self.life} is started by {who}")
        if self.starts_fail > 0:
            self.starts_fail -= 1
            self.soon(self.start_s / 2, self.die, "crash")
        else:
            self.soon(self.start_s, self._changed)

    def soon(self, seconds: float, work: Callable[..., None], *args: Any) -> None:
        """Does it later, to this process and no other."""
        life = self.life

        def do() -> None:
            if self.life == life:
                work(*args)

        self.later(seconds, do)

    def die(self, how: str) -> None:
        """The process ends: `crash`, `by hand`, or `asked` by guard."""
        if not self.is_up:
            return
        self.is_up, self.ended_how, self.ready_at = False, how, math.inf
        self.requests.clear()
        self._changed()
        self._note(f"{self.name}: its process ends ({how})")
        if how == "crash":
            self.when_it_crashes()

    def become(self, core: Core, seconds: float = 0.0) -> None:
        """The core hangs, dies, is in a call for so long, or works again; what hangs or ends does nothing else."""
        if not self.is_up or self.is_ending or (self.core is Core.HANGS and core is not Core.DEAD):
            return
        if self.core is Core.DEAD and core is not Core.WORKS:
            return
        self._count()
        if self.core is Core.WORKS:
            self._worked_at = self.now()
        elif core is Core.WORKS:
            self.calls_s.append(self.now() - self._worked_at)
        self.core, self.was_paused = core, self.is_paused
        self._changed()
        self._note(f"{self.name}: its core {core}")
        if core is Core.CALLS:
            self.soon(seconds, self._call_ends)
        elif core is Core.DEAD and seconds:
            self.soon(seconds, self.die, "crash")
        elif core is Core.WORKS:
            self.go_on()

    def _call_ends(self) -> None:
        if self.core is Core.CALLS:  # one that died in it stays dead
            self.called_until = self.now()
            self.become(Core.WORKS)

    def go_on(self) -> None:
        """It finishes what has waited, one request after the other."""
        for place, number in enumerate(self.requests):
            self.later(5.0 * (place + 1), self.finish, number)

    def _changed(self) -> None:
        self.changed_at = self.now()
        self.healthy_since = min(self.healthy_since, self.now()) if self.is_ready and self.core is Core.WORKS else math.inf
        self.alive_since = min(self.alive_since, self.now()) if self.is_alive else math.inf
        self.hangs_since = math.inf
        is_broken = not self.is_alive and self.ended_how != "asked"
        self.broken_since = min(self.broken_since, self.now()) if is_broken else math.inf

    # Its requests

    def take(self, number: int, seconds: float) -> bool:
        """A client's request reaches it: whether it was let in."""
        if not self.is_ready or self.is_ending or self.core is Core.DEAD or (self.has_gate and self.phase == gate.REFUSING):
            return False
        self._count()
        self.requests[number] = self.now()
        self.begun += 1
        self.admitted_at = self.now()
        self.later(seconds, self.finish, number)
        return True

    def finish(self, number: int) -> None:
        if number in self.requests and self.core is Core.WORKS and not self.is_paused:
            self._count()
            del self.requests[number]
            self.served += 1
            self.last_byte_at = self.now()

    def _count(self) -> None:
        """Steps are made while there is work and it works."""
        now = self.now()
        if self.requests and self.core is Core.WORKS and not self.is_paused:
            self._steps += (now - self._steps_at) / STEP_S
            self.last_byte_at = self._idle_since = self._stepped_at = now
        elif not self.requests:
            self._idle_since = now
        self._steps_at = now
        if self.core is Core.HANGS and self.requests:
            self.hangs_since = min(self.hangs_since, now)

    # What it says

    def answer(self, request: Request) -> Reply | None:
        """The answer of its port; None where it takes the request and stays silent."""
        path = request.url.removeprefix(self.url)
        self._count()
        if self.now() < self.overload_until:
            return None
        if path == "/metrics":
            page = self._page()
            if self.now() >= self.old_page_until:
                self._old_page = page
            return Reply(200, self._old_page or page)
        if path == "/health":
            is_well = self.core is not Core.DEAD and self.now() >= self.says_503_until
            return Reply(200 if is_well else 503, b"")
        if path == "/version":
            return Reply(200, json.dumps({"version": self.version}).encode())
        if path == "/is_paused":
            return None if self.core in (Core.HANGS, Core.CALLS) else _json(200, {"is_paused": self.is_paused})
        if path == "/v1/models":
            return _json(200, {"data": [{"id": MODEL, "max_model_len": 4096}]})
        if path == "/v1/completions":
            return self._completion()
        if self.has_gate and path.startswith("/plimsoll/"):
            return self._gate(path.removeprefix("/plimsoll/"), request)
        return _json(404, {"detail": "Not Found"})

    def _completion(self) -> Reply | None:
        if self.core is Core.DEAD:
            return _json(500, {"error": {"message": "EngineCore encountered an issue", "code": 500}})
        if self.has_gate and self.phase == gate.REFUSING:
            return _json(503, {"error": {"message": "draining", "code": 503}})
        if self.core is not Core.WORKS or self.is_paused or self.now() < self.old_page_until:
            return None
        self._steps += 1
        self._stepped_at = self.now()
        return _json(200, {"choices": [{"text": " 6", "finish_reason": "length"}]})

    def _page(self) -> bytes:
        count, now = len(self.requests), self.now()
        running = count if self.core is Core.WORKS and not self.is_paused else 0
        return _PAGE % (
            running, count - running, min(0.9, 0.02 * count), self._steps, 20 * self._steps, self.served,
            UNIX_S + self.ready_at - self.start_s, 10.0 + 0.01 * (now - self.ready_at),
        )  # fmt: skip

    @property
    def is_proven_wedged(self) -> bool:
        """By its gate, which excuses a paused one."""
        is_due = self.core is Core.HANGS and bool(self.requests) and not self.is_paused
        return is_due and self.now() - self._idle_since > GATE_WEDGE_S

    def _gate(self, verb: str, request: Request) -> Reply | None:
        now = self.now()
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return Reply(401, b"{}", {"www-authenticate": "Bearer"})
        fields: Mapping[str, Any] = json.loads(request.body) if request.body else {}
        if verb in ("drain", "undrain"):
            wish = {"lease_s": fields.get("lease_s", 60.0), "refuse": fields.get("refuse", False)}
            epoch = fields.get("epoch")
            try:
                change = (
                    gate.begin(self.drain, now, self.admitted_at, epoch=epoch, **wish)
                    if verb == "drain"
                    else gate.end(self.drain, epoch)
                )
            except gate.StaleEpoch as stale:
                return _json(409, {"error": {"message": str(stale), "code": 409}})
            if verb != "drain" or not self.drain.is_on(now):
                self._note(f"{self.name}: its gate takes `{verb}`, epoch {change.epoch}")
            self.drain = change
            return _json(200, self._drain_words())
        if verb in ("shed", "unshed"):
            self.shed_until = now + fields.get("lease_s", 0.0)
            return _json(200, {"max_wait_s": fields.get("max_wait_s"), "lease_left_s": fields.get("lease_s", 0)})
        if verb == "memory":
            return _json(200, {"workers": []})
        if verb != "state":
            return _json(404, {"error": {"message": "no such endpoint", "code": 404}})
        ready = gate.judge(
            has_engine=True, is_dead=self.core is Core.DEAD, is_wedged=self.is_proven_wedged,
            asleep="paused" if self.is_paused else "", is_stopping=False, drain_phase=self.phase,
        )  # fmt: skip
        return _json(200, {
            "schema": "plimsoll.state/1", "pid": 1000 + self.life, "started": UNIX_S + self.ready_at - self.start_s,
            "at": UNIX_S + now, "api_servers": 1, "ready": ready.is_ready, "reason": ready.reason, "detail": ready.detail,
            "in_flight": len(self.requests), "background": 0, "engine_requests": len(self.requests), "begun": self.begun,
            "idle": not self.requests, "drain": self._drain_words(),
            "shed": {"max_wait_s": None, "lease_left_s": 0, "expected_wait_s": 0.0},
            "call": {"is_running": self.core is Core.CALLS, "last": None},
            "engine": {
                "is_dead": self.core is Core.DEAD, "is_wedged": self.is_proven_wedged,
                "asleep": "paused" if self.is_paused else "", "steps": int(self._steps),
                "last_step_age_s": now - self._stepped_at if self._steps else None, "running": len(self.requests), "waiting": 0,
            },
        })  # fmt: skip

    def _drain_words(self) -> dict[str, Any]:
        now = self.now()
        return {
            "phase": self.phase, "epoch": self.drain.epoch, "lease_left_s": max(0.0, self.drain.until - now),
            "since_s": None, "in_flight": len(self.requests), "idle": not self.requests,
        }  # fmt: skip


def _json(status: int, body: Mapping[str, Any]) -> Reply:
    return Reply(status, json.dumps(body).encode())


_LABELS = b'{engine="0",model_name="m"}'
_PAGE = b"".join(
    name + (_LABELS if name.startswith(b"vllm") else b"") + value + b"\n"
    for name, value in (
        (b"vllm:num_requests_running", b" %d"),
        (b"vllm:num_requests_waiting", b" %d"),
        (b"vllm:kv_cache_usage_perc", b" %f"),
        (b"vllm:iteration_tokens_total_count", b" %d"),
        (b"vllm:generation_tokens_total", b" %d"),
        (b"vllm:request_success_total", b" %d"),
        (b"process_start_time_seconds", b" %f"),
        (b"process_cpu_seconds_total", b" %f"),
    )
)
