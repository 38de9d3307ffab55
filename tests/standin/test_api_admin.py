"""The endpoints that steer an engine, and those that break it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from plimsoll.standin.config import ServerFlags
from tests.fakes import TOKEN, Got, eventually
from tests.standin.engines import GIB, engine
from tests.standin.servers import SLOW, Server, standin
from tests.standin.test_api import PATHS, asked

BEARER = {"authorization": f"Bearer {TOKEN}"}
DEV = ServerFlags(is_dev_mode=True, token=TOKEN)


class Asking:
    def __init__(self, server: Server, **more: Any) -> None:
        self.got: Got | None = None
        body = asked(PATHS[0], **{"max_tokens": 400, "ignore_eos": True, **more})

        def ask() -> None:
            self.got = server.ask("POST", PATHS[0], body)

        self._thread = threading.Thread(target=ask)
        self._thread.start()

    def end(self) -> Got:
        self._thread.join(20)
        assert self.got is not None
        return self.got


def begun(server: Server) -> None:
    eventually(lambda: server.service.engine.figures.generation_tokens > 1)


def test_without_sleep_mode_an_engine_that_sleeps_keeps_its_memory() -> None:
    """200 and asleep all the same, as in vLLM, whose allocator has nothing to put away then."""
    for has_mode in (False, True):
        with standin(replace(DEV, has_sleep_mode=has_mode)) as server:
            memory = server.service.engine.memory
            free = memory.free
            assert server.ask("POST", "/sleep?level=1").json() == {"status": "sleeping", "level": 1}
            assert (memory.free - free > 10 * GIB) == has_mode
            assert b'sleep_state="weights_offloaded"} 1.0' in server.ask("GET", "/metrics").body
            assert server.ask("POST", "/wake_up?tags=weights").json()["status"] == "sleeping"
            assert server.ask("POST", "/wake_up?tags=kv_cache").json()["status"] == "awake"
            assert server.ask("POST", PATHS[0], asked(PATHS[0])).status == 200


def test_what_runs_keeps_its_cache_and_a_pause_can_wait_for_it() -> None:
    """No reset while blocks are held, unless they are pushed out; a pause that waits cuts nothing short."""
    with standin(DEV, one=engine(step_time=SLOW)) as server:
        asking = Asking(server, max_tokens=30)
        begun(server)
        assert server.ask("POST", "/reset_prefix_cache").json() == {"success": False}
        assert server.ask("POST", "/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
        assert server.ask("POST", "/pause?mode=wait").status == 200
        assert asking.end().json()["usage"]["completion_tokens"] == 30


def test_faults_need_the_token() -> None:
    """403 where there is none, 401 for a wrong one; nothing is changed then."""
    with standin(ServerFlags()) as server:
        assert server.ask("POST", "/standin/faults", {"kind": "wedge"}, **BEARER).status == 403
        assert server.ask("GET", "/standin/state").status == 403
    with standin(DEV) as server:
        assert server.ask("POST", "/standin/faults", {"kind": "wedge"}).status == 401
        assert server.ask("POST", "/standin/faults", {"kind": "wedge"}, authorization="Bearer wrong").status == 401
        assert server.ask("GET", "/standin/faults", **BEARER).json() == {"faults": []}
        assert server.ask("GET", "/standin/nothing", **BEARER).status == 404


def test_a_wedge_can_be_begun_and_ended() -> None:
    """Nothing is answered while it is on, and /health says 200; then all goes on."""
    with standin(DEV) as server:
        found = server.ask("POST", "/standin/faults", {"kind": "wedge"}, **BEARER).json()["faults"]
        assert [(fault["kind"], fault["is_on"]) for fault in found] == [("wedge", True)]
        asking = Asking(server, max_tokens=2)
        time.sleep(0.3)
        assert asking.got is None
        assert server.ask("GET", "/health").status == 200
        assert server.ask("GET", "/standin/state", **BEARER).json()["in_flight"] == 1
        assert server.ask("DELETE", "/standin/faults", {"kind": "wedge"}, **BEARER).json() == {"faults": []}
        assert asking.end().status == 200


def test_a_fault_that_is_none_is_refused_and_a_frozen_page_stays_as_it_was() -> None:
    """400 with what there is; byte for byte until the fault is over."""
    with standin(DEV) as server:
        for body, says in (
            ({"kind": "nonsense"}, "there is no fault"), ({"kind": "wedge", "for_s": "x"}, "is not a time"),
            ({"kind": "slow-start"}, "it has started"), ({"what": 1}, "is not an object of"), (b"{", "is not JSON"),
            *(({"kind": "growth", name: 10**400}, "growth") for name in ("at_s", "for_s", "value")),
        ):  # fmt: skip
            got = server.ask("POST", "/standin/faults", body, **BEARER)
            assert got.status == 400
            assert says in got.json()["error"]["message"]
        server.ask("POST", "/standin/faults", {"kind": "frozen-gauges"}, **BEARER)
        before = server.ask("GET", "/metrics").body
        server.ask("POST", PATHS[0], asked(PATHS[0]))
        assert server.ask("GET", "/metrics").body == before
        server.ask("DELETE", "/standin/faults", **BEARER)
        assert server.ask("GET", "/metrics").body != before


def test_pages_can_be_cut_false_and_endless() -> None:
    """Cut within a line; numbers that cannot be; as long as was asked for, without a length said before."""
    with standin(DEV) as server:
        whole = server.ask("GET", "/metrics").body
        server.ask("POST", "/standin/faults", {"kind": "cut-page"}, **BEARER)
        got = server.ask("GET", "/metrics")
        assert len(got.body) < 0.7 * len(whole)
        assert not got.body.endswith(b"\n")
        server.ask("DELETE", "/standin/faults", **BEARER)
        server.ask("POST", "/standin/faults", {"kind": "lying-page"}, **BEARER)
        body = server.ask("GET", "/metrics").body
        assert b" NaN\n" in body
        assert b" +Inf\n" in body
        assert b"num_requests_running" not in body
        server.ask("DELETE", "/standin/faults", **BEARER)
        server.ask("POST", "/standin/faults", {"kind": "huge-page", "value": 3_000_000}, **BEARER)
        got = server.ask("GET", "/metrics")
        assert len(got.body) == 3_000_000
        assert "content-length" not in got.headers
