"""Drafts, LoRA slots and limits of the queue: what a command says of them, and what a replay makes of it.

That the steps are vLLM's own is shown by test_recorded.py, and by tests/real/test_scheduler_agrees.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from plimsoll.cli.main import parse
from plimsoll.errors import BadInput
from plimsoll.simulate import layout as at
from plimsoll.simulate.features import ACCEPTANCE, UNREPLAYED_DRAFTS, read_speculation, with_drafts
from plimsoll.simulate.inputs import read_inputs
from plimsoll.simulate.open_run import OpenRun
from plimsoll.simulate.options import ReplayOptions
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import CacheGroup, EncoderLimits, EngineLimits, HostCache, Speculation
from plimsoll.simulate.trace import Trace, make_trace
from plimsoll.tune.goodput import Slo, score
from tests.each import each
from tests.simulate.test_recorded import CASES, recorded_case

DRAFTERS = [  # configuration, then lookahead, slots of the budget and whether the last block of a hit is dropped
    ('{"method": "eagle3", "num_speculative_tokens": 3, "model": "x"}', (3, 0, True)),
    ('{"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "num_speculative_tokens": 3}', (3, 0, True)),
    ('{"method": "eagle3", "num_speculative_tokens": 4, "parallel_drafting": true}', (4, 3, True)),
    ('{"method": "eagle", "num_speculative_tokens": 2, "disable_eagle_block_drop": true}', (2, 0, False)),
    ('{"method": "deepseek_mtp", "num_speculative_tokens": 1}', (1, 0, True)),
    ('{"method": "dflash", "num_speculative_tokens": 5}', (6, 5, True)),
    ('{"model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 5}', (5, 1, False)),
    ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}', (0, 0, False)),
    ('{"model": "[ngram]", "num_speculative_tokens": 5}', (0, 0, False)),
]


@each(("config", "expected"), DRAFTERS)
def test_a_drafter_reserves_what_vllm_reserves(config: str, expected: tuple[int, int, bool]) -> None:
    """Slots ahead, slots of the budget and the dropped block of each method, as vLLM's SpeculativeConfig has them."""
    found = read_speculation(json.loads(config), None)
    assert found is not None
    assert (found.lookahead, found.slots, found.drops_block) == expected
    assert found.acceptance == ACCEPTANCE[1]


def test_drafts_that_cannot_be_replayed_are_said() -> None:
    """Without a number of tokens, or beside Mamba layers; where nobody says the share, the band is wider."""
    for settings, config in (
        (EngineLimits(), {"method": "mtp"}),
        (EngineLimits(groups=(CacheGroup(), CacheGroup("mamba"))), {"method": "ngram", "num_speculative_tokens": 2}),
    ):
        assert with_drafts(settings, config, None) == (settings, (UNREPLAYED_DRAFTS,), (1.0, 1.0))
    config = {"method": "ngram", "num_speculative_tokens": 4}
    low, high = with_drafts(EngineLimits(), config, None).band
    assert low < 1 < high
    assert with_drafts(EngineLimits(), config, 0.5)[1:] == ((), (1.0, 1.0))


def test_what_vllm_does_not_start_with_is_a_line() -> None:
    """A number of drafts that is none, slots that fill a step, and limits below 0; a whole number in any form is taken."""
    for said, tokens in (("3", 3), (3.0, 3), (True, 1)):
        found = read_speculation({"method": "ngram", "num_speculative_tokens": said}, None)
        assert found is not None
        assert found.tokens == tokens
    for odd in (0, -1, 1.5, "x", [3], math.nan, math.inf, 1001):
        with pytest.raises(BadInput, match="num_speculative_tokens must be a whole number from 1 to 1000, not "):
            read_speculation({"method": "ngram", "num_speculative_tokens": odd}, None)
    trace = make_trace("t", [0], [250], [4])
    whole = EngineLimits(
        max_num_batched_tokens=256, max_model_len=256, chunked_prefill=False, speculation=Speculation(9, 0.6, slots=9)
    )
    with pytest.raises(BadInput, match=r"a whole prompt and its drafter's slots .* raise --max-num-batched-tokens"):
        replay(trace, whole)
    words = ["synthetic:requests=2", "--gpu", "L4", "--", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    with pytest.raises(BadInput, match="--max-num-queued-reqs must be 0 or more, not -5"):
        read_inputs(parse(ReplayOptions, [*words, "--max-model-len", "8K", "--max-num-queued-reqs", "-5"]))


@each("acceptance", [0.0, 0.3, 0.6, 1.0])
def test_as_many_drafts_are_accepted_as_the_log_says(acceptance: float) -> None:
    """The share is of all drafts, as in vLLM's log; the same request always gets the same ones, and no token is lost."""
    trace = make_trace("t", np.arange(200) * 10**6, [64] * 200, [100] * 200)
    settings = EngineLimits(speculation=Speculation(3, acceptance, 3, 0, True))
    run = replay(trace, settings)
    assert run.produced.tolist() == [100] * 200
    assert run.totals.accepted_tokens / run.totals.drafted_tokens == pytest.approx(acceptance, abs=0.02)
    assert run.finish_ns.tolist() == replay(trace, settings).finish_ns.tolist()


def test_a_full_queue_refuses_and_a_broken_promise_counts() -> None:
    """Who is refused is neither rejected nor served as promised; the rest waits less."""
    trace = make_trace("t", np.arange(300) * 10**5, [400] * 300, [40] * 300)
    free, full = (replay(trace, EngineLimits(max_num_seqs=16, max_num_queued_reqs=most)) for most in (None, 24))
    assert (free.totals.refused, free.totals.finished) == (0, 300)
    assert full.totals.refused > 100
    assert full.totals.finished + full.totals.refused == 300
    assert full.totals.peak_waiting < 24 < free.totals.peak_waiting
    scored = score(full, Slo(e2e=60.0))
    assert (scored.met, scored.refused, scored.rejected) == (full.totals.finished, full.totals.refused, 0)


def test_requests_wait_for_a_lora_slot() -> None:
    """Two adapters with one slot take turns; those of one adapter, and those of none, run side by side."""
    for adapters, most in (((1, 1, 0, 0), 4), ((1, 2, 2, 0), 2)):
        trace = make_trace("t", [0] * 4, [16] * 4, [10] * 4, adapter=adapters)
        run = replay(trace, EngineLimits(max_loras=1))
        assert run.totals.peak_running == most, adapters
    same = [[7, 8], [7, 8]]
    hits = [
        replay(make_trace("t", [0, 10**9], [33, 33], [1, 1], None, same, 16, adapters), EngineLimits(max_loras=2)).cached_tokens
        for adapters in ((5, 5), (5, 6))
    ]
    assert [found.tolist() for found in hits] == [[0, 32], [0, 0]]


def test_a_picture_is_encoded_once_and_takes_its_time() -> None:
    """The same picture again costs nothing while the cache holds it; with a small budget the prompts wait for each other."""
    same = [list(range(20))] * 4
    trace = make_trace("t", np.arange(4) * 10**9, [320] * 4, [4] * 4, ids=same, prefix_block=16, images=[(100, 100)] * 4)
    own = make_trace("t", np.arange(4) * 10**9, [320] * 4, [4] * 4, images=[(100, 100)] * 4)
    free, slow = (EngineLimits(prefix_caching=False, encoder=EncoderLimits(embed_ps=one)) for one in (0, 10**9))
    took = [replay(one, slow).totals.busy_ns - replay(one, free).totals.busy_ns for one in (trace, own)]
    assert took == [200 * 10**6, 800 * 10**6]
    at_once = own._replace(arrival_ns=np.zeros(4, dtype=np.int64))
    steps = [replay(at_once, EngineLimits(encoder=EncoderLimits(budget, 800))).totals.steps for budget in (800, 100)]
    assert steps[0] == 4
    assert steps[1] > 8


def test_a_prompt_that_left_the_card_comes_back_from_the_host() -> None:
    """Whole blocks of prompts, those used longest ago first to go; each takes its time to load."""
    ids = [[1, 1, 1, 1], [2, 2, 2, 2], [1, 1, 1, 1]]
    trace = make_trace("t", [0, 10**9, 2 * 10**9], [49] * 3, [20] * 3, ids=ids, prefix_block=16)
    card = EngineLimits(num_blocks=6, max_model_len=80)
    alone, large, small = (
        replay(trace, card._replace(host_cache=host)) for host in (None, HostCache(6, 10**6), HostCache(2, 10**6))
    )
    assert [one.totals.host_hit_tokens for one in (alone, large, small)] == [0, 48, 0]
    assert alone.totals.hit_tokens == large.totals.hit_tokens == 0
    assert large.totals.busy_ns == alone.totals.busy_ns - 48 * 20_000 + 3 * 10**6
    assert small.totals.busy_ns == alone.totals.busy_ns


def test_handed_in_one_by_one_it_is_the_replay_of_all() -> None:
    """The run of a router's engine makes the recorded cases' steps, with drafts, adapters and limits too."""
    for case in CASES[-20:]:
        trace, settings, step_time = recorded_case(case["case"])
        if any(trace.images):
            continue  # a router's engine has no encoder
        whole = replay(trace, settings, step_time)
        run = OpenRun(settings, step_time, prefix_block=trace.prefix_block, first_rows=trace.size)
        for one in range(trace.size):
            _submit(run, trace, one)
        for _ in run.until(10**18):
            pass
        assert run.state.stamps[:, at.FINISH].tolist() == whole.finish_ns.tolist()
        assert run.count(at.REFUSED_COUNT) == whole.totals.refused


def _submit(run: OpenRun, trace: Trace, one: int) -> None:
    prompt, ids = int(trace.prompt[one]), trace.ids_of(one)
    named = {"priority": int(trace.priority[one]), "adapter": int(trace.adapter[one])}
    run.submit(prompt, int(trace.output[one]), int(trace.arrival_ns[one]), ids=ids, ids_tokens=prompt, **named)


def test_a_command_brings_its_limits_and_a_trace_its_adapters(tmp_path: Path) -> None:
    """Flags of `vllm serve` reach the replay, with notes on what it does not know."""
    rows = [
        {"timestamp": at, "input_length": 40, "output_length": 8, "adapter": name, "images": [30]}
        for at, name in enumerate(("a", "b", None))
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8K --max-num-queued-reqs 2 --enable-lora --max-loras 3"
    drafter = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}')
    given = read_inputs(ReplayOptions(rest=(str(path),), gpu="L40S", verbatim=(*words.split(), *drafter)))
    assert (given.settings.max_num_queued_reqs, given.settings.max_loras) == (2, 3)
    assert given.settings.speculation is not None
    assert given.settings.speculation.tokens == 4
    first, second, none = given.trace.adapter.tolist()
    assert first != second
    assert none == 0
    assert given.trace.images.tolist() == [(30,)] * 3
    assert any("--acceptance-rate" in note for note in given.notes)
    assert not any("is not replayed" in note for note in given.notes)
    with pytest.raises(BadInput, match="--acceptance-rate"):
        read_inputs(ReplayOptions(rest=(str(path),), acceptance_rate=0.5))
