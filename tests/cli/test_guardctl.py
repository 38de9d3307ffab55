"""`plimsoll guardctl` against a running guard: what it shows, its exit codes, and what it refuses."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from plimsoll.cli import guardctl
from tests.cli.answers import ask
from tests.cli.test_guard import QUICK, config, holds, kill_engine, url
from tests.each import each
from tests.guard.daemon.guards import TOKEN, guarding
from tests.net.page_server import serving
from tests.standin.servers import standin


def test_it_asks_the_guard_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            at = f"--at http://127.0.0.1:{guard.port}"
            out = ask(f"guardctl status {at}", code=1).out  # of an engine that does not answer nothing is known
            assert out.startswith("2 engines, 1 unreachable (1 never reached); no other problem known\n")
            assert "unreachable (connection refused), and has never answered since guard began" in out
            assert out.count("its log says why: plimsoll doctor LOG") == 1
            ask(f"guardctl status one {at}")
            assert "  dead         connection refused since guard started" in ask(f"guardctl status gone {at}", code=1).out
            kill_engine(server)
            guard.hears("engine.dead")
            out = ask(f"guardctl status {at}", code=1).out
            assert "one: engine.dead (critical): the engine is dead" in out
            assert "plimsoll doctor --explain engine.dead" in out
            out = ask(f"guardctl status one {at}", code=1).out
            assert "true:\n  dead " in out
            assert "unknown:" in out
            assert ask(f"guardctl status --json {at}", code=1).codes[0] == "engine.dead"
            out = ask(f"guardctl history {at}").out
            assert out.count("\n") == 3
            assert "one: the engine is dead (engine.dead)" in out
            changes = ask(f"guardctl history gone --limit 1 --json {at}").body["changes"]
            assert [row["engine"] for row in changes] == ["gone"]
            assert "no engine named 'none'; engines: gone, one" in ask(f"guardctl status none {at}", code=2).line
            (tmp_path / "wrong").write_text(TOKEN, encoding="utf-8")
            assert "show the token" in ask(f"guardctl status --token-file {tmp_path / 'wrong'} {at}", code=2).line
            assert guard.stop() == 0


@pytest.mark.real
def test_it_shows_the_last_canary_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        out = ask(f"guardctl status {name} --at http://127.0.0.1:{guard.port}").out
        assert re.search(r"\nthe last canary request, .* ago, was answered within [0-9.]+ s\n", out)
        assert guard.stop() == 0
    made = {"age_s": 12.0, "is_answered": True, "seconds": 0.5, "is_garbage": True, "why": ""}
    assert guardctl._canary(made) == "the last canary request, 12 s ago, was answered within 0.5 s, with garbage"
    assert guardctl._canary({**made, "is_answered": False}) == "the last canary request, 12 s ago, got no answer"
    why = {**made, "is_answered": None, "why": "the engine wants an API key"}
    assert guardctl._canary(why) == "the last canary request, 12 s ago, proved nothing: the engine wants an API key"


@each(
    "body",
    [b"hello", b"{}", b'{"schema": "plimsoll.guard/1"}', b'{"schema": "plimsoll.guard/1", "engines": [1], "status": 2}', b"[]"],
)
def test_something_else_there_is_exit_code_3(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is no guard: one line, and the token in none of it."""
    monkeypatch.setenv("PLIMSOLL_GUARD_TOKEN", TOKEN)
    with serving(lambda handler: handler.answer(body)) as server:
        assert TOKEN not in ask(f"guardctl status --at http://{server.host} --timeout 5", code=3).line


def test_where_no_guard_runs_or_one_of_somebody_else_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 3 and how to start one, with a token or without: that is not what is missing; where it is, exit code 2."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for token in ("", TOKEN):
        monkeypatch.setenv("PLIMSOLL_GUARD_TOKEN", token)
        line = ask("guardctl status --at http://127.0.0.1:9", code=3).line
        assert "no guard runs there; plimsoll guard --engine http://HOST:PORT starts one" in line
    monkeypatch.delenv("PLIMSOLL_GUARD_TOKEN")
    with serving(lambda handler: handler.answer(b'{"status": "ok"}')) as server:
        line = ask(f"guardctl status --at http://{server.host}", code=2).line
    assert "asks for a token; give --token-file FILE or $PLIMSOLL_GUARD_TOKEN" in line


def test_what_cannot_be_foreseen_is_no_forecast_and_columns_do_not_collide() -> None:
    """Not "none", which reads as an all-clear; the next column begins behind the longest, at the same place in every line."""
    forecasts = {"device": {"unknown": "not enough data", "likely_s": None, "soonest_s": None, "latest_s": None}}
    one: dict[str, object] = {"findings": [], "conditions": [], "canary": None, "forecasts": forecasts}
    assert guardctl._detail(one)[-1] == "runs out of device memory: no forecast, not enough data"
    plain = {"vllm": "0.32.0", "look_age_s": 3.0, "reach": "answers", "needs": "", "note": "", "has_answered": True}
    named: list[tuple[str, list[str]]] = [("a", []), ("b" * 70, ["dead", "neighbour", "saturated"]), ("c" * 31, ["wedged"])]
    engines = [{**plain, "name": name, "holds": states} for name, states in named]
    texts = [line.text for line in guardctl._engines(engines)]
    assert {text.index(" vLLM 0.32.0, looked at 3 s ago") for text in texts} == {2 + 70 + 1 + len("dead, neighbour, saturated")}
    assert {text.index(state) for text, state in zip(texts, ("healthy", "dead, ", "wedged"), strict=True)} == {2 + 70 + 1}
