"""What `plimsoll guard` is told of acting: --act, [act], and a server of its own behind --."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.errors import BadInput
from tests.cli.test_guard import config
from tests.options import guard_options


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("vllm serve m", "http://127.0.0.1:8000"),
        ("vllm serve m --port 9000 --host 0.0.0.0", "http://127.0.0.1:9000"),
        ("vllm serve m --host=:: --port=9000", "http://[::1]:9000"),
        ("vllm serve m --host 10.0.0.7 --port 1 --port 2", "http://10.0.0.7:2"),
        ("numactl -N 0 vllm serve m --port 9001 --ssl-certfile c --ssl-keyfile k", "https://127.0.0.1:9001"),
        ("python -m vllm.entrypoints.openai.api_server --model m --port 9002", "http://127.0.0.1:9002"),
    ],
)
def test_a_server_of_its_own_is_watched_where_its_command_says(words: str, url: str) -> None:
    """Behind -- nothing is guard's own; the address is that of --host and --port, and a wildcard is this machine."""
    asked = guard_options(["--act", "--", *words.split(), "--act", "--engine", "http://not.ours"], {"PLIMSOLL_TOKEN": "t" * 16})
    (engine,) = asked.config.engines
    assert (engine.url, asked.own, engine.token) == (url, engine.name, "t" * 16)
    assert asked.command == (*words.split(), "--act", "--engine", "http://not.ours")
    assert asked.is_acting
    assert asked.config.engines[0].only_observed == ""


def test_a_server_of_its_own_that_guard_may_not_touch() -> None:
    """A KV connector or a second machine in the command is enough: it is only observed."""
    for words in ("--kv-transfer-config {}", "--nnodes 2", "--nnodes $N", "--data-parallel-address 10.0.0.1"):
        asked = guard_options(["--", "vllm", "serve", "m", *words.split()], {})
        assert asked.config.engines[0].only_observed, words
        assert not asked.is_acting


def test_a_server_of_its_own_may_be_named_in_the_configuration(tmp_path: Path) -> None:
    """By its address; it comes first, keeps what was said of it, and cannot be restarted in a second way."""
    text = "[[engine]]\nurl = 'http://b:1'\n[[engine]]\nurl = 'http://127.0.0.1:8000'\nname = 'mine'\ngroup = 'g'\n"
    asked = guard_options(["--config", config(tmp_path, text), "--act", "--", "vllm", "serve", "m"], {})
    assert [one.name for one in asked.config.engines] == ["mine", "b:1"]
    assert (asked.own, asked.config.engines[0].group) == ("mine", "g")
    with pytest.raises(BadInput, match=r"line 9: mine is started by guard itself"):
        guard_options(["--config", config(tmp_path, text + "restart = {docker = 'x'}"), "--", "vllm", "serve", "m"], {})
    asked = guard_options(["--engine", "http://127.0.0.1:7", "--", "./start.sh"], {})
    assert (asked.own, asked.command) == ("127.0.0.1:7", ("./start.sh",))
    for words, url in (("--port $P", "http://10.0.0.9:7"), ("--uds /x", "http://10.0.0.9:7"), ("", "http://127.0.0.1:8000")):
        asked = guard_options(["--engine", "http://10.0.0.9:7", "--", "vllm", "serve", "m", *words.split()], {})
        assert asked.config.engines[0].url == url, "its own words count where they tell"
        assert {one.url for one in asked.config.engines} == {url, "http://10.0.0.9:7"}


def test_it_acts_only_when_told_to(tmp_path: Path) -> None:
    """An [act] alone makes it say what it would do; --act with something in hand makes it act."""
    plain, act = "[[engine]]\nurl = 'http://x:1'\n", "[act]\n"
    hand = f"{plain}restart = {{systemd = 'v.service'}}\n"
    asked = guard_options(["--config", config(tmp_path, act + plain)], {})
    assert (asked.is_acting, asked.is_dry_run) == (False, True)
    asked = guard_options(["--config", config(tmp_path, plain)], {})
    assert (asked.is_acting, asked.is_dry_run) == (False, False)
    for text in (hand, act + hand):
        asked = guard_options(["--config", config(tmp_path, text), "--act"], {})
        assert (asked.is_acting, asked.is_dry_run) == (True, False)
    assert guard_options(["--engine", "http://x:1", "--act"], {"PLIMSOLL_TOKEN": "t" * 16}).is_acting
    with pytest.raises(BadInput, match="nothing can be done"):
        guard_options(["--config", config(tmp_path, act + plain), "--act"], {})
