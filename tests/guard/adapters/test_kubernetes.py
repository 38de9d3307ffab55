"""Eviction against a Kubernetes API that kmock plays, and against one that answers nonsense; a cluster is not here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kmock
import pytest

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.kubernetes import PodConfig, PodEviction
from tests.each import each, in_loop
from tests.net.raw_answers import Answer, answer, on_a_port

POD, NAMESPACE = "vllm-7d4b9-abcde", "llm"
EVICTION = f"/api/v1/namespaces/{NAMESPACE}/pods/{POD}/eviction"
TOKEN = "a-token-of-a-pod"


@pytest.fixture
def account(tmp_path: Path) -> str:
    """What Kubernetes mounts into every pod."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text(NAMESPACE)
    return str(tmp_path)


def pod(
    name: str, uid: str, *, ready: bool = True, owner: str = "rs-1", kind: str = "ReplicaSet", **meta: str
) -> dict[str, Any]:
    owners = [{"kind": kind, "uid": owner, "controller": True}] if owner else []
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid, "ownerReferences": owners,
                     "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"app": "vllm"}, **meta},
        "status": {"podIP": "10.0.0.9", "conditions": [{"type": "Ready", "status": str(ready)}]},
    }  # fmt: skip


@asynccontextmanager
async def evicting(
    account: str,
    evict: Callable[[Any], Any] | None = None,
    pods: tuple[dict[str, Any], ...] = (pod(POD, "u-1"), pod("vllm-7d4b9-other", "u-2")),
) -> AsyncIterator[tuple[PodEviction, Any, list[Any]]]:
    """With these pods in kmock's cluster, which it gives too; the evictions that were asked for."""
    asked: list[Any] = []
    async with kmock.KubernetesEmulator() as api, kmock.Server(api):
        api.resources["v1/pods"] = kmock.ResourceInfo()
        for one in pods:
            api.objects["v1/pods", NAMESPACE, one["metadata"]["name"]] = one

        def taken(request: Any) -> Any:
            asked.append((request.headers.get("Authorization"), request.data))
            return evict(api) if evict else _gone(api)

        api["post", EVICTION] << taken
        engine = PodEviction(PodConfig(POD), cluster=ClusterClient(str(api.url).rstrip("/"), account, {}), environ={})
        engine.look_every_s = 0.05
        yield engine, api, asked


def _gone(api: Any) -> Any:
    del api.objects["v1/pods", NAMESPACE, POD]
    return {"kind": "Status", "status": "Success"}


@in_loop
async def test_evicted_gone_and_replaced(account: str) -> None:
    """The uid goes along, siblings are no replacement, and the new pod is told with its readiness."""
    async with evicting(account) as (engine, api, asked):
        assert engine.replaces
        assert await engine.is_running() is True
        learned = await engine.learn()
        assert learned.facts == {"uid": "u-1", "owner": "rs-1", "since": "2026-01-01T00:00:00Z", "siblings": "u-1,u-2"}
        stopped = await engine.stop(5.0)
        assert (stopped.is_done, stopped.facts["was_running"]) == (True, True)
        assert await engine.is_running() is False
        assert (await engine.stop(5.0)).facts["was_running"] is False
        waiting = await engine.start()
        assert (waiting.is_done, waiting.facts) == (False, {"waiting": True})
        api.objects["v1/pods", NAMESPACE, "vllm-7d4b9-new"] = pod("vllm-7d4b9-new", "u-3", ready=False)
        assert (await engine.start()).facts["ready"] is False
        api.objects["v1/pods", NAMESPACE, "vllm-7d4b9-new"] = pod("vllm-7d4b9-new", "u-3")
        there = await engine.start()
        assert there.facts == {"pod": "vllm-7d4b9-new", "new_uid": "u-3", "ready": True, "ip": "10.0.0.9"}

        later = PodEviction(PodConfig(POD), cluster=engine._cluster, environ={})
        later.recall(learned.facts)
        assert (await later.start()).facts["new_uid"] == "u-3", "another guard goes on from what was written down"
    assert asked == [
        (
            f"Bearer {TOKEN}",
            {
                "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": POD, "namespace": NAMESPACE},
                "deleteOptions": {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "u-1"}},
            },
        )
    ]  # fmt: skip


@in_loop
async def test_a_pod_of_the_same_name_is_another(account: str) -> None:
    """As a StatefulSet makes it: the old one is gone, the new one is never evicted in its place."""

    def replaced(api: Any) -> Any:
        api.objects["v1/pods", NAMESPACE, POD] = pod(POD, "u-9", kind="StatefulSet")
        return {"kind": "Status", "status": "Success"}

    async with evicting(account, replaced, (pod(POD, "u-1", kind="StatefulSet"),)) as (engine, _, asked):
        assert (await engine.stop(5.0)).is_done
        assert await engine.is_running() is False
        assert (await engine.stop(5.0)).facts["was_running"] is False
        assert (await engine.start()).facts["new_uid"] == "u-9"
    assert len(asked) == 1


@in_loop
async def test_a_pod_that_is_not_evicted(account: str) -> None:
    """One that nobody would replace is left alone; one that somebody else evicted is waited for, and nothing is forced."""
    for found in (pod(POD, "u-1", owner=""), pod(POD, "u-1", kind="Job")):
        async with evicting(account, pods=(found,)) as (engine, _, asked):
            outcome = await engine.stop(5.0)
            assert (outcome.is_done, outcome.facts, asked) == (False, {"bare": True}, [])
    async with evicting(account, pods=(pod(POD, "u-1", deletionTimestamp="2026-01-01T00:00:00Z"),)) as (engine, _, asked):
        outcome = await engine.stop(0.2)
        assert (outcome.is_done, asked) == (None, [])
        assert "still ending" in outcome.message


@each("environ", [{"HOSTNAME": POD}, {"PLIMSOLL_POD": POD, "HOSTNAME": "node-1"}, {"POD_NAME": POD}])
def test_a_sidecar_only_watches(account: str, environ: dict[str, str]) -> None:
    """A guard in the pod itself does not evict it; the same name in another namespace is another pod."""
    cluster = ClusterClient("http://127.0.0.1:9", account, {})
    engine = PodEviction(PodConfig(POD), cluster=cluster, environ=environ)
    for outcome in (asyncio.run(engine.stop(1.0)), asyncio.run(engine.learn())):
        assert (outcome.is_done, outcome.facts) == (False, {"own_pod": True})
    assert not PodEviction(PodConfig(POD, "elsewhere"), cluster=cluster, environ=environ).is_own_pod


LEARNED = {"uid": "u-1", "owner": "rs-1", "since": "2026-01-01T00:00:00Z", "siblings": "u-1"}


def budget(reason: str) -> dict[str, Any]:
    return {"kind": "Status", "code": 429, "message": "Cannot evict pod", "details": {"causes": [{"reason": reason}]}}


@each(
    ("told", "is_done", "facts"),
    [
        (answer(429, budget("DisruptionBudget")), False, {"budget": True, "status": 429}),
        (answer(429, budget("Other")), False, {"budget": False, "status": 429}),
        (answer(403, {"message": "forbidden"}), False, {"status": 403}),
        (answer(302, {}), False, {"status": 302}),
        (answer(500, {"message": "more than one PodDisruptionBudget"}), None, {"status": 500}),
        (b"HTTP/1.1 200", None, LEARNED),
        (None, None, LEARNED),
    ],
)
@in_loop
async def test_evictions_that_are_not_taken(account: str, told: Answer, is_done: bool | None, facts: dict[str, Any]) -> None:
    """A budget, a missing right, a redirect, trouble of the server's own, an answer that is lost."""

    def reply(line: str) -> Answer:
        if line.startswith("POST"):
            return told
        return answer(200, {"items": [pod(POD, "u-1")]}) if "limit" in line else answer(200, pod(POD, "u-1"))

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
        answer(404, {"message": "a proxy's own page"}), answer(200, pod("another", "u-1")), answer(401, {}), b"\x00" * 100,
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
