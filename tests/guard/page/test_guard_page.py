"""Guard's page as its process serves it: what a listener is told, how many there may be, and an engine meant by its id."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll.guard.page.engine import id_of
from plimsoll.guard.page.page import MOST_LISTENERS
from tests.guard.daemon.guards import Guard, guarding

NAME = "127.0.0.1:9"


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guard]:
    """One that watches an address where nobody listens."""
    with guarding(tmp_path_factory.mktemp("guard"), "--engine", f"http://{NAME}") as found:
        found.hears("connection refused")
        yield found


def listen(guard: Guard, path: str = "/events") -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A connection that is told of changes."""
    connection = http.client.HTTPConnection("127.0.0.1", guard.port, timeout=20)
    connection.request("GET", path, headers={"authorization": f"Bearer {guard.token}"})
    return connection, connection.getresponse()


def told(answer: http.client.HTTPResponse) -> tuple[str, Any]:
    name, data = answer.readline().decode(), answer.readline().decode()
    assert answer.readline() == b"\n"
    return name.removeprefix("event: ").strip(), json.loads(data.removeprefix("data: "))


def test_a_listener_is_told_everything_once(guard: Guard) -> None:
    """First the whole fleet and how guard is, then the engine it asked for."""
    connection, answer = listen(guard, f"/events?engine={id_of(NAME)}")
    assert answer.getheader("content-type") == "text/event-stream"
    name, fleet = told(answer)
    assert (name, fleet["all"], fleet["gone"]) == ("fleet", True, [])
    assert [(row["id"], row["name"], row["state"]) for row in fleet["rows"]] == [(id_of(NAME), NAME, "gone")]
    assert fleet["about"]["acting"] is False
    name, engine = told(answer)
    assert (name, engine["id"], engine["head"]["name"]) == ("engine", id_of(NAME), NAME)
    assert engine["ledger"]["bars"] == []
    assert engine["ledger"]["why"].startswith("unknown")
    connection.close()


def test_an_engine_that_is_not_watched_is_said_not_to_be(guard: Guard) -> None:
    """Nothing else is told of it."""
    connection, answer = listen(guard, "/events?engine=nobody")
    told(answer)
    assert told(answer)[1] == {"id": "nobody", "none": "no engine named nobody"}
    connection.close()


def test_listeners_are_bounded_and_leave_room(guard: Guard) -> None:
    """One more than there may be is refused, other questions are still answered, and who hangs up makes room."""
    there = [listen(guard) for _ in range(MOST_LISTENERS)]
    for _, answer in there:
        told(answer)
    assert guard.get("/events")[0] == 503
    assert guard.get("/engines")[0] == 200
    for connection, answer in there:
        answer.close()
        connection.close()
    for _ in range(100):
        connection, answer = listen(guard)
        if answer.status == 200:
            break
        connection.close()
    assert answer.status == 200
    connection.close()


def test_the_page_is_there_without_a_token_and_what_it_shows_is_not(guard: Guard) -> None:
    """Its files are open; the stream and the journal are not."""
    for path in ("/", "/page/app.js", "/page/style.css", "/page/icon.svg"):
        assert guard.get(path, authorization="")[0] == 200
    for path in ("/events", "/journal", "/page/nothing.js"):
        assert guard.get(path, authorization="")[0] == 401


def test_a_guard_that_observes_has_no_journal(guard: Guard) -> None:
    """It says so, and is no error."""
    found = guard.json(f"/journal?engine={id_of(NAME)}")
    assert found["entries"] == []
    assert "--act" in found["says"]
