"""Events of pods: what is written, how often, and one incident's id over all that belongs together."""

from __future__ import annotations

import asyncio

from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.kubernetes import Pod, read_pod
from plimsoll.guard.adapters.pod_events import BURST, MESSAGE_MAX, PodEvents
from plimsoll.guard.daemon.observer import Incidents
from plimsoll.render.guard import Event, EventKind, alert, event_json
from plimsoll.unknown import Condition, Status
from tests.cluster_api import ClusterApi, pod
from tests.each import in_loop, sure


def event(what: EventKind, message: str = "x", kind: str = "", at: float = 1_000.0, engine: str = "llm/a") -> Event:
    held = Condition(kind, Status.TRUE, "Seen", f"it is {kind}", 0.0) if kind else None
    return Event(at, engine, what, message, held)


@in_loop
async def test_findings_and_actions_are_events_of_the_pod(account: str) -> None:
    """Few, of bounded length, with the incident; a sick card asks to cordon its node; one that has just gone keeps its name."""
    api, now, pods = ClusterApi(), [0.0], {"llm/a": read_pod(pod("a", uid="u-1"))}
    async with api.serving():
        events = PodEvents(ClusterClient(api.url, account), pods.get, lambda: now[0])
        sending = asyncio.create_task(events.run())
        events.put(event(EventKind.BEGINS, "no step", "wedged")._replace(incident="ab12"))
        events.put(event(EventKind.BEGINS, "Xid 79", "card"))
        events.put(event(EventKind.ACTED, "restart because it is stuck " + "y" * 5_000))
        events.put(event(EventKind.LISTED))
        events.put(event(EventKind.NEEDS, engine="not-a-pod"))
        pods.clear()
        events.put(event(EventKind.ACTED, "restart completed"))
        while len(api.kind("/events")) < 4:
            await asyncio.sleep(0.01)
        found = list(api.kind("/events").values())
        assert [(one["reason"], one["type"]) for one in found] == [
            ("EngineWedged", "Warning"), ("CordonRequested", "Warning"), *[("GuardAction", "Normal")] * 2
        ]  # fmt: skip
        assert found[0]["message"].endswith("[incident ab12]")
        assert "kubectl cordon node-1" in found[1]["message"]
        assert all(len(one["message"]) <= MESSAGE_MAX for one in found)
        assert {one["involvedObject"]["uid"] for one in found} == {"u-1"}
        for number in range(40):
            events.put(event(EventKind.ACTED, f"step {number}"))
        assert events.dropped == 40 - (BURST - 4)
        now[0] = 3_600.0
        for _ in range(3):
            events.put(event(EventKind.ACTED, "the same"))
        assert events.dropped == 40 - (BURST - 4) + 2, "what says the same is said once"
        api.may = lambda _: False
        while not events.trouble:
            events.put(event(EventKind.ACTED, f"{now[0]}"))
            now[0] += 60.0
            await asyncio.sleep(0.05)
        assert "may not do that" in events.trouble
        sending.cancel()


def test_a_pod_that_took_the_name_is_another(account: str) -> None:
    """As a StatefulSet makes it: its Events begin anew, with its own uid."""
    pods: dict[str, Pod] = {"llm/a": read_pod(pod("a", uid="u-1"))}
    events = PodEvents(ClusterClient("http://127.0.0.1:9", account), pods.get)
    events.put(event(EventKind.NEEDS))
    pods["llm/a"] = read_pod(pod("a", uid="u-2"))
    events.put(event(EventKind.NEEDS))
    queued = [events._waiting.get_nowait()[1] for _ in range(2)]
    assert [one["involvedObject"]["uid"] for one in queued] == ["u-1", "u-2"]


def test_one_id_from_the_first_trouble_to_the_last() -> None:
    """In events, alerts and the API; what comes after all is well is another incident, and so is another engine's."""
    incidents = Incidents()
    first = incidents.note(event(EventKind.BEGINS, kind="stalled"))
    assert len(first) == 8
    assert incidents.note(event(EventKind.BEGINS, kind="wedged", at=1_010.0)) == first
    assert incidents.note(event(EventKind.ACTED, "restart because", at=1_011.0)) == first
    assert incidents.note(event(EventKind.OVER, kind="stalled", at=1_012.0)) == first
    assert incidents.of("llm/a") == first
    assert incidents.note(event(EventKind.BEGINS, kind="wedged", engine="llm/b")) not in ("", first)
    assert incidents.note(event(EventKind.OVER, kind="wedged", at=1_020.0)) == first
    assert (incidents.of("llm/a"), incidents.note(event(EventKind.ACTED))) == ("", "")
    assert incidents.note(event(EventKind.UNREACHABLE, at=1_030.0)) not in ("", first)
    told = event(EventKind.BEGINS, kind="wedged")._replace(incident=first)
    sent = sure(alert(told, starts_unix_s=1.0, lasts_s=60.0))
    assert sent["annotations"]["incident"] == event_json(told)["incident"] == first  # type: ignore[index]
