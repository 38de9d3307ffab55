"""The endpoints: the token before all, strict bodies, a drain with epochs, calls only where a probe answers."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside import endpoints
from plimsoll.inside.answers import LARGEST_BODY, GateAnswer
from plimsoll.inside.endpoints import ENDPOINTS, GateRequest
from plimsoll.inside.engine_view import EngineClientView
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.figures import empty_figures, write_whole
from plimsoll.inside.gate_control import Calls, GateControl
from plimsoll.inside.places import ancestors, start_ticks, sweep
from plimsoll.inside.pulse import Pulse
from plimsoll.inside.shared import OWN, SharedPage
from tests.each import each, rows
from tests.fakes import BEARER, TOKEN, EngineClient, State, settings
from tests.inside.test_gate_control import feed, made

CASES = Path(__file__).parent / "cases.txt"
GUARDED = [endpoint for endpoint in ENDPOINTS if endpoint.needs_token]


def ask(core: GateControl, method: str, path: str, body: Any = None, headers: Any = (BEARER,)) -> GateAnswer:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    found = asyncio.run(endpoints.answer(core, GateRequest(method, f"/plimsoll/{path}", headers, raw)))
    json.loads(found.encoded()[0])
    return found


def message(found: GateAnswer) -> str:
    text = str(found.body["error"]["message"])
    assert "\n" not in text
    assert found.body["error"]["code"] == found.status
    return text


def put_figures(folder: Path, **changed: Any) -> None:
    """A worker's figures: this process plays the worker."""
    me = os.getpid()
    known = {
        "pid": me, "started": start_ticks(me), "ancestors": ancestors(me), "beat": time.monotonic(), "at": time.time(),
        "engine": 0, "rank": 0, **changed,
    }  # fmt: skip
    write_whole(str(folder), f"worker-{known['pid']}-{known['started']}", {**empty_figures(), **known})


def test_only_ready_is_open_and_tells_nothing_but_readiness(tmp_path: Path) -> None:
    """The table, whole; no token is needed, also where there is none."""
    assert {(e.method, e.path) for e in ENDPOINTS} == {
        *(("GET", f"/plimsoll/{name}") for name in ("ready", "state", "memory", "knobs")),
        *(("POST", f"/plimsoll/{name}") for name in ("drain", "undrain", "compact", "snapshot", "shed", "unshed", "knobs")),
    }
    assert [e.path for e in ENDPOINTS if not e.needs_token] == ["/plimsoll/ready"]
    for token in (TOKEN, ""):
        core, client = made(tmp_path, PLIMSOLL_TOKEN=token)
        found = ask(core, "GET", "ready", headers=())
        assert (found.status, dict(found.body)) == (200, {"ready": True, "reason": "ready", "detail": ""})
        client.errored = True
        found = ask(core, "GET", "ready", headers=())
        assert (found.status, found.body["reason"]) == (503, "dead")
        core.engine = EngineClientView(State())
        assert ask(core, "GET", "ready", headers=()).body["reason"] == "starting"


@pytest.mark.parametrize("endpoint", GUARDED, ids=lambda e: e.path)
def test_no_endpoint_but_ready_answers_without_the_token(tmp_path: Path, endpoint: endpoints.Endpoint) -> None:
    """Off without one; denied when it is missing, wrong, doubled, or an address is claimed instead."""
    name = endpoint.path.removeprefix("/plimsoll/")
    core, _ = made(tmp_path)
    off, _ = made(tmp_path, PLIMSOLL_TOKEN="")
    forged = [(b"x-forwarded-for", b"127.0.0.1"), (b"x-real-ip", b"127.0.0.1"), (b"forwarded", b"for=127.0.0.1")]
    for method in ("GET", "POST", "HEAD", "BREW"):
        assert ask(off, method, name, headers=(BEARER,)).status == 403
        for headers in ((), forged, (BEARER, BEARER), [(b"authorization", b"Bearer wrong")], [*forged, (b"cookie", BEARER[1])]):
            found = ask(core, method, name, b"{", headers)
            assert found.status == 401
            assert (b"www-authenticate", b"Bearer") in found.headers
    assert ask(core, endpoint.method, name, {"max_wait_s": 5} if name == "shed" else None).status in (200, 501)
    assert core.shared.total("refused_drain") == 0


def test_methods_and_paths_are_exact(tmp_path: Path) -> None:
    """405 with the one that is allowed, HEAD where there is GET, 404 with what there is."""
    core, _ = made(tmp_path)
    for endpoint in ENDPOINTS:
        name = endpoint.path.removeprefix("/plimsoll/")
        if name == "knobs":  # takes both
            found = ask(core, "PUT", name)
            assert (found.status, (b"allow", b"GET, POST") in found.headers) == (405, True)
            continue
        found = ask(core, "POST" if endpoint.method == "GET" else "GET", name)
        assert found.status == 405
        assert (b"allow", endpoint.method.encode()) in found.headers
        assert ask(core, "HEAD", name).status == (200 if endpoint.method == "GET" else 405)
    for name in ("", "nothing", "state/", "state/x", "x" * 5000, "../state"):
        found = ask(core, "GET", name, headers=())
        assert found.status == 404
        assert len(message(found)) < 400


@each(
    ("name", "body"),
    [*rows(CASES, "bad bodies"), ("knobs", '{"max-num-seqs": ' + "9" * 5000 + "}"), ("drain", " " * (LARGEST_BODY + 1))],
    ids=lambda case: str(case)[:80],
)
def test_a_bad_body_is_refused_in_one_line_and_changes_nothing(
    name: str, body: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """400, or 413 where it is too long, and no fault of ours is counted."""
    core, client = made(tmp_path_factory.mktemp("gate"))
    found = ask(core, "POST", name, body.encode())
    assert found.status == (413 if len(body) > LARGEST_BODY else 400)
    assert len(message(found)) < 200
    assert (core.phase(), core.shed_bound_s(), client.calls, FAULTS.counts) == ("serving", None, [], {})


@given(name=st.sampled_from([e.path.removeprefix("/plimsoll/") for e in GUARDED]), body=st.binary(max_size=60))
def test_no_body_makes_an_endpoint_fail(name: str, body: bytes) -> None:
    """Whatever the bytes: an answer, never a mistake of ours."""
    core = GateControl(settings("/proc/none"), State(engine_client=EngineClient()), Pulse())
    assert ask(core, next(e.method for e in ENDPOINTS if e.path.endswith(name)), name, body).status in (200, 400, 501)


def test_a_drain_is_begun_renewed_refused_to_the_old_and_ended(tmp_path: Path) -> None:
    """409 for an older epoch, which changes nothing."""
    core, _ = made(tmp_path)
    first = ask(core, "POST", "drain", {"epoch": 5, "lease_s": 30, "quiet_s": 20})
    assert (first.status, first.body["phase"], first.body["epoch"]) == (200, "leaving", 5)
    assert ask(core, "GET", "ready").status == 503
    before = core.shared.drain()
    assert "5" in message(ask(core, "POST", "drain", {"epoch": 4, "lease_s": 3600}))
    assert ask(core, "POST", "undrain", {"epoch": 4}).status == 409
    assert core.shared.drain() == before
    assert ask(core, "POST", "drain", {"epoch": 6, "refuse": True}).body["phase"] == "refusing"
    assert ask(core, "POST", "drain", {"epoch": 6, "quiet_s": 3600, "bound_s": 3600}).body["phase"] == "refusing"
    ended = ask(core, "POST", "undrain", {"epoch": 6})
    assert (ended.status, ended.body["phase"], ended.body["lease_left_s"]) == (200, "serving", 0.0)
    assert ask(core, "GET", "ready").status == 200
    assert ask(core, "POST", "drain", {"epoch": 5}).status == 409, "epochs outlive the drain"


def test_idle_is_told_with_everything_that_runs(tmp_path: Path) -> None:
    """In flight, with the engine, or in the background."""
    core, client = made(tmp_path)
    assert ask(core, "GET", "state").body["idle"]
    core.enter()
    core.begin()
    assert not ask(core, "POST", "drain").body["idle"]
    core.finish()
    client.add("a", 1)
    assert not ask(core, "GET", "state").body["idle"], "counted when asked, not up to a tenth of a second before"


def test_a_server_that_has_not_looked_since_a_request_ended_is_not_called_idle(tmp_path: Path) -> None:
    """It may have left a response in the background, which another API server of the same vLLM would not know of."""
    core, _ = made(tmp_path)
    fellow = SharedPage(OWN, str(tmp_path / f"api-{core.shared._stem}-1.page"))
    fellow["pid"], fellow["started"] = os.getpid(), core.shared.own["started"]
    assert ask(core, "GET", "state").body["api_servers"] == 2
    fellow["begun"] = 1  # and ended
    assert not ask(core, "GET", "state").body["idle"]
    fellow["ended_seen"] = 1
    assert ask(core, "GET", "state").body["idle"]
    fellow["background"] = 1
    assert not ask(core, "GET", "state").body["idle"]


def test_the_state_is_whole_and_its_schema_is_named(tmp_path: Path) -> None:
    """Unknown is null, before the first step and after it."""
    core, _ = made(tmp_path)
    found = ask(core, "GET", "state").body
    assert found["schema"] == "plimsoll.state/1"
    assert (found["api_servers"], found["in_flight"], found["workers"]) == (1, 0, 0)
    assert (found["engine"]["last_step_age_s"], found["engine"]["running"], found["engine"]["kv_usage"]) == (None, None, None)
    feed(core, 3, 0)
    for number in range(3):
        core.engine.client.add(str(number), 5)
    engine = ask(core, "GET", "state").body["engine"]
    assert (engine["running"], engine["kv_usage"], engine["steps"]) == (3, 0.5, 41)
    assert engine["last_step_age_s"] < 1


def test_memory_answers_with_figures_or_with_the_reason(tmp_path: Path) -> None:
    """Their age grows when nobody writes."""
    core, _ = made(tmp_path)
    assert "--worker-extension-cls" in ask(core, "GET", "memory").body["reason"]
    put_figures(tmp_path, beat=time.monotonic() - 100)
    found = ask(core, "GET", "memory").body
    assert found["reason"] is None
    assert found["workers"][0]["age_s"] == pytest.approx(100, abs=5)
    assert found["workers"][0]["alive"]


def test_calls_need_a_probe_and_an_engine_that_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """501 without figures or with those of a dead worker; 409 while dead, asleep or called; else every worker is called."""
    core, client = made(tmp_path)
    client.may_answer.set()
    assert ask(core, "POST", "compact").status == 501
    put_figures(tmp_path, started=1)
    assert ask(core, "POST", "compact").status == 501
    sweep(str(tmp_path))
    put_figures(tmp_path)
    client.errored = True
    assert ask(core, "POST", "compact").status == 409
    client.errored = False
    core.note_sleep(2)
    assert ask(core, "POST", "compact").status == 409
    core.note_sleep(0)
    assert client.calls == []
    assert ask(core, "POST", "compact", b"{}").body["workers"] == [{"released_bytes": 1}]
    assert ask(core, "POST", "snapshot", {"history": 10}).status == 200
    assert client.calls == [("plimsoll_compact", ()), ("plimsoll_snapshot", (10,))]
    monkeypatch.setattr(Calls, "is_running", True)
    assert ask(core, "POST", "compact").status == 409, "one at a time"


def test_shed_needs_a_bound_and_ends_with_its_lease(tmp_path: Path) -> None:
    """What was set at start stands behind it."""
    assert "max_wait_s" in message(ask(made(tmp_path)[0], "POST", "shed"))
    core, _ = made(tmp_path, PLIMSOLL_SHED_WAIT_S="30")
    assert ask(core, "POST", "shed", {"max_wait_s": 2, "lease_s": 100}).body["max_wait_s"] == 2.0
    assert ask(core, "POST", "unshed").body["max_wait_s"] == 30.0
    ask(core, "POST", "shed", {"max_wait_s": 2, "lease_s": 100})
    core.shared.common["shed_until_ns"] = time.monotonic_ns() - 1
    assert core.shed_bound_s() == 30.0


def test_what_cannot_be_done_is_an_answer(tmp_path: Path) -> None:
    """501 where a drain would be of one of several servers; 500 with its kind for a mistake of ours, and the server goes on."""
    core, _ = made(tmp_path)
    core.shared.can_drain = False
    assert ask(core, "POST", "drain").status == 501
    core, _ = made(tmp_path)
    core.shared.own.close()
    found = ask(core, "GET", "state")
    assert found.status == 500
    assert "ValueError" in message(found)
