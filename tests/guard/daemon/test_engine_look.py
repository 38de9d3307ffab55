"""Looks at engines and test requests over real sockets: at stand-ins with their faults, and at servers that lie."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.guard.act.ports import Outcome
from plimsoll.guard.config import TlsConfig, read_guard_config
from plimsoll.guard.daemon import engine_look as watch
from plimsoll.guard.daemon.engine_look import ABSENT_AGAIN_S, AGAIN_S, STILL_S, CanaryPlan, EngineWatcher, is_garbage
from plimsoll.guard.judge.judge import Judge
from plimsoll.guard.judge.look import Canary, CoreFigures, Look, Reach
from plimsoll.guard.judge.policy import read_policy
from plimsoll.inside.settings import InsideSettings
from plimsoll.net.client import TRUST
from tests.certificates import certificate
from tests.each import cases, each, in_loop, sure
from tests.fakes import TOKEN
from tests.guard.acting import acting
from tests.guard.daemon.looking import CAPTURED, FAST, GATED, INSIDE, at, fault, looks, plain, remembering
from tests.net.raw_answers import Answers, answer
from tests.net.raw_server import RawServer, Talk, Visitor, by_path, free_port, raw_server
from tests.standin.servers import standin


def test_what_was_recorded_becomes_a_look() -> None:
    """Figures, version, settings, start and health of a real page; the gate's words of an H200; all else is nobody's."""
    answers: dict[str, bytes | str] = {"/metrics": CAPTURED, "/health": "200 OK", "/version": b'{"version":"0.32.0"}'}
    (look,), _ = looks(by_path(answers))
    assert (look.reach, look.why, look.health, look.vllm) == (Reach.ANSWERS, "", 200, "0.32.0")
    assert (look.figures["prompt_tokens"], look.config["block_size"]) == (183, "128")
    assert look.started_unix_s == pytest.approx(1794704708.86)
    assert (look.gate, look.workers, look.is_paused, look.canary, look.ranks) == (None, (), None, None, ())
    row = b'vllm:iteration_tokens_total_count{engine="%d"} %d\nvllm:num_requests_running{engine="%d"} %d\n'
    (look,), _ = looks(by_path({"/metrics": b"".join(row % (n, n, n, n) for n in (0, 1, 10))}))
    assert look.ranks == (CoreFigures("0", 0, 0), CoreFigures("1", 1, 1), CoreFigures("10", 10, 10))
    gate = sure(watch.read_gate(json.loads((INSIDE / "state.json").read_text(encoding="utf-8"))))
    assert (gate.ready, gate.engine_requests, gate.expected_wait_s, gate.last_step_age_s) == (True, 0, 0.0, 19.311)
    assert gate.survival is None, "recorded before there was such a key"
    told = watch.read_gate(
        {"ready": True, "reason": "", "in_flight": 0, "engine_requests": 0, "survive": {"armed": True, "contained": 3}}
    )
    assert told is not None
    assert told.survival is not None
    assert (told.survival.armed, told.survival.contained, told.survival.storm) == (True, 3, None)
    (worker,) = watch.read_workers(json.loads((INSIDE / "memory.json").read_text(encoding="utf-8")))
    assert (worker.allocated, worker.by_others, worker.host_limit) == (67825706496, 9240576, 137438953472)
    assert (worker.requested, worker.weights, worker.kv_cache) == (75054940160, 16110919680, 51539607552)
    assert (worker.activation_peak, worker.graphs) == (None, 0)
    for bad in ({}, {"ready": 1}, {"ready": True, "reason": "x", "in_flight": float("nan"), "engine_requests": 1}):
        assert watch.read_gate(bad) is None
    for odd in ({"workers": 5}, {"workers": [5, {}, {"age_s": "x"}, {"age_s": float("inf")}]}):
        assert watch.read_workers(odd) == ()


def test_a_stand_in_with_its_gate() -> None:
    """What the gate knows, the memory of its workers, and whether it is paused, from one look."""
    with standin(GATED, settings=InsideSettings({"PLIMSOLL_TOKEN": TOKEN})) as server:
        first, second = at(server, lambda url: watch.EngineWatcher(url, TOKEN), 2)
        assert first.gate is not None
        assert (first.gate.ready, first.gate.in_flight, first.gate.drain) == (True, 0, "serving")
        (worker,) = first.workers
        assert (worker.rank, worker.device_total) == ("0/0", 24 << 30)
        assert worker.host_resident is not None
        assert (second.is_paused, second.vllm, second.health) == (False, "0.32.0", 200)
        server.ask("POST", "/pause")
        assert at(server, lambda url: watch.EngineWatcher(url, TOKEN))[0].is_paused is True
        (open_look,) = at(server, plain)
        assert (open_look.gate, open_look.workers[0].allocated) == (None, sure(worker.allocated))


@pytest.mark.parametrize(("kind", "reach"), cases("guard", "pages that misbehave"))
def test_a_stand_in_that_misbehaves(kind: str, reach: str) -> None:
    """Each fault of a page has its word, ends in time and in little memory, and leads to nothing that would act."""
    with standin() as server:
        at(server, plain)  # what is made once is not counted
        fault(server, kind)
        tracemalloc.start()
        began = time.monotonic()
        found = at(server, plain, 3)
        took, (_, peak) = time.monotonic() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert {look.reach for look in found} == {reach}
    assert took < 3 * FAST.look_s + 5  # a machine may be busy
    assert peak < 24 << 20
    assert all(0 <= value <= 1e18 for look in found for value in look.figures.values())
    judge = Judge("e", read_policy({}))
    for look in found:
        judge.see(look)
    assert acting(judge) == ()


async def test_nobody_listens_and_then_somebody_does() -> None:
    """Refused while nothing is there; what was known of the last process is forgotten with it."""
    port, found = free_port(), []
    watcher = watch.EngineWatcher(f"http://127.0.0.1:{port}/metrics", limits=FAST)
    found.append(await watcher.look(1.0, 1.0))
    server = RawServer(by_path({"/metrics": CAPTURED, "/version": b'{"version":"0.32.0"}'}))
    listening = await asyncio.start_server(server.visited, "127.0.0.1", port)
    found.append(await watcher.look(6.0, 6.0))
    await watcher._client.close()
    listening.close()
    found.append(await watcher.look(11.0, 11.0))
    await watcher.close()
    (first, second, third) = found
    assert (first.reach, first.why) == (Reach.REFUSED, "cannot be reached (Connection refused)")
    assert (second.reach, second.vllm) == (Reach.ANSWERS, "0.32.0")
    assert (third.reach, third.vllm) == (Reach.REFUSED, None)


def test_a_dead_engine_and_a_proxy_without_one_and_letters_that_are_none() -> None:
    """503 of /health counts when it is vLLM's: bare, and beside its page; odd bytes and labels cost only their own lines."""
    (look,), _ = looks(by_path({"/metrics": CAPTURED, "/health": "503 Service Unavailable"}))
    assert (look.reach, look.health) == (Reach.ANSWERS, 503)
    for status in ("500 Oops", "404 Not Found"):  # the supervisor of data parallelism, while it stops
        (look,), _ = looks(by_path({"/metrics": status, "/health": "503 Service Unavailable"}))
        assert (look.reach, look.health) == (Reach.NONSENSE, None)

    async def router(visitor: Visitor) -> None:
        while head := await visitor.asked():
            await (visitor.answer(CAPTURED) if "/metrics" in head else visitor.answer(b"no healthy upstream", "503 No"))

    (look,), _ = looks(router)
    assert (look.reach, look.health) == (Reach.ANSWERS, None)

    async def proxy(visitor: Visitor) -> None:
        while await visitor.asked():
            await visitor.answer(b"no healthy upstream", "503 Service Unavailable")

    (look,), _ = looks(proxy)
    assert (look.reach, look.health) == (Reach.NONSENSE, None)
    assert look.why == "answers /metrics with 503, not with a page"
    labels = b",".join(b'a%d="b"' % number for number in range(2_000))
    noise = (
        b'vllm:num_requests_waiting{model_name="\xff\xfe"} 2\nvllm:kv_cache_usage_perc{' + labels + b"} 0.5\n"
        b'vllm:prompt_tokens_total{m="' + b"x" * (1 << 19) + b'"} 5\nvllm:num_requests_running{engine="0"} 3\n'
    )
    (look,), _ = looks(by_path({"/metrics": noise}))
    assert (look.reach, look.figures) == (Reach.ANSWERS, {"waiting": 2, "running": 3})


LABEL_BOMB = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % n for n in range(20_000))


@each("page", [b"<html>\n<body>hello</body>\n</html>\n", b"", b"\xff\xfe\x00" * 1000 + b"\n", LABEL_BOMB,
               CAPTURED[:3000] + b"\nvllm:num_req"], ids=lambda page: repr(page[:20]))  # fmt: skip
def test_pages_that_are_none(page: bytes) -> None:
    """A web page, nothing, no text, labels without end, one that is cut: nonsense, with its reason, without figures."""
    (look,), _ = looks(by_path({"/metrics": page, "/health": "200 OK"}))
    assert (look.reach, look.health) == (Reach.NONSENSE, 200)
    assert look.why
    assert look.figures == {}


async def test_a_redirect_to_another_host_is_nonsense_and_the_token_stays_here() -> None:
    """Neither the page nor the gate leads anywhere else."""
    stolen: list[str] = []

    async def thief(visitor: Visitor) -> None:
        stolen.append(await visitor.asked())

    async with raw_server(thief) as elsewhere:

        async def talk(visitor: Visitor) -> None:
            while head := await visitor.asked():
                if head.split()[1] == "/metrics" and not is_page:
                    await visitor.answer(b"", "302 Found", f"Location: {elsewhere.url}/metrics")
                elif head.split()[1] == "/metrics":
                    await visitor.answer(CAPTURED)
                else:
                    await visitor.answer(b"", "307 Temporary Redirect", f"Location: {elsewhere.url}/plimsoll/state")

        async with raw_server(talk) as server:
            is_page = False
            watcher = watch.EngineWatcher(server.url, TOKEN, limits=FAST)
            look = await watcher.look(1, 1)
            is_page = True
            assert (await watcher.look(6, 6)).gate is None
            await watcher.close()
    assert look.reach is Reach.NONSENSE
    assert "redirects to another host" in look.why
    assert stolen == []


def test_what_a_server_does_not_have_is_asked_every_five_minutes() -> None:
    """No gate, no dev mode, no version: asked once, then left alone for five minutes; a restart asks again at once."""
    paths: list[str] = []
    page = {"/metrics": CAPTURED}
    looks(remembering({**page}, paths), 120, token=TOKEN)
    counts = {path: paths.count(path) for path in paths}
    assert counts == {"/metrics": 120, "/health": 120, "/plimsoll/state": 2, "/is_paused": 2, "/version": 2}
    paths.clear()
    looks(remembering({**page, "/is_paused": b'{"is_paused": false}', "/version": b'{"version": "0.32.0"}'}, paths), 30)
    counts = {path: paths.count(path) for path in paths}
    assert counts == {"/metrics": 30, "/health": 30, "/is_paused": 1, "/version": 1}


def beside_page(own: Callable[[Visitor, str], Awaitable[bool]], page: bytes = CAPTURED) -> Talk:
    """A page, and what this makes of another request; where it is False, there is no such thing."""

    async def talk(visitor: Visitor) -> None:
        while head := await visitor.asked():
            if not await own(visitor, head):
                await visitor.answer(page if "/metrics" in head else b"", "200 OK" if "/metrics" in head else "404 No")

    return talk


def gate_server(kind: str, heads: list[str]) -> Talk:
    """Something that answers /plimsoll/state in its own way; what it was asked."""

    async def own(visitor: Visitor, head: str) -> bool:
        heads.append(head)
        if head.split()[1] != "/plimsoll/state" or kind == "none":
            return False
        if kind == "open" or (kind == "gate" and f"Bearer {TOKEN}" in head):
            await visitor.answer((INSIDE / "state.json").read_bytes())
        else:
            asks = "Basic realm=x" if kind == "another" else "Bearer"
            await visitor.answer(b"", "401 Unauthorized", f"WWW-Authenticate: {asks}")
        return True

    return beside_page(own)


@pytest.mark.parametrize(("kind", "is_shown", "note"), cases("guard", "who is shown a token"))
async def test_the_token_is_shown_only_to_what_asks_for_it_as_the_gate_does(kind: str, is_shown: bool, note: str) -> None:
    """A server without a gate never sees it; a gate that does not take it is named, and the rest of the look is there."""
    heads: list[str] = []
    async with raw_server(gate_server(kind, heads)) as server:
        watcher = watch.EngineWatcher(server.url, TOKEN, limits=FAST)
        found = [await watcher.look(1 + 5 * number, 1) for number in range(2)]
        await watcher.close()
        (look, said) = found[-1], watcher.gate_note
    assert look.reach is Reach.ANSWERS
    assert (look.gate is not None) == (kind == "gate")
    assert said.startswith(note)
    assert bool(said) == bool(note)
    assert any(TOKEN in head for head in heads) == is_shown
    assert TOKEN not in next(head for head in heads if "/plimsoll/state" in head)


STUCK = b'vllm:num_requests_running{engine="0",model_name="m"} 1\nvllm:num_requests_waiting{engine="0",model_name="m"} 0\n'


def paused_server(say: Callable[[int], str | bytes | None], page: bytes = CAPTURED) -> Talk:
    """What becomes of each question whether it is paused; None: no answer."""
    count = itertools.count(1)

    async def own(visitor: Visitor, head: str) -> bool:
        if "/is_paused" not in head:
            return False
        said = say(next(count))
        if said is None:
            await asyncio.sleep(1.0)
            visitor.writer.close()
        else:
            await (visitor.answer(said) if isinstance(said, bytes) else visitor.answer(b"", said))
        return True

    return beside_page(own, page)


def test_a_lost_answer_about_a_pause_is_said() -> None:
    """Lost, or an error on the way: it may rest. A server without the question does not."""
    assert [look.is_rest_unknown for look in looks(paused_server(lambda _: None), 2)[0]] == [True, True]
    answers: list[str | bytes | None] = ["502 Bad Gateway", b'{"is_paused": true}', None, b'{"is_paused": true}', b"<html>"]
    found, _ = looks(paused_server(lambda number: answers[number - 1], STUCK), 5, every_s=60.0)
    assert [(look.is_paused, look.is_rest_unknown) for look in found] == [
        (None, True), (True, False), (None, True), (True, False), (None, True),
    ]  # fmt: skip
    found, _ = looks(paused_server(lambda _: "404 Not Found", STUCK), 2)
    assert [look.is_rest_unknown for look in found] == [False, False]


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"40\r\n", CAPTURED[:5000],
                             b"vllm:num_requests_running 1e309\n", b"vllm:kv_cache_usage_perc -1\n", b'{"ready": true}']),
        ),
        max_size=8,
    )
)  # fmt: skip
def test_a_look_never_raises(pieces: list[bytes]) -> None:
    """Whatever bytes a server says to every question, a look comes back, and the judge does not act on it."""

    async def talk(visitor: Visitor) -> None:
        if await visitor.asked():
            await visitor.say(*pieces)

    found, _ = looks(talk, 2, token=TOKEN, canary=watch.CanaryPlan(every_s=5))
    judge = Judge("e", read_policy({}))
    for look in found:
        judge.see(look)
    assert acting(judge) == ()


def page(steps: float = 7, running: float = 0, waiting: float = 0) -> dict[str, float]:
    return {"steps": steps, "running": running, "waiting": waiting}


def met() -> watch.PauseState:
    """One that was asked at second 0, while it had nothing to do."""
    pause = watch.PauseState()
    assert pause.is_due(page(), None, 0.0)
    pause.answered(0.0, is_paused=False)
    return pause


@pytest.mark.parametrize("before", [0, 1], ids=["was idle", "was busy"])
def test_one_that_stands_still_with_work_is_asked_when_a_crash_would_be_over(before: int) -> None:
    """Until then it is not known whether it rests; then it is asked, and again every minute while it stands still."""
    pause = met()
    pause.is_due(page(8, before), None, 5.0)
    asked = []
    for number in range(2, 40):
        now_s = 5.0 * number
        if pause.is_due(page(8, 2), None, now_s):
            asked.append(now_s)
            pause.answered(now_s, is_paused=True)
        assert pause.state() == ((True, False) if asked else (None, True))
    assert asked[0] - 10.0 >= STILL_S
    assert all(later - sooner >= AGAIN_S for sooner, later in itertools.pairwise(asked))
    pause.is_due(page(9, 2), None, 200.0)
    assert pause.state() == (False, False)


def test_what_a_pause_is_taken_for() -> None:
    """Each standstill is asked about anew, a test request without an answer is work that waits, and no question is hurried."""
    pause = met()
    for now_s in (100.0, 125.0):
        if pause.is_due(page(7, 1), None, now_s):
            pause.answered(now_s, is_paused=False)
    assert pause.state() == (False, False)
    pause.is_due(page(8, 1), None, 130.0)
    pause.is_due(page(8, 1), None, 135.0)
    assert pause.state() == (None, True), "what was said of an earlier standstill says nothing of the next one"
    pause = met()
    assert not pause.is_due(page(), Canary(30.0, True), 45.0)
    assert pause.is_due(page(), Canary(60.0, False), 60.0 + STILL_S), "so an idle engine that somebody has paused is found"
    assert pause.state() == (None, True)
    pause.answered(80.0, is_paused=True)
    assert pause.state() == (True, False)
    pause = watch.PauseState()
    assert pause.is_due(page(), None, 0.0)
    pause.lost(0.0)
    assert pause.state() == (None, True)
    assert [pause.is_due(page(), None, at) for at in (AGAIN_S - 1, AGAIN_S)] == [False, True], "a core may be stuck in it"
    pause = watch.PauseState()
    pause.absent(0.0)
    assert pause.state() == (None, False), "a server that does not know the question does not rest"
    assert [pause.is_due(page(7, 1), None, at) for at in (ABSENT_AGAIN_S - 1, ABSENT_AGAIN_S)] == [False, True]
    other = met()
    other.is_due(page(7, 1), None, 10.0)
    other.absent(30.0)
    assert other.state() == (None, True), "one that has known it is taken to know it still"


LOOKS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from(["yes", "no", "lost", "absent"])), max_size=60)


@given(looks=LOOKS, every_s=st.sampled_from([0.5, 1.0, 5.0, 30.0]))
def test_no_question_within_a_crash_of_the_last_sign_of_life(looks: list[tuple[bool, int, str]], every_s: float) -> None:
    """Whatever it shows and answers: once it has answered, the next question comes when work has stood still for STILL_S."""
    pause, has_answered, still_since, steps = watch.PauseState(), False, 0.0, 0
    for number, (moves, work, says) in enumerate(looks):
        now_s = every_s * number
        steps += moves
        still_since = now_s if moves or not work or not number else still_since
        is_asked = pause.is_due(page(steps, work), None, now_s)
        if is_asked:
            assert not has_answered or now_s - still_since >= STILL_S - every_s
            how: Any = {"yes": True, "no": False}.get(says)
            if how is None:
                getattr(pause, says)(now_s)
            else:
                has_answered = True
                pause.answered(now_s, is_paused=how)
        is_paused, is_unknown = pause.state()
        assert not (is_paused and is_unknown)
        if moves and has_answered and number and not is_asked:
            assert is_paused is False


MODELS = b'{"data": [{"id": "one", "max_model_len": 4096}, {"id": "two"}]}'
HALF = b'{"choices": [{"text": "\xef\xbf\xbd", "finish_reason": "length"}]}'
TEXT = b'{"choices": [{"text": " world", "finish_reason": "length"}]}'


def warmed(answer: bytes | str, models: bytes | str = MODELS) -> Outcome:
    """What becomes of the first request at a server that answers it so."""

    async def scene() -> Outcome:
        async with raw_server(by_path({"/v1/models": models, "/v1/completions": answer})) as server:
            return await watch.warm_up(f"http://127.0.0.1:{server.port}", deadline_s=5)

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("answer", "is_done"),
    [(TEXT, True), ("500 Internal Server Error", False), ("503 Service Unavailable", None), ("404 Not Found", None),
     ("429 Too Many Requests", None), (HALF, False), (b"{}", None)],
)  # fmt: skip
def test_a_first_request_that_the_engine_breaks_over_is_a_failure(answer: bytes | str, is_done: bool | None) -> None:
    """500 and half a letter are; a refusal, an answer that is no completion, or no model at all says nothing of the engine."""
    assert warmed(answer).is_done is is_done
    outcome = warmed(answer, "404 Not Found")
    assert (outcome.is_done, "unknown which model it serves" in outcome.message) == (None, True)


@pytest.mark.parametrize(
    ("models", "found"),
    [(MODELS, watch.ServedModel("one", 4096.0)), (b'{"data": []}', None),
     (b'{"data": [{"id": "x", "max_model_len": true}]}', watch.ServedModel("x", None)),
     (b"[" * 100_000, None), (b'{"data": [{"id": 7}]}', None), ("500 Oops", None)],
)  # fmt: skip
async def test_the_first_model_of_the_list_is_told(models: bytes | str, found: watch.ServedModel | None) -> None:
    """With its context where it is a number; whatever else a server says is not known."""
    async with raw_server(by_path({"/v1/models": models})) as server:
        result = await watch.served_model(f"http://127.0.0.1:{server.port}")
    assert result == found


@in_loop
async def test_an_engine_over_tls(tmp_path: Path) -> None:
    """Believed only by the authority of [tls]; a certificate with another name only where that is allowed."""
    context = certificate(tmp_path / "own", "DNS:chat.models.svc")
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + CAPTURED
    answers = Answers(lambda asked: page if asked.endswith("/metrics") else answer(200, {"version": "0.32.0"}))
    server = await asyncio.start_server(answers.serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    certificate(tmp_path / "other")
    (tmp_path / "guard.toml").write_text('[tls]\nca_file = "own/ca.crt"\nany_name = true\n', encoding="utf-8")
    given = read_guard_config(str(tmp_path / "guard.toml")).tls
    ca_file, other = str(tmp_path / "own" / "ca.crt"), str(tmp_path / "other" / "ca.crt")
    for tls, reach in ((given, Reach.ANSWERS), (None, Reach.SILENT), (TlsConfig(ca_file), Reach.SILENT),
                       (TlsConfig(other, any_name=True), Reach.SILENT)):  # fmt: skip
        before, heard = TRUST.set(None if tls is None else tls.trust), len(answers.got)
        watcher = watch.EngineWatcher(url, None, None, limits=FAST)
        TRUST.reset(before)
        look = await watcher.look(100.0, 1e9)
        await watcher.close()
        assert look.reach is reach, (tls, look.why)
        assert (len(answers.got) > heard) is (reach is Reach.ANSWERS), "nothing is sent to a stranger"
        assert reach is Reach.ANSWERS or "certificate" in look.why, look.why
    server.close()
    for text, why in (("any_name = true", "any_name needs a ca_file"), ('ca_file = "none"', "no certificates can be read")):
        (tmp_path / "guard.toml").write_text(f"[tls]\n{text}\n", encoding="utf-8")
        with pytest.raises(BadInput, match=f"line 2: .*{why}"):
            read_guard_config(str(tmp_path / "guard.toml"))


def canary_server(answer: Callable[[Visitor], Awaitable[None]], asks: list[str]) -> Talk:
    """What it does with a completion; those that it was asked for."""

    async def own(visitor: Visitor, head: str) -> bool:
        if is_post := head.startswith("POST"):
            asks.append(head)
            await answer(visitor)
        return is_post

    return beside_page(own)


def test_a_canary_that_is_answered_and_how_often_it_flies_and_what_is_garbage() -> None:
    """One token by the name on the page, as often as planned; half a letter is garbage; an unnamed model is sent nothing."""
    asks: list[str] = []

    async def answer(visitor: Visitor) -> None:
        await asyncio.sleep(0.2)
        await visitor.answer(TEXT)

    found, _ = looks(canary_server(answer, asks), 14, canary=CanaryPlan(every_s=30))
    assert len(asks) == 3
    last = sure(found[-1].canary)
    assert (last.is_answered, last.is_garbage, last.at_s) == (True, False, 160.0)
    assert 0.19 < sure(last.seconds) < 20
    for text in ("", "\ufffd", "\ufffd\ufffd", "\x00\x01", "<unk>", " <unk>"):
        assert is_garbage(json.dumps({"choices": [{"text": text, "finish_reason": "length"}]}).encode()) is True
    for text in (" 6", "!", "\n\t", " ", "6\ufffd", "\u4f60", "\U0001f600", "<|channel|>"):
        assert is_garbage(json.dumps({"choices": [{"text": text, "finish_reason": "length"}]}).encode()) is False
    assert is_garbage(b'{"choices": [{"text": "", "finish_reason": "stop"}]}') is False
    paths: list[str] = []
    talk = remembering({"/metrics": b"vllm:num_requests_running 1\n"}, paths)
    (_, look), _ = looks(talk, 2, canary=CanaryPlan(every_s=5))
    assert look.canary is not None
    assert (look.canary.is_answered, look.canary.why) == (None, "unknown which model it serves")
    assert "/v1/completions" not in paths


def http(status: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


NO_COMPLETIONS = (
    b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": "x"}', b'{"choices": [{"text": 5}]}', b"[" * 100_000,
)  # fmt: skip
NO_MODEL = b'{"error": {"message": "The model `x` does not exist."}}'


@each(
    ("raw", "is_answered", "why"),
    [
        (None, False, ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", None, "the answer began and did not finish within 1 s"),
        (b"", None, "it "),
        (http("503 Busy"), None, "the engine answers /v1/completions with 503"),
        (http("500 Oops"), None, "the engine answers /v1/completions with 500"),
        (http("401 Unauthorized", b'{"error": "Unauthorized"}'), None, "the engine requires an API key"),
        (http("404 Not Found", b'{"detail": "Not Found"}'), None, "the engine does not serve /v1/completions"),
        (http("404 Not Found", NO_MODEL), None, "the engine does not serve a model named"),
        (http("429 Too Many Requests"), None, "the engine is too busy for it (429)"),
        *((http("200 OK", body), None, "it answers /v1/completions with something that is not") for body in NO_COMPLETIONS),
    ],
)
def test_only_silence_after_asking_fails_a_canary(raw: bytes | None, is_answered: bool | None, why: str) -> None:
    """An engine that refused, hung up, began to answer or sent no completion has not failed; whoever wonders is told why."""
    asks: list[str] = []

    async def answer(visitor: Visitor) -> None:
        await visitor.say(raw or b"")
        if raw is None or raw.endswith(b"{"):
            await asyncio.sleep(5)
        visitor.writer.close()

    plan = CanaryPlan(every_s=30, deadline_s=1.0)  # long enough to be asked on a busy machine
    last = looks(canary_server(answer, asks), 3, canary=plan)[0][-1].canary
    assert len(asks) == 1
    assert last is not None
    assert (last.is_answered, last.is_garbage) == (is_answered, False)
    assert last.why.startswith(why)


@pytest.mark.parametrize(("kind", "is_answered"), [("open", True), ("wants it", True), ("wants another", None)])
def test_the_key_is_shown_only_to_what_asks_for_one(kind: str, is_answered: bool | None) -> None:
    """A server that takes the request without a key never sees it."""
    posts: list[str] = []

    async def answer(visitor: Visitor) -> None:
        is_taken = kind == "open" or (kind == "wants it" and "Bearer s3cret" in posts[-1])
        await visitor.answer(TEXT if is_taken else b"", "200 OK" if is_taken else "401 Unauthorized")

    plan = CanaryPlan(every_s=5, api_key="s3cret")
    last = sure(looks(canary_server(answer, posts), 3, canary=plan)[0][-1].canary)
    assert last.is_answered is is_answered
    assert last.why == ("" if is_answered else "the engine rejects this API key")
    shown = ["s3cret" in head for head in posts]
    assert shown == {"open": [False] * 3, "wants it": [False, True, True, True], "wants another": [False, True]}[kind]


async def looks_at(mutes: list[list[str]], pause_s: float, is_paused: bool | None = None) -> tuple[list[Look], int]:
    """A look for each of these lists of paths that get no answer, and how many test requests came in all."""
    posts, mute = list[str](), list[str]()

    async def talk(visitor: Visitor) -> None:
        while head := await visitor.asked():
            path = head.split()[1]
            posts.extend([head] if head.startswith("POST") else [])
            if path in mute:
                await asyncio.sleep(10)
            if path == "/is_paused" and is_paused is None:
                await visitor.answer(b"", "404 No")
            else:
                said = {"/metrics": CAPTURED, "/is_paused": json.dumps({"is_paused": is_paused}).encode()}.get(path, TEXT)
                await visitor.answer(said)

    async with raw_server(talk) as server:
        quick = watch.LookLimits(look_s=2.0, page_s=1.0, small_s=0.7)
        watcher = EngineWatcher(server.url, None, CanaryPlan(every_s=5, deadline_s=1.0), limits=quick)
        found = []
        for number, silent in enumerate(mutes):
            mute[:] = silent
            found.append(await watcher.look(5.0 * number, 1e9 + 5 * number))
            await asyncio.sleep(pause_s)
        await watcher.close()
    return found, len(posts)


async def test_a_server_that_takes_connections_and_says_nothing_gets_its_test_request() -> None:
    """Silence of the page alone is no proof; the test request that nobody answers is."""
    everything = ["/metrics", "/health", "/version", "/is_paused", "/v1/completions", "/v1/models"]
    found, posts = await looks_at([[], everything, everything], 1.5)
    assert (found[-1].reach, posts) == (Reach.SILENT, 3)
    assert found[-1].canary is not None
    assert (found[-1].canary.is_answered, found[-1].canary.at_s) == (False, 5.0)


@pytest.mark.parametrize("is_paused", [True, False])
async def test_what_was_last_said_of_a_pause_holds_while_no_answer_comes(is_paused: bool) -> None:
    """Where the question or the whole page is lost: none is sent to one that was paused; a stuck one does get its own."""
    found, posts = await looks_at([[], ["/is_paused"], *[["/is_paused", "/metrics"]] * 2], 0.5, is_paused)
    assert [look.reach for look in found] == [Reach.ANSWERS, Reach.ANSWERS, Reach.SILENT, Reach.SILENT]
    assert [look.is_rest_unknown for look in found] == [False] * 4
    assert posts == (0 if is_paused else 4)


def test_a_stand_in_s_canary_and_its_wedge() -> None:
    """Answered while it steps, failed when it is stuck; it does not count as work; none is sent to one that rests."""
    plan = CanaryPlan(every_s=5, deadline_s=0.6)
    with standin(GATED, settings=InsideSettings({"PLIMSOLL_TOKEN": TOKEN})) as server:
        server.ask("POST", "/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 1})  # the first one loads code
        *_, last = at(server, lambda url: EngineWatcher(url, TOKEN, plan), 2, 0.5)
        assert last.canary is not None
        assert (last.canary.is_answered, last.canary.is_garbage) == (True, False)
        fault(server, "wedge")
        found = at(server, lambda url: EngineWatcher(url, TOKEN, plan), 6, 0.2)
        assert sure(found[-1].canary).is_answered is False
        gates = [look.gate for look in found if look.gate is not None]  # on a busy machine a look may get no answer
        assert [gate for gate in gates if gate.engine_requests - gate.ours > 0] == []
        assert gates
        server.ask("DELETE", "/standin/faults", Authorization=f"Bearer {TOKEN}")
        server.ask("POST", "/pause")
        assert at(server, lambda url: EngineWatcher(url, TOKEN, plan), 3, 0.1)[-1].canary is None
