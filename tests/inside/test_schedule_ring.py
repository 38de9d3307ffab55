"""Which requests a dead engine had begun: known from shared memory, and where it is not known they count as begun."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.guard.daemon.evidence import death_in_log
from plimsoll.inside.answers import App, Receive, Scope, Send
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.gate_control import GateControl, note_engine_request
from plimsoll.inside.places import start_ticks
from plimsoll.inside.schedule_ring import ENTRIES, OWN_SCHEDULERS, ScheduleRing, ScheduleRings, follow_requests, install_into
from tests.fakes import EngineClient, ask
from tests.inside.test_gate_control import Around, made


def ring(folder: Path, name: str = "ring-1-1") -> ScheduleRing:
    found = ScheduleRing(f"{folder}/{name}", makes=True)
    found.set_busy(is_busy=False)
    return found


def test_what_the_ring_cannot_answer_counts_as_begun(tmp_path: Path) -> None:
    """Not active yet, inside the scheduler, come before it was active, or so long ago that entries were overwritten."""
    silent = ScheduleRing(f"{tmp_path}/ring-2-2", makes=True)
    assert silent.count == -1
    assert silent.may_have_begun("a", silent.count)
    silent.set_busy(is_busy=False)
    assert silent.may_have_begun("a", -1)
    assert not silent.may_have_begun("a", 0)
    silent.set_busy(is_busy=True)
    assert silent.may_have_begun("a", 0)
    silent.set_busy(is_busy=False)
    for number in range(ENTRIES):
        silent.note(f"other {number}")
    assert not silent.may_have_begun("a", 0)
    silent.note("one more")
    assert silent.may_have_begun("a", 0)
    assert not silent.may_have_begun("a", 1)


@given(events=st.lists(st.tuples(st.sampled_from("note come".split()), st.integers(0, 30)), max_size=80))
def test_a_request_is_free_exactly_when_it_was_not_noted_since_it_came(events: list[tuple[str, int]]) -> None:
    """Against a plain set, in any order."""
    with tempfile.TemporaryDirectory() as folder:
        log = ring(Path(folder))
        reader = ScheduleRing(log.path, makes=False)  # as an API server opens it
        came: dict[int, tuple[int, set[int]]] = {}
        for does, number in events:
            if does == "come":
                came[number] = reader.count, set()
            else:
                log.note(str(number))
                for _, noted in came.values():
                    noted.add(number)
        for number, (since, noted) in came.items():
            if number in noted:
                assert reader.may_have_begun(str(number), since)
            elif not any(does == "note" and other == number for does, other in events):
                assert not reader.may_have_begun(str(number), since)


class Scheduler:
    """As vLLM's: what it plans is what it was given."""

    connector: Any = None

    def schedule(self, *plan: str) -> Any:
        if "raise" in plan:
            raise RuntimeError("a mistake in the scheduler")
        return SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in plan])


def followed(folder: Path, module: str = OWN_SCHEDULERS[1]) -> tuple[Any, Any, ScheduleRing]:
    """A scheduler and an engine core of classes of their own, followed, and their ring."""
    core = type("EngineCore", (), {"preprocess_add_request": lambda _self, request: request})
    scheduler = type("AsyncScheduler", (Scheduler,), {"__module__": module})
    log = ScheduleRing(f"{folder}/ring-3-3", makes=True)
    for _ in range(2):
        install_into(core, scheduler, log)
    return scheduler(), core(), log


def test_a_scheduler_notes_what_it_begins_and_its_plan_is_untouched(tmp_path: Path) -> None:
    """Installed twice, once it counts; one that ends inside its scheduler frees nobody: what it died of is not written yet."""
    scheduler, _, log = followed(tmp_path)
    assert [request.req_id for request in scheduler.schedule("a", "b").scheduled_new_reqs] == ["a", "b"]
    assert log.count == 2
    assert (log.may_have_begun("b", 0), log.may_have_begun("c", 0)) == (True, False)
    with pytest.raises(RuntimeError, match="a mistake in the scheduler"):
        scheduler.schedule("raise")
    assert log.may_have_begun("c", 0)


@pytest.mark.parametrize("how", ["another scheduler", "a connector"])
def test_a_scheduler_that_cannot_be_followed_is_left_alone(tmp_path: Path, how: str) -> None:
    """One of somebody else's, or one whose requests load their cache before they are scheduled."""
    scheduler, _, log = followed(tmp_path, "somebody.elses" if how == "another scheduler" else OWN_SCHEDULERS[0])
    scheduler.connector = "a connector" if how == "a connector" else None
    assert len(scheduler.schedule("a").scheduled_new_reqs) == 1
    assert log.count == -1


def test_a_grammar_or_a_picture_begins_when_it_comes_in(tmp_path: Path) -> None:
    """Either is worked on before the request is scheduled."""
    scheduler, core, log = followed(tmp_path)
    scheduler.schedule()
    plain, grammar = SimpleNamespace(structured_outputs=None), SimpleNamespace(structured_outputs={"json": {}})
    for name, params, features in (("plain", plain, None), ("grammar", grammar, None), ("picture", plain, ["a picture"])):
        core.preprocess_add_request(SimpleNamespace(request_id=name, sampling_params=params, mm_features=features))
    assert [log.may_have_begun(name, 0) for name in ("plain", "grammar", "picture")] == [False, True, True]
    assert FAULTS.counts == {}


def _write(folder: str, pipe: Connection) -> None:
    log = ScheduleRing(f"{folder}/ring-{os.getpid()}-{start_ticks(os.getpid())}", makes=True)
    log.set_busy(is_busy=False)
    pipe.send("ready")
    pipe.recv()
    log.note("begun")
    pipe.send("noted")
    pipe.recv()


def test_what_was_noted_outlives_a_killed_engine_core(tmp_path: Path) -> None:
    """SIGKILL, as the kernel's: the API server still knows; without a ring of every core it knows nothing."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(str(tmp_path), there))
    process.start()
    assert here.recv() == "ready"
    rings = ScheduleRings(str(tmp_path), os.getpid())
    assert rings.counts() == {}
    rings.look()
    assert rings.is_active
    since = rings.counts()
    here.send("go")
    assert here.recv() == "noted"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    rings.look()
    assert not rings.never_scheduled(["waiting", "begun"], since, 1)
    assert rings.never_scheduled(["waiting"], since, 1)
    assert rings.never_scheduled([], since, 1)
    assert not rings.never_scheduled(["waiting"], since, 2), "of the other core nothing is known"
    assert not rings.never_scheduled(["waiting"], {}, 1), "it came before the ring was there"
    stranger = ScheduleRings(str(tmp_path), 1 << 30)
    stranger.look()
    assert not stranger.is_active


# The gate
def dying(
    client: EngineClient, *ids: str | None, stream: bool = False, begins: Callable[[], None] | None = None, dies: bool = True
) -> App:
    """An app that fails while its engine has requests of these ids; by default since the engine dies."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await receive()
        if stream:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for name in ids:
            note_engine_request(name)
        if begins is not None:
            begins()
        client.errored = dies
        if not stream:
            await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b'data: {"error": {}}\n\n', "more_body": stream})
        if stream:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


def followed_gate(folder: Path, **more: Any) -> tuple[GateControl, EngineClient, ScheduleRing]:
    gate, client = made(folder, **more)
    log = ring(folder)
    gate.rings._rings = {"ring-1-1": ScheduleRing(log.path, makes=False)}
    gate.is_following = True
    return gate, client, log


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_dead_engine_never_began_may_go_elsewhere(tmp_path: Path, stream: bool) -> None:
    """503 with Retry-After and the reason, in place of vLLM's 500 or of a stream that says so with 200."""
    gate, client, log = followed_gate(tmp_path)
    log.note("somebody else")
    for ids in ((), ("a",), ("a", "b")):
        got = asyncio.run(ask(Around(dying(client, *ids, stream=stream), gate), "POST", "/v1/completions"))
        assert (got.status, got.headers["retry-after"], got.headers["connection"]) == (503, "1", "close")
        assert got.headers["x-plimsoll-reason"] == "engine-died-unscheduled"
        assert got.json()["error"]["code"] == 503
        client.errored = False
    assert gate.shared.own["refused_dead"] == 3
    assert (gate.in_layer, gate.answering) == (0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("why", ["begun", "unknown id", "no ring", "off", "not followed", "alive"])
def test_any_other_request_keeps_vllms_answer(tmp_path: Path, why: str, stream: bool) -> None:
    """It had begun, or that is not known, or it is not wanted: 500, and the error event of a stream."""
    gate, client, log = followed_gate(tmp_path, PLIMSOLL_FAILOVER="0" if why == "off" else "1")
    if why == "no ring":
        gate.rings._rings = {}
    gate.is_following = why != "not followed"
    ids = {"begun": ("a", "b"), "unknown id": ("a", None)}.get(why, ("a",))
    app = dying(client, *ids, stream=stream, begins=(lambda: log.note("b")) if why == "begun" else None, dies=why != "alive")
    got = asyncio.run(ask(Around(app, gate), "POST", "/v1/completions"))
    assert got.status == (200 if stream else 500)
    assert b"error" in got.body
    assert gate.shared.own["refused_dead"] == 0


def test_the_ids_of_requests_are_noted_before_the_engine_has_them(tmp_path: Path) -> None:
    """On this client's own output processor, once, with lengths and kinds alone; a client without one is not followed."""
    del tmp_path
    seen: list[Any] = []
    client = SimpleNamespace(output_processor=SimpleNamespace(add_request=lambda *_: seen.append("vllm")))
    assert all(follow_requests(client, lambda *noted: seen.append(noted)) for _ in range(2))
    params = SimpleNamespace(max_tokens=4, logprobs=None, prompt_logprobs=20, structured_outputs={"json": "secret"})
    request = SimpleNamespace(
        request_id="a", prompt_token_ids=[1] * 9, prompt="secret", sampling_params=params, mm_features=[1, 2], lora_request="x"
    )
    client.output_processor.add_request(request, "prompt")
    client.output_processor.add_request(SimpleNamespace(), "prompt")
    shape = "prompt 9, max_tokens 4, prompt_logprobs 20, items 2, lora, structured"
    assert seen == [("a", shape), "vllm", (None, ""), "vllm"]
    assert not follow_requests(SimpleNamespace(), lambda *noted: seen.append(noted))


def test_the_log_names_the_shapes_of_the_requests_that_a_dead_engine_had_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, without those that it never began: guard compares them with what another dead engine had begun."""
    gate, client, log = followed_gate(tmp_path)
    waiting = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await receive()
        name = f"r{len(gate._passages)}"
        note_engine_request(name, f"prompt {len(gate._passages)}, max_tokens 5")
        if name != "r3":
            log.note(name)
        if len(gate._passages) == 3:
            client.errored = True
            waiting.set()
        await waiting.wait()
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def go() -> None:
        await asyncio.gather(*(ask(Around(app, gate), "POST", "/v1/completions") for _ in range(3)))

    with caplog.at_level("ERROR"):
        asyncio.run(go())
    said = [record.getMessage() for record in caplog.records]
    assert said == ["plimsoll: the engine died with 2 requests begun: prompt 1, max_tokens 5; prompt 2, max_tokens 5"]
    (tmp_path / "engine.log").write_text(f"ERROR [x.py:1] {said[0]}\nEngineDeadError\n")
    assert death_in_log(str(tmp_path / "engine.log")).requests == "prompt 1, max_tokens 5; prompt 2, max_tokens 5"
    assert gate._passages == {}
