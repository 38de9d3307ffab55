"""The clock of measured kernels: what it says without a fit, and where it does not apply."""

from __future__ import annotations

import numpy as np

from plimsoll.cli.main import parse
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import read_command
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import EngineLimits, StepTime, planned_settings
from plimsoll.simulate.silicon import MEASURED_BAND, RELATIVE_BAND, SHEET_BAND, StepClock, planned_clock
from plimsoll.simulate.trace import make_trace
from tests.each import each

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
LONG = EngineLimits(num_blocks=60_000, max_model_len=131_072, async_scheduling=True)


def clock(card: str, *words: str) -> StepClock:
    """Of a command; its limits are its own."""
    given = ["--gpu", card, "--vllm", "0.32.0", "--", "vllm", "serve", *(words or (LLAMA,))]
    ready = read_command(parse(ServerOptions, given), learned=False)
    ledger, _ = ready.replan(ready.settings)
    found = planned_clock(ledger, ready.model.shape, planned_settings(ledger.settings, ledger.kv_plan))
    assert found is not None
    return found


def table(card: str, *words: str) -> np.ndarray:
    """Nanoseconds by tokens."""
    found = clock(card, *words).step_time.by_tokens
    assert found is not None
    return found


@each(("card", "words"), [("H200", ()), ("H100", ()), ("A100 SXM 80GB", ()), ("RTX 4090", (LLAMA, "--max-model-len", "8192")),
                          ("H200", ("Qwen/Qwen3-32B", "-tp", "2")), ("H200", ("Qwen/Qwen3-30B-A3B",)),
                          ("H200", (LLAMA, "--enforce-eager"))])  # fmt: skip
def test_more_tokens_never_take_less(card: str, words: tuple[str, ...]) -> None:
    """Every part is above 0, and the table does not fall."""
    times = clock(card, *words).step_time
    assert min(times.base_ns, times.token_ns, times.seq_ns, times.ctx_ps, times.pair_fs) > 0
    assert (np.diff(table(card, *words)[1:]) >= 0).all()


def test_a_step_is_slower_than_the_card_could_be_and_small_chunks_are_not_free() -> None:
    """Each step reads all weights: eight steps of 256 tokens take a fifth longer than one of 2,048."""
    known = table("H200")
    assert 1.2 < known[1] / (1e9 * 15.0e9 / 4.8e12) < 1.8
    assert 1.1 < known[8192] / (1e9 * 2 * 7.5e9 * 8192 / 989.5e12) < 1.5
    known = table("H200")
    assert 8 * known[256] > 1.2 * known[2048]


def test_a_long_prompt_pays_for_its_context() -> None:
    """100,000 tokens on an H200: about 2 s of products and 5 s of attention, which grows with the square."""
    times = clock("H200", LLAMA, "--max-num-batched-tokens", "2048", "--max-num-seqs", "256").step_time
    first = [replay(make_trace("one", [0], [size], [1]), LONG, times).finish_ns[0] / 1e9 for size in (25_000, 100_000)]
    assert 5.5 < first[1] < 9.0
    assert first[1] > 6 * first[0]


def test_cards_that_speak_to_each_other_take_time_for_it() -> None:
    """Two cards are faster than one, and never twice as fast; over PCIe the band is wider at the slow end."""
    one, two = table("H200", "Qwen/Qwen3-32B"), table("H200", "Qwen/Qwen3-32B", "-tp", "2")
    assert (two[1:] < one[1:]).all()
    assert (2 * two[1:] > one[1:]).all()
    assert clock("H200", "Qwen/Qwen3-32B", "-tp", "2").band == MEASURED_BAND
    assert clock("RTX PRO 6000 Blackwell Server", "Qwen/Qwen3-32B", "-tp", "2").band[1] > MEASURED_BAND[1]


@each(("card", "words", "band", "basis"), [
    ("H200", (LLAMA,), MEASURED_BAND, "kernels measured on H200 SXM 141GB"),
    ("RTX 4090", (LLAMA, "--max-model-len", "8192"), RELATIVE_BAND, "kernels measured on L40S, by the data sheet of RTX 4090"),
    ("H200", ("deepseek-ai/DeepSeek-V2-Lite",), SHEET_BAND, "the data sheet of 1 x H200 SXM 141GB"),
    ("MI300X", (LLAMA,), SHEET_BAND, "the data sheet of 1 x MI300X"),
])  # fmt: skip
def test_what_was_not_measured_has_a_wider_band(
    card: str, words: tuple[str, ...], band: tuple[float, float], basis: str
) -> None:
    """A card of a measured generation borrows its ratios; latent attention and other makers are left to the data sheet."""
    found = clock(card, *words)
    assert (found.band, found.basis) == (band, basis)


def test_tokens_times_context_and_the_way_to_the_scheduler_count_to_the_nanosecond() -> None:
    """A prompt of 40 tokens in chunks of 16, 16 and 8: twice its pairs are 16^2, 16 * 48 and 8 * 72."""
    limits = EngineLimits(max_num_batched_tokens=16, max_num_seqs=16)
    trace = make_trace("one", [5], [40], [1])
    run = replay(trace, limits, StepTime(0, 0, 0, 0, None, pair_fs=10**6, prompt_ns=100, front_ns=7))
    assert run.first_token_ns.tolist() == [5 + 7 + 256 + 768 + 576 + 300]
    assert run.arrival_ns.tolist() == [5]
