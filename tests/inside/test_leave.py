"""Out of service before the stop: what preStop and ExecStop run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lab.engine.server import free_port
from plimsoll.inside.leave import LEASE_S, leave, main
from plimsoll.standin.config import ServerFlags
from tests.fakes import TOKEN
from tests.standin.servers import standin

GATED = ServerFlags(token=TOKEN, middleware=("plimsoll.inside.Gate",))
ENVIRON = {"PLIMSOLL_TOKEN": TOKEN}


@pytest.fixture(autouse=True)
def _token_of_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_TOKEN", TOKEN)


def test_an_idle_server_leaves_and_stays_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not ready, refusing, with a lease that outlives any stop; and asked again, with the token in a file, the same."""
    (tmp_path / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
    with standin(GATED) as server:
        assert main(["2", str(server.port)], ENVIRON) == 0
        assert capsys.readouterr().out == "it refuses new work and is idle\n"
        assert server.ask("GET", "/plimsoll/ready").status == 503
        drain = server.ask("GET", "/plimsoll/state", Authorization=f"Bearer {TOKEN}").json()["drain"]
        assert drain["phase"] == "refusing"
        assert drain["lease_left_s"] > LEASE_S - 60
        began = time.monotonic()
        assert main(["20", str(server.port)], {"PLIMSOLL_TOKEN_FILE": str(tmp_path / "token")}) == 0
        assert time.monotonic() - began < 15


def test_a_request_in_flight_is_waited_for_and_the_time_ends() -> None:
    """It goes on being served; the sentence says that it was still there."""
    with standin(GATED, speed=0.02) as server:
        body = {"model": "m", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
        model = server.ask("GET", "/v1/models").json()["data"][0]["id"]
        threading.Thread(
            target=lambda: server.ask("POST", "/v1/completions", {**body, "model": model}), daemon=True
        ).start()  # fmt: skip
        url = f"http://127.0.0.1:{server.port}/plimsoll"
        end = time.monotonic() + 60
        while server.ask("GET", "/plimsoll/state", Authorization=f"Bearer {TOKEN}").json()["in_flight"] == 0:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert leave(url, TOKEN, 6) == "it is refusing with 1 in flight; the time is over"


@pytest.mark.parametrize("token", ["a-wrong-token-of-some-length", ""])
def test_a_gate_that_does_not_obey_is_said(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and one line; the server serves on."""
    with standin(GATED) as server:
        assert main(["2", str(server.port)], {"PLIMSOLL_TOKEN": token}) == 1
        assert capsys.readouterr().err.count("\n") == 1
        assert server.ask("GET", "/plimsoll/ready").status == 200


def test_a_server_that_is_gone_is_said_and_words_that_are_none_get_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 for the latter."""
    assert main(["2", str(free_port())], ENVIRON) == 1
    assert "could not be asked" in capsys.readouterr().err
    assert main([], ENVIRON) == main(["soon"], ENVIRON) == 2
    assert "usage: python3 -m plimsoll.inside.leave" in capsys.readouterr().err
