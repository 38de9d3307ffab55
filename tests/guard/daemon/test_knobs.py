"""Knobs: advice from a recording, and settings by the engine's own word and its steps; the whole way is in tests/real."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from plimsoll.guard.act.ports import Outcome, done, failed
from plimsoll.guard.adapters.file_lock import FileLock
from plimsoll.guard.adapters.gate import GateHttpClient, knob_words
from plimsoll.guard.config import PromiseConfig
from plimsoll.guard.daemon.journal import Journal
from plimsoll.guard.daemon.knob_advice import KnobAdvisor, limits_from, limits_of
from plimsoll.guard.daemon.knob_replay import advice_on, recorded
from plimsoll.guard.daemon.knob_settings import KnobSettings
from plimsoll.guard.daemon.steps import SharedLock
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.standin.config import ServerFlags
from tests.fakes import TOKEN
from tests.standin.servers import standin

BURST = Path(__file__).parents[3] / "lab" / "results" / "service-h200" / "article" / "article-1.requests.jsonl.gz"
LIMITS = {
    "num_blocks": 53_856, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 24_576, "max_model_len": 32_768,
    "prefix_caching": True, "watermark": 0.0, "long_prefill_token_threshold": 0,
}  # fmt: skip


def rows(*pairs: tuple[float, float]) -> str:
    """A recording of requests that came and ended at these times."""
    return "".join(json.dumps({"arrival": arrival, "finished": finished}) + "\n" for arrival, finished in pairs)


@pytest.mark.real
def test_a_recorded_burst_gets_its_advice_from_a_process_of_its_own(tmp_path: Path) -> None:
    """As guard asks it: JSON in, JSON out, with the sentence that stands on the page."""
    (tmp_path / "requests-1.jsonl").write_bytes(gzip.decompress(BURST.read_bytes()))
    asked = {
        "folder": str(tmp_path), "since": 0, "limits": LIMITS, "knobs": ["max-num-seqs"], "unfinished": 0,
        "promise": [10.0, 0.1],
    }  # fmt: skip
    command = [sys.executable, "-m", "plimsoll.guard.daemon.knob_replay", json.dumps(asked)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)
    assert (found["knob"], found["value"], found["measured"]) == ("max-num-seqs", 24, 17)
    assert abs(found["kept"] - 36) <= 3
    assert found["sentence"].startswith("with max-num-seqs 24, ")
    assert {knob for knob, *_ in found["tried"]} == {"max-num-seqs"}, "no knob that this engine does not turn"


def test_nothing_is_advised_in_the_middle_of_a_burst_and_a_window_begins_where_the_engine_was_idle(tmp_path: Path) -> None:
    """A recording holds what has ended: half a burst advised 4 sequences, the whole 24; what was in flight would be missing."""
    (tmp_path / "requests-1.jsonl").write_bytes(gzip.decompress(BURST.read_bytes()))
    asked = {"folder": str(tmp_path), "since": 0, "limits": LIMITS, "unfinished": 31, "promise": [10.0, 0.1]}
    assert "31 requests have not ended yet, beside 64" in advice_on(asked).why_not
    (tmp_path / "requests-1.jsonl").unlink()
    busy = [(float(second), second + 5.0) for second in range(30)]
    later = [(100.0 + second, 101.5 + second) for second in range(40)]
    (tmp_path / "a.jsonl").write_text(rows(*busy, *later) + "nonsense\n{}\n")
    assert len(recorded(tmp_path, 10.0)) == 40
    assert len(recorded(tmp_path, 120.0)) == 20
    assert recorded(tmp_path, 500.0) == []
    assert recorded(tmp_path / "absent", 0.0) == []


@pytest.mark.parametrize("is_set", [False, True])
def test_the_engines_own_limits_are_asked(tmp_path: Path, *, is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its gate, its models and its metrics page; while a knob is set, nothing is advised."""
    monkeypatch.setenv("PLIMSOLL_TOKEN", TOKEN)
    with standin(ServerFlags(middleware=("plimsoll.inside.Gate",), token=TOKEN)) as server:
        engine = EngineConfig(name="a", url=f"http://127.0.0.1:{server.port}", token=TOKEN, recording=str(tmp_path))
        if is_set:
            assert server.ask("POST", "/plimsoll/knobs", {"max-num-seqs": 3}, authorization=f"Bearer {TOKEN}").status == 200
        found = asyncio.run(limits_of(engine))
        remarks: list[tuple[str, str, str]] = []
        advisor = KnobAdvisor(PromiseConfig(), [engine], lambda *words: remarks.append(words))
        (tmp_path / "a.jsonl").write_text(rows((time.time(), time.time() + 1)))
        assert asyncio.run(advisor.advise(engine)) == ("", found)
        assert ("knobs are set" if is_set else "does not tell its blocks") in found  # a stand-in's page has no such labels
        facts = {"leased": "", "in_force": "", "fixed": "max-num-batched-tokens max-num-seqs"}

        async def knobs(_: GateHttpClient) -> Outcome:
            return done("read", **facts)

        monkeypatch.setattr(GateHttpClient, "knobs", knobs)
        assert "cannot be turned" in str(asyncio.run(limits_of(engine))), "data parallel engines: advice that would be refused"


@pytest.mark.parametrize(
    ("page", "blocks", "size"),
    [("vllm-0.32.0-cpu/metrics.txt", 4096, 128), ("vllm-0.25.1-h200-failures/neighbour.metrics-after.txt", 495_993, 16)],
)
def test_the_blocks_stand_on_the_engines_page(page: str, blocks: int, size: int) -> None:
    """Two releases, as they were recorded."""
    text = (Path(__file__).parents[2] / "captures" / page).read_text(encoding="utf-8")
    in_force = "kv-headroom=0 long-prefill-token-threshold=0 max-num-batched-tokens=24576 max-num-seqs=64"
    found = limits_from(text, in_force, 32_768)
    assert not isinstance(found, str), found
    assert (found["num_blocks"], found["block_size"], found["prefix_caching"]) == (blocks, size, True)
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (64, 24_576)


class Engine:
    """A gate whose answers are given."""

    def __init__(self) -> None:
        self.leased, self.calls = "", 0
        self.answer: Outcome | None = None
        self.facts: dict[str, float] = {"running": 30, "steps": 0, "largest_step": 0, "most_needed": 30}

    async def set_knobs(self, values: Mapping[str, float], lease_s: float, epoch: int) -> Outcome:
        del lease_s, epoch
        self.calls += 1
        if self.answer is not None:
            return self.answer
        self.leased = knob_words(values)
        return done(f"in force: {self.leased}")

    async def knobs(self) -> Outcome:
        return done("read", leased=self.leased, **self.facts)


async def test_it_is_verified_when_steps_show_it_and_over_when_its_time_is(tmp_path: Path) -> None:
    """Not by the answer alone: requests that ran beyond the bound must have ended first."""
    clock, remarks, engine = [1000.0], dict[str, str](), Engine()
    book = Journal(tmp_path / "guard.journal")
    lock = SharedLock(FileLock(tmp_path / "fleet.lock"))
    given = {"a": engine, "bare": None}, book, lock, remarks.__setitem__, lambda: clock[0]
    knobs = KnobSettings(*given)
    assert "no gate" in (await knobs.set("bare", {"max-num-seqs": 3}, 60.0, "me")).message
    assert (await knobs.set("a", {"max-num-seqs": 24}, 60.0, "me")).is_done
    await knobs.look(100.0)
    assert "not seen" in remarks["a"]
    engine.facts |= {"steps": 50, "running": 26, "largest_step": 900}
    await knobs.look(111.0)
    assert "not seen" in remarks["a"]
    engine.facts |= {"running": 24}
    await knobs.look(115.0)
    assert "not seen" in remarks["a"], "it is not asked all the time"
    await knobs.look(122.0)
    assert "verified by its steps" in remarks["a"]
    engine.leased = ""  # as after a restart
    await knobs.look(133.0)
    assert (engine.leased, engine.calls) == ("max-num-seqs=24", 2), "set again, for the time that is left"
    await KnobSettings(*given).look(134.0)
    assert "max-num-seqs=24 until " in remarks["a"], "the next guard knows it by the journal"
    clock[0] += 61
    await knobs.look(145.0)
    assert (remarks["a"], knobs.settings, engine.calls) == ("", {}, 2)
    engine.answer = failed("the gate does not take this token")
    assert (await knobs.set("a", {"max-num-seqs": 2}, 60.0, "me")).is_done is False
    assert knobs.settings == {}
    book.close()
