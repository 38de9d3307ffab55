"""`plimsoll sweep` as a user meets it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tests.cli.answers import ask

BUSY = "synthetic:requests=200,rate=30,prompt=600,output=100,families=4,family_tokens=256,seed=7"
WORDS = f"sweep {BUSY} max_num_seqs=4..32 block_size=8,16 --num-blocks 600 --slo ttft=1s,tpot=50ms"


def test_a_row_for_every_setting(tmp_path: Path) -> None:
    """JSON and CSV have all of them, with the same figures; the table ranks as many as asked for."""
    table = tmp_path / "x.csv"
    body = ask(f"{WORDS} --json --csv {table}").body
    assert body["schema"] == "plimsoll.sweep/1"
    assert body["axes"] == {"max_num_seqs": [4, 8, 16, 32], "block_size": [8, 16]}
    rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))))
    assert len(rows) == len(body["points"]) == 8
    for row, point in zip(rows, body["points"], strict=True):
        assert float(row["goodput"]) == point["score"]["goodput"]
        assert int(row["max_num_seqs"]) == point["values"]["max_num_seqs"]
    text = ask(f"{WORDS} --top 3").out
    assert all(said in text for said in ("as promised/s", "and 5 more", "rough guide: not fitted"))
