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

from tests.cli.answers import LLAMA, ask

BUSY = "synthetic:requests=200,rate=30,prompt=600,output=100,families=4,family_tokens=256,seed=7"
WORDS = f"sweep {BUSY} max_num_seqs=4..32 block_size=8,16 --num-blocks 600 --slo ttft=1s,tpot=50ms"
SERVER = f"--gpu L4 --vllm 0.32.0 -- vllm serve {LLAMA} --max-model-len 8192"


def test_a_row_for_every_setting(tmp_path: Path) -> None:
    """JSON, CSV and the page have all of them, with the same figures; the table ranks as many as asked for."""
    table, page = tmp_path / "x.csv", tmp_path / "x.html"
    body = ask(f"{WORDS} --json --csv {table} --html {page}").body
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
    text = ask(f"{WORDS} --top 3").out
    assert all(said in text for said in ("as promised/s", "and 5 more", "rough guide: not fitted"))


@pytest.mark.real
def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """kill -9 in the middle: the second call runs the missing settings alone and says what an undisturbed one says."""
    kept = tmp_path / "runs.jsonl"
    slow = (
        "sweep synthetic:requests=20000,rate=20,prompt=600,output=100,seed=2 num_blocks=400..12800 max_num_seqs=16,32,64 --json"
    )
    command = [sys.executable, "-m", "plimsoll", *slow.split(), "--into", str(kept)]
    sweep = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while (not kept.exists() or kept.read_bytes().count(b"\n") < 3) and time.monotonic() < deadline and sweep.poll() is None:
        time.sleep(0.005)
    sweep.send_signal(signal.SIGKILL)
    assert sweep.wait() == -signal.SIGKILL, "it was done before it could be killed"
    before = kept.read_bytes().count(b"\n")
    assert 3 <= before < 18
    first_lines = kept.read_bytes().split(b"\n")[:before]
    resumed = ask(f"{slow} --into {kept}").out
    lines = kept.read_bytes().splitlines()
    assert (lines[:before], len(lines)) == (first_lines, 18)
    assert len({json.loads(line)["run"] for line in lines}) == 18
    assert ask(slow).out == resumed
