"""`plimsoll guardctl` against a running guard: what it shows, its exit codes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from tests.cli.guards import TOKEN, guarding
from tests.cli.test_guard import QUICK, config, kill_engine, url
from tests.sources.page_server import serving
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
            guard.hears("gone: nobody listens there")
            at = ("--at", f"http://127.0.0.1:{guard.port}")
            code, out, _ = said(capsys, "status", *at)
            assert code == 0
            assert out.startswith("2 engines, 1 not answering; no trouble is known\n")
            code, out, _ = said(capsys, "status", "gone", *at)
            assert code == 0
            assert "  dead         nobody listens there, and nobody has since guard looks" in out
            kill_engine(server)
            guard.hears("engine.dead")
            code, out, _ = said(capsys, "status", *at)
            assert code == 1
            assert "one: engine.dead (critical): the engine is dead" in out
            assert "plimsoll doctor --explain engine.dead" in out
            code, out, _ = said(capsys, "status", "one", *at)
            assert code == 1
            assert "holds:\n  dead " in out
            assert "not known:" in out
            code, out, _ = said(capsys, "status", "--json", *at)
            assert (code, json.loads(out)["findings"][0]["code"]) == (1, "engine.dead")
            code, out, _ = said(capsys, "history", *at)
            assert code == 0
            assert out.count("\n") == 3
            assert "one: the engine is dead (engine.dead)" in out
            code, out, _ = said(capsys, "history", "gone", "--limit", "1", "--json", *at)
            assert [row["engine"] for row in json.loads(out)["changes"]] == ["gone"]
            code, _, err = said(capsys, "status", "none", *at)
            assert (code, "no engine is called" in err) == (2, True)
            wrong = tmp_path / "wrong"
            wrong.write_text(TOKEN, encoding="utf-8")
            code, _, err = said(capsys, "status", "--token-file", str(wrong), *at)
            assert (code, "show the token" in err) == (2, True)
            assert guard.stop() == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "say what"),
        ("restart x", "guardctl restart comes with a later release"),
        ("drain", "comes with a later release"),
        ("stats", "guardctl has no 'stats'"),
        ("status a b", "one engine at most"),
        ("status --at nowhere", "the address must be"),
        ("status --at http://127.0.0.1:9", "no token"),
        ("status --at http://guard.example:9790", "no token"),
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
