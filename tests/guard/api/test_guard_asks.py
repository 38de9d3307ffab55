"""Guard's API where it acts, over a real socket, and `plimsoll guardctl` that talks to it; the token it leaves for its user."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from plimsoll.cli.main import main
from plimsoll.guard.act.decide import ActionPlan, BlockedAction, Decision, Switches
from plimsoll.guard.act.journal_entry import CLOSED, INTENT, NOTE, OPENED, OUTCOME, RESTART, SWITCH
from plimsoll.guard.act.ports import Outcome, done, failed
from plimsoll.guard.act.steps import BROKEN, ActionRun, End, open_action
from plimsoll.guard.api import token
from plimsoll.guard.api.actions import VERBS, ActionDesk, ActionRoutes
from plimsoll.guard.api.openapi import document
from plimsoll.guard.daemon.approvals import Approval
from plimsoll.guard.daemon.journal import Journal, JournalFailed
from plimsoll.guard.judge.tracker import Grade
from plimsoll.net.server import THE_TOKEN as WHO
from plimsoll.net.server import GuardServer, HttpAnswer
from tests.each import cases, sure
from tests.fakes import asked

TOKEN = "a-token-that-is-long-enough"
NAME = "llama/a b"
Capsys = pytest.CaptureFixture[str]


class Acts(ActionDesk):
    """Somebody who acts, in words only."""

    trouble = ""
    switches = Switches()

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.asked: list[tuple[str, ...]] = []
        self.decision: Decision | None = ActionPlan(NAME, Grade.RESTART, "asked", "an operator asked for it", BROKEN)
        self.is_full = False
        self.needing: dict[str, str] = {}

    def under_way(self) -> list[tuple[ActionRun, float | None]]:
        course = open_action("x1", NAME, Grade.RESTART, "dead", is_broken=True).begun()
        return [(course, 1_700_000_000.0), (course._replace(engine="b", kind="drain"), None)]

    def ended(self) -> dict[tuple[str, Grade, End], int]:
        """One, and one that has not happened."""
        return {(NAME, Grade.COMPACT, End.DONE): 2, (NAME, Grade.COMPACT, End.FAILED): 0}

    def needs(self) -> dict[str, str]:
        return self.needing

    def pending(self) -> list[Approval]:
        return [Approval("0a1b", NAME, Grade.RESTART, "it is stuck", 1_700_000_000.0, 1_700_003_600.0)]

    def answer(self, id_: str, *, is_approved: bool, who: str) -> tuple[Approval | None, str]:
        self.asked.append((id_, str(is_approved), who))
        return (self.pending()[0], "") if id_ == "0a1b" else (None, "no such question")

    def switch(self, engine: str, rung: str, *, is_paused: bool, who: str = "") -> None:
        if self.is_full:
            raise JournalFailed("the journal cannot be written: no space")
        assert who == WHO
        self.asked.append(("pause" if is_paused else "resume", engine, rung))

    async def ask(self, grade: Grade, engine: str) -> Decision:
        return await self._found(str(grade), engine)

    async def drain(self, engine: str) -> Decision:
        return await self._found("drain", engine)

    async def undrain(self, engine: str) -> Decision:
        return await self._found("undrain", engine)

    async def set_knobs(self, engine: str, values: Mapping[str, float], for_s: float, who: str = "") -> Outcome:
        del who
        self.asked.append(("set", engine, str(dict(values)), str(for_s)))
        return done("in force: max-num-seqs=24") if for_s < 86_400 else failed("the gate does not take this token")

    async def _found(self, *words: str) -> Decision:
        self.asked.append(words)
        if self.decision is None:
            await asyncio.sleep(60)
        assert self.decision is not None
        return self.decision


class Api:
    """Where it listens, and one question to it."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = body.encode() if isinstance(body, str) else {} if method == "POST" and body is None else body
        told = asked(self.port, method, path, data, authorization=f"Bearer {TOKEN}")
        return told.status, told.json()


@contextlib.contextmanager
def listening(actions: ActionDesk | None) -> Iterator[Api]:
    """The API under /v1/, and a history without changes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def open_it() -> GuardServer:
        asks = ActionRoutes(lambda: actions, lambda name: name in (NAME, "b"))

        def answers(path: str, query: Any) -> Any:
            history = {"schema": "plimsoll.guard/1", "told": 0, "changes": []}
            return HttpAnswer(200, json.dumps(history).encode()) if path == "/history" else asks.get(path, query)

        server = GuardServer(answers, TOKEN, (), asks.post)
        await server.open("127.0.0.1", 0)
        return server

    server = asyncio.run_coroutine_threadsafe(open_it(), loop).result(10)
    try:
        yield Api(server.port)
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture
def acts(tmp_path: Path) -> Acts:
    """Somebody who acts, with a journal of one restart."""
    path = tmp_path / "guard.journal"
    numbers = iter(range(1_700_000_000, 1_800_000_000))
    book = Journal(path, clock=lambda: float(next(numbers)))
    where: dict[str, Any] = {"engine": NAME, "action": "x1"}
    book.append(OPENED, **where, fields={"grade": "restart", "kind": "dead", "why": "it is dead", "steps": []})
    book.append(INTENT, **where, step="stop")
    book.append(RESTART, **where, fields={"own": True})
    book.append(OUTCOME, **where, step="stop", fields={"done": True, "says": "it is gone", "facts": {}})
    book.append(OUTCOME, **where, step="start", fields={"done": None, "says": "nobody knows", "facts": {}})
    book.append(NOTE, **where, fields={"take-over": "ours", "done": True})
    book.append(CLOSED, **where, fields={"end": "held", "grade": "restart", "kind": "dead", "why": ""})
    book.append(SWITCH, engine="b", step="pause", fields={"on": True, "who": "the API", "token": "hunter2hunter2"})
    book.append("new-kind", engine="b", fields={})
    book.close()
    return Acts(path)


def holds(schema: str, answer: Any) -> None:
    """The answer is what the document says."""
    jsonschema.Draft202012Validator({**document("x"), "$ref": f"#/components/schemas/{schema}"}).validate(answer)


def said(capsys: Capsys, api: Api, *words: str) -> tuple[int, str, str]:
    """What guardctl says: the exit code and both outputs."""
    code = main(["guardctl", *words, "--at", f"http://127.0.0.1:{api.port}"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_GUARD_TOKEN", TOKEN)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_pause_and_resume(acts: Acts) -> None:
    """All of it, one engine or one rung; a name that nobody has is a mistake, not a success."""
    with listening(acts) as api:
        for body in ({}, {"engine": NAME}, {"rung": "restart"}):
            for verb in ("pause", "resume"):
                status, answer = api("POST", f"/v1/{verb}", body)
                assert status == 200
                holds("Accepted", answer)
        assert acts.asked == [
            (verb, engine, rung) for engine, rung in (("", ""), (NAME, ""), ("", "restart")) for verb in ("pause", "resume")
        ]  # fmt: skip
        wrong: Any = (
            ({"engine": "lama"}, 404), ({"rung": "sleep"}, 400), ({"engine": NAME, "rung": "shed"}, 400), ({"who": "me"}, 400),
            ({"engine": 3}, 400), ("[]", 400), ("{", 400), ("[" * 9_000, 400),
        )  # fmt: skip
        for body, status in wrong:
            found, answer = api("POST", "/v1/pause", body)
            assert found == status, body
            holds("Error", answer)
        assert api("POST", "/v1/resume", {"engine": "gone"})[0] == 404
        acts.switches = Switches(paused=frozenset({"gone"}))
        assert api("POST", "/v1/resume", {"engine": "gone"})[0] == 200, "one that is not watched any more can be resumed"
        acts.needing = {"held": "needs attention"}
        assert api("POST", "/v1/pause", {"engine": "held"})[0] == 404
        assert api("POST", "/v1/resume", {"engine": "held"})[0] == 200
        acts.is_full = True
        status, answer = api("POST", "/v1/pause")
        assert (status, answer["reason"]) == (409, "NotWritten")
        holds("Refused", answer)


def test_knobs_are_set_for_a_time_or_let_go(acts: Acts) -> None:
    """Values are numbers within reason, a time is one; what the engine does not take is refused with its words."""
    path = "/v1/engines/b/set"
    with listening(acts) as api:
        status, answer = api("POST", path, {"max-num-seqs": "24", "kv-headroom": "0.05", "for": "2h"})
        assert (status, answer["says"]) == (200, "b: set, in force: max-num-seqs=24")
        assert api("POST", path, {})[1]["says"].startswith("b: let go")
        asked = [("set", "b", "{'max-num-seqs': 24, 'kv-headroom': 0.05}", "7200.0"), ("set", "b", "{}", "3600.0")]
        assert acts.asked == asked
        assert api("POST", path, {"max-num-seqs": "24", "for": "2d"})[0] in (400, 409)
        for body in (
            {"max-num-seqs": "0"}, {"max-num-seqs": "1e3"}, {"max-num-seqs": "-1"}, {"kv-headroom": "5"}, {"max-num-seq": "3"},
            {"max-num-seqs": 24}, {"for": "never"}, {"for": "999h"}, {"max-num-seqs": "9" * 40},
        ):  # fmt: skip
            assert api("POST", path, body)[0] == 400, body
        assert api("POST", "/v1/engines/nobody/set", {"max-num-seqs": "3"})[0] == 404


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("set", "quarantine")])
def test_one_action_on_one_engine(verb: str, acts: Acts) -> None:
    """Accepted with its steps, or refused with a word a program can test and a sentence."""
    path = f"/v1/engines/llama%2Fa%20b/{verb}"
    with listening(acts) as api:
        status, answer = api("POST", path)
        assert (status, acts.asked) == (200, [(verb, NAME)])
        holds("Accepted", answer)
        assert answer["plan"][0].startswith("1. lock: takes the fleet's lock; before: ")
        acts.decision = BlockedAction(NAME, Grade.RESTART, "asked", "BudgetSpent", "2 restarts in an hour")
        status, answer = api("POST", path)
        assert (status, answer["reason"], answer["says"]) == (409, "BudgetSpent", "2 restarts in an hour")
        holds("Refused", answer)
        acts.trouble = "the disk is full"
        wanted = "BudgetSpent" if verb == "undrain" else "Stopped"
        assert api("POST", path)[1]["reason"] == wanted, "what is out must come back, whatever else cannot be done"
        for wrong, status in ((path.replace("llama", "x"), 404), (f"{path}x", 404), (f"/v1/engines/{verb}", 404)):
            assert api("POST", wrong)[0] == status
        assert api("POST", path, {"engine": NAME})[0] == 400
        assert api("GET", path)[0] == 405


def test_what_is_not_answered_in_time_is_not_done_later(acts: Acts, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer in time is a refusal, and what was asked for is cancelled; guardctl says that it may have been heard."""
    assert said(capsys, Api(9), "pause")[0] == 3
    acts.decision = None
    with listening(acts) as api:
        code, _, err = said(capsys, api, "restart", "b", "--yes", "--timeout", "1")
        assert (code, "it may have been heard all the same" in err) == (3, True)
        monkeypatch.setattr("plimsoll.guard.api.actions.ASK_S", 0.2)
        status, answer = api("POST", "/v1/engines/b/restart")
    assert (status, answer["reason"]) == (409, "Busy")


def test_what_is_under_way_and_what_was_done_and_the_document_names_every_verb(acts: Acts) -> None:
    """As the document says, with what may be answered; no secret in it, and what is wrong with the journal is told."""
    with listening(acts) as api:
        status, answer = api("GET", "/v1/actions")
        assert status == 200
        holds("Actions", answer)
        assert (answer["actions"][0]["step"], answer["actions"][0]["since"]) == ("lock", 1_700_000_000.0)
        status, answer = api("GET", "/v1/journal?last=3")
        assert status == 200
        holds("Journal", answer)
        assert [row["kind"] for row in answer["entries"]] == ["closed", "switch", "new-kind"]
        assert "hunter2" not in json.dumps(api("GET", "/v1/journal")[1])
        for last in ("0", "x", "1001", "-1", ""):
            assert api("GET", f"/v1/journal?last={last}")[0] == 400
        acts.journal = acts.journal.with_name("none")
        assert "no journal" in api("GET", "/v1/journal")[1]["wrong"][0]
        assert api("GET", "/v1/nothing")[0] == 404
    paths = document("x")["paths"]
    assert {path.rpartition("/")[2] for path in paths if path.startswith("/v1/engines/")} == set(VERBS)
    for verb in VERBS:
        post = paths[f"/v1/engines/{{name}}/{verb}"]["post"]
        assert {"200", "400", "401", "404", "409", "415", "503"} <= set(post["responses"])
    for path in ("/v1/pause", "/v1/resume"):
        assert paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Switch")


def test_a_guard_that_only_observes_says_so(capsys: Capsys) -> None:
    """503 with a sentence to every one of these; guardctl is refused, and its history is that of the changes."""
    with listening(None) as api:
        for path in ("/v1/actions", "/v1/journal", "/v1/pause", "/v1/engines/b/shed"):
            status, answer = api("GET" if path in ("/v1/actions", "/v1/journal") else "POST", path)
            assert (status, answer["says"]) == (503, "guard only observes: start it with --act")
            holds("Observes", answer)
        code, out, _ = said(capsys, api, "pause")
        assert (code, out) == (1, "blocked: guard only observes: start it with --act\n")
        assert said(capsys, api, "actions")[:2] == (0, "nothing is under way: guard only observes: start it with --act\n")
        assert said(capsys, api, "history")[:2] == (0, "nothing has changed since guard began\n")


def test_guardctl_tells_it_what_to_do(acts: Acts, capsys: Capsys) -> None:
    """Plain words, the steps of what accepted, exit code 1 for a refusal; nothing harmful without --yes."""
    with listening(acts) as api:
        assert said(capsys, api, "pause")[:2] == (0, "all actions: paused until resumed\n")
        assert said(capsys, api, "resume", NAME)[:2] == (0, f"{NAME}: resumed\n")
        assert said(capsys, api, "pause", "--rung", "restart")[1].startswith("restart on all engines: paused")
        assert acts.asked == [("pause", "", ""), ("resume", NAME, ""), ("pause", "", "restart")]
        code, out, _ = said(capsys, api, "restart", NAME, "--yes")
        assert code == 0
        assert out.startswith(f"{NAME}: restart accepted\n  1. lock: takes")
        acts.asked.clear()
        for verb in ("restart", "drain", "compact", "shed"):
            code, _, err = said(capsys, api, verb, NAME)
            assert (code, "not a terminal: pass --yes to confirm" in err) == (2, True)
        assert acts.asked == []
        assert said(capsys, api, "undrain", NAME)[0] == 0
        acts.decision = BlockedAction(NAME, Grade.SHED, "asked", "NoGate", "it has no gate")
        code, out, _ = said(capsys, api, "shed", NAME, "--yes")
        assert (code, out.splitlines()[0]) == (1, "blocked (NoGate): it has no gate")
        assert "\n  what to do: start it with the gate" in out
        code, out, _ = said(capsys, api, "shed", NAME, "--yes", "--json")
        assert (code, json.loads(out)["reason"]) == (1, "NoGate")
        code, _, err = said(capsys, api, "restart", "lama", "--yes")
        assert (code, "no engine named 'lama'" in err) == (2, True)


class Terminal(io.StringIO):
    """Somebody who sits there and answers."""

    def isatty(self) -> bool:
        return True


def test_a_person_approves_or_denies_and_is_asked_back(acts: Acts, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the id that guardctl actions shows, and on a terminal only a yes is one; what waits no longer is refused."""
    with listening(acts) as api:
        assert "0a1b       " + NAME + ": restart waits for approval: it is stuck\n" in said(capsys, api, "actions")[1]
        code, out, _ = said(capsys, api, "approve", "0a1b")
        assert (code, out) == (0, f"{NAME}: restart approved: guard judges once more, and acts if it is still called for\n")
        assert said(capsys, api, "deny", "0a1b")[:2] == (0, f"{NAME}: restart denied: not done\n")
        code, out, _ = said(capsys, api, "approve", "ff")
        assert (code, out.splitlines()[0]) == (1, "blocked (NotPending): no such question")
        assert acts.asked == [("0a1b", "True", WHO), ("0a1b", "False", WHO), ("ff", "True", WHO)]
        for words in (("approve",), ("deny", "../x")):
            code, _, err = said(capsys, api, *words)
            assert (code, "as guardctl actions shows it" in err) == (2, True)
        assert api("POST", "/v1/approvals/../approve")[0] == 404
        acts.asked.clear()
        for answer, code in (("n\n", 1), ("\n", 1), ("", 1), ("y\n", 0)):
            monkeypatch.setattr("sys.stdin", Terminal(answer))
            found, out, err = said(capsys, api, "drain", "b")
            assert (found, err, "[y/N]" in out) == (code, "drain b? [y/N] ", False)
            assert acts.asked == ([] if code else [("drain", "b")])


def test_guardctl_shows_what_is_done(acts: Acts, capsys: Capsys) -> None:
    """What is under way, and the history with what was done, from the API or from the file itself."""
    acts.switches = Switches(is_paused=True, paused=frozenset({"b"}), rungs_off=frozenset({Grade.SHED}))
    acts.trouble = "the disk is full"
    acts.needing = {"c": "held: it is down or out of service"}
    history = str(cases("guard", "a history as guardctl prints it")[0]).replace("NAME", NAME)
    with listening(acts) as api:
        code, out, _ = said(capsys, api, "actions")
        assert code == 0
        assert f"  {NAME:30} restart (dead): lock, since " in out
        assert "b                              drain by hand: lock\n" in out
        assert "c                              held: it is down or out of service\n" in out
        for text in ("everything is paused", "b is paused (guardctl resume b)", "--rung shed", "the disk is full"):
            assert text in out
        assert json.loads(said(capsys, api, "actions", "--json")[1])["paused"]["rungs"] == ["shed"]
        assert said(capsys, api, "history")[:2] == (0, history)
        assert said(capsys, api, "history", "b", "-n", "1")[1] == history.splitlines()[-1] + "\n"
        assert len(json.loads(said(capsys, api, "history", "-n", "2", "--json")[1])["entries"]) == 2
    code = main(["guardctl", "history", "--journal", str(acts.journal), "-n", "2"])
    assert (code, capsys.readouterr().out) == (0, "\n".join(history.splitlines()[-2:]) + "\n")
    assert main(["guardctl", "history", NAME, "--journal", str(acts.journal), "--json"]) == 0
    assert {row["engine"] for row in json.loads(capsys.readouterr().out)["entries"]} == {NAME}


def test_a_journal_that_is_damaged_or_not_there(acts: Acts, capsys: Capsys) -> None:
    """What can be believed is shown, and that it is not all: exit code 1; no file at all is a wrong word."""
    acts.journal.write_bytes(acts.journal.read_bytes().replace(b"nobody knows", b"nobody nose!"))
    assert main(["guardctl", "history", "--journal", str(acts.journal)]) == 1
    out = " ".join(capsys.readouterr().out.split())  # what is wrong is wrapped to the terminal's width
    assert "stop: it is gone" in out
    assert "its checksum is not right" in out
    assert main(["guardctl", "history", "--journal", str(acts.journal.with_name("none"))]) == 2
    assert "no journal at" in capsys.readouterr().err


def test_only_its_user_can_read_it_and_only_its_own_is_taken_away(tmp_path: Path) -> None:
    """Mode 0600 in a folder of mode 0700; a token not written whole replaces none; without a folder there is no place."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    victim = tmp_path / "victim"
    victim.write_text("keep", encoding="ascii")
    token.write_token(1, "first", environ)
    path = sure(token.token_path(1, environ))
    path.unlink()
    path.symlink_to(victim)
    token.write_token(1, "second", environ)
    assert (path.read_text(encoding="ascii"), victim.read_text(encoding="ascii")) == ("second\n", "keep")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(UnicodeEncodeError):
        token.write_token(1, "half \N{SNOWMAN}", environ)
    assert path.read_text(encoding="ascii") == "second\n"
    environ = {"HOME": str(tmp_path)}
    token.write_token(1, "mine", environ)
    path = sure(token.token_path(1, environ))
    token.remove_token(1, "another", environ)
    assert path.exists()
    token.remove_token(1, "mine", environ)
    token.remove_token(1, "mine", environ)
    assert not path.exists()
    assert token.token_path(1, {}) is None
    with pytest.raises(OSError, match="neither"):
        token.write_token(1, "x", {})
