"""Advice on max-num-seqs: the recorded bursts of an H200, and what keeps it silent."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from plimsoll.simulate.advice import Promise, advise
from plimsoll.simulate.fit import only_first
from plimsoll.simulate.settings import EngineLimits
from plimsoll.simulate.trace import MeasuredRun
from plimsoll.simulate.trace_files import read_measured

BURSTS = Path(__file__).parents[2] / "lab" / "results" / "service-h200"
PROMISE = Promise(10.0, 0.1)
ARTICLE = EngineLimits(
    num_blocks=53_856, max_num_seqs=64, max_num_batched_tokens=24_576, max_model_len=32_768, async_scheduling=True
)


def measured(folder: Path, name: str) -> MeasuredRun:
    """What clients saw of one burst of 64 requests."""
    path = folder / "burst.jsonl"
    path.write_bytes(gzip.decompress((BURSTS / f"{name}.requests.jsonl.gz").read_bytes()))
    return read_measured(str(path))


def test_the_burst_of_an_h200_gets_the_advice_that_was_measured(tmp_path: Path) -> None:
    """17 of 64 within the promise with 64 sequences; the replay says 24, and with 24 it was 36 on the same card."""
    advice = advise(measured(tmp_path, "article/article-1"), ARTICLE, PROMISE)
    assert (advice.requests, advice.measured, advice.knob, advice.value) == (64, 17, "max-num-seqs", 24)
    assert abs(advice.replayed - 17) <= 2
    assert abs(advice.kept - 36) <= 3, "36 is what the card did"
    assert advice.kept_at_least <= advice.kept
    assert advice.sentence() == f"with max-num-seqs 24, {advice.kept} of 64 requests instead of 17 within the promise"


def test_an_engine_that_is_set_well_gets_none(tmp_path: Path) -> None:
    """With 24 sequences no other setting gains more than the clock's error."""
    advice = advise(measured(tmp_path, "tuned-segments/tuned-1"), ARTICLE._replace(max_num_seqs=24), PROMISE)
    assert advice.measured == 36
    assert "no setting keeps clearly more" in advice.why_not
    assert advice.sentence().startswith("no advice: ")


@pytest.mark.parametrize(
    ("change", "why"),
    [("few", "too few"), ("another engine", "the replay of what happened"), ("no stamps", "0 requests that ended")],
)
def test_a_replay_that_is_not_what_happened_gives_none(tmp_path: Path, change: str, why: str) -> None:
    """Too few requests, stamps that no engine of this kind makes, or none."""
    run = measured(tmp_path, "article/article-1")
    if change == "few":
        run = only_first(run, 10)
    elif change == "another engine":  # half of them answered in the wrong order, as if another queue had decided
        first = run.first_token_ns.copy()
        first[::2] = run.trace.arrival_ns[::2] + np.random.default_rng(1).integers(1, 10**11, len(first[::2]))
        run = run._replace(first_token_ns=first, finish_ns=np.maximum(run.finish_ns, first + 1))
    else:
        run = run._replace(first_token_ns=np.full_like(run.first_token_ns, -1), finish_ns=np.full_like(run.finish_ns, -1))
    assert why in advise(run, ARTICLE, PROMISE).why_not
