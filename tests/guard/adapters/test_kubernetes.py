"""Eviction against an API server that the test plays, and against one that answers nonsense; a cluster is not here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.kubernetes import PodConfig, PodEviction
from tests.cluster_api import TOKEN, ClusterApi, Json, pod
from tests.each import each, in_loop
from tests.net.raw_answers import Answer, answer, on_a_port

POD, NAMESPACE = "vllm-7d4b9-abcde", "llm"
EVICTION = f"/api/v1/namespaces/{NAMESPACE}/pods/{POD}/eviction"
SINCE = "2026-01-01T00:00:00Z"


def made(name: str, uid: str, *, ready: bool = True, kind: str = "ReplicaSet", **meta: Any) -> Json:
    return pod(name, is_ready=ready, owner=(kind, "rs", "rs-1") if kind else None, uid=uid, creationTimestamp=SINCE, **meta)


@asynccontextmanager
async def evicting(
    account: str, *pods: Json, then: Callable[[ClusterApi], Any] = lambda _: None
) -> AsyncIterator[tuple[PodEviction, ClusterApi]]:
    """With these pods in a cluster; one that is evicted is gone at once, and `then` happens."""
    api = ClusterApi()
    for one in pods or (made(POD, "u-1"), made("vllm-7d4b9-other", "u-2")):
        api.put("/pods", one)

    def gone(one: Json) -> tuple[int, Json, dict[str, str]]:
        api.evicted.append(one["metadata"]["name"])
        api.drop("/pods", NAMESPACE, one["metadata"]["name"])
        then(api)
        return 201, {"kind": "Status", "status": "Success"}, {}

    api.evicts = gone
    async with api.serving():
        engine = PodEviction(PodConfig(POD), cluster=ClusterClient(api.url, account, {}), environ={})
        engine.look_every_s = 0.05
        yield engine, api


@in_loop
async def test_evicted_gone_and_replaced(account: str) -> None:
    """Siblings are no replacement, and the new pod is told with its readiness; another guard goes on from what was kept."""
    async with evicting(account) as (engine, api):
        assert engine.replaces
        assert await engine.is_running() is True
        learned = await engine.learn()
        assert learned.facts == {"uid": "u-1", "owner": "rs-1", "since": SINCE, "siblings": "u-1,u-2"}
        stopped = await engine.stop(5.0)
        assert (stopped.is_done, stopped.facts["was_running"]) == (True, True)
        assert await engine.is_running() is False
        assert (await engine.stop(5.0)).facts["was_running"] is False
        waiting = await engine.start()
        assert (waiting.is_done, waiting.facts) == (False, {"waiting": True})
        for ready in (False, True):
            api.put("/pods", made("vllm-7d4b9-new", "u-3", ready=ready))
            there = await engine.start()
            assert there.facts == {"pod": "vllm-7d4b9-new", "new_uid": "u-3", "ready": ready, "ip": "10.0.0.9"}
        later = PodEviction(PodConfig(POD), cluster=engine._cluster, environ={})
        later.recall(learned.facts)
        assert (await later.start()).facts["new_uid"] == "u-3"
        assert api.evicted == [POD]


@in_loop
async def test_a_pod_of_the_same_name_is_another_and_one_that_nobody_replaces_is_left_alone(account: str) -> None:
    """The new one of a StatefulSet is never evicted; one that somebody else evicted is waited for, and nothing is forced."""
    replaced = made(POD, "u-9", kind="StatefulSet")
    old = made(POD, "u-1", kind="StatefulSet")
    async with evicting(account, old, then=lambda api: api.put("/pods", replaced)) as (engine, api):
        assert (await engine.stop(5.0)).is_done
        assert await engine.is_running() is False
        assert (await engine.stop(5.0)).facts["was_running"] is False
        assert (await engine.start()).facts["new_uid"] == "u-9"
        assert api.evicted == [POD]
    for kind in ("", "Job"):
        async with evicting(account, made(POD, "u-1", kind=kind)) as (engine, api):
            outcome = await engine.stop(5.0)
            assert (outcome.is_done, outcome.facts, api.evicted) == (False, {"bare": True}, [])
    async with evicting(account, made(POD, "u-1", deletionTimestamp=SINCE)) as (engine, api):
        outcome = await engine.stop(0.2)
        assert (outcome.is_done, api.evicted) == (None, [])
        assert "still ending" in outcome.message


@each("environ", [{"HOSTNAME": POD}, {"PLIMSOLL_POD": POD, "HOSTNAME": "node-1"}, {"POD_NAME": POD}])
def test_a_sidecar_only_watches(account: str, environ: dict[str, str]) -> None:
    """A guard in the pod itself does not evict it; the same name in another namespace is another pod."""
    cluster = ClusterClient("http://127.0.0.1:9", account, {})
    engine = PodEviction(PodConfig(POD), cluster=cluster, environ=environ)
    for outcome in (asyncio.run(engine.stop(1.0)), asyncio.run(engine.learn())):
        assert (outcome.is_done, outcome.facts) == (False, {"own_pod": True})
    assert not PodEviction(PodConfig(POD, "elsewhere"), cluster=cluster, environ=environ).is_own_pod


LEARNED = {"uid": "u-1", "owner": "rs-1", "since": SINCE, "siblings": "u-1"}


def budget(reason: str) -> dict[str, Any]:
    return {"kind": "Status", "code": 429, "message": "Cannot evict pod", "details": {"causes": [{"reason": reason}]}}


@each(
    ("told", "is_done", "facts"),
    [
        (answer(429, budget("DisruptionBudget")), False, {"budget": True, "status": 429}),
        (answer(429, budget("Other")), False, {"budget": False, "status": 429}),
        (answer(403, {"message": "forbidden"}), False, {"status": 403}), (answer(302, {}), False, {"status": 302}),
        (answer(500, {"message": "more than one PodDisruptionBudget"}), None, {"status": 500}),
        (b"HTTP/1.1 200", None, LEARNED), (None, None, LEARNED),
    ],
)  # fmt: skip
@in_loop
async def test_evictions_that_are_not_taken(account: str, told: Answer, is_done: bool | None, facts: dict[str, Any]) -> None:
    """A budget, a missing right, a redirect, trouble of the server's own, an answer that is lost."""

    def reply(line: str) -> Answer:
        if line.startswith("POST"):
            return told
        return answer(200, {"items": [made(POD, "u-1")]}) if "limit" in line else answer(200, made(POD, "u-1"))

    async with on_a_port(reply) as (answers, url):
        outcome = await PodEviction(PodConfig(POD), cluster=ClusterClient(url, account, {}), environ={}).stop(1.0)
        assert (outcome.is_done, outcome.facts) == (is_done, facts), outcome
        assert TOKEN not in outcome.message
        assert [line.split("?")[0] for line in answers.lines] == [
            f"GET /api/v1/namespaces/llm/pods/{POD}", "GET /api/v1/namespaces/llm/pods", f"POST {EVICTION}"
        ]  # fmt: skip


@each(
    "told",
    [
        None, answer(200, []), answer(200, {"metadata": 5}), answer(200, {"metadata": {"uid": "x" * 100, "name": POD}}),
        answer(404, {"message": "a proxy's own page"}), answer(200, made("another", "u-1")), answer(401, {}), b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
    ],
)  # fmt: skip
@in_loop
async def test_answers_that_say_nothing(account: str, told: Answer) -> None:
    """Nobody knows whether the pod is there, and nothing is asked for."""
    async with on_a_port(lambda _: told) as (answers, url):
        engine = PodEviction(PodConfig(POD), cluster=ClusterClient(url, account, {}), environ={})
        assert await engine.is_running() is None
        assert (await engine.stop(1.0)).is_done is None
        assert (await engine.start()).is_done is None
        assert not [line for line in answers.lines if line.startswith("POST")]


def test_names_and_places(account: str) -> None:
    """What cannot be a pod's name is refused at once, a journal that somebody wrote into leads nowhere, and no pod is none."""
    cluster = ClusterClient("http://127.0.0.1:9", account, {})
    engine = PodEviction(PodConfig(POD, uid="u-1"), cluster=cluster, environ={})
    engine.recall({"uid": "../x", "owner": 7, "since": "x", "siblings": "a,/b,c"})
    assert engine._facts() == {"uid": "u-1", "owner": "", "since": "", "siblings": "a,c"}
    wrong = [PodConfig(name) for name in ("", "A", "a/b", "-a", "a?b", "x" * 300)]
    for config in (*wrong, PodConfig(POD, selector="a=b&c"), PodConfig(POD, uid="../x"), PodConfig(POD, "A")):
        with pytest.raises(BadInput):
            PodEviction(config, cluster=cluster, environ={})
    (Path(account) / "token").unlink()
    assert "no token" in asyncio.run(PodEviction(PodConfig(POD), cluster=cluster, environ={}).stop(1.0)).message
    assert asyncio.run(PodEviction(PodConfig(POD), cluster=cluster, environ={}).learn()).facts == {}
