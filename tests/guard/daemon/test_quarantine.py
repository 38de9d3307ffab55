"""Quarantine: a person takes a pod away from its Service and its owner; one at a time, and it ends."""

from __future__ import annotations

from typing import Any

from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.kubernetes import read_pod
from plimsoll.guard.daemon import quarantine as module
from plimsoll.guard.daemon.quarantine import Quarantine
from tests.cluster_api import ClusterApi, pod
from tests.guard.daemon.drain_world import POLICY, Lock, World, ports_of


async def test_one_pod_loses_its_label_and_is_evicted_at_its_end(account: str, monkeypatch: Any) -> None:
    """The label that was named, and no other; blocked as a restart would be; a later guard ends it by the journal."""
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    api, world, now = ClusterApi(), World(), [1_000.0]
    pods = {name: read_pod(api.put("/pods", pod(name, labels={"x": "y"}))) for name in ("a", "b")}
    async with api.serving():

        def made() -> Quarantine:
            cluster = ClusterClient(api.url, account)
            ports = ports_of(world, Lock(world, "me"))._replace(wall=lambda: now[0])
            return Quarantine("app", ports, POLICY, cluster, pods.get, lambda: world.entries)

        here = made()
        assert "no pod" in (await here.begin("c", 600.0, "alice")).message
        world.engines = [one._replace(rollout="a rollout is in progress") for one in world.engines]
        assert (await here.begin("a", 600.0, "alice")).message == "a rollout is in progress"
        world.engines = [one._replace(rollout="") for one in world.engines]
        taken = await here.begin("a", 600.0, "alice")
        assert taken.is_done, taken
        about = api.kind("/pods")["llm", "a"]["metadata"]
        assert about["labels"] == {"x": "y"}
        assert about["annotations"] == {"plimsoll.dev/quarantined": "1600 by alice"}
        assert (await here.begin("b", 600.0, "bob")).message == "a is in quarantine: one at a time"
        await here.look()
        assert "deletionTimestamp" not in about
        now[0] = 1_601.0
        await made().look()
        assert "deletionTimestamp" in api.kind("/pods")["llm", "a"]["metadata"]
        assert made().held() is None
        api.may = lambda call: call.verb != "patch"
        refused = await here.begin("b", 600.0, "bob")
        assert (refused.is_done, "may not do that" in refused.message, here.held()) == (False, True, None)
        assert world.holder == "", "the lock is given back each time"
