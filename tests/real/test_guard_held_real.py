"""An engine that an earlier guard held: told, shown on every page, and put right by a person. And a token that only reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lab.engine.server import free_port
from plimsoll.cli.main import main
from plimsoll.errors import BadInput
from plimsoll.guard.act.journal_entry import CLOSED
from plimsoll.guard.daemon.journal import Journal
from plimsoll.inside.settings import InsideSettings
from tests.cli.test_guard import config, holds, url
from tests.fakes import asked, eventually
from tests.guard.daemon.guards import TOKEN, guarding
from tests.net.page_server import receiving
from tests.options import guard_options
from tests.standin.servers import standin
from tests.standin.test_api_gate import GATED

READS = "a-token-that-can-only-read"
Capsys = pytest.CaptureFixture[str]


def test_one_that_was_held_is_told_shown_and_put_right(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """At guard's start, in guardctl and on /metrics; an alert of its own, which ends when somebody has resumed the engine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PLIMSOLL_GUARD_TOKEN", raising=False)
    (tmp_path / "reads").write_text(READS, encoding="ascii")
    with Journal(tmp_path / "journal") as journal:
        journal.append(CLOSED, engine="one", action="x", fields={"grade": "restart", "kind": "dead", "end": "held"})
    with standin() as server, receiving() as receiver:
        text = f"read_token_file = 'reads'\n[act]\njournal = 'journal'\n[notify]\nwebhook = '{receiver.url}'\n[[engine]]\n"
        text += f"url = '{url(server)}'\nname = 'one'\nbalancer = 'readiness'\n"
        text += "restart = {stop = ['/bin/false'], start = ['/bin/false', 'start'], is_running = ['/bin/true']}\n"
        with guarding(tmp_path, "--act", "--config", config(tmp_path, text)) as guard:
            guard.hears("one: answers")
            guard.hears("one: needs attention: down or out of rotation; guardctl undrain one puts it back in rotation")
            at = ("--at", f"http://127.0.0.1:{guard.port}")
            assert main(["guardctl", "status", *at]) == 1
            out = capsys.readouterr().out
            assert out.startswith("1 engine; one needs attention\n")
            assert "  one                            needs attention " in out
            assert "needs attention: down or out of rotation" in out
            holds("Engines", guard.json("/engines"))
            assert 'plimsoll_guard_needs_a_person{engine="one"} 1.0\n' in guard.get("/metrics")[1]
            assert main(["guardctl", "actions", *at]) == 0
            assert "  one                            needs attention: down" in capsys.readouterr().out
            only_reads = (*at, "--token-file", str(tmp_path / "reads"))
            assert main(["guardctl", "status", *only_reads]) == 1
            assert main(["guardctl", "history", *only_reads]) == 0
            capsys.readouterr()
            for words in (["resume", "one"], ["undrain", "one"], ["restart", "one", "--yes"], ["pause"]):
                assert main(["guardctl", *words, *only_reads]) == 2
                assert "this token only reads" in capsys.readouterr().err
            assert main(["guardctl", "undrain", "one", *at]) == 0, capsys.readouterr()
            guard.hears("one: back in rotation")
            assert 'plimsoll_guard_actions_total{engine="one",rung="restart",end="done"} 0.0\n' in guard.get("/metrics")[1]
            capsys.readouterr()
            assert main(["guardctl", "actions", *at]) == 0
            shown = " ".join(capsys.readouterr().out.split())
            assert "it was put back in rotation by hand; guardctl resume one once it is fixed" in shown
            assert main(["guardctl", "resume", *at]) == 0
            time.sleep(2.5)
            assert guard.json("/engines")["engines"][0]["needs"], "the end of a pause of everything mends no engine"
            assert main(["guardctl", "resume", "one", *at]) == 0
            guard.hears("one: no longer needs attention")
            capsys.readouterr()
            assert main(["guardctl", "status", *at]) == 0
            assert 'plimsoll_guard_needs_a_person{engine="one"} 0.0\n' in guard.get("/metrics")[1]
            assert guard.stop() == 0
    alerts = [one for _, _, body in receiver.got for one in body if one["labels"]["alertname"] == "guard.needs-a-person"]
    assert {one["labels"]["engine"] for one in alerts} == {"one"}
    assert len({one["startsAt"] for one in alerts}) == 1
    assert alerts[0]["endsAt"] > alerts[-1]["endsAt"], "the last one says that it is over"
    assert json.dumps(receiver.got).count(READS) == 0


def test_the_two_tokens_are_two(tmp_path: Path) -> None:
    """One that reads and can do all else as well would be no second token: said in one line, whoever gave it."""
    (tmp_path / "token").write_text(TOKEN, encoding="ascii")
    text = "[[engine]]\nurl = 'http://x:1'\n"
    with pytest.raises(BadInput, match="line 4: the token that only reads must be another one"):
        guard_options(["--config", config(tmp_path, f"token_file = 'token'\nread_token_file = 'token'\n{text}")], {})
    path = config(tmp_path, f"read_token_file = 'token'\n{text}")
    for words, environ in ((["--token-file", str(tmp_path / "token")], {}), ([], {"PLIMSOLL_GUARD_TOKEN": TOKEN})):
        with pytest.raises(BadInput, match="must be another one"):
            guard_options(["--config", path, *words], environ)
    assert guard_options(["--config", path], {}).config.api.read_token == TOKEN


def test_tokens_are_rotated_without_a_restart(tmp_path: Path) -> None:
    """Written into their files, the new tokens of gate and API are the ones with the next request, and the old ones end."""
    gate, api = tmp_path / "gate.token", tmp_path / "api.token"
    first, second = "the-first-token-of-them", "the-second-token-of-them"
    gate.write_text(first, encoding="ascii")
    api.write_text(first + "-of-the-api", encoding="ascii")
    port = free_port()
    text = (
        f"[api]\nlisten = '127.0.0.1:{port}'\ntoken_file = 'api.token'\n[[engine]]\nname = 'one'\ntoken_file = 'gate.token'\n"
    )
    with standin(GATED, settings=InsideSettings({"PLIMSOLL_TOKEN_FILE": str(gate)})) as server:
        (tmp_path / "plimsoll.toml").write_text(text + f"url = '{url(server)}'\n", encoding="utf-8")

        def answers(token: str) -> int:
            answer = asked(port, "GET", "/engines/one", authorization=f"Bearer {token}")
            told.append(answer.json())
            return answer.status

        told: list[dict[str, Any]] = []
        with guarding(tmp_path, "--config", str(tmp_path / "plimsoll.toml")) as guard:
            guard.hears("one: answers")
            assert answers(first + "-of-the-api") == 200
            api.write_text(second + "-of-the-api", encoding="ascii")
            assert (answers(first + "-of-the-api"), answers(second + "-of-the-api")) == (401, 200)
            gate.write_text(second, encoding="ascii")
            assert server.ask("GET", "/plimsoll/state", authorization=f"Bearer {first}").status == 401
            looks = told[-1]["engine"]["looks"]
            eventually(lambda: answers(second + "-of-the-api") == 200 and told[-1]["engine"]["looks"] > looks + 2)
            engine = told[-1]["engine"]
            api.write_text("short", encoding="ascii")
            assert answers(second + "-of-the-api") == 200, "a file that holds no token changes nothing"
            assert guard.stop() == 0
    assert "rejects this token" not in "".join([*guard.said, *guard.complained, json.dumps(engine)])
