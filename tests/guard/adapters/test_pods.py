"""Pods as engines, found in an API server that the test plays (tests/cluster_api.py): lists, watches, owners, nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from plimsoll.guard.adapters import pods as pods_module
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.kubernetes import Owner, node_leaving, read_owner, read_pod
from plimsoll.guard.adapters.pods import PodFinder, PodsConfig, PodStanding
from tests.cluster_api import TOKEN, ClusterApi, Trouble, deployment, owned_by, pod, status_of
from tests.each import cases, each, in_loop, sure, trees


@contextlib.asynccontextmanager
async def found_in(
    api: ClusterApi, account: str, asked: PodsConfig
) -> AsyncIterator[tuple[PodFinder, Callable[[], list[str]]]]:
    """A finder that follows this API server, and the names of what it has found."""
    async with api.serving():
        finder = PodFinder(asked, ClusterClient(api.url, account), 0.1)
        await finder.refresh()
        following = asyncio.create_task(finder.follow(lambda: None))
        try:
            yield finder, lambda: sorted(engine.name for engine in finder.engines())
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def vllm(api: ClusterApi, *pods: dict[str, Any]) -> None:
    """A Deployment, its ReplicaSet, a node and these pods."""
    api.put("apps/deployments", deployment("vllm", 3))
    owner = owned_by("Deployment", "vllm", "uid-of-vllm")
    meta = {"name": "vllm-5f7", "namespace": "llm", "uid": "uid-of-vllm-5f7", "ownerReferences": owner}
    api.put("apps/replicasets", {"kind": "ReplicaSet", "metadata": meta})
    api.put("/nodes", {"metadata": {"name": "node-1"}, "spec": {}})
    for one in pods:
        api.put("/pods", one)


@in_loop
async def test_pods_are_listed_page_by_page_and_then_followed(account: str) -> None:
    """Of several namespaces, in answers that come in pieces; running ones with an address, and not those being deleted."""
    api = ClusterApi()
    api.page, api.pieces = 2, 7
    one_port = {"containers": [{"ports": [{"containerPort": 7}]}]}
    for one in (
        pod("a"), pod("v6", address="fd00::1"), pod("starting", status={"phase": "Pending"}), pod("bare", address=""),
        pod("going", deletionTimestamp="2026-01-01T00:00:00Z"), pod("one", spec=one_port),
    ):  # fmt: skip
        api.put("/pods", one)
    api.put("/pods", pod("b", namespace="chat"))
    api.put("/pods", pod("other", labels={"app": "other"}))
    async with found_in(api, account, PodsConfig("app=vllm", ("llm", "chat"), scheme="https")) as (finder, names):
        assert names() == ["chat/b", "llm/a", "llm/one", "llm/v6"]
        urls = {engine.name: engine.url for engine in finder.engines()}
        assert (urls["llm/v6"], urls["llm/one"]) == ("https://[fd00::1]:8000", "https://10.0.0.9:7")
        api.put("/pods", pod("c", namespace="chat"))
        await until(lambda: "chat/c" in names())
        api.drop("/pods", "llm", "a")
        api.put("/pods", pod("b", namespace="chat", deletionTimestamp="now"))
        await until(lambda: names() == ["chat/c", "llm/one", "llm/v6"])
        assert finder.left["chat/b"] == "its pod is being deleted"
        assert finder.left["llm/a"] == "its pod is gone"
        assert not finder.trouble
    lists = [call for call in api.calls if call.verb == "list"]
    assert len(lists) == 4, "three pages of one, one of the other, and no polling"
    assert not finder.is_acting
    assert {call.resource for call in api.calls} == {"pods"}, "an observing guard asks for nothing else"


@in_loop
async def test_a_watch_goes_on_where_it_ended_or_begins_anew(account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut connection costs no list; 410 Gone, as a status or as an event, and a time without the server cost one."""
    monkeypatch.setattr(pods_module, "FIRST_PAUSE_S", 0.05)
    api = ClusterApi()
    async with found_in(api, account, PodsConfig("app=vllm")) as (finder, names):

        def lists() -> int:
            return len([call for call in api.calls if call.verb == "list"])

        async def sees(name: str) -> None:
            api.put("/pods", pod(name))
            await until(lambda: f"llm/{name}" in names())

        await sees("a")
        before = lists()
        api.cut_watches()
        await sees("b")
        api.forget()
        await sees("c")
        assert lists() == before + 1, "after the event"
        api.troubles.append(Trouble("watch", "pods", 410))
        api.cut_watches()
        await sees("d")
        api.tokens = {"another"}
        api.cut_watches()
        await until(lambda: "it answers 401" in finder.trouble)
        assert names() == ["llm/a", "llm/b", "llm/c", "llm/d"], "the last list stays in use"
        api.put("/pods", pod("e"))
        (Path(account) / "token").write_text("another")
        await until(lambda: "llm/e" in names())
        assert not finder.trouble


@each(
    ("trouble", "says"),
    [
        (Trouble("list", "pods", 403), "it answers 403: the service account may not do that"),
        (Trouble("list", "pods", 500), "it answers 500"),
        (Trouble("list", "pods", 200, body={"items": 3}), "it answers no list of pods"),
        (Trouble("list", "pods", 200, body={"items": [], "metadata": {"continue": "0"}}), ""),
        (Trouble("list", "pods", 429, {"Retry-After": "1"}), "it answers 429"),
        (Trouble("list", "pods", wait_s=3.0), "did not answer within 0.5 s"),
    ],
)
@in_loop
async def test_a_cluster_in_trouble(trouble: Trouble, says: str, account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each, without the token; and it is asked again."""
    monkeypatch.setattr("plimsoll.guard.adapters.cluster.DEADLINE_S", 0.5)
    monkeypatch.setattr(ClusterClient.ask, "__defaults__", (None, 0.5))
    api = ClusterApi()
    api.put("/pods", pod("a"))
    api.troubles.append(trouble)
    async with found_in(api, account, PodsConfig("app=vllm")) as (finder, names):
        assert says in finder.trouble
        assert TOKEN not in finder.trouble
        assert not says or finder.trouble.endswith("the last list stays in use")
        await until(lambda: names() == ["llm/a"])
        assert not finder.trouble


@in_loop
async def test_restarts_and_ends_of_pods(account: str) -> None:
    """Counted by the cluster, for the container that serves; an end is told only where nobody starts it again."""
    bare = {"containers": [{"name": "vllm", "ports": [{"containerPort": 8000}]}, {"name": "side"}], "restartPolicy": "Never"}
    counts = [{"name": "vllm", "restartCount": 3}, {"name": "side", "restartCount": 9}]
    killed = [{"name": "vllm", "restartCount": 3, "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]
    failed = {"phase": "Failed", "containerStatuses": killed}
    api = ClusterApi()
    api.put("/pods", pod("a", owner=None, spec=bare, status={"containerStatuses": counts}))
    api.put("/pods", pod("b", status={"containerStatuses": counts}))
    api.put("/pods", pod("d", owner=None, spec=bare))
    api.put("/pods", pod("e", owner=("Job", "j", "u"), spec=bare))
    async with found_in(api, account, PodsConfig("app=vllm")) as (finder, names):
        assert (finder.restarts, finder.ended) == ({"llm/a": 3, "llm/b": 3}, {})
        api.put("/pods", pod("a", owner=None, spec=bare, status=failed))
        api.put("/pods", pod("d", owner=None, spec=bare, status={"phase": "Failed", "reason": "Evicted"}))
        for name in ("never-seen", "e"):
            api.put("/pods", pod(name, owner=None if name != "e" else ("Job", "j", "u"), spec=bare, status=failed))
        await until(lambda: names() == ["llm/a", "llm/b", "llm/d"])
        assert finder.ended == {
            "llm/a": "its container ended with exit code 137 (OOMKilled) and is not started again: restartPolicy is Never",
            "llm/d": "its pod is over (Evicted), and restartPolicy is Never",
        }


@in_loop
async def test_what_the_cluster_says_against_acting(account: str) -> None:
    """A rollout, a scale to zero, a drained or taken node, a disruption, a missing right: each is known and said."""
    api = ClusterApi()
    vllm(api, pod("a"))
    async with found_in(api, account, PodsConfig("app=vllm", act=True)) as (finder, _):

        def standing() -> Any:
            return finder.standing("llm/a")

        await until(lambda: standing().wanted == 3)
        assert standing() == PodStanding("llm/Deployment/vllm", wanted=3)
        api.put("apps/deployments", deployment("vllm", 3, updatedReplicas=1))
        await until(lambda: standing().rollout)
        assert standing().rollout == "a rollout of Deployment vllm is in progress: 1 of 3 pods are of its new version"
        api.put("apps/deployments", deployment("vllm", 3, readyReplicas=2))
        await until(lambda: standing().missing == 1)
        assert not standing().rollout
        api.put("apps/deployments", deployment("vllm", 0))
        await until(lambda: standing().leaving == "Deployment vllm is scaled to zero")
        api.put("apps/deployments", deployment("vllm", 5, readyReplicas=3))
        await until(lambda: standing().wanted == 5)
        assert standing().missing == 0, "an autoscaler that flaps: fewer were wanted a moment ago"
        api.put("/nodes", {"metadata": {"name": "node-1"}, "spec": {"unschedulable": True}})
        await until(lambda: standing().cordoned == "its node node-1 is cordoned")
        taints = [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]
        api.put("/nodes", {"metadata": {"name": "node-1"}, "spec": {"taints": taints}})
        await until(lambda: standing().leaving)
        assert standing().leaving == "its node node-1 has the taint karpenter.sh/disrupted: Karpenter removes it"
        api.put("/nodes", {"metadata": {"name": "node-1"}, "spec": {}})
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        api.put("/pods", pod("a", status={"conditions": [condition]}))
        await until(lambda: "PreemptionByScheduler" in standing().leaving)
    api.may = lambda call: call.resource not in ("nodes", "deployments")
    api.calls.clear()
    async with found_in(api, account, PodsConfig("app=vllm", act=True)) as (finder, _):
        assert (
            "whether a rollout of Deployment vllm is in progress is not known: it answers 403"
            in finder.standing("llm/a").observed
        )
        await asyncio.sleep(0.5)
        assert len([call for call in api.calls if call.resource == "nodes"]) == 1, (
            "a missing right is not asked for again and again"
        )


@each(("about", "says"), cases("guard", "pods that are only observed"))
def test_pods_that_are_only_observed(about: dict[str, Any], says: str) -> None:
    """What serves together with others is never restarted one pod at a time."""
    found = read_pod(pod("a", **about)).observed
    assert (says in found) if says else not found, found


@each(("kind", "status", "spec", "says"), cases("guard", "rollouts"))
def test_rollouts(kind: str, status: dict[str, Any], spec: dict[str, Any], says: str) -> None:
    """By the counts of the owner; a change that its controller has not seen yet is one, too."""
    item = {"metadata": {"uid": "u", "generation": 2}, "spec": spec, "status": {"observedGeneration": 2, **status}}
    found = sure(read_owner(Owner(kind, "vllm", "u"), item))
    assert (says in found.rollout) if says else not found.rollout
    assert read_owner(Owner(kind, "vllm", "another"), item) is None


_KEYS = ["metadata", "spec", "status", "containers", "ports", "containerPort", "containerStatuses", "restartCount", "state",
         "terminated", "exitCode", "phase", "restartPolicy", "ownerReferences", "podIP", "name", "labels", "args", "conditions",
         "type", "controller", "kind", "uid", "taints", "key", "replicas", "ray.io/cluster", "creationTimestamp"]  # fmt: skip


@given(trees(_KEYS, 25, ["Failed", "Running", "Never"]))
def test_any_answer_is_read(item: Any) -> None:
    """Whatever the cluster shows, reading it raises nothing, and what is shown of it is one printable line."""
    found = read_pod(item)
    assert 0 < found.port < 65_536
    assert found.restarts is None or found.restarts >= 0
    assert (found.observed + found.disrupted + found.node + found.uid).isprintable()
    table = item if isinstance(item, dict) else {}
    assert node_leaving(table)[0].isprintable()
    read_owner(Owner("Deployment", "a", "u"), table)


@in_loop
async def test_events_that_are_none_are_left_out(account: str) -> None:
    """Lines that are no JSON, objects without a name, a type that nobody knows: the watch goes on."""
    api = ClusterApi()
    async with found_in(api, account, PodsConfig("app=vllm")) as (finder, names):
        for event in (
            {},
            {"type": "ADDED", "object": 5},
            {"type": "WHAT", "object": pod("x")},
            {"type": "ADDED", "object": {}},
        ):
            assert not finder._take("llm", event)
        finder._take("llm", {"type": "ERROR", "object": status_of(500)})
        api.cut_watches()
        api.put("/pods", pod("a"))
        await until(lambda: names() == ["llm/a"])
