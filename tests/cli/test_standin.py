"""`plimsoll standin` as a user meets it: what it takes, what it refuses in one line, and starts that fail as vLLM's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.errors import BadInput
from plimsoll.standin.launch import CARD, MODEL
from tests.each import each
from tests.options import standin_options


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on standard error, with exit code 2."""
    assert main(["standin", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert "mistake of ours" not in captured.err
    return captured.err


@each(
    ("words", "says"),
    [
        ("--gpu", "--gpu needs a value"),
        ("--gpu Voodoo2", "no GPU called"),
        ("--gpus x", "--gpus 'x' is not a whole number"),
        ("--gpus 1 -tp 2", "needs 2 GPUs"),
        ("--gpu-memory-gib 0", "a card has memory"),
        ("--gpu-memory-gib lots", "is not a size"),
        ("--used-gib -1", "is not a size"),
        ("--vllm banana", "is not a version"),
        ("--vllm 0.6.0", "from 0.11.0 on"),
        ("--speed 0", "--speed must lie above 0"),
        ("--speed nan", "--speed is not a number"),
        ("--speed 1e9", "--speed must lie above 0"),
        ("--start-seconds -1", "--start-seconds must lie"),
        ("--start-seconds soon", "--start-seconds is not a number"),
        ("--fault", "--fault needs a value"),
        ("--fault earthquake", "there is no fault 'earthquake'"),
        ("--fault wedge@later", "is not a time"),
        ("--fault neighbour=much", "is not a size"),
        ("--fault @@", "--fault '@@'"),
        ("--fleet 0", "--fleet must lie"),
        ("--fleet many", "--fleet"),
        ("--fleet 3 --port-range 9000-9001", "3 servers need 3 ports"),
        ("--port-range 9000", "is not a range"),
        ("--port-range 9001-9000", "ends before it begins"),
        ("--fleet 2 --port 65535", "2 servers need 2 ports"),
        ("--fleet 2 --port 0", "--port 0"),
        ("--base-ns -5", "--base-ns"),
        ("--base-ns 1e99", "--base-ns"),
        ("--host 0.0.0.0", "set PLIMSOLL_TOKEN or --api-key"),
        ("--host ::", "set PLIMSOLL_TOKEN or --api-key"),
        ("--host 0.0.0.0 --api-key ", "set PLIMSOLL_TOKEN or --api-key"),
        ("--host 127.example.com", "set PLIMSOLL_TOKEN or --api-key"),
        ("--data-parallel-size 2", "--data-parallel-size 2"),
        ("--api-server-count 2", "--api-server-count 2"),
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization must lie"),
        ("--max-num-seqs 0", "must be at least 1"),
        ("--config nowhere.yaml", "no such file"),
        ("x.sh -- vllm serve m", "stands in front of --"),
        ("-- ls", "no vLLM start"),
        ("--vllm 0.25.1 --max-model-len auto --num-gpu-blocks-override 1", "null block"),
        ("--gpu L4 --gpu H100", "--gpu is given twice"),
    ],
)
def test_wrong_input_is_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong with our own words is said in one line, with exit code 2."""
    line = refusal(capsys, *words.split(" "))
    assert line.startswith("plimsoll: ")
    assert says in line


@each(
    ("words", "says"),
    [
        ("--swap-space 4", "vllm: error: unrecognized arguments: --swap-space 4"),
        ("--gppu L4", "vllm: error: unrecognized arguments: --gppu"),
        ("--made-up=1 --port 8001", "vllm: error: unrecognized arguments: --made-up=1"),
        (f"{MODEL} second", "vllm: error: unrecognized arguments: second"),
        (f"{MODEL} --enforce-eager true", "vllm: error: unrecognized arguments: true"),
        ("--kv-cache-dtype int3", "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'int3' (choose from 'auto'"),
        ("--gpu-memory-utilization plenty", "invalid float value: 'plenty'"),
        ("--port", "vllm serve: error: argument --port: expected one argument"),
        ("--port abc", "vllm serve: error: argument --port: invalid int value: 'abc'"),
        ("--max-num 3", "vllm serve: error: ambiguous option: --max-num could match"),
        ("--enforce-eager=yes", "ignored explicit argument 'yes'"),
    ],
)
def test_a_flag_is_refused_in_vllms_words(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the release's own parser does not take is refused with its line and its exit code."""
    line = refusal(capsys, "--vllm", "0.32.0", *words.split())
    assert line.startswith("vllm")
    assert says in line


def test_what_was_typed_does_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in a refused word are not repeated, nor is more of it than a screen."""
    line = refusal(capsys, "--x\x1b[2J\n\x07", "y" * 10_000)
    assert line.rstrip("\n").isprintable()
    assert len(line) <= 2001


def test_the_recorded_refusal_is_met_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of the real parser, recorded with 0.32.0, to the letter."""
    captures = Path(__file__).parents[1] / "captures" / "vllm-0.32.0-failures"
    for name, words in (("unrecognized-argument", "--swap-space 4"), ("invalid-choice", "--kv-cache-dtype int3"),
                        ("invalid-value", "--gpu-memory-utilization plenty")):  # fmt: skip
        real = (captures / f"{name}.log").read_text(encoding="utf-8").splitlines()[-1]
        assert refusal(capsys, "--vllm", "0.32.0", *words.split()) == real + "\n"


def test_a_start_that_does_not_fit_ends_as_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    """The log goes to stdout, tracebacks to stderr, and the exit code is 1."""
    assert main(["standin", "--gpu", "L4", "--gpu-memory-utilization", "0.7"]) == 1
    captured = capsys.readouterr()
    assert "EngineCore failed to start." in captured.out
    assert "Available KV cache memory: -" in captured.out
    assert captured.err.rstrip().endswith("Failed core proc(s): {}")


def test_nothing_said_is_a_known_model_on_a_known_card() -> None:
    """Without a word it is a bundled model on an L4 that fits, on this machine's own address."""
    options = standin_options([], {"HF_HUB_OFFLINE": "1"})
    (launch,) = options.launches
    assert launch.failure is None
    assert (launch.config.model, launch.log.ledger.card.name, launch.config.max_model_len) == (MODEL, CARD, 8192)
    assert (launch.options.host, launch.options.port) == ("127.0.0.1", 8000)
    assert (options.speed, options.faults) == (1.0, ())


@pytest.mark.parametrize(
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


def test_files_are_read(tmp_path: Path) -> None:
    """A start script is a command, too, and so are the flags of a --config file."""
    (tmp_path / "c.yaml").write_text("max-model-len: 2048\nport: 9100\nserved-model-name: [a, b]\n", encoding="utf-8")
    script = tmp_path / "start.sh"
    script.write_text(
        f"#!/bin/sh\nexport VLLM_SERVER_DEV_MODE=1\nvllm serve {MODEL} --config c.yaml --port 9101\n", encoding="utf-8"
    )
    (launch,) = standin_options([str(script)], {}).launches
    assert (launch.config.max_model_len, launch.options.port, launch.config.served_names) == (2048, 9101, ("a", "b"))
    assert launch.options.is_dev_mode


def test_faults_may_be_many() -> None:
    """--fault is taken as often as it is given, also with an equals sign; after -- the stand-in says where it belongs."""
    options = standin_options(["--fault", "wedge@60s:30s", "--fault=neighbour@10s=3GiB"], {})
    assert [(fault.kind, fault.at_s) for fault in options.faults] == [("wedge", 60.0), ("neighbour", 10.0)]
    assert options.faults[1].value == 3 << 30
    with pytest.raises(BadInput, match="in front of --"):
        standin_options(["--", "vllm", "serve", MODEL, "--fault", "oom"], {})


def test_where_it_listens_can_be_said_beside_a_command(tmp_path: Path) -> None:
    """A start script that listens everywhere can be tried on this machine alone."""
    script = tmp_path / "start.sh"
    script.write_text(f"vllm serve {MODEL} --max-model-len 4096 --host 0.0.0.0 --port 8000\n", encoding="utf-8")
    place = ["--host", "127.0.0.1", "--port", "9123"]
    command = ["vllm", "serve", MODEL, "--max-model-len", "4096", "--host", "0.0.0.0"]
    for words in ([str(script), *place], [*place, "--", *command]):
        options = standin_options(words, {}).launches[0].options
        assert (options.host, options.port) == ("127.0.0.1", 9123)


def test_what_is_not_imitated_is_said() -> None:
    """A version that is not known and flags that do nothing here get a word each."""
    notes = " ".join(standin_options(["--vllm", "9.9.9", "--enable-lora", "--kv-cache-metrics"], {}).notes)
    assert "9.9.9" in notes
    assert "--enable-lora" in notes
    assert "--kv-cache-metrics" in notes


def test_a_fleet_has_ports_of_its_own() -> None:
    """Each of them listens elsewhere, answers with other words, and says so in its log."""
    launches = standin_options(["--fleet", "3", "--port-range", "9000-9499", "--max-num-seqs", "8"], {}).launches
    assert [launch.options.port for launch in launches] == [9000, 9001, 9002]
    assert len({launch.config.seed for launch in launches}) == 3
    assert launches[2].log.address == "http://127.0.0.1:9002"
    assert len(standin_options(["--port-range", "9000-9009"], {}).launches) == 10


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--host", "0.0.0.0", "--api-key", "k"], {}),
        (["--host", "0.0.0.0"], {"PLIMSOLL_TOKEN": "a-long-enough-token"}),
        (["--host", "0.0.0.0"], {"VLLM_API_KEY": "k"}),
        (["--host", "localhost"], {}),
        (["--host", "::1"], {}),
        (["--host", "127.3.2.1"], {}),
    ],
)
def test_an_open_address_needs_a_secret(words: list[str], environ: dict[str, str]) -> None:
    """With a token or a key any address will do; this machine's own needs none."""
    assert standin_options(words, environ).launches[0].options.host == words[1]


def test_what_is_left_out_is_said() -> None:
    """A flag that moves the scheduler and is not imitated is named."""
    notes = standin_options(["--max-num-scheduled-tokens", "512", "--max-num-queued-reqs", "5"], {}).notes
    assert any("--max-num-scheduled-tokens" in note for note in notes)
    assert not any("--max-num-queued-reqs" in note for note in notes)


def test_a_later_version_may_know_more() -> None:
    """For a version newer than we know, an unknown flag is not refused."""
    assert standin_options(["--vllm", "99.0.0", "--made-up"], {}).launches[0].failure is None
    with pytest.raises(BadInput):
        standin_options(["--vllm", "99.0.0", "--port", "70000"], {})


def test_it_serves_until_it_is_stopped() -> None:
    """The command itself: it opens its port, says so in vLLM's words, and ends with 0 on SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "plimsoll", "standin", "--port", str(port)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "PLIMSOLL_COMPILE": "0"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as server:
        try:
            assert _answers(f"http://127.0.0.1:{port}/health", 60.0)
        finally:
            server.send_signal(signal.SIGTERM)
            out, err = server.communicate(timeout=30)
    assert server.returncode == 0, err
    assert "GPU KV cache size: " in out
    assert "[shutdown] API server: shutdown triggered" in out
    assert "Application startup complete." in err


def _answers(url: str, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            time.sleep(0.1)
    return False


@pytest.mark.parametrize(("command", "extra"), [("standin", "standin"), ("demo", "demo")])
def test_without_its_packages_it_says_what_brings_them(command: str, extra: str) -> None:
    """An installation without extras: exit code 3 and one line with the command that mends it, no mistake of ours."""
    missing = "numpy pydantic starlette uvicorn uvloop httptools".split()
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({missing})); from plimsoll.cli.main import run_and_exit; run_and_exit()"
    )
    words = [sys.executable, "-c", program, command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("plimsoll: a stand-in needs numpy, pydantic, starlette, uvicorn, ")
    assert f"pip install 'plimsoll-line[{extra}]', or in a clone pip install '.[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1
