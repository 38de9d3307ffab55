"""What plan says before launch: what will go wrong, by code, and offers that keep what they promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.cli.main import main
from plimsoll.findings import Code, Severity
from plimsoll.hardware.cards import gpu_named
from plimsoll.plan.settings import Card
from plimsoll.plan.weights import weights_from_shape
from plimsoll.plan.weights_checkpoint import weights_from_tensors
from plimsoll.units import GIB, MIB, allocated_bytes
from tests.each import cases, each
from tests.models.model_configs import LLAMA_8B
from tests.plan.planning import H100, H200, L4, LLAMA, Planned, bundled, card, facts_of, ledger_of, planned, settings_of

LLAMA_7B = LLAMA_8B | {
    "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
QWEN_1_5B = LLAMA_8B | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    "torch_dtype": "float16", "tie_word_embeddings": True,
}  # fmt: skip
LARGE, TIED, QWEN = map(facts_of, (LLAMA_70B, QWEN_1_5B, bundled("Qwen/Qwen3-8B")))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
L40S = card("L40S", 44.4, 44.3, 44.5, (8, 9))
EAGER = "--enforce-eager --max-model-len 4096"


def on_h200(model: dict[str, object] | None = None, command: str = "", used: int = 0, release: str = "0.25.1") -> Planned:
    """A plan for the card and the release that the recorded starts ran on."""
    return planned(command, release, facts_of(model or LLAMA_7B), replace(H200, used_bytes=used))


@each(("model", "gpu", "release", "command", "code", "kv_gib"), cases("plan", "reported_refusals_are_foreseen_by_code"))
def test_reported_refusals_are_foreseen_by_code(
    model: str, gpu: str, release: str, command: str, code: Code, kv_gib: float | None
) -> None:
    """The first finding names the step that failed, and where the log printed the KV figure the band holds it."""
    known = gpu_named(gpu)
    on = Card(known.name, known.total_bytes, known.total_low_bytes, known.total_high_bytes, known.compute_capability)
    found = planned(command, release, facts_of(bundled(model)), on)
    assert found.findings[0].code == code
    if kv_gib is not None:
        assert found.ledger.kv.low <= kv_gib * GIB <= found.ledger.kv.high


@each(
    ("on", "command", "unquantised", "code"),
    [
        (card("T4", 14.6, 14.5, 14.7, (7, 5)), "--dtype bfloat16", False, Code.OTHER_UNSUPPORTED_GPU),
        (card("T4", 14.6, 14.5, 14.7, (7, 5)), "--dtype half", False, None),
        (card("T4", 14.6, 14.5, 14.7, (7, 5)), "", False, None),  # vLLM takes float16 by itself
        (L4, "--dtype bfloat16", False, None),
        (L4, "--quantization awq", True, Code.OTHER_BAD_CONFIG),
        (L4, "--quantization gptq", True, Code.OTHER_BAD_CONFIG),
        (L4, "--quantization awq", False, None),  # the checkpoint may have a file that says how it was made
        (L4, "--quantization fp8", True, None),  # made while it loads
        (L4, "--enable-lora --max-loras 8 --max-cpu-loras 4", False, Code.OTHER_BAD_CONFIG),
        (L4, "--enable-lora --max-loras 8 --max-cpu-loras 8", False, None),
        (L4, "--enable-lora --max-loras 8 --max-cpu-loras 0", False, None),  # vLLM reads 0 as not given
        (L4, "--max-loras 8 --max-cpu-loras 4", False, None),  # LoRA is off
    ],
)
def test_settings_that_vllm_refuses_whatever_the_memory(on: Card, command: str, unquantised: bool, code: Code | None) -> None:
    """Only what is certain: a type the card has not, a method that reads packed weights, too few LoRAs in the host."""
    model = facts_of(bundled("Qwen/Qwen3-0.6B"))
    assert planned(command, "0.32.0", model, on, unquantised=unquantised).stops == ({code} if code else set())


def test_segments_beside_a_connector_are_refused() -> None:
    """vLLM stops at expandable segments with a KV connector since 0.21.0."""
    command = """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert planned(command, "0.25.1", environment=environment).stops == {Code.STARTUP_BAD_FLAG}
    assert planned(command, "0.19.0", environment=environment).stops == set()


def test_a_trial_run_or_weights_that_do_not_fit_are_named() -> None:
    """24,576 tokens can be tried and 51,200 cannot; beside weights that do not fit the cache is not asked for."""
    flags = f"{EAGER} --max-num-seqs 64 --gpu-memory-utilization 0.97 --max-num-batched-tokens"
    assert next(iter(on_h200(LLAMA_70B, f"{flags} 51200").codes)) is Code.STARTUP_PROFILE_RUN
    assert list(on_h200(LLAMA_70B, f"{flags} 24576").codes) == [Code.STARTUP_NO_CACHE_BLOCKS]
    found = on_h200(LLAMA_70B, EAGER, used=80 * GIB)
    assert list(found.codes) == [Code.STARTUP_WEIGHTS_DO_NOT_FIT, Code.STARTUP_FREE_MEMORY_CHECK]
    first = next(offer for offer in planned("", "0.25.1", LARGE).advice if offer.clears is Code.STARTUP_WEIGHTS_DO_NOT_FIT)
    assert (first.flag, first.value) in {("--tensor-parallel-size", "4"), ("--tensor-parallel-size", "2")}


def test_the_block_that_vllm_keeps() -> None:
    """With exactly the blocks of one full request the server starts and does not answer it; the first engine kept none."""
    for blocks, warned in ((256, True), (257, False)):
        found = on_h200(command=f"{EAGER} --kv-cache-memory-bytes {blocks * 8 * MIB}")
        assert found.ledger.fits
        assert (found.codes.get(Code.KV_SATURATED) is Severity.WARNING) is warned
    assert Code.KV_SATURATED not in on_h200(command=f"{EAGER} --num-gpu-blocks-override 256", release="0.7.3").codes


def test_what_comes_beside_a_granted_request() -> None:
    """A neighbour that leaves 0.3 GiB more than is asked for passes vLLM's check and stops the warm-up of the sampler."""
    flags = f"{EAGER} --gpu-memory-utilization 0.5"
    for left_mib, severity in ((72416, Severity.CRITICAL), (73700, None)):
        found = on_h200(QWEN_1_5B, flags, used=H200.total_bytes - left_mib * MIB).codes
        assert found.get(Code.STARTUP_SAMPLER_WARMUP) is severity
        assert Code.STARTUP_FREE_MEMORY_CHECK not in found
    # Until 0.26 the sampler's buffers come off the slack; from 0.27 vLLM counts them itself, and they are outside torch.
    before, after = on_h200(QWEN_1_5B, flags).ledger, on_h200(QWEN_1_5B, flags, release="0.27.0").ledger
    assert after.slack.value - before.slack.value == pytest.approx(4.125 * 1024 * 151936, abs=1)
    assert after.non_torch.value - before.non_torch.value >= 4.125 * 1024 * 151936


def test_a_tied_table_is_copied_too() -> None:
    """Compiled, Qwen2.5-1.5B peaks at 0.45 GiB: a second copy of its embedding, which is its head as well."""
    found = on_h200(QWEN_1_5B, "--max-model-len 16384 --max-num-batched-tokens 2048 --max-num-seqs 256")
    assert found.ledger.activation.value / GIB == pytest.approx(0.45, abs=0.01)


def test_zero_points_grow_on_hopper() -> None:
    """Llama 3.3 70B in AWQ took 37.88 GiB on an H200; on a card without Machete, or before 0.19, it is 0.75 less."""
    model = facts_of(LLAMA_70B, quantization_config=AWQ)
    here = ledger_of(EAGER, "0.25.1", model, H200).weights.value / GIB
    ampere = ledger_of(EAGER, "0.25.1", model, replace(H200, compute_capability=(8, 0))).weights.value / GIB
    assert here == pytest.approx(37.88, abs=0.1)
    assert ampere == pytest.approx(here - 0.75, abs=0.05)
    assert ledger_of(EAGER, "0.18.0", model, H200).weights.value / GIB == pytest.approx(here - 0.75, abs=0.05)
    # Where the tensors are known by name, the packed zero points count four times.
    shape = facts_of(LLAMA_7B, num_hidden_layers=1, quantization_config=AWQ).shape
    zeros = [("model.layers.0.mlp.down_proj.qzeros", "I32", (86, 512))]
    wide = weights_from_tensors(zeros, shape, settings_of("", "0.19.0")).value
    assert wide - weights_from_tensors(zeros, shape).value == 3 * 86 * 512 * 4


def test_the_rest_of_a_large_segment_counts() -> None:
    """Under max_split_size_mb:20 a tensor of 26.25 MiB holds 28; a smaller one, or an older release, only its own size."""
    size = int(26.25 * MIB)
    assert allocated_bytes(size) == size
    assert allocated_bytes(size, whole_segments=True) == 28 * MIB
    assert allocated_bytes(int(12.5 * MIB), whole_segments=True) == allocated_bytes(int(12.5 * MIB))
    new, old = (weights_from_shape(TIED.shape, settings_of("", release, TIED)).value for release in ("0.21.0", "0.18.0"))
    assert new - old == 28 * (1.75 + 1.5) * MIB  # down projection, and gate with up, of every layer


def test_a_cache_of_a_given_size_leaves_room_for_the_pieces_of_a_batch() -> None:
    """133.78 GB started on the H200 and died in its first full batch: plan warns of that there, and is sure again when what it
    might take in pieces is left too. A utilisation is not judged by it."""
    flags = f"{EAGER} --max-num-batched-tokens 16384 --max-num-seqs 256"
    found = on_h200(command=f"{flags} --kv-cache-memory-bytes 133781520384")
    assert found.codes[Code.RUNTIME_FORWARD] is Severity.WARNING
    assert found.ledger.slack.low < 0 < found.ledger.slack.value
    assert found.ledger.slack.value - found.ledger.slack.low >= int(0.7 * found.ledger.activation.value)
    after = on_h200(command=f"{flags} --kv-cache-memory-bytes {found.ledger.kv.value + found.ledger.slack.low}")
    assert Code.RUNTIME_FORWARD not in after.codes
    assert after.ledger.slack.low >= 0
    assert Code.RUNTIME_FORWARD not in on_h200(command=f"{flags} --gpu-memory-utilization 0.985").codes


@each(("flags", "code"), cases("plan", "a_cache_that_is_too_large_fails_where_its_memory_is_first_missed"))
def test_a_cache_that_is_too_large_fails_where_its_memory_is_first_missed(flags: str, code: Code) -> None:
    """vLLM tries nothing out beside a cache of a given size: it starts and dies in its first full batch, dies while graphs are
    captured, or has no room for the cache itself. Each was seen on the H200, and the size that is advised clears it."""
    command = f"--max-model-len 4096 --max-num-seqs 256 {flags}"
    found = on_h200(command=command)
    assert found.codes[Code(code)] is Severity.CRITICAL
    assert next(iter(found.codes)) == code
    assert found.advice[0].flag == "--kv-cache-memory-bytes"
    after = on_h200(command=f"{command} {found.advice[0].words}")
    assert not after.stops
    assert after.ledger.slack.low > 0


def test_little_slack_is_a_warning_and_a_neighbour_is_a_refusal() -> None:
    """0.98 of the card leaves too little for a full batch of logits, but may start; 10 GiB of another process do not."""
    assert planned("", "0.25.1", on=replace(H100, used_bytes=10 * GIB)).stops == {Code.STARTUP_FREE_MEMORY_CHECK}
    assert planned("--gpu-memory-utilization 0.98", "0.25.1").codes[Code.RUNTIME_LOGITS] is Severity.WARNING
    assert planned("", "0.25.1").findings == []


def test_a_context_that_does_not_fit() -> None:
    """131,072 tokens of an 8B model do not fit beside it on an L4; the context offered is the largest that does."""
    found = planned("", "0.25.1", on=L4)
    assert found.stops == {Code.STARTUP_CONTEXT_TOO_LONG}
    fits = next(int(offer.value) for offer in found.advice if offer.flag == "--max-model-len")
    assert not planned(f"--max-model-len {fits}", "0.25.1", on=L4).stops
    longer = ledger_of(f"--max-model-len {fits + 16}", "0.25.1", on=L4)
    assert not longer.fits
    assert longer.fits_at_high_end  # so the finding is a warning: a little less overhead would do


@each(
    ("command", "model", "on", "first"),
    [
        ("--max-model-len 400k", QWEN, L40S, "--max-model-len 40960"),
        ("--max-model-len 400k", QWEN, L4, "--max-model-len 2"),
        ("--gpu-memory-utilization 1.0", QWEN, L40S, "--gpu-memory-utilization 0.9"),
        ("--max-model-len 400k --gpu-memory-utilization 1.0", QWEN, L40S, "--max-model-len 40960 --gpu-memory-utilization 0.9"),
        ("--max-loras 8 --enable-lora --max-cpu-loras 4", QWEN, L40S, "--max-cpu-loras 8"),
        ("--max-loras 8 --enable-lora --max-cpu-loras 4 --max-model-len 50k", QWEN, L40S,
         "--max-model-len 40960 --max-cpu-loras 8"),
        ("--gpu-memory-utilization 0.7", LLAMA, L4, ""),
        ("-tp 2", LARGE, H100, ""),
        ("", LLAMA, replace(H100, used_bytes=10 * GIB), "--gpu-memory-utilization 0.8"),  # a neighbour: what is free
    ],
)  # fmt: skip
def test_nothing_stops_the_start_after_any_offer(command: str, model: object, on: Card, first: str) -> None:
    """A context beyond the model's own is never offered, and what one change leaves the next one of the offer clears."""
    advised = planned(command, model=model, on=on).advice  # type: ignore[arg-type]
    assert advised[0].words.startswith(first)
    for offer in advised:
        after = planned(f"{command} {offer.words}", model=model, on=on)  # type: ignore[arg-type]
        assert not after.stops, offer.words
    if first and model is QWEN:
        assert not planned(f"{command} {advised[0].words}", model=QWEN, on=on).findings


def test_a_longer_context_is_offered_where_the_user_allows_it() -> None:
    """VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 lifts the model's limit, and then memory is the only one."""
    allowed = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    assert int(planned("--max-model-len 400k", model=QWEN, on=L40S, environment=allowed).advice[0].value) > 40960


def test_the_same_cache_has_the_same_tokens() -> None:
    """vLLM rounds down from a quotient, by which one token of the very same blocks gets lost: the advice shows the plan's."""
    found = planned(model=QWEN, on=L4)
    assert found.ledger.kv_plan.tokens % 16 == 0
    assert f"{found.ledger.kv_plan.tokens:,} tokens" in found.advice[0].effect


def test_what_no_value_clears_hides_no_offer() -> None:
    """A checkpoint that is not quantised has to be left to the user; the context is cleared all the same."""
    small = card("L4", 10, 10, 10, (8, 9))
    found = planned("--quantization awq", model=QWEN, on=small, unquantised=True)
    assert set(found.codes) >= {Code.OTHER_BAD_CONFIG, Code.STARTUP_CONTEXT_TOO_LONG}
    assert found.advice[0].flag == "--max-model-len"


def test_a_card_that_a_release_has_no_kernels_for() -> None:
    """CUDA 13, with which vLLM is built from 0.20.0 on, has none for a V100; a build with CUDA 12 may. No flag clears it."""
    v100 = card("V100", 31.74, 31.73, 31.75, (7, 0))
    found = planned("--dtype half --max-model-len 400000", "0.20.0", QWEN, v100)
    assert found.codes[Code.OTHER_UNSUPPORTED_GPU] is Severity.CRITICAL
    assert any("0.19.1" in finding.because for finding in found.findings)
    assert found.advice, "what else stops the start is advised on"
    assert Code.OTHER_UNSUPPORTED_GPU not in planned("--dtype half", "0.19.1", QWEN, v100).codes
    turing = card("T4", 14.56, 14.5, 14.7, (7, 5))
    assert Code.OTHER_UNSUPPORTED_GPU not in planned("--dtype half", "0.32.0", QWEN, turing).codes
    words = ("plan", "--gpu", "V100 32GB", "--vllm")
    assert main([*words, "0.32.0", "vllm", "serve", "Qwen/Qwen3-8B", "--dtype", "half"]) == 1
    assert main([*words, "0.21.0+cu129", "vllm", "serve", "Qwen/Qwen3-8B", "--dtype", "half"]) == 0
