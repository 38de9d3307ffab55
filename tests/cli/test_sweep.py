"""`plimsoll sweep` as a user meets it."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.launch.options import options_of
from tests.each import each

BUSY = "synthetic:requests=200,rate=30,prompt=600,output=100,families=4,family_tokens=256,seed=7"
WORDS = ["sweep", BUSY, "max_num_seqs=4..32", "block_size=8,16", "--num-blocks", "600", "--slo", "ttft=1s,tpot=50ms"]


def test_a_row_for_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON, CSV and the page have all of them, with the same figures."""
    table, page = tmp_path / "x.csv", tmp_path / "x.html"
    assert main([*WORDS, "--json", "--csv", str(table), "--html", str(page)]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "plimsoll.sweep/1"
    assert body["axes"] == {"max_num_seqs": [4, 8, 16, 32], "block_size": [8, 16]}
    rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))))
    assert len(rows) == len(body["points"]) == 8
    for row, point in zip(rows, body["points"], strict=True):
        assert float(row["goodput"]) == point["score"]["goodput"]
        assert int(row["max_num_seqs"]) == point["values"]["max_num_seqs"]
    html = page.read_text(encoding="utf-8")
    assert html.count("<tr") == 9
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")


def test_the_table_ranks_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Best first, as many as asked for; a missing trace is one line with the words of sweep."""
    assert main([*WORDS, "--top", "3"]) == 0
    text = capsys.readouterr().out
    assert "as promised/s" in text
    assert "and 5 more" in text
    assert "rough guide: not fitted" in text
    assert main(["sweep", "max_num_seqs=4,8"]) == 2
    assert "which trace? plimsoll sweep TRACE" in capsys.readouterr().err


def test_without_a_promise_nothing_is_as_promised(capsys: pytest.CaptureFixture[str]) -> None:
    """The column is called what it is; a cache that stands for a server nobody named is a note, unless it is what varies."""
    traffic = "synthetic:requests=50,rate=5,prompt=100,output=20"
    assert main(["sweep", traffic, "max_num_seqs=4,8"]) == 0
    text = capsys.readouterr().out
    assert "served/s" in text
    assert "as promised/s" not in text
    assert "no server was named" in text
    assert main(["sweep", traffic, "num_blocks=400,800"]) == 0
    assert "no server was named" not in capsys.readouterr().out


@pytest.mark.real
def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """kill -9 in the middle: the second call runs the missing settings alone and says what an undisturbed one says."""
    kept = tmp_path / "runs.jsonl"
    slow = [
        "sweep",
        "synthetic:requests=20000,rate=20,prompt=600,output=100,seed=2",
        "num_blocks=400..12800",
        "max_num_seqs=16,32,64",
    ]
    sweep = subprocess.Popen(
        [sys.executable, "-m", "plimsoll", *slow, "--into", str(kept), "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 90
    while (not kept.exists() or kept.read_bytes().count(b"\n") < 3) and time.monotonic() < deadline and sweep.poll() is None:
        time.sleep(0.005)
    sweep.send_signal(signal.SIGKILL)
    assert sweep.wait() == -signal.SIGKILL, "it was done before it could be killed"
    before = kept.read_bytes().count(b"\n")
    assert 3 <= before < 18
    first_lines = kept.read_bytes().split(b"\n")[:before]
    assert main([*slow, "--into", str(kept), "--json"]) == 0
    resumed = capsys.readouterr().out
    lines = kept.read_bytes().splitlines()
    assert lines[:before] == first_lines
    assert len(lines) == 18
    assert len({json.loads(line)["run"] for line in lines}) == 18
    assert main([*slow, "--json"]) == 0
    assert capsys.readouterr().out == resumed


def test_a_setting_that_cannot_be_replayed_is_told_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are there, and the exit code says that something is missing."""
    assert main(["sweep", BUSY, "max_num_batched_tokens=64,2048", "--json"]) == 1
    points = json.loads(capsys.readouterr().out)["points"]
    assert points[0]["score"] is None
    assert points[0]["problem"]
    assert points[1]["score"]["met"] == 200


def test_with_a_command_unsafe_settings_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """They are replayed, since that was asked, and nobody can overlook that plan warns of them."""
    server = [
        "--gpu", "L4", "--vllm", "0.32.0", "--", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len",
        "8192",
    ]  # fmt: skip
    assert main(["sweep", "synthetic:requests=50,rate=1", "gpu_memory_utilization=0.9,0.99", "--json", *server]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["is_safe"] for point in points] == [True, False]
    assert "startup.free-memory-check" in points[1]["objection"]
    assert main(["sweep", "synthetic:requests=50,rate=1", "gpu_memory_utilization=0.9,0.99", *server]) == 0
    assert "unsafe: startup.free-memory-check" in capsys.readouterr().out


def test_a_command_without_a_cache_is_swept_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """The settings decide: one that has a cache is replayed, one that has none says why, and the exit code is 1."""
    words = ["sweep", "synthetic:requests=50,rate=1", "gpu_memory_utilization=0.5,0.9", "--gpu", "L4", "--vllm", "0.32.0"]
    server = ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len", "8192", "--gpu-memory-utilization", "0.5"]
    assert main([*words, "--json", "--", *server]) == 1
    points = json.loads(capsys.readouterr().out)["points"]
    assert points[0]["problem"].startswith("no block of cache is left: ")
    assert points[1]["score"] is not None


@pytest.mark.parametrize("command", ["tune", "sweep", "simulate"])
def test_help_names_every_option_that_is_read(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is taken and not told is found by nobody; what is as for another command is told there."""
    from plimsoll.cli import simulate, sweep, tune

    kind = {"tune": tune.TuneOptions, "sweep": sweep.SweepOptions, "simulate": simulate.SimulateOptions}[command]
    told_by_simulate = set(options_of(simulate.SimulateOptions)) if command == "sweep" else set()
    read = {info.name for field, info in options_of(kind).items() if field not in told_by_simulate}
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    elsewhere = "--fit-series --save-times --arrivals --burstiness --seed".split() if command == "tune" else []
    assert {name for name in read if name not in said} == set(elsewhere)


@each(
    "words",
    [
        [],
        [BUSY],
        ["max_num_seqs=4"],
        [BUSY, "max_num_seqs=4", "max_num_seqs=8"],
        [BUSY, "bogus=4"],
        [BUSY, "max_num_seqs=4", "--bogus"],
        [BUSY, "max_num_seqs=4", "--slo", "fast"],
        [BUSY, "max_num_seqs=4", "--top", "0"],
        [BUSY, "max_num_seqs=4", "--on", "moon"],
        [BUSY, "max_num_seqs=4", "--into", ""],
        [BUSY, "max_num_seqs=4", "vllm", "serve", "m"],
    ],
)
def test_wrong_input_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line, never a traceback."""
    assert main(["sweep", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("plimsoll: ")
    assert said.count("\n") == 1
