"""Learning from real starts: what is compared, what is stored, what the next plan makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput
from plimsoll.models.shape import ModelShape
from plimsoll.plan.learned import Correction, Learned, Start, TermDifference, compare, corrected, correction_from, key_of
from plimsoll.plan.ledger import Ledger, ModelFacts, neighbours_in_budget
from plimsoll.plan.settings import Card
from plimsoll.plan.store import read_start
from plimsoll.units import GIB, MIB
from plimsoll.vllm.log_lines import Measured
from tests.each import cases, each
from tests.models.model_configs import LLAMA_8B
from tests.plan.planning import H200, facts_of, ledger_of

CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200"
BASE = "--max-model-len 8192"
EAGER = "--max-model-len 8192 --gpu-memory-utilization 0.9 --enforce-eager"
SEED = "--gpu-memory-utilization 0.88 --max-model-len 32768 --max-num-seqs 64 --max-num-batched-tokens 24576 --enforce-eager"


def _shape(**changes: object) -> ModelShape:
    return facts_of(LLAMA_8B, **changes).shape


LLAMA = _shape()
MODEL = ModelFacts("m", LLAMA)


def _plan(command: str = BASE, release: str = "0.25.1", card: Card = H200, shape: ModelShape = LLAMA) -> Ledger:
    return ledger_of(command, release, ModelFacts("m", shape), card)


def _gib(size: float) -> int:
    return round(size * GIB)


def _by_name(rows: list[TermDifference]) -> dict[str, TermDifference]:
    return {row.term: row for row in rows}


def _width(ledger: Ledger) -> int:
    return ledger.kv.high - ledger.kv.low


def _spent(ledger: Ledger) -> int:
    return ledger.weights.value + ledger.non_torch.value + ledger.activation.value + ledger.graphs.value


FULL = Measured(
    release="0.25.1", total_bytes=_gib(139.8), free_bytes=_gib(139.29), utilization=0.92, requested_bytes=_gib(128.62),
    weights_bytes=_gib(15.0), non_torch_bytes=_gib(0.24), activation_bytes=_gib(1.1), graphs_actual_bytes=_gib(0.98),
    kv_bytes=_gib(112.28), kv_tokens=919_824, tensor_parallel=1,
)  # fmt: skip


@pytest.mark.parametrize(("log", "command"), [("base.log", BASE), ("eager90.log", EAGER), ("seedcfg.log", SEED)])
def test_a_real_start_makes_the_next_plan_exact(log: str, command: str) -> None:
    """Three real H200 starts: the KV cache then lies within 0.02 GiB, the band is under 0.1 GiB to a side and holds."""
    ledger, measured = _plan(command), read_start(CAPTURES / log)
    after = corrected(ledger, correction_from(ledger, measured), MODEL)
    assert measured.kv_bytes is not None
    assert measured.kv_tokens is not None
    assert abs(after.kv.value - measured.kv_bytes) < 0.02 * GIB
    assert after.kv.low <= measured.kv_bytes <= after.kv.high
    assert _width(after) < min(_width(ledger), 0.2 * GIB)
    assert abs(after.kv_plan.tokens - measured.kv_tokens) <= 0.0002 * measured.kv_tokens
    assert after.kv.value == after.requested.value - _spent(after)


def test_a_start_on_a_cpu_makes_the_next_plan_exact() -> None:
    """What vLLM 0.32.0 said of a two-layer model on a machine of 22.71 GiB: the cache was 23 % off, and then is 0.2 % off."""
    config = {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 2048, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }  # fmt: skip
    tiny, node = _shape(**config), Card("a card of 22.71 GiB", _gib(22.71), _gib(22.71), _gib(22.71), None)
    flags = "--dtype float32 --enforce-eager --max-model-len 2048 --block-size 128 --gpu-memory-utilization 0.11"
    ledger = _plan(f"{flags} --max-num-seqs 4 --max-num-batched-tokens 2048", "0.32.0", node, tiny)
    measured = Measured(
        release="0.32.0", total_bytes=_gib(22.71), utilization=0.11, requested_bytes=_gib(2.5), kv_bytes=_gib(1.89),
        kv_tokens=1_984_512, max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=2048, enforce_eager=True,
    )  # fmt: skip
    after = corrected(ledger, correction_from(ledger, measured), ModelFacts("tiny", tiny))
    assert ledger.kv_plan.tokens == pytest.approx(1.23 * 1_984_512, rel=0.01)
    assert after.kv_plan.tokens == pytest.approx(1_984_512, rel=0.002)
    assert after.kv.low <= _gib(1.89) <= after.kv.high


def test_one_start_serves_other_utilisations_and_lengths() -> None:
    """What was learned at one utilisation and length predicts a real start at another (0.90 eager from 0.88 eager)."""
    seed = _plan(SEED)
    lesson = correction_from(seed, read_start(CAPTURES / "seedcfg.log"))
    other = _plan(EAGER)
    assert key_of(seed, LLAMA) == key_of(other, LLAMA)
    after = corrected(other, lesson, MODEL)
    assert abs(after.kv.value - 109.72 * GIB) < 0.1 * GIB
    assert after.kv.low <= 109.72 * GIB <= after.kv.high


def test_terms_that_are_not_told_apart_are_compared_together() -> None:
    """A log at the normal level gives weights, KV and the rest in one; each row says whether its band held."""
    rows = _by_name(compare(_plan(), read_start(CAPTURES / "base.log")))
    assert list(rows) == ["weights", "non_torch+activation", "graphs_actual", "kv", "kv_tokens"]
    assert rows["non_torch+activation"].measured == pytest.approx(1.336 * GIB, abs=0.01 * GIB)
    assert all(row.is_in_band for row in rows.values())
    assert rows["kv"].error == rows["kv"].predicted.value - rows["kv"].measured


def test_a_log_with_every_term() -> None:
    """Each printed term is replaced, its band is the printed one with what starts differ by, and the sum is the log's."""
    ledger = _plan()
    rows = _by_name(compare(ledger, FULL))
    assert list(rows) == ["weights", "non_torch", "activation", "graphs_actual", "context", "kv", "kv_tokens"]
    after = corrected(ledger, correction_from(ledger, FULL), MODEL)
    assert after.non_torch.value == pytest.approx(0.24 * GIB, abs=0.02 * GIB)
    assert after.activation.value == pytest.approx(1.1 * GIB, abs=0.02 * GIB)
    assert after.context.value == pytest.approx(0.51 * GIB, abs=MIB)
    assert after.kv.value == pytest.approx(112.28 * GIB, abs=0.02 * GIB)
    assert "measured, 1 start" in after.activation.why
    assert after.slack.high - after.slack.low < ledger.slack.high - ledger.slack.low


def test_consumed_memory_is_split_by_the_weights() -> None:
    """From 0.27 non-torch is what was consumed beside the weights."""
    ledger = _plan(release="0.32.0")
    consumed = FULL._replace(release="0.32.0", non_torch_bytes=None, consumed_bytes=_gib(15.7), kv_bytes=_gib(111.8))
    rows = _by_name(compare(ledger, consumed))
    assert rows["non_torch"].measured == pytest.approx(0.7 * GIB, abs=MIB)
    after = corrected(ledger, correction_from(ledger, consumed), MODEL)
    assert after.kv.value == pytest.approx(111.8 * GIB, abs=0.02 * GIB)


@each(("change", "says"), cases("plan", "another_start_teaches_nothing"))
def test_another_start_teaches_nothing(change: dict[str, object], says: str) -> None:
    """A log of another release, card, batch or parallelism, or one disturbed by a neighbour, is refused in one line."""
    with pytest.raises(BadInput, match=says) as refusal:
        correction_from(_plan(), FULL._replace(**change))  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_the_log_of_another_model_teaches_nothing() -> None:
    """A token of this model takes more room in the cache than one of the log's: nothing is kept, and the line says why."""
    measured = read_start(str(CAPTURES / "base.log"))
    correction_from(_plan(), measured)
    other = _plan(shape=_shape(num_hidden_layers=36, intermediate_size=12288, vocab_size=128000))
    with pytest.raises(BadInput, match="log of another model"):
        correction_from(other, measured)


def test_a_card_whose_size_is_slightly_off() -> None:
    """Where the card is a little smaller than the table says, the next plan's cache is still the one that was measured."""
    table = replace(H200, total_bytes=int(139.84 * GIB))
    ledger = _plan(card=table)
    after = corrected(ledger, correction_from(ledger, FULL), MODEL)
    assert after.kv.value == pytest.approx(112.28 * GIB, abs=0.02 * GIB)


def test_a_log_that_tells_nothing_or_nothing_sharper_changes_nothing() -> None:
    """Tokens alone are no term; weights counted to the byte are not replaced by a rounded figure."""
    with pytest.raises(BadInput, match="nothing learned"):
        correction_from(_plan(), Measured(kv_tokens=5))
    ledger = _plan()
    ledger = replace(ledger, weights=replace(ledger.weights, value=_gib(15.004), low=_gib(15.004), high=_gib(15.004)))
    assert corrected(ledger, correction_from(ledger, FULL), MODEL).weights == ledger.weights


def test_another_batch_moves_the_centre_and_keeps_the_band() -> None:
    """A start with other limits shows which way the planner errs, not how well: activation keeps its width."""
    ledger, bigger = _plan(), _plan("--max-model-len 8192 --max-num-batched-tokens 32768")
    lesson = correction_from(ledger, FULL._replace(activation_bytes=_gib(1.2), kv_bytes=_gib(112.18)))
    after = corrected(bigger, lesson, MODEL)
    assert after.activation.high - after.activation.low == pytest.approx(
        bigger.activation.high - bigger.activation.low, rel=0.02
    )
    assert after.activation.value > bigger.activation.value
    assert after.weights == corrected(ledger, lesson, MODEL).weights


def test_more_starts_widen_what_differs() -> None:
    """The band spans all starts of these limits, and the centre is the middle one, of two the larger."""
    ledger = _plan()
    one = correction_from(ledger, FULL)
    two = one.joined(correction_from(ledger, FULL._replace(activation_bytes=_gib(1.3), kv_bytes=_gib(112.08))))
    first, second = corrected(ledger, one, MODEL), corrected(ledger, two, MODEL)
    assert _width(second) > _width(first)
    assert second.kv.value == pytest.approx(112.08 * GIB, abs=0.02 * GIB)
    assert second.kv.low <= _gib(112.08) < _gib(112.28) <= second.kv.high


def test_a_cache_that_was_set_stays_set() -> None:
    """--kv-cache-memory-bytes or --num-gpu-blocks-override, before and after a lesson; only the slack learns."""
    ledger = _plan("--max-model-len 8192 --kv-cache-memory-bytes 60G")
    after = corrected(ledger, correction_from(ledger, FULL._replace(weights_bytes=_gib(16))), MODEL)
    assert after.kv == ledger.kv
    assert after.slack.value < ledger.slack.value
    ledger = _plan("--max-model-len 8192 --num-gpu-blocks-override 20000")
    after = corrected(ledger, correction_from(ledger, FULL._replace(kv_bytes=None, weights_bytes=_gib(16))), MODEL)
    assert after.kv == ledger.kv
    assert after.slack.value < ledger.slack.value < H200.total_bytes - ledger.kv.value


def test_a_lesson_that_agrees_changes_no_sum() -> None:
    """Terms that were measured as predicted leave cache and slack as they were, the sampler's buffers taken off once."""
    ledger = _plan()
    told = {name: (term.value, term.value, 0) for name in ("weights", "non_torch", "activation", "context")
            for term in (getattr(ledger, name),)}  # fmt: skip
    lesson = Correction((Start(1024, 8192, 8192, {name: Learned(*term) for name, term in told.items()}),))
    after = corrected(ledger, lesson, MODEL)
    assert (after.kv.value, after.slack.value) == (ledger.kv.value, ledger.slack.value)
    assert after.kv_plan == ledger.kv_plan


def test_neighbours_of_an_old_release_come_off_once() -> None:
    """Until 0.9.0 what others hold came out of the budget: what was measured beside them is planned beside them again."""
    card = replace(H200, used_bytes=_gib(10))
    ledger = _plan(release="0.8.5", card=card)
    start = Measured(weights_bytes=_gib(15.0), kv_bytes=ledger.kv.value - _gib(0.2), utilization=ledger.settings.utilization)
    after = corrected(ledger, correction_from(ledger, start), MODEL)
    assert after.kv.value == pytest.approx(start.kv_bytes, abs=0.02 * GIB)
    alone = _plan(release="0.8.5")
    lesson = correction_from(ledger, start)
    assert corrected(alone, lesson, MODEL).kv.value - after.kv.value == pytest.approx(_gib(10), abs=0.02 * GIB)


def test_the_first_engine_counted_neighbours_in_one_release() -> None:
    """As the wheels' workers do: V0 takes what others hold off the budget in 0.6.4 alone, the second engine until 0.9.0."""
    beside = replace(H200, used_bytes=_gib(10))
    counted = [v for v in ("0.6.3", "0.6.4", "0.6.5", "0.8.5", "0.9.1")
               if _plan(release=v).kv.value > _plan(release=v, card=beside).kv.value]  # fmt: skip
    assert counted == ["0.6.4", "0.8.5"]
    settings = replace(_plan(release="0.8.5").settings, first_engine=True)
    assert neighbours_in_budget(settings, beside) == 0


def test_the_key_tells_apart_what_must_be() -> None:
    """Release, card, shape, parallelism and whatever else changes what a rank holds; not the batch, not the utilisation."""
    base = key_of(_plan(), LLAMA)
    assert base == key_of(_plan("--max-model-len 4096 --gpu-memory-utilization 0.5 --max-num-seqs 8"), LLAMA)
    wider = _shape(intermediate_size=16384)
    others = [
        key_of(_plan(release="0.24.0"), LLAMA),
        key_of(_plan(card=replace(H200, name="H100")), LLAMA),
        key_of(_plan(shape=wider), wider),
        key_of(_plan(f"{BASE} --tensor-parallel-size 2"), LLAMA),
        key_of(_plan(f"{BASE} --pipeline-parallel-size 2"), LLAMA),
        key_of(_plan(f"{BASE} --enforce-eager"), LLAMA),
        key_of(_plan(f"{BASE} --enable-lora"), LLAMA),
    ]
    assert len({base, *others}) == 8
    odd = _plan(card=replace(H200, name='hf_secret "x"\n/home/me; tp=9'))
    assert "\n" not in key_of(odd, LLAMA)


_size = st.integers(0, 200 * GIB)


@given(st.dictionaries(st.sampled_from(["weights", "non_torch", "activation", "remainder", "graphs", "context"]),
                       st.tuples(_size, _size, _size)), st.booleans())  # fmt: skip
def test_any_correction_leaves_a_ledger_in_order(terms: dict[str, tuple[int, int, int]], same: bool) -> None:
    """Whatever a file holds, bands enclose their values, no term is negative and the sum is right."""
    ledger = _plan()
    limits = (1024, 8192, 8192) if same else (1, 2, 3)
    start = Start(*limits, {name: Learned(*term) for name, term in terms.items()})
    after = corrected(ledger, Correction((start,)), MODEL)
    for term in (after.weights, after.non_torch, after.activation, after.graphs, after.context):
        assert 0 <= term.low <= term.value <= term.high
    assert after.kv.low <= after.kv.value <= after.kv.high
    assert abs(after.kv.value - (after.requested.value - _spent(after))) <= 1
