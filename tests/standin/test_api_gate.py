"""The gate's own code around a stand-in: the endpoints under /plimsoll/ work as around vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll.inside.settings import InsideSettings
from plimsoll.simulate.settings import EngineLimits
from plimsoll.standin.config import ServerFlags
from tests.fakes import TOKEN, Got, eventually
from tests.standin.engines import engine
from tests.standin.servers import SLOW, Server, standin
from tests.standin.test_api import PATHS, asked
from tests.standin.test_api_admin import BEARER, Asking, begun

GATED = ServerFlags(is_dev_mode=True, token=TOKEN, middleware=("plimsoll.inside.Gate",))
QUICK = {"PLIMSOLL_TOKEN": TOKEN, "PLIMSOLL_WEDGE_S": "0.5", "PLIMSOLL_CANARY_S": "0.5"}


@pytest.fixture
def server() -> Iterator[Server]:
    """One with slow steps and a gate that soon suspects."""
    with standin(GATED, one=engine(step_time=SLOW), settings=InsideSettings(QUICK)) as found:
        assert found.ask("GET", "/plimsoll/ready").status == 200
        yield found


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.ask("GET", "/plimsoll/state", **BEARER).json()
    return found


def own(server: Server, path: str, body: object = None) -> Got:
    return server.ask("POST", f"/plimsoll/{path}", body, **BEARER)


def test_the_gate_sees_the_engines_steps_and_requests(server: Server) -> None:
    """What runs, what waits and how many steps there were, from the same listener as in vLLM."""
    asking = Asking(server, max_tokens=40)
    begun(server)
    found = state(server)
    assert (found["in_flight"], found["engine_requests"], found["idle"]) == (1, 1, False)
    assert found["engine"]["steps"] > 0
    assert found["faults"] == {} or all("standin" not in place for place in found["faults"])
    asking.end()
    eventually(lambda: state(server)["idle"])


def test_the_gate_shows_the_ledgers_memory(server: Server) -> None:
    """Every worker has figures, and compaction answers what it gave back."""
    workers = server.ask("GET", "/plimsoll/memory", **BEARER).json()["workers"]
    assert len(workers) == 1
    assert workers[0]["allocator"]["reserved"] > 0
    got = own(server, "compact")
    assert got.status == 200
    assert got.json()["workers"][0]["reserved_after"] <= got.json()["workers"][0]["reserved_before"]
    page = server.ask("GET", "/metrics").body.decode()
    shown = next(line for line in page.splitlines() if line.startswith('plimsoll_torch_reserved_bytes{engine="0",worker="0"}'))
    assert float(shown.split()[1]) == workers[0]["allocator"]["reserved"]
    assert "plimsoll_ready 1.0" in page
    assert "vllm:num_requests_running" in page
    # A snapshot is refused as the CPU build's own workers refuse it, and no fault is counted.
    before, got = state(server)["faults"], own(server, "snapshot")
    assert (got.status, "no torch" in got.json()["error"], state(server)["faults"]) == (409, True, before)


def test_a_wedged_engine_is_proven_by_the_gates_own_test(server: Server) -> None:
    """No step with work waiting, and a request of one token unanswered: wedged; ready again once it steps."""
    assert server.ask("POST", PATHS[0], asked(PATHS[0])).status == 200
    server.ask("POST", "/standin/faults", {"kind": "wedge"}, **BEARER)
    asking = Asking(server, max_tokens=30)
    eventually(lambda: server.ask("GET", "/plimsoll/ready").json()["reason"] == "wedged")
    assert server.ask("GET", "/health").status == 200
    server.ask("DELETE", "/standin/faults", **BEARER)
    eventually(lambda: server.ask("GET", "/plimsoll/ready").status == 200)
    assert asking.end().status == 200


def test_a_dead_or_sleeping_engine_is_not_ready(server: Server) -> None:
    """The reasons are the gate's own."""
    server.ask("POST", "/sleep?level=1")
    assert server.ask("GET", "/plimsoll/ready").json()["reason"] == "asleep"
    server.ask("POST", "/wake_up")
    eventually(lambda: server.ask("GET", "/plimsoll/ready").status == 200)
    service = server.service
    server.do(lambda: service.engine.die("CUDA out of memory."))
    assert server.ask("GET", "/plimsoll/ready").json()["reason"] == "dead"


@pytest.mark.parametrize("stream", [False, True])
def test_at_the_engines_death_only_what_had_not_begun_may_go_elsewhere(stream: bool) -> None:
    """503 for those that waited, streams among them; what ran gets vLLM's own 500, and a stream its error event."""
    limits = EngineLimits(num_blocks=256, block_size=16, max_num_seqs=1, max_num_batched_tokens=2048, max_model_len=2048)
    with standin(GATED, one=engine(step_time=SLOW, settings=limits), settings=InsideSettings(QUICK)) as server:
        ran = Asking(server, stream=stream)
        begun(server)
        waited = [Asking(server, stream=is_stream) for is_stream in (True, False, True)]
        service = server.service
        eventually(lambda: len(service.states) == 4 and service.engine.figures.waiting == 3)
        server.do(lambda: service.engine.die("CUDA out of memory."))
        server.do(service.driver.turn)
        for asking in waited:
            got = asking.end()
            assert (got.status, got.headers["retry-after"]) == (503, "1")
            assert got.headers["x-plimsoll-reason"] == "engine-died-unscheduled"
        got = ran.end()
        assert (got.status, "x-plimsoll-reason" in got.headers) == (200 if stream else 500, False)
        assert b"EngineCore encountered an issue" in got.body
        late = server.ask("POST", PATHS[0], asked(PATHS[0]))
        assert (late.status, late.headers["x-plimsoll-reason"]) == (503, "engine-died-unscheduled")
        assert state(server)["refused"] == {"drain": 0, "shed": 0, "dead": 4}
        assert b'plimsoll_refused_total{why="dead"} 4.0' in server.ask("GET", "/metrics").body
