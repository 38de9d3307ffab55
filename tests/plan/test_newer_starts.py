"""Starts of 0.19 to 0.31 that others published, and the rules that newer releases brought, planned from their commands."""

from __future__ import annotations

from pathlib import Path

from benchmarks.plan_accuracy import DATA, newer, scored
from plimsoll.findings import Code, Severity
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import MemoryPlan, plan_command
from plimsoll.units import GIB
from tests.each import SOAK, cases, each


def _plan(model: str, gpu: str, release: str, *flags: str) -> MemoryPlan:
    return plan_command(ServerOptions(gpu=gpu, vllm=release, rest=("vllm", "serve", model, *flags)))


def test_no_start_that_ran_is_refused_and_what_is_promised_too_much_is_said() -> None:
    """Every newer start lies in its band, none is impossible, and over-estimates beyond 2 % are in theirs."""
    newer_starts, _ = newer()
    older = scored() if DATA.is_dir() and SOAK else []
    assert len(newer_starts) >= 50
    assert not [start.name for start in newer_starts if start.is_refused] + [start.name for start in older if start.is_refused]
    assert not [start.name for start in newer_starts if not start.is_covered]
    errors = {start.name: (start.error, start.is_covered) for start in newer_starts}
    errors |= {start.name: (start.kv_error / start.total, start.is_covered) for start in older}
    assert not [name for name, (error, is_covered) in errors.items() if error > 0.02 and not is_covered]
    assert max(start.error for start in newer_starts) < 0.03


@each(
    ("model", "gpu", "flags", "gib"),
    [
        ("Qwen/Qwen3.8-27B", "H100", '--speculative-config {"method":"mtp","num_speculative_tokens":1}', 0.79),
        ("Qwen/Qwen3.8-27B", "H100", '--speculative-config {"method":"ngram","num_speculative_tokens":1}', 0.0),
    ],
)
def test_a_head_that_drafts_is_weighed(model: str, gpu: str, flags: str, gib: float) -> None:
    """A start with MTP took 51.89 GiB where one without took 51.1 (0.28)."""
    alone, drafting = (_plan(model, gpu, "0.28.0", *words).ledger.weights.value for words in ((), flags.split()))
    assert abs((drafting - alone) / GIB - gib) < 0.02


def test_a_film_is_profiled_unless_none_is_allowed() -> None:
    """Qwen2.5-VL's film of 114,688 tokens took 15.3 GiB on an A100 (0.23); the note says how to be rid of it."""
    plan = _plan("Qwen/Qwen2.5-VL-7B-Instruct", "A100 80GB", "0.23.0")
    assert abs(plan.ledger.activation.value / GIB - 15.3) < 0.2
    assert any("114,688 tokens" in note for note in plan.notes)
    without = _plan("Qwen/Qwen2.5-VL-7B-Instruct", "A100 80GB", "0.23.0", "--limit-mm-per-prompt", '{"video": 0}')
    assert without.ledger.activation.value < 3 * GIB
    assert not any("film" in note for note in without.notes)


def test_a_card_known_by_its_size_alone_leaves_the_batch_open() -> None:
    """vLLM's defaults hang on the card's name: the band holds both, and nothing is refused for a guess."""
    command = ("vllm", "serve", "Qwen/Qwen3.8-27B", "--max-model-len", "131072")
    plan = plan_command(ServerOptions(gpu_memory_gib=80 * GIB, vllm="0.28.0", rest=command))
    assert plan.fits
    assert any("known by its size alone" in note for note in plan.notes)
    told = plan_command(ServerOptions(gpu_memory_gib=80 * GIB, vllm="0.28.0", rest=(*command, "--max-num-seqs", "1024")))
    assert not told.fits
    assert told.ledger.kv.high < plan.ledger.kv.high


@each(
    ("gpu", "release", "limits"),
    [
        ("GB10", "0.27.1", (256, 2048)),  # NVML does not tell its total
        ("B300", "0.28.0", (1024, 16384)),
    ],
)
def test_default_batches_follow_what_the_platform_tells(gpu: str, release: str, limits: tuple[int, int]) -> None:
    """Sequences and tokens of a step, as vLLM of that release chooses them on that card."""
    settings = _plan("Qwen/Qwen3-0.6B", gpu, release).ledger.settings
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == limits


@each(
    ("gpu", "release", "is_first"),
    [("T4", "0.9.2", True), ("T4", "0.11.0", False), ("L4", "0.9.2", False), ("T4", "0.7.3", True)],
)
def test_old_cards_fall_back_to_the_first_engine(gpu: str, release: str, *, is_first: bool) -> None:
    """Until 0.10 the second engine refused cards before Ampere; the terms are those of the engine that runs."""
    ledger = _plan("Qwen/Qwen3-0.6B", gpu, release, "--dtype", "float16").ledger
    assert ledger.settings.first_engine == is_first
    assert ledger.activation.why.endswith("vLLM V0") == is_first


@each(("model", "release", "tokens", "severity"), cases("plan", "a_picture_that_must_fit_one_batch"))
def test_a_picture_that_must_fit_one_batch(model: str, release: str, tokens: int, severity: Severity | None) -> None:
    """Only a model that looks at a picture in both directions needs one batch for it."""
    plan = _plan(model, "RTX 5090", release)
    assert plan.ledger.settings.max_num_batched_tokens == tokens
    assert [f.severity for f in plan.findings if f.title.startswith("one picture")] == ([severity] if severity else [])


def test_a_hybrids_plain_awq_leaves_its_attention_in_16_bits() -> None:
    """QuantTrio/Qwen3.5-9B-AWQ took 11.21 GiB, cyankiwi's AWQ-4bit of it 7.55 without its encoder; the band holds both."""
    plain = _plan("QuantTrio/Qwen3.5-9B-AWQ", "A10G", "0.24.0").ledger.weights
    assert abs(plain.value / GIB - 11.21) < 0.3
    assert plain.low < 8.2 * GIB
    all_of_it = _plan("cyankiwi/Qwen3.5-9B-AWQ-4bit", "A10G", "0.24.0", "--language-model-only").ledger.weights
    assert abs(all_of_it.value / GIB - 7.55) < 0.4


def _hybrid(tmp_path: Path) -> str:
    """A folder with a model of Mamba and attention layers whose states are large."""
    (tmp_path / "config.json").write_text(
        """{"architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
        "mamba_d_conv": 4, "mamba_expand": 2, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}"""
    )
    return str(tmp_path)


def test_more_sequences_than_states_stop_a_start_with_full_graphs(tmp_path: Path) -> None:
    """vLLM 0.20 refuses them; fewer sequences, piecewise graphs and older releases start, and the advice names the number."""
    model, tight = _hybrid(tmp_path), ("--gpu-memory-utilization", "0.3", "--max-num-seqs", "1024")
    plan = _plan(model, "H100", "0.29.0", *tight)
    (finding,) = [f for f in plan.findings if "exceeds available Mamba cache blocks" in f.because]
    assert finding.code is Code.STARTUP_GRAPH_CAPTURE
    assert finding.severity is Severity.CRITICAL
    assert not plan.fits
    offer = next(advice for advice in plan.advice if advice.flag == "--max-num-seqs")
    for release, flags in (
        ("0.29.0", ("--gpu-memory-utilization", "0.3", "--max-num-seqs", offer.value)),
        ("0.29.0", (*tight, "--enforce-eager")),
        ("0.29.0", (*tight, "--compilation-config", '{"cudagraph_mode": "PIECEWISE"}')),
        ("0.19.0", tight),
    ):
        findings = _plan(model, "H100", release, *flags).findings
        assert not any("Mamba cache blocks" in finding.because for finding in findings), (release, flags)


def test_what_the_band_leaves_open_is_neither_called_fitting_nor_refused() -> None:
    """A context that fits at the high end of the band only: undecided, with both ends and the fact that would decide."""
    fits = _plan("Qwen/Qwen3-8B", "L4", "0.28.0", "--max-model-len", "40960").ledger.kv_plan.largest_context_that_fits
    plan = _plan("Qwen/Qwen3-8B", "L4", "0.28.0", "--max-model-len", str(fits + 512))
    assert plan.is_undecided
    assert not plan.fits
    assert plan.ledger.kv.low < plan.ledger.kv_plan.bytes_for_one_request < plan.ledger.kv.high
    far = _plan("Qwen/Qwen3-8B", "L4", "0.28.0", "--max-model-len", "40960", "--gpu-memory-utilization", "0.8")
    assert not far.is_undecided
    assert not far.fits


def test_both_ends_of_a_compile_cache_lie_in_the_band() -> None:
    """0.27 and newer: with a warm cache there is no copy of the embedding table, with a cold one up to two."""
    ledger = _plan("Qwen/Qwen3-8B", "RTX 5090", "0.28.0").ledger
    table = 151936 * 4096 * 2
    assert ledger.activation.low < table / 2
    assert ledger.activation.high > 2 * table


def test_memory_shared_with_the_host_widens_the_band() -> None:
    """On a GB10 the host's own memory counts, over two of them their network cards' too, and a plan says so."""
    plan, two = (_plan("Qwen/Qwen3-8B", "GB10", "0.27.1", "--tensor-parallel-size", ranks) for ranks in "12")
    assert two.ledger.non_torch.high > plan.ledger.non_torch.high + 3 * GIB
    assert plan.ledger.non_torch.high - plan.ledger.non_torch.low > 5 * GIB
    assert any("shares its memory with the host" in note for note in plan.notes)


@each("flags", cases("plan", "sizes_that_contradict_each_other_are_refused"))
def test_sizes_that_contradict_each_other_are_refused(flags: str) -> None:
    """What vLLM's own configuration refuses before it touches a card."""
    plan = _plan("Qwen/Qwen3-8B", "H100", "0.29.0", *flags.split())
    assert Code.OTHER_BAD_CONFIG in {f.code for f in plan.findings if f.severity is Severity.CRITICAL}
    assert not plan.fits
