"""`plimsoll whatif` as a user meets it: over a recording, and over what a guard's engines recorded."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.cli.main import parse
from plimsoll.cli.whatif import WhatifOptions, changed, split_changes
from plimsoll.errors import BadInput
from plimsoll.guard.api.openapi import document
from plimsoll.render.whatif import ReplayOutcome, WhatifReport, is_tie
from plimsoll.simulate.summary import summarise
from plimsoll.tune.goodput import Slo
from tests.cli.answers import CAPTURES, LLAMA, ask
from tests.cli.test_guard import config, holds
from tests.each import cases
from tests.guard.daemon.guards import guarding
from tests.simulate.golden_runs import hand_made

STORM = CAPTURES / "vllm-0.25.1-h200-traffic" / "storm.requests.jsonl.gz"
FLAGS = "--max-model-len 16384 --max-num-seqs 256 --max-num-batched-tokens 2048 --kv-cache-memory-bytes 4294967296"
SERVER = f"--gpu H200 --vllm 0.25.1 --slo ttft=2s,tpot=30ms -- vllm serve {LLAMA} {FLAGS}"


def whatif(words: str, trace: str = str(STORM), server: str = SERVER) -> dict[str, Any]:
    before, dashes, command = server.partition(" -- ")
    return ask(f"whatif {words} {trace} {before} --json{dashes}{command}").body


def test_the_recording_as_measured_as_replayed_and_changed() -> None:
    """The replay of what was recorded is near what was measured; both replays are those that `simulate` makes."""
    found = whatif("'replicas=2 rate=2x'")
    assert found["schema"] == "plimsoll.whatif/1"
    was, now, measured = found["as_recorded"], found["what_if"], found["measured"]
    assert was["ttft"]["p50"] == pytest.approx(measured["ttft_50"], rel=0.1)
    assert was["met"] == pytest.approx(measured["met"], abs=15)
    assert (was["replicas"], now["replicas"], found["is_tie"]) == (1, 2, False)
    server = SERVER.replace("--slo ttft=2s,tpot=30ms ", "--replicas 2 --speedup 2 --json ")
    simulated = ask(f"simulate {STORM} {server}").body
    assert all(now[name] == simulated[name] for name in ("steps", "preemptions", "ttft", "e2e"))
    assert found["reading"][0].startswith(f"With replicas=2 rate=2x: {now['met']} of 500 requests served as promised")
    text = ask(f"whatif replicas=2 {STORM} {SERVER}").out
    assert all(word in text for word in ("measured", "as recorded", "what if", "as promised"))


def test_a_command_that_was_not_the_recorded_one_is_told() -> None:
    """A replay that is far from the stamps says so, and whose fit it is where another card is asked for."""
    found = whatif("gpu=L40S", server=SERVER.replace(" --kv-cache-memory-bytes 4294967296", ""))
    assert any(sentence.startswith("Do not trust it") for sentence in found["reading"])
    assert any("kernels measured on L40S" in note for note in found["what_if"]["notes"])


def test_changes_become_options() -> None:
    """Relative and absolute counts, cards, flags in place of the command's own; without a command simulate's own."""
    words = ["t", "--gpu", "H100", "--replicas", "4", "--speedup", "1.5", "--fit", "r", "--", "vllm", "serve", "m"]
    base = parse(WhatifOptions, [*words, "--max-num-seqs=8"])
    for text, expected in (
        ("replicas=+2", {"replicas": 6}), ("replicas=-1", {"replicas": 3}), ("rate=2x", {"speedup": 3.0}),
        ("router=gateway", {"router": "gateway"}),
        ("gpu=L40Sx2", {"gpu": "L40S", "fit": None, "verbatim": (*(base.verbatim or ()), "--tensor-parallel-size", "2")}),
        ("max-num-seqs=64", {"verbatim": ("vllm", "serve", "m", "--max-num-seqs", "64")}),
    ):  # fmt: skip
        changes, traces = split_changes((text, "t"))
        assert (traces, changed(base, changes)) == (("t",), replace(base, **expected)), text
    plain = parse(WhatifOptions, ["t"])
    assert changed(plain, {"max_num_seqs": "64"}).max_num_seqs == 64
    with pytest.raises(BadInput, match="gpu= needs the recorded server"):
        changed(plain, {"gpu": "H100"})


@pytest.mark.parametrize(("cards", "was", "now", "tied"), cases("cli", "a_tie_is_what_the_clock_cannot_tell"))
def test_a_tie_is_what_the_clock_cannot_tell(
    cards: tuple[str, str], was: tuple[int, ...], now: tuple[int, ...], tied: bool
) -> None:
    """One card's clock is off the same way in both replays; the better one must be so at both ends of the band."""
    summary = summarise(hand_made([], []))
    both = [
        ReplayOutcome("", summary, 1, kept[0], card, (0.9, 1.1), tuple((one, 0.0) for one in kept[1:]), ())
        for card, kept in zip(cards, (was, now), strict=True)
    ]
    assert is_tie(WhatifReport({}, both[0], both[1], None, Slo(ttft=1.0))) is tied


def test_what_guards_engines_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running guard hands out both recordings, of the window alone and without a half line; the replay is that of files."""
    rows = [json.loads(line) for line in gzip.decompress(STORM.read_bytes()).splitlines()]
    shift = time.time() - 3600 - rows[0]["arrival"]
    stamps = ("arrival", "scheduled", "first_token", "finished")
    lines = [json.dumps({**row, **{name: row[name] + shift for name in stamps if name in row}}) + "\n" for row in rows]
    old = json.dumps({**rows[0], "arrival": 1000.0, "scheduled": 1000.0, "first_token": 1001.0, "finished": 1002.0}) + "\n"
    text = ""
    for engine in (0, 1):
        folder = tmp_path / f"e{engine}"
        folder.mkdir()
        content = old + "".join(lines[engine::2]) + '{"schema": "plims'
        (folder / "requests-20260101T000000Z-1.jsonl").write_text(content, encoding="utf-8")
        text += f"[[engine]]\nurl = 'http://127.0.0.1:{9 + engine}'\nname = 'e {engine}'\nrecording = '{folder}'\n"
    with guarding(tmp_path, "--config", config(tmp_path, text)) as guard:
        url = f"http://127.0.0.1:{guard.port}"
        holds("Recordings", guard.json("/recordings"))
        assert "/recordings/{name}" in document("x")["paths"]
        assert guard.get("/recordings/none")[0] == 404
        assert guard.get("/recordings/e%200?seconds=-1")[0] == 400
        assert guard.get("/recordings", authorization="")[0] == 401
        monkeypatch.setenv("PLIMSOLL_GUARD_TOKEN", guard.token)
        found = whatif("replicas=-1", trace=f"--from-guard {url}")
        assert (found["as_recorded"]["replicas"], found["what_if"]["replicas"]) == (2, 1)
        (tmp_path / "all.jsonl").write_text("".join(lines), encoding="utf-8")
        local = whatif("replicas=1", trace=f"{tmp_path / 'all.jsonl'} --replicas 2")
        for key in ("as_recorded", "what_if"):
            assert all(found[key][name] == local[key][name] for name in ("requests", "steps", "ttft", "e2e")), key
        assert ask(f"simulate --from-guard {url} --json --num-blocks 9000").body["requests"] == 500
        assert (
            "no request was recorded in the last 0.5 hours" in ask(f"simulate --from-guard {url} --last-hours 0.5", code=2).line
        )
        guard.stop()
