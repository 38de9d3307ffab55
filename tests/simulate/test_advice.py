"""Advice on knobs: the recorded bursts of an H200, a chat that long prompts hold up, and what keeps it silent."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from lab.measured_runs import only_first
from plimsoll.simulate.advice import Promise, advise
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.trace import MeasuredRun, make_trace
from plimsoll.simulate.trace_files import read_measured
from tests.simulate.test_fit import as_measured

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


@pytest.mark.real
def test_the_burst_of_an_h200_gets_the_advice_that_was_measured(tmp_path: Path) -> None:
    """17 of 64 within the promise with 64 sequences; the replay says 24, and with 24 it was 36 on the same card."""
    advice = advise(measured(tmp_path, "article/article-1"), ARTICLE, PROMISE)
    assert (advice.requests, advice.measured, advice.knob, advice.value) == (64, 17, "max-num-seqs", 24)
    assert abs(advice.replayed - 17) <= 2
    assert abs(advice.kept - 36) <= 3, "36 is what the card did"
    assert advice.sentence() == f"with max-num-seqs 24, {advice.kept} of 64 requests instead of 17 within the promise"


def test_a_chat_that_long_prompts_hold_up_gets_smaller_steps() -> None:
    """Short answers beside prompts of 4,000 tokens that come in one step: no number of sequences helps them as much."""
    chat = np.arange(320) * 37_500_000
    long = np.arange(12) * 1_000_000_000 + 37_000_000
    arrival = np.concatenate((chat, long))
    order = np.argsort(arrival, kind="stable")
    prompt, output = np.repeat((60, 4000), (320, 12))[order], np.repeat((4, 2), (320, 12))[order]
    limits = EngineLimits(num_blocks=20_000, max_num_seqs=32, max_num_batched_tokens=8192, max_model_len=32_768)
    clock = StepTime(8_000_000, 100_000, 20_000, 10_000)
    run = replay(make_trace("chat", arrival[order], prompt, output), limits, clock)
    advice = advise(as_measured(run), limits, Promise(0.7, 0.06))
    assert (advice.knob, advice.requests, advice.why_not) == ("max-num-batched-tokens", 332, "")
    turned = replay(run.trace, limits.turned(max_num_batched_tokens=advice.value), clock)
    assert int((turned.finish_ns - turned.first_token_ns <= 0.06e9 * (output - 1)).sum()) == advice.kept > advice.measured
    assert max(kept for knob, _, kept in advice.tried if knob == "max-num-seqs") < advice.kept


@pytest.mark.real
def test_an_engine_that_is_set_well_gets_none(tmp_path: Path) -> None:
    """With 24 sequences no other setting gains more than the clock's error."""
    advice = advise(measured(tmp_path, "tuned-segments/tuned-1"), ARTICLE._replace(max_num_seqs=24), PROMISE)
    assert advice.measured == 36
    assert "no setting keeps clearly more" in advice.why_not
    assert advice.sentence().startswith("no advice: ")


@pytest.mark.real
def test_a_gain_is_over_what_happened_and_over_its_replay(tmp_path: Path) -> None:
    """Six requests that were quicker than the replay says are no gain of a setting that keeps hardly more than they did."""
    run, promise = measured(tmp_path, "article/article-1"), Promise(10.0, 0.135)
    advice = advise(run, ARTICLE, promise)
    slow = np.flatnonzero(run.finish_ns - run.first_token_ns > 0.135e9 * (run.trace.output - 1))[:6]
    finish = run.finish_ns.copy()
    finish[slow] = run.first_token_ns[slow] + np.int64(0.13e9) * (run.trace.output[slow] - 1)
    quicker = advise(run._replace(finish_ns=finish), ARTICLE, promise)
    assert (advice.why_not, quicker.measured) == ("", advice.measured + 6)
    assert "no setting keeps clearly more" in quicker.why_not


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("few", "too few"),
        ("no stamps", "0 requests that ended"),
        pytest.param("another engine", "the replay of what happened", marks=pytest.mark.real),
    ],
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
