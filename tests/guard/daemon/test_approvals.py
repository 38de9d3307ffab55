"""Approval: guard asks once, waits up to a bound, judges once more, and keeps who said what."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

from lab.guard.acting import State, World
from lab.guard.acting_lives import POLICY, MemoryBook
from lab.guard.acting_parts import ENGINE
from lab.guard.acting_play import ends, play, says, view_of
from plimsoll.guard.act.decide import ASKED, ActionPlan, BlockedAction, FleetView, consider
from plimsoll.guard.act.journal_entry import APPROVAL, OPENED, Entry
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.steps import BROKEN
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.identities import ClusterIdentities
from plimsoll.guard.adapters.kubernetes import read_pod
from plimsoll.guard.daemon.approvals import Approval, Approvals, ApprovalState, read_approvals
from plimsoll.guard.daemon.conductor import Conductor
from plimsoll.guard.judge.tracker import Grade
from plimsoll.net.server import HttpAnswer
from tests.cluster_api import ClusterApi, pod
from tests.each import cases

WITH_APPROVAL = ActPolicy(approve=(Grade.RESTART,), approve_within_s=600.0)


class Desk:
    """Approvals over a journal in memory, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.said = 1_000.0, list[str]()
        self.entries: list[Entry] = []
        names = itertools.count(1)
        self.approvals = Approvals(
            self, lambda: self.entries, WITH_APPROVAL, lambda: self.now, lambda: f"{next(names):x}", self._hear
        )  # fmt: skip

    def append(self, kind: str, **more: object) -> Entry:
        entry = Entry(len(self.entries) + 1, self.now, kind, **more)  # type: ignore[arg-type]
        self.entries.append(entry)
        return entry

    def kept(self) -> list[Entry]:
        return self.entries

    def _hear(self, one: Approval, text: str) -> None:
        self.said.append(f"{one.state}: {text}")

    def turn(self, *plans: ActionPlan) -> list[str]:
        """The ids under which these may begin."""
        return [plan.action for plan in self.approvals.allowed(plans, plans)]


PLAN = ActionPlan("a", Grade.RESTART, "dead", "it is dead", BROKEN, needs_approval=True)


def test_asked_once_let_through_under_the_same_id_and_odd_entries_left_out() -> None:
    """Approved, it begins with who approved it in its reason; a later failure is another question; what is odd asks nobody."""
    desk = Desk()
    assert [desk.turn(PLAN), desk.turn(PLAN)] == [[], []]
    assert len(desk.said) == 1
    assert "it is dead; guardctl approve 1, or guardctl deny 1" in desk.said[0]
    assert "guardctl approve 1" in desk.approvals.needs()["a"]
    assert desk.approvals.decide("1", is_approved=True, who="alice")[1] == ""
    (plan,) = desk.approvals.allowed([PLAN], [PLAN])
    assert (plan.action, plan.why) == ("1", "it is dead (approved by alice)")
    assert desk.approvals.decide("1", is_approved=False, who="bob")[1] == "it waits no longer: approved by alice"
    desk.append(OPENED, engine="a", action="1")
    assert desk.turn(PLAN) == []
    assert [one.id for one in desk.approvals.pending()] == ["2"]
    assert desk.turn(PLAN._replace(engine="b", needs_approval=False)) == [""], "what needs no approval goes on"
    entries = [
        Entry(n, 1.0, APPROVAL, "a", f"{n}", step, fields) for n, (step, fields) in enumerate(cases("guard", "no approvals"))
    ]
    assert read_approvals(entries) == {}
    assert Approval("1", "a", Grade.RESTART, "", 0.0, 5.0, ApprovalState.USED).is_pending(1.0) is False


def test_denied_expired_or_over() -> None:
    """Each is kept with who; nobody is asked again for as long as the bound, and an old approval lets nothing through."""
    desk = Desk()
    desk.turn(PLAN)
    desk.approvals.decide("1", is_approved=False, who="alice")
    desk.now += 599
    assert desk.turn(PLAN) == []
    assert len(desk.said) == 2, "not asked again"
    desk.now += 1
    desk.turn(PLAN)
    desk.now += 600
    assert desk.turn(PLAN) == []
    assert desk.said[-1] == "expired: restart was not approved within 10 min: not done"
    assert desk.approvals.decide("2", is_approved=True, who="late")[1] == "it waits no longer: expired"
    desk.now += 600
    desk.turn(PLAN)
    desk.approvals.decide("3", is_approved=True, who="alice")
    desk.now += 601
    assert desk.turn(PLAN) == [], "what was approved an hour ago is not done now"
    desk.now += 600
    desk.turn(PLAN)
    for _ in range(3):
        desk.now += 30
        desk.turn()
    assert desk.said[-1] == "withdrawn: restart needs no approval any more: nothing calls for it"
    steps = [(entry.step, entry.fields.get("who", "")) for entry in desk.entries if entry.kind == APPROVAL]
    assert steps == [
        ("asked", ""), ("denied", "alice"), ("asked", ""), ("expired", ""), ("asked", ""), ("approved", "alice"), ("asked", ""),
        ("withdrawn", ""),
    ]  # fmt: skip
    assert desk.approvals.decide("77", is_approved=True, who="x")[0] is None


def test_the_conductor_waits_judges_once_more_and_acts() -> None:
    """Nothing is stopped before the answer; what is over by then is not done; the next guard knows the question."""
    world, book, policy = World(State("down")), MemoryBook(), replace(POLICY, approve=(Grade.RESTART,))
    seen = [view_of("dead")]

    async def asks(conductor: Conductor) -> None:
        for _ in range(3):
            await conductor.turn()
            conductor.help_broken()

    def view(_: frozenset[str]) -> FleetView:
        return seen[0]

    play(world, book, asks, policy=policy, view=view)
    assert world.state.starts == 0
    assert "restart waits for approval" in says(world)

    async def answered(conductor: Conductor) -> None:
        (one,) = conductor.approvals.pending()
        conductor.approvals.decide(one.id, is_approved=True, who="alice")
        seen[0] = view_of("dead", is_true=False)
        await conductor.turn()
        assert world.state.starts == 0, "judged once more"
        seen[0] = view_of("dead")
        await conductor.turn()
        while conductor.runs:
            await asyncio.sleep(1.0)

    play(world, book, answered, policy=policy, view=view)
    assert world.state.starts == 1
    assert ends(world)[-1] == "done"
    opened = next(entry for entry in book.kept() if entry.kind == OPENED)
    assert opened.fields["why"] == "it is dead (approved by alice)"
    asked = [entry.step for entry in book.kept() if entry.kind == APPROVAL and entry.action == opened.action]
    assert asked == ["asked", "approved"]


def test_who_asks_has_approved_and_the_only_replica_needs_a_person() -> None:
    """Also against `rungs`; a single replica that is proven dead waits for approval, one that serves is never evicted."""
    view = view_of("dead")
    engine = next(one for one in view.engines if one.name == ENGINE)

    def plan(engine: object, kind: str, policy: ActPolicy) -> ActionPlan | BlockedAction:
        return consider(view, policy, engine, Grade.RESTART, kind, "")  # type: ignore[arg-type]

    assert plan(engine, "dead", WITH_APPROVAL).needs_approval  # type: ignore[union-attr]
    assert not plan(engine, ASKED, WITH_APPROVAL).needs_approval  # type: ignore[union-attr]
    assert plan(engine, "dead", ActPolicy(rungs=(Grade.SHED,))).reason == "RungOff"  # type: ignore[union-attr]
    assert isinstance(plan(engine, ASKED, ActPolicy(rungs=(Grade.SHED,))), ActionPlan)
    assert plan(engine._replace(replicas=1), "dead", ActPolicy()).needs_approval  # type: ignore[union-attr]
    serving = engine._replace(replicas=1, conditions={})
    assert plan(serving, ASKED, ActPolicy(may_be_last=True)).reason == "OneReplica"  # type: ignore[union-attr]


async def test_identities_are_the_clusters(account: str) -> None:
    """Who may evict the pod may act on it, who may get pods everywhere may read; answers are believed for a minute."""
    api, now = ClusterApi(), [0.0]
    api.reviews = {"t-alice": {"username": "alice", "groups": ["dev"]}, "t-ops": {"username": "ops", "extra": {"a": ["b"]}}}
    allowed: dict[str, Callable[[dict[str, str]], bool]] = {
        "alice": lambda what: (what["verb"], what["namespace"]) in (("get", "llm"), ("get", "chat"), ("create", "llm")),
        "ops": lambda what: (what["resource"], what["namespace"], what["name"]) == ("leases", "llm", "watch"),
    }
    api.may_user = lambda user, what: allowed[user](what)
    pods = {f"{space}/a": read_pod(pod("a", namespace=space)) for space in ("llm", "chat")}
    async with api.serving():

        def about(path: str) -> str:
            return path.removeprefix("/v1/engines/").rpartition("/")[0]

        client = ClusterClient(api.url, account)
        who = ClusterIdentities(client, ("llm", "chat"), about, pods.get, lambda: now[0], "watch")

        async def status(token: str, method: str, path: str) -> str | int:
            found = await who.identify(token, method, path)
            return found.status if isinstance(found, HttpAnswer) else found

        for token, method, path, found in cases("guard", "who may do what"):
            assert await status(token, method, path) == found, path
        assert api.asked[-1] == {"user": "ops", "groups": [], "extra": {"a": ["b"]}}
        calls = len(api.calls)
        api.reviews.clear()
        assert await status("t-alice", "GET", "/engines") == "alice"
        assert len(api.calls) == calls
        now[0] = 61.0
        assert await status("t-alice", "GET", "/engines") == 401
        api.may = lambda _: False
        now[0] = 200.0
        assert await status("t-alice", "GET", "/engines") == 503
