"""`plimsoll guardctl` against a running guard: what it shows, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from plimsoll.cli import guardctl
from plimsoll.cli.main import main
from tests.cli.test_guard import QUICK, config, holds, kill_engine, url
from tests.guard.daemon.guards import TOKEN, guarding
from tests.net.page_server import serving
from tests.standin.servers import standin

Capsys = pytest.CaptureFixture[str]


def said(capsys: Capsys, *words: str) -> tuple[int, str, str]:
    """The exit code and both outputs."""
    code = main(["guardctl", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_asks_the_guard_of_this_user(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word about tokens: status, one engine, history, as text and as JSON; exit code 1 while something holds."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PLIMSOLL_GUARD_TOKEN", raising=False)
    with standin() as server:
        text = (
            f"{QUICK}[[engine]]\nurl = '{url(server)}'\nname = 'one'\n[[engine]]\nurl = 'http://127.0.0.1:9'\nname = 'gone'\n"
        )
        with guarding(tmp_path, "--config", config(tmp_path, text)) as guard:
            guard.hears("one: answers")
            guard.hears("gone: unreachable: connection refused")
            at = ("--at", f"http://127.0.0.1:{guard.port}")
            code, out, _ = said(capsys, "status", *at)
            assert code == 1, "of an engine that does not answer nothing is known"
            assert out.startswith("2 engines, 1 unreachable (1 never reached); no other problem known\n")
            assert "unreachable (connection refused), and has never answered since guard began" in out
            assert out.count("its log says why: plimsoll doctor LOG") == 1
            assert said(capsys, "status", "one", *at)[0] == 0
            code, out, _ = said(capsys, "status", "gone", *at)
            assert code == 1
            assert "  dead         connection refused since guard started" in out
            kill_engine(server)
            guard.hears("engine.dead")
            code, out, _ = said(capsys, "status", *at)
            assert code == 1
            assert "one: engine.dead (critical): the engine is dead" in out
            assert "plimsoll doctor --explain engine.dead" in out
            code, out, _ = said(capsys, "status", "one", *at)
            assert code == 1
            assert "true:\n  dead " in out
            assert "unknown:" in out
            code, out, _ = said(capsys, "status", "--json", *at)
            assert (code, json.loads(out)["findings"][0]["code"]) == (1, "engine.dead")
            code, out, _ = said(capsys, "history", *at)
            assert code == 0
            assert out.count("\n") == 3
            assert "one: the engine is dead (engine.dead)" in out
            code, out, _ = said(capsys, "history", "gone", "--limit", "1", "--json", *at)
            assert [row["engine"] for row in json.loads(out)["changes"]] == ["gone"]
            code, _, err = said(capsys, "status", "none", *at)
            assert (code, "no engine named 'none'; engines: gone, one" in err) == (2, True)
            wrong = tmp_path / "wrong"
            wrong.write_text(TOKEN, encoding="utf-8")
            code, _, err = said(capsys, "status", "--token-file", str(wrong), *at)
            assert (code, "show the token" in err) == (2, True)
            assert guard.stop() == 0


@pytest.mark.real
def test_it_shows_the_last_canary_request(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it took, or why it could not be made; and that the answer was garbage."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PLIMSOLL_GUARD_TOKEN", raising=False)
    with standin() as server, guarding(tmp_path, "--engine", url(server), "--canary") as guard:
        name, end = f"127.0.0.1:{server.port}", time.monotonic() + 30
        while (guard.json(f"/engines/{name}")["engine"]["canary"] or {}).get("is_answered") is None and time.monotonic() < end:
            time.sleep(0.2)
        answer = guard.json(f"/engines/{name}")
        holds("OneEngine", answer)
        canary = answer["engine"]["canary"]
        assert (canary["is_answered"], canary["is_garbage"], canary["why"]) == (True, False, "")
        assert 0 <= canary["seconds"] < 30
        _, out, _ = said(capsys, "status", name, "--at", f"http://127.0.0.1:{guard.port}")
        assert re.search(r"\nthe last canary request, .* ago, was answered within [0-9.]+ s\n", out)
        assert guard.stop() == 0
    made = {"age_s": 12.0, "is_answered": True, "seconds": 0.5, "is_garbage": True, "why": ""}
    assert guardctl._canary(made) == "the last canary request, 12 s ago, was answered within 0.5 s, with garbage"
    assert guardctl._canary({**made, "is_answered": False}) == "the last canary request, 12 s ago, got no answer"
    why = {**made, "is_answered": None, "why": "the engine wants an API key"}
    assert guardctl._canary(why) == "the last canary request, 12 s ago, proved nothing: the engine wants an API key"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "a verb is missing"),
        ("drain", "drain which engine?"),
        ("restart", "restart which engine?"),
        ("status --yes", "--yes does not go with status"),
        ("drain x --rung shed", "--rung does not go with drain"),
        ("actions x", "actions shows those of all engines"),
        ("pause --rung sleep --token-file /dev/null", "--rung 'sleep': it is shed, compact or restart"),
        ("history -n 0", "--limit '0' is not a whole number"),
        ("history -n 1 --limit 2", "--limit is given twice"),
        ("status --journal x", "--journal does not go with status"),
        ("stats", "guardctl has no 'stats'"),
        ("status a b", "one engine at most"),
        ("status --at nowhere", "the address must be"),
        ("status --at 127.0.0.1:9790", "on one line: http://127.0.0.1:9790?"),
        ("status --token-file nowhere", "No such file"),
    ],
)
def test_wrong_input_is_one_line(
    words: str, says: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever is typed wrong is said in one line, with exit code 2."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PLIMSOLL_GUARD_TOKEN", raising=False)
    code, out, err = said(capsys, *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


@pytest.mark.parametrize(
    "body",
    [b"hello", b"{}", b'{"schema": "plimsoll.guard/1"}', b'{"schema": "plimsoll.guard/1", "engines": [1], "status": 2}', b"[]"],
)
def test_something_else_there_is_exit_code_3(body: bytes, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody, or a server that is no guard: one line, and the token in none of it."""
    monkeypatch.setenv("PLIMSOLL_GUARD_TOKEN", TOKEN)
    with serving(lambda ask: ask.answer(body)) as server:
        code, _, err = said(capsys, "status", "--at", f"http://{server.host}", "--timeout", "5")
    assert (code, err.count("\n"), TOKEN in err) == (3, 1, False)
    assert said(capsys, "status", "--at", "http://127.0.0.1:9")[0] == 3


@pytest.mark.parametrize("token", ["", TOKEN])
def test_where_no_guard_runs_that_is_said(token: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 3 and how to start one, whether or not there is a token: that is not what is missing."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PLIMSOLL_GUARD_TOKEN", token)
    code, out, err = said(capsys, "status", "--at", "http://127.0.0.1:9")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "no guard runs there; plimsoll guard --engine http://HOST:PORT starts one" in err


def test_a_guard_of_somebody_else_wants_its_token(capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody listens, and no token is at hand: exit code 2 and where one is read from."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PLIMSOLL_GUARD_TOKEN", raising=False)
    with serving(lambda ask: ask.answer(b'{"status": "ok"}')) as server:
        code, _, err = said(capsys, "status", "--at", f"http://{server.host}")
    assert (code, "asks for a token; give --token-file FILE or $PLIMSOLL_GUARD_TOKEN" in err) == (2, True)


def test_what_cannot_be_foreseen_is_no_forecast() -> None:
    """Not "none", which reads as an all-clear."""
    forecasts = {"device": {"unknown": "not enough data", "likely_s": None, "soonest_s": None, "latest_s": None}}
    one: dict[str, object] = {"findings": [], "conditions": [], "canary": None, "forecasts": forecasts}
    assert guardctl._detail(one)[-1] == "runs out of device memory: no forecast, not enough data"
