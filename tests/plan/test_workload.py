"""A workload against a cache: numbers worked out by hand, and what must hold for any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.engine.kv_cases import named, published
from plimsoll.errors import BadInput
from plimsoll.plan.kv import plan_kv
from plimsoll.plan.kv_layers import FullSpec, KvSpec, SlidingSpec, StateSpec
from plimsoll.plan.settings import Card, Settings
from plimsoll.plan.workload import Pool, Workload, WorkloadVerdict, judge, pool_of, waste_of
from plimsoll.units import GIB
from tests.each import each
from tests.models.model_configs import LLAMA_8B
from tests.plan.planning import LLAMA, facts_of, ledger_of

CARD = Card("H100", 79 * GIB, 79 * GIB, 79 * GIB, (9, 0))
CASES = {case.name: case for case in published()}
FULL = FullSpec(block_size=16, heads=8, head_size=128, head_size_v=128, dtype="bfloat16")
WINDOW = SlidingSpec(block_size=16, heads=8, head_size=128, head_size_v=128, dtype="bfloat16", window=128)
STATE = StateSpec(block_size=16, shapes=((1024,),), dtypes=("float32",))


def _pool(name: str, **changes: Any) -> Pool:
    case = CASES[name]
    plan = plan_kv(case.ranks, case.settings, case.available)
    return Pool(plan, case.ranks, replace(case.settings, **changes), plan.num_blocks, plan.num_blocks)


def _pool_of(specs: list[KvSpec], blocks: int, settings: Settings | None = None) -> Pool:
    ranks = (named(specs),)
    chosen = replace(settings or Settings(max_model_len=8192, prefix_caching=False), num_gpu_blocks_override=blocks)
    plan = plan_kv(ranks, chosen, 0)
    return Pool(plan, ranks, chosen, plan.num_blocks, plan.num_blocks)


def test_llama_with_forty_gibibytes() -> None:
    """2 MiB a block: 40 GiB are 20,480 blocks, one is vLLM's own, and a request of 1,500 tokens takes 94 of the rest."""
    answer = judge(Workload.parse("prompt=1200,output=300,concurrency=64"), _pool("llama-3.1-8b"))
    assert answer.usable_blocks == 20479
    assert [group.blocks_per_request for group in answer.largest_groups] == [94]
    assert answer.at_once == answer.at_once_settled == 20479 // 94 == 217
    assert answer.at_once_prompts == 20479 // 75
    assert answer.verdict is WorkloadVerdict.FITS
    assert answer.use_at_end == pytest.approx(64 * 94 / 20479)
    assert answer.use_at_prompt == pytest.approx(64 * 75 / 20479)
    assert answer.paged_bytes == 64 * 94 * 2 * 2**20
    assert answer.reserved_bytes == 64 * 8192 * 2 * 2**20 == 1024 * GIB
    assert answer.reserved_at_once == 2
    assert answer.saved_share == pytest.approx(1 - 94 / 8192)


def test_the_edges_between_the_verdicts() -> None:
    """217 x 94 blocks fit at the end, 273 x 75 with prompts alone; one more of each does not."""
    verdicts = [judge(Workload(((1200, 300),), count), _pool("llama-3.1-8b")).verdict for count in (217, 218, 273, 274)]
    assert verdicts == [WorkloadVerdict.FITS, WorkloadVerdict.PREEMPTS, WorkloadVerdict.PREEMPTS, WorkloadVerdict.NO]


def test_seventeen_tokens_take_two_blocks() -> None:
    """The second block of a 17-token request is 93.75 % empty at block size 16."""
    answer = judge(Workload(((16, 1),), 1), _pool("llama-3.1-8b"))
    assert answer.blocks_per_request == 2
    waste = next(row for row in answer.waste if row.in_force)
    assert (waste.block_size, waste.slots, waste.last_block_empty) == (16, 15, 0.9375)
    assert waste.share == 15 / 32
    assert waste.uniform_slots == 7.5


def test_waste_by_block_size() -> None:
    """1,500 tokens leave 4 slots in blocks of 8, 16 and 32, and 36 in blocks of 64 and 128; a block in force is added."""
    rows = {row.block_size: row for row in waste_of([1500], [560])}
    assert [rows[size].slots for size in (8, 16, 32, 64, 128, 560)] == [4, 4, 4, 36, 36, 180]
    assert [size for size, row in rows.items() if row.in_force] == [560]
    assert rows[128].uniform_slots == 63.5


def test_windows_are_counted_as_vllm_does_and_once_slid() -> None:
    """gpt-oss at 1,500 tokens: 94 full and 95 window blocks while a batch is in flight, 94 and 10 once windows have slid."""
    pool = _pool("gpt-oss-20b async")
    answer = judge(Workload(((1200, 300),), 64), pool)
    assert sorted(group.blocks_per_request for group in answer.largest_groups) == [94, 95]
    assert answer.at_once == 27305 // 189
    assert answer.at_once_settled == 27305 // 104


def test_a_state_is_counted_whatever_the_length() -> None:
    """Beside full attention a state takes its one block, and it wastes no slots."""
    pool = _pool_of([FULL, STATE], 1000)
    short, long = (judge(Workload(((1, length),), 1), pool) for length in (15, 1599))
    assert {g.kind: g.blocks_per_request for g in short.largest_groups} == {"full": 1, "state": 1}
    assert {g.kind: g.blocks_per_request for g in long.largest_groups} == {"full": 100, "state": 1}
    assert [row.block_size for row in long.waste if row.in_force] == [
        g.block_size for g in pool.plan.groups if g.kind == "full"
    ]  # fmt: skip


def test_a_trace_fits_by_its_largest_and_on_average() -> None:
    """Of requests with 1, 2 and 7 blocks the largest rule what surely fits, the average what usually does."""
    trace = Workload.from_trace([(15, 1), (16, 16), (100, 12)], 3)
    answer = judge(trace, _pool_of([FULL], 21))
    assert answer.blocks_per_request == pytest.approx(10 / 3)
    assert answer.at_once == 6  # 20 blocks: twice all three
    assert answer.at_once_typical == 6
    tight = judge(trace._replace(concurrency=2), _pool_of([FULL], 9))
    assert tight.at_once == 1  # 7 + 2 are more than 8
    assert tight.at_once_typical == 2
    assert tight.verdict is WorkloadVerdict.PREEMPTS


def test_what_is_too_long_is_left_out() -> None:
    """A request beyond max_model_len is refused by vLLM; if all are, the answer says so."""
    pool = _pool_of([FULL], 10_000)
    mixed = judge(Workload.from_trace([(100, 28), (8000, 193)], 4), pool)
    assert (mixed.too_long, mixed.verdict, mixed.blocks_per_request) == (1, WorkloadVerdict.FITS, 8)
    assert judge(Workload(((8000, 193),), 1), pool).verdict is WorkloadVerdict.TOO_LONG
    assert judge(Workload(((8000, 192),), 1), pool).verdict is WorkloadVerdict.FITS


def test_replicas_and_max_num_seqs() -> None:
    """Two data-parallel engines hold twice as many; beyond max_num_seqs of both the rest waits."""
    answer = judge(Workload(((1200, 300),), 434), _pool("llama-3.1-8b", data_parallel=2, max_num_seqs=200))
    assert answer.at_once == 434
    assert answer.verdict is WorkloadVerdict.FITS
    assert answer.waits == 34
    assert judge(Workload(((1200, 300),), 435), _pool("llama-3.1-8b", data_parallel=2)).verdict is WorkloadVerdict.PREEMPTS


def test_a_model_that_keeps_nothing() -> None:
    """An encoder has no blocks to run out of."""
    answer = judge(Workload(((100, 1),), 1000), _pool_of([], 1))
    assert (answer.at_once, answer.use_at_end, answer.saved_share, answer.verdict) == (None, None, 0.0, WorkloadVerdict.FITS)


def test_a_whole_launch() -> None:
    """From the ledger: a fixed cache of 40 GiB gives the same figures, and a launch that does not start serves nothing."""

    def planned(command: str = "") -> tuple[WorkloadVerdict, int | None, int | None, int | None]:
        answer = judge(Workload(((1200, 300),), 64), pool_of(ledger_of(command, on=CARD), LLAMA))
        return answer.verdict, answer.at_once_low, answer.at_once, answer.at_once_high

    assert planned(f"--kv-cache-memory-bytes {40 * GIB}") == (WorkloadVerdict.FITS, 217, 217, 217)
    verdict, low, middle, high = planned()
    assert verdict is WorkloadVerdict.FITS
    assert (low or 0) < (middle or 0) < (high or 0)
    assert planned("--gpu-memory-utilization 0.2")[0] is WorkloadVerdict.NO_START


def test_a_drafter_keeps_blocks_too() -> None:
    """A request of full length takes as many blocks as the plan says, those of a draft model with a window among them."""
    small = {"model_type": "mistral", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    drafter = facts_of(LLAMA_8B | small, sliding_window=1024, rope_scaling=None)
    model = replace(facts_of(LLAMA_8B, max_position_embeddings=8192), drafter=drafter)
    ledger = ledger_of("""--speculative-config '{"model": "small", "num_speculative_tokens": 3}'""", model=model, on=CARD)
    answer = judge(Workload(((8000, 192),), 1), pool_of(ledger, model))
    assert answer.blocks_per_request == ledger.kv_plan.blocks_per_request
    assert len(answer.largest_groups) == len(ledger.kv_plan.groups) > 1


@each(
    "text",
    ["", "prompt", "prompt=1", "output=1", "prompt=1,output=0", "prompt=1,output=-5", "prompt=x,output=1", "prompt=1,output=1,",
     "prompt=1,prompt=2,output=1", "promt=1,output=1", "prompt=1\noutput=1\nx=\x1b[31m", "prompt=1.5K,output=1",
     "prompt=1,output=1,concurrency=0", "prompt=99999999999,output=1", "prompt=" + "9" * 5000 + ",output=1"],
)  # fmt: skip
def test_nonsense_is_one_line(text: str) -> None:
    """What is not a workload is refused in one short printable line that says so."""
    with pytest.raises(BadInput) as caught:
        Workload.parse(text)
    said = str(caught.value)
    assert said.startswith("--workload")
    assert said.isprintable()
    assert len(said) < 250


def test_suffixes_are_vllms() -> None:
    """1k is 1,000 and 1K is 1,024; the concurrency may be left out."""
    assert Workload.parse(" prompt=1k, output=1K ") == Workload(((1000, 1024),), None)
    assert Workload.parse("concurrency=64,output=300,prompt=1200") == Workload(((1200, 300),), 64)


@pytest.mark.parametrize("pairs", [[], [(0, 1)], [(1, -1)], [(10**10, 1)]])
def test_a_trace_of_nonsense(pairs: list[tuple[int, int]]) -> None:
    """An empty trace and impossible lengths are refused."""
    with pytest.raises(BadInput, match="--workload"):
        Workload.from_trace(pairs)


ORDER = [WorkloadVerdict.FITS, WorkloadVerdict.PREEMPTS, WorkloadVerdict.NO]
REQUESTS = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 4000)), min_size=1, max_size=6)
LAYERS = st.sampled_from([[FULL], [FULL, WINDOW], [FULL, WINDOW, STATE], [WINDOW], [FULL, FULL, STATE]])


@given(REQUESTS, LAYERS, st.integers(1, 3000), st.integers(1, 300), st.integers(1, 300))
def test_more_at_once_never_fits_when_less_does_not(
    requests: list[tuple[int, int]], layers: list[KvSpec], blocks: int, fewer: int, more: int
) -> None:
    """The verdict only gets worse with the concurrency, and `at_once` is exactly where it stops to fit."""
    pool = _pool_of(layers, blocks)
    trace = Workload.from_trace(requests)
    less, much = (judge(trace._replace(concurrency=n), pool) for n in sorted((fewer, more)))
    assert ORDER.index(less.verdict) <= ORDER.index(much.verdict)
    edge = less.at_once
    assert edge is not None
    if edge:
        assert judge(trace._replace(concurrency=edge), pool).verdict is WorkloadVerdict.FITS
    assert judge(trace._replace(concurrency=edge + 1), pool).verdict is not WorkloadVerdict.FITS


@given(REQUESTS, LAYERS)
def test_figures_are_in_their_order(requests: list[tuple[int, int]], layers: list[KvSpec]) -> None:
    """What surely fits <= what usually fits <= what fits once windows slid <= prompts alone, and paging never costs more."""
    answer = judge(Workload.from_trace(requests), _pool_of(layers, 5000))
    figures = [answer.at_once, answer.at_once_typical, answer.at_once_settled, answer.at_once_prompts]
    assert figures == sorted(figure for figure in figures if figure is not None)
    assert answer.paged_bytes <= answer.reserved_bytes


@given(st.integers(1, 8192), LAYERS)
def test_counts_are_the_planners_own(length: int, layers: list[KvSpec]) -> None:
    """Blocks of a request equal those of a plan whose max_model_len is its length."""
    pool = _pool_of(layers, 5000)
    answer = judge(Workload(((length, 0),)), pool)
    alone = plan_kv(pool.specs, replace(pool.settings, max_model_len=length), 0)
    assert answer.blocks_per_request == alone.blocks_per_request
