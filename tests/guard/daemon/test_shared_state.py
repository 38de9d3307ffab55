"""What outlives guard's node: entries of the journal beside the Lease, and a pause that kubectl sets there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hypothesis import given

from plimsoll.guard.act.journal_entry import CLOSED, INTENT, OPENED, OUTCOME, RESTART, SEEN, SWITCH, Entry
from plimsoll.guard.act.journal_replay import PAUSE, open_actions, read_restarts, read_switches
from plimsoll.guard.act.steps import SERVING, Step, open_action, opening_fields
from plimsoll.guard.adapters.locks import LeaseLock
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.shared_state import MOST_LETTERS, SharedState, missing, read_state, written
from plimsoll.guard.judge.tracker import Grade
from tests.cluster_api import ClusterApi
from tests.each import trees

NOW = 1_000_000.0


@contextlib.asynccontextmanager
async def lease(account: str) -> AsyncIterator[tuple[ClusterApi, LeaseLock]]:
    api = ClusterApi()
    async with api.serving():
        yield api, LeaseLock("plimsoll-guard", url=api.url, folder=account, timeout_s=5.0)


def journal(path: Path) -> Journal:
    return Journal(path, clock=lambda: NOW)


def acted(book: Journal, action: str, *steps: str, is_over: bool = False) -> None:
    run = open_action(action, "llm/a", Grade.RESTART, "dead", is_broken=False)
    book.append(OPENED, engine="llm/a", action=action, fields=opening_fields(run))
    for step in steps:
        book.append(INTENT, engine="llm/a", action=action, step=step, fields={"epoch": 1})
        if step == "stop":
            book.append(RESTART, engine="llm/a", action=action, fields={"own": True})
        if step != steps[-1] or is_over:
            book.append(OUTCOME, engine="llm/a", action=action, step=step, fields={"done": True, "facts": {"epoch": 1}})
    if is_over:
        book.append(CLOSED, engine="llm/a", action=action, fields={"end": "done", "grade": "restart", "kind": "dead"})


UP_TO_STOP = ("lock", "evidence", "drain", "idle", "stop")


async def test_the_next_guard_knows_pauses_budgets_and_what_is_open(tmp_path: Path, account: str) -> None:
    """On another node, with an empty journal; a guard that runs takes up no action of another one."""
    async with lease(account) as (api, lock):
        first, later, other = (journal(tmp_path / name / "journal") for name in ("first", "later", "other"))
        acted(first, "a1", *UP_TO_STOP, is_over=True)
        acted(first, "a2", *UP_TO_STOP)
        acted(first, "a3", *map(str, SERVING))  # it is in probation
        first.append(SWITCH, engine="llm/b", step=PAUSE, fields={"on": True, "who": "alice"})
        first.append(SEEN, engine="llm/a", fields={"started": 5.0})
        assert await SharedState(first, lock, lambda: NOW).save() == ""
        annotation = api.kind("coordination.k8s.io/leases")["llm", "plimsoll-guard"]["metadata"]["annotations"]
        assert "a2" in annotation["plimsoll.dev/journal"]
        next_lock = LeaseLock("plimsoll-guard", url=api.url, folder=account)
        state = SharedState(later, next_lock, lambda: NOW)
        await state.begin()
        kept = later.kept()
        assert read_switches(kept).paused == {"llm/b"}
        assert len(read_restarts(kept)) == 3
        still = [(run.action, run.step, run.is_down) for run in open_actions(kept)]
        assert still == [("a2", Step.STOP, True), ("a3", Step.PROBATION, True)]
        assert not [one for one in kept if one.kind == SEEN]
        count = len(kept)
        state.absorb(with_open=True)
        assert len(later.kept()) == count, "nothing is taken up twice"
        beside = SharedState(other, next_lock, lambda: NOW)
        beside.absorb()
        assert open_actions(other.kept()) == []
        assert len(read_restarts(other.kept())) == 3
        other.append(SWITCH, engine="llm/b", step=PAUSE, fields={"on": False, "who": "bob"}, at=NOW + 5)
        beside.absorb()
        assert read_switches(other.kept()).paused == frozenset(), "an older switch does not undo a newer one"
        await beside.save()
        await next_lock.look()
        state.absorb()
        assert read_switches(later.kept()).paused == frozenset()
        for book in (first, later, other):
            book.close()


async def test_kubectl_alone_stops_all_acting(account: str) -> None:
    """The annotation is read also by a guard that does not hold the lock, and one who sets it loses no write of guard's."""
    async with lease(account) as (api, lock):
        assert (await lock.acquire("guard")).is_done
        assert lock.paused == ""
        found = api.kind("coordination.k8s.io/leases")["llm", "plimsoll-guard"]
        notes = {"plimsoll.dev/pause": "true"}
        api.put("coordination.k8s.io/leases", {**found, "metadata": {**found["metadata"], "annotations": notes}})
        assert (await lock.renew()).is_done
        assert lock.paused == "Lease llm/plimsoll-guard has the annotation plimsoll.dev/pause"
        other = LeaseLock("plimsoll-guard", url=api.url, folder=account)
        assert await other.look() == ""
        assert other.paused
        assert await other.save("[]") == ""
        assert await lock.save("[1]") == "", "two write in turn, and neither loses the pause"
        after = api.kind("coordination.k8s.io/leases")["llm", "plimsoll-guard"]
        assert after["metadata"]["annotations"] == {**notes, "plimsoll.dev/journal": "[1]"}
        assert after["spec"]["holderIdentity"].startswith("guard_")
        api.may = lambda _: False
        assert "answers 403" in await other.look()
        assert other.paused, "as last known"


def test_what_is_kept_there_is_small() -> None:
    """Thousands of entries, long texts: the newest are kept, below what an annotation may have."""
    many = [
        Entry(n, NOW - 1 + n / 10_000, RESTART, f"llm/pod-{n}", f"{n:08x}", "", {"own": True, "failure": "x" * 4_000})
        for n in range(5_000)
    ]
    text = written(many, NOW)
    assert len(text) <= MOST_LETTERS
    assert read_state(text)[-1].engine == "llm/pod-4999"


@given(trees(most=20))
def test_any_annotation_is_read(tree: Any) -> None:
    """Whoever may write the Lease can write anything there: what is no entry is left out."""
    with contextlib.suppress(ValueError):
        text = json.dumps(tree)
        assert all(isinstance(one, Entry) for one in read_state(text))
        missing([], read_state(text), with_open=True)
    for odd in ("", "{", "[" * 9_000, "[[1,2]]", '[[true,"a","b","c","d",{}]]'):  # cut, or never one
        assert read_state(odd) == []
    assert len(read_state('[[1,"a","b","c","d",{}]]')) == 1
