"""Guard as it is typed, over three stand-ins as pods of a Deployment, in an API server that the test plays.

The pods are real processes with the gate and the probe; a toy controller replaces those that are evicted, endpoints follow
readiness, and clients send each request to a pod that is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from lab.guard.command import Guard, begun, closed, told
from lab.guard.pods import Clients, StandIns
from plimsoll.assets.settings import Cluster
from plimsoll.guard.act.journal_entry import APPROVAL, CLOSED, INTENT, OUTCOME
from plimsoll.guard.adapters.cluster import LEASE_NAME
from tests.assets.roles import Right, rights_of, role_objects
from tests.cluster_api import TOKEN, Call, ClusterApi, Trouble, status_of
from tests.real.small_farm import until

Record = Callable[[str, object], None]
PODS = Path(__file__).with_name("guard_of_pods.toml").read_text(encoding="utf-8")
POLICY = '[policy.saturated]\nwait = "10m"\n[policy.slow]\ntakes = "5m"\n[policy.wedged]\nstill = "10s"\n'
RESTART_S = 240.0
SLOW = {"lock": ("get", "leases"), "drain": ("get", "pods"), "stop": ("create", "pods/eviction"), "start": ("list", "pods")}
"""Calls that are answered late, so that guard can be killed in a step that is short."""


class Roles:
    """The Roles that `plimsoll assets --for guard` writes with these components; calls are allowed by them alone."""

    def __init__(self, *parts: str) -> None:
        self.rights = rights_of(role_objects(Cluster(namespaces=("llm",)), parts))

    def allow(self, call: Call) -> bool:
        at = (call.verb, call.group, call.resource, call.namespace)
        return any(Right(*at, name) in self.rights for name in ("", call.name))

    def differ(self, calls: Sequence[Call]) -> set[tuple[str, str, str]]:
        """Kinds of calls that were made and are not allowed, and those that are allowed and were not made."""
        return {(one.verb, one.group, one.resource) for one in calls} ^ {(r.verb, r.group, r.resource) for r in self.rights}


ACTING = Roles("observe", "act", "nodes")
NEVER_CALLED = {("get", "apps", "statefulsets")}  # the fleet is a Deployment's


class Scene:
    """The API server, the fleet, and guards that reach the cluster by a kubeconfig."""

    def __init__(self, folder: Path, api: ClusterApi, fleet: StandIns) -> None:
        self.folder, self.api, self.fleet = folder, api, fleet
        self._guards: list[Guard] = []

    async def guard(self, name: str = "guard", act: str = "", api: str = "", pods: str = "") -> Guard:
        (self.folder / "kube.token").write_text(TOKEN, encoding="ascii")
        context = {"cluster": "c", "user": "u", "namespace": "llm"}
        tree = {
            "current-context": "here", "contexts": [{"name": "here", "context": context}],
            "clusters": [{"name": "c", "cluster": {"server": self.api.url}}],
            "users": [{"name": "u", "user": {"tokenFile": "kube.token"}}],
        }  # fmt: skip
        (self.folder / "kubeconfig").write_text(json.dumps(tree), encoding="utf-8")
        words = ("--kubeconfig", str(self.folder / "kubeconfig"))
        guard = Guard(self.folder / name, [PODS.format(pods=pods)], policy=POLICY, act=act, api=api, words=words)
        self._guards.append(guard)
        await guard.start()
        await self.sees_all(guard)
        return guard

    async def sees_all(self, guard: Guard) -> None:
        """Until guard has looked at every pod that is ready."""

        async def sees() -> bool:
            with contextlib.suppress(ValueError, KeyError):
                engines = {one["name"]: one for one in json.loads((await guard.ctl("status", "--json"))[1])["engines"]}
                return all(engines.get(f"llm/{name}", {}).get("looks", 0) > 1 for name in self.fleet.endpoints())
            return False

        await until(sees, 60)

    async def close(self) -> None:
        for guard in self._guards:
            await guard.kill()


@contextlib.asynccontextmanager
async def scene(*, replicas: int = 3, net: int = 11, roles: Roles = ACTING) -> AsyncIterator[Scene]:
    api = ClusterApi()
    api.may, api.pieces = roles.allow, 900
    with tempfile.TemporaryDirectory(prefix="plimsoll-pods-") as folder:
        fleet = StandIns(api, Path(folder), replicas=replicas, net=net)
        here = Scene(Path(folder), api, fleet)
        async with api.serving(), fleet.running():
            try:
                yield here
            finally:
                await here.close()


async def said(guard: Guard, *words: str) -> str:
    """What guardctl prints, which must be accepted."""
    code, printed = await guard.ctl(*words)
    assert code == 0, printed
    return printed


@pytest.mark.once
@pytest.mark.timeout(900)
async def test_of_500_requests_only_those_inside_the_wedged_engine_are_lost(record_property: Record) -> None:
    """Guard finds the pods, sheds, restarts one on request, waits for a disruption budget, and evicts one that is wedged.

    The Role allows exactly the calls that were made: none was refused, and each that it allows was made.
    """
    async with scene() as here:
        guard = await here.guard()
        load = Clients(here.fleet, tokens=8)
        first, second, third = sorted(here.fleet.endpoints())
        await said(guard, "shed", f"llm/{third}", "--yes")
        await guard.until(lambda entries: closed(entries, "done", "shed") == 1, 60)
        refusals = iter([
            (429, status_of(429, details={"causes": [{"reason": "DisruptionBudget"}]}), {"Retry-After": "1"}),
            (429, status_of(429, "busy"), {"Retry-After": "2"}),
        ])  # fmt: skip
        here.api.evicts = lambda _: next(refusals, None)
        here.api.forget()
        await said(guard, "restart", f"llm/{first}", "--yes")
        entries = await guard.until(lambda entries: closed(entries) == 1, RESTART_S)
        assert closed(entries, "done") == 1, told(entries)
        assert [lost for lost in load.lost if lost.pod] == []
        await here.fleet.until_ready(3)
        await here.fleet.fault(second, "wedge")
        entries = await guard.until(lambda entries: closed(entries) == 2, RESTART_S)
        await here.fleet.until_ready(3)
        while load.done + len(load.lost) < 500:
            await asyncio.sleep(0.5)
        lost = await load.end()
        assert {one.pod for one in lost} <= {second}, lost
        assert first not in here.fleet.processes or here.fleet.processes[first].returncode == 0, "it was not killed"
        evictions = [call.name for call in here.api.calls if call.resource == "pods/eviction"]
        assert evictions == [first, first, first, second]
        assert [one.fields["end"] for one in entries if one.kind == CLOSED] == ["done"] * 3
        assert here.api.refused == []
        assert ACTING.differ(here.api.calls) == NEVER_CALLED
        assert {call.name for call in here.api.calls if call.resource == "leases"} <= {"", LEASE_NAME}
        record_property("figures", f"{load.done} requests answered, {len(lost)} lost, all of them with {second}")


@pytest.mark.timeout(900)
async def test_people_with_tokens_of_the_cluster_approve_and_quarantine(record_property: Record) -> None:
    """Who may evict the pod may approve; guard's own token changes meanwhile; a pod without its label is out until its end.

    With every component the Roles allow exactly the calls that were made.
    """
    roles = Roles("observe", "act", "nodes", "quarantine", "identities")
    async with scene(replicas=2, net=40, roles=roles) as here:
        here.api.reviews = {f"the-token-of-{name}": {"username": name, "groups": ["dev"]} for name in ("alice", "bob")}
        here.api.may_user = lambda user, what: user == "alice" and what["namespace"] == "llm"
        quarantine = 'quarantine_label = "app"\nquarantine = "1m"\n'
        guard = await here.guard(act='approve = ["restart"]', api="kubernetes = true", pods=quarantine)

        async def ask(who: str, *words: str) -> tuple[int, str]:
            file = here.folder / f"{who}.token"
            file.write_text(f"the-token-of-{who}", encoding="ascii")
            file.chmod(0o600)
            return await guard.ctl(*words, "--token-file", str(file))

        first, second = sorted(here.fleet.endpoints())
        await here.fleet.fault(second, "wedge")
        entries = await guard.until(lambda entries: any(one.kind == APPROVAL for one in entries), 120)
        (question,) = [one.action for one in entries if one.kind == APPROVAL]
        code, printed = await ask("bob", "approve", question)
        assert (code, "bob may not create pods/eviction" in printed) == (2, True), printed
        assert here.api.evicted == []
        assert (await ask("alice", "approve", question))[0] == 0
        here.api.tokens.add("the-next-token")
        (here.folder / "kube.token").write_text("the-next-token", encoding="ascii")
        here.api.cut_watches()
        entries = await guard.until(closed, RESTART_S)
        here.api.tokens.remove(TOKEN)
        answers = [(one.step, one.fields.get("who")) for one in entries if one.kind == APPROVAL]
        assert answers == [("asked", None), ("approved", "alice")]
        assert here.api.evicted == [second]
        events = [one["message"] for one in here.api.kind("/events").values()]
        assert any(f"guardctl approve {question}" in one for one in events), events
        await here.fleet.until_ready(2)
        await here.sees_all(guard)
        assert (await ask("alice", "quarantine", f"llm/{first}", "--yes"))[0] == 0
        assert "app" not in here.api.kind("/pods")["llm", first]["metadata"]["labels"]
        await here.fleet.until_ready(2)
        assert first not in here.fleet.endpoints()
        assert here.fleet.processes[first].returncode is None, "it lives on for inspection"
        code, printed = await ask("alice", "quarantine", f"llm/{min(here.fleet.endpoints())}", "--yes")
        assert (code, "one at a time" in printed) == (1, True), printed
        await until(lambda: here.api.evicted != [second], 150)
        assert here.api.evicted == [second, first], "guard ends it: nobody else would"
        assert here.api.refused == []
        assert roles.differ(here.api.calls) == NEVER_CALLED
        record_property("figures", "; ".join(f"{who} {step}" for step, who in answers))


STEPS = {"lock": "undone", "drain": "undone", "idle": "undone", "stop": "done", "start": "done", "ready": "done",
         "probation": "done"}  # fmt: skip
"""Steps in which guard is killed, and how the next guard ends the restart."""


async def killed_in(step: str, net: int) -> int:
    """One restart whose guard is killed in this step, in a fleet of its own; how many requests were answered meanwhile."""
    for _ in range(3):  # a step may be over before its kill comes
        if (answered := await _killed_once(step, net)) is not None:
            return answered
    raise AssertionError(f"{step} was over before guard could be killed, three times")


async def _killed_once(step: str, net: int) -> int | None:
    async with scene(replicas=2, net=net) as here:
        guard = await here.guard()
        load = Clients(here.fleet, count=2, tokens=4, pause_s=0.5)
        pod = min(here.fleet.endpoints())
        if step in SLOW and step != "start":
            here.api.troubles.append(Trouble(*SLOW[step], wait_s=6.0))
        await said(guard, "restart", f"llm/{pod}", "--yes")
        if step == "start":
            await guard.until(lambda entries: begun(entries, "idle"), RESTART_S)
            here.api.troubles.append(Trouble(*SLOW[step], wait_s=6.0))
        entries = await guard.until(lambda entries: begun(entries, step) or closed(entries), RESTART_S)
        if closed(entries):
            await load.end()
            return None
        await guard.kill()
        if step in ("idle", "stop", "ready", "probation"):  # its node is gone: the next one knows what stands beside the Lease
            shutil.rmtree(guard.folder / "state")
        await guard.start()
        entries = await guard.until(closed, RESTART_S)
        assert [one.fields["end"] for one in entries if one.kind == CLOSED] == [STEPS[step]], (step, told(entries))
        await here.fleet.until_ready(2)
        assert [lost for lost in await load.end() if lost.pod] == [], (step, guard.log())
        assert here.api.evicted == ([pod] if STEPS[step] == "done" else []), step
        assert here.api.refused == [], step
        return load.done


@pytest.mark.once
@pytest.mark.timeout(900)
async def test_a_guard_that_is_killed_at_each_step_is_followed_by_one_that_ends_it(record_property: Record) -> None:
    """No pod stays drained, none is evicted twice for one restart, no request is lost. Seven fleets at once, a kill in each."""
    began_s = time.monotonic()
    kills = (killed_in(step, 20 + place) for place, step in enumerate(STEPS))
    answered = dict(zip(STEPS, await asyncio.gather(*kills, return_exceptions=True), strict=True))
    wrong = {step: found for step, found in answered.items() if not isinstance(found, int)}
    assert not wrong, "\n\n".join(f"{step}: {type(found).__name__}: {found}" for step, found in wrong.items())
    record_property("figures", f"requests, none lost: {answered}; {STEPS}; {time.monotonic() - began_s:.0f} s")


@pytest.mark.once
@pytest.mark.timeout(900)
async def test_two_guards_on_one_lease(record_property: Record) -> None:
    """A wedged pod is evicted once; two restarts asked for at once are done one after the other or not at all."""
    async with scene() as here:
        one, two = await here.guard("one"), await here.guard("two")
        first, second, third = sorted(here.fleet.endpoints())
        await asyncio.gather(*(guard.ctl("restart", f"llm/{pod}", "--yes") for guard, pod in ((one, first), (two, second))))
        for guard in (one, two):
            await guard.until(lambda entries: closed(entries) == len([e for e in entries if e.kind == "opened"]), RESTART_S)
        spans = [
            (entry.at, entry.kind == INTENT) for guard in (one, two) for entry in guard.journal()
            if (entry.kind == INTENT and entry.step == "stop") or (entry.kind == OUTCOME and entry.step == "ready")
        ]  # fmt: skip
        away = 0
        for _, is_stop in sorted(spans):
            away += 1 if is_stop else -1
            assert away <= 1, "two were out at once"
        await here.fleet.until_ready(3)
        load = Clients(here.fleet, count=3, tokens=4, pause_s=0.2)
        await here.fleet.fault(third, "wedge")
        await until(lambda: third not in here.fleet.endpoints() and len(here.fleet.endpoints()) == 3, RESTART_S)
        evictions = [call.name for call in here.api.calls if call.resource == "pods/eviction"]
        assert evictions.count(third) == 1
        assert len(evictions) == len(set(evictions))
        assert {lost.pod for lost in await load.end()} <= {third}
        record_property("figures", f"evicted, each once: {evictions}")
