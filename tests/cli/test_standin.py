"""`plimsoll standin` as a user meets it: what it takes, and starts that fail as vLLM's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.page_world import answers
from plimsoll.standin.launch import CARD, MODEL
from tests.cli.answers import CPU, ask
from tests.each import cases, each
from tests.fakes import eventually
from tests.net.raw_server import free_port
from tests.options import standin_options


def test_a_start_that_fails_ends_as_vllms() -> None:
    """The last line of the real parser, recorded with 0.32.0, to the letter; without memory the log, tracebacks and exit 1."""
    for name, words in (
        ("unrecognized-argument", "--swap-space 4"),
        ("invalid-choice", "--kv-cache-dtype int3"),
        ("invalid-value", "--gpu-memory-utilization plenty"),
    ):
        real = (CPU / f"{name}.log").read_text(encoding="utf-8").splitlines()[-1]
        assert ask(f"standin --vllm 0.32.0 {words}", code=2).line == real + "\n"
    answer = ask("standin --gpu L4 --gpu-memory-utilization 0.7", code=1)
    assert "EngineCore failed to start." in answer.out
    assert "Available KV cache memory: -" in answer.out
    assert answer.err.rstrip().endswith("Failed core proc(s): {}")


def test_nothing_said_is_a_known_model_on_a_known_card() -> None:
    """Without a word it is a bundled model on an L4 that fits, on this machine's own address."""
    options = standin_options([], {"HF_HUB_OFFLINE": "1"})
    (launch,) = options.launches
    assert launch.failure is None
    assert (launch.config.model, launch.log.ledger.card.name, launch.config.max_model_len) == (MODEL, CARD, 8192)
    assert (launch.options.host, launch.options.port) == ("127.0.0.1", 8000)
    assert (options.speed, options.faults) == (1.0, ())


@each(
    "words",
    [
        (MODEL, "--max-model-len", "4096", "--port", "9009"),
        ("--model", MODEL, "--max-model-len", "4096", "--port", "9009"),
        ("vllm", "serve", MODEL, "--max-model-len", "4096", "--port", "9009"),
        ("--", "vllm", "serve", MODEL, "--max-model-len", "4096", "--port", "9009"),
        (f"vllm serve {MODEL} --max-model-len 4096 --port 9009",),
        ("--", "python", "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--max-model-len=4096", "--port=9009"),
    ],
)
def test_a_command_may_be_written_in_many_ways(words: tuple[str, ...]) -> None:
    """Flags alone, a command as pasted, or one in quotes: the same server."""
    (launch,) = standin_options(words, {}).launches
    assert (launch.config.model, launch.config.max_model_len, launch.options.port) == (MODEL, 4096, 9009)


def test_files_are_read_and_where_it_listens_can_be_said_beside_them(tmp_path: Path) -> None:
    """A start script is a command, too, and so are the flags of a --config file; it can be tried on this machine alone."""
    (tmp_path / "c.yaml").write_text("max-model-len: 2048\nport: 9100\nserved-model-name: [a, b]\n", encoding="utf-8")
    script = tmp_path / "start.sh"
    command = f"vllm serve {MODEL} --config c.yaml --port 9101 --host 0.0.0.0"
    script.write_text(f"#!/bin/sh\nexport VLLM_SERVER_DEV_MODE=1\n{command}\n", encoding="utf-8")
    (launch,) = standin_options([str(script)], {"PLIMSOLL_TOKEN": "a-long-enough-token"}).launches
    assert (launch.config.max_model_len, launch.options.port, launch.config.served_names) == (2048, 9101, ("a", "b"))
    assert launch.options.is_dev_mode
    place = ["--host", "127.0.0.1", "--port", "9123"]
    for words in (
        [str(script), *place],
        [*place, "--", "vllm", "serve", MODEL, "--max-model-len", "4096", "--host", "0.0.0.0"],
    ):
        options = standin_options(words, {}).launches[0].options
        assert (options.host, options.port) == ("127.0.0.1", 9123)


def test_faults_and_servers_may_be_many() -> None:
    """--fault is taken as often as it is given; each server of a fleet listens elsewhere and answers with other words."""
    faults = standin_options(["--fault", "wedge@60s:30s", "--fault=neighbour@10s=3GiB"], {}).faults
    assert [(fault.kind, fault.at_s) for fault in faults] == [("wedge", 60.0), ("neighbour", 10.0)]
    assert faults[1].value == 3 << 30
    launches = standin_options(["--fleet", "3", "--port", "9000", "--max-num-seqs", "8"], {}).launches
    assert [launch.options.port for launch in launches] == [9000, 9001, 9002]
    assert len({launch.config.seed for launch in launches}) == 3
    assert launches[2].log.address == "http://127.0.0.1:9002"


def test_what_is_not_imitated_is_said() -> None:
    """A version that is not known, flags that do nothing here and one that moves the scheduler get a word each."""
    words = "--vllm 9.9.9 --enable-lora --kv-cache-metrics --max-num-scheduled-tokens 512 --max-num-queued-reqs 5"
    notes = " ".join(standin_options(words.split(), {}).notes)
    for said in ("9.9.9", "--enable-lora", "--kv-cache-metrics", "--max-num-scheduled-tokens"):
        assert said in notes
    assert "--max-num-queued-reqs" not in notes
    assert standin_options(["--vllm", "99.0.0", "--made-up"], {}).launches[0].failure is None, "a later one may know more"


@each(("words", "environ"), cases("cli", "an_open_address_needs_a_secret"))
def test_an_open_address_needs_a_secret(words: list[str], environ: dict[str, str]) -> None:
    """With a token or a key any address will do; this machine's own needs none."""
    assert standin_options(words, environ).launches[0].options.host == words[1]


@pytest.mark.real
def test_it_serves_until_it_is_stopped() -> None:
    """The command itself: it opens its port, says so in vLLM's words, and ends with 0 on SIGTERM."""
    port = free_port()
    words = [sys.executable, "-m", "plimsoll", "standin", "--port", str(port)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PLIMSOLL_COMPILE": "0"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as server:
        try:
            eventually(lambda: answers(f"http://127.0.0.1:{port}/health"), 60)
        finally:
            server.send_signal(signal.SIGTERM)
            out, err = server.communicate(timeout=30)
    assert server.returncode == 0, err
    assert "GPU KV cache size: " in out
    assert "[shutdown] API server: shutdown triggered" in out
    assert "Application startup complete." in err
