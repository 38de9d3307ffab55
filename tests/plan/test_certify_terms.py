"""The terms against what a real vLLM asked for when it died, and against its own rules."""

from __future__ import annotations

import re
from pathlib import Path

from tests.plan.test_certify import FIRST, LLAMA, certificate, kind_of, recorded

LOGS = Path(__file__).resolve().parents[1] / "captures" / "vllm-0.25.1-h200-failures"
SIZES = {"MiB": 2**20, "GiB": 2**30}


def asked_for(run: str) -> float:
    """The allocation that failed, as torch printed it."""
    text = (LOGS / f"{run}.log").read_text(encoding="utf-8", errors="replace")
    size, unit = re.findall(r"Tried to allocate ([\d.]+) (MiB|GiB)", text)[-1]
    return float(size) * SIZES[unit]


def test_the_copy_that_failed_is_counted_twice_over(tmp_path: Path) -> None:
    """8,000 prompt tokens failed at one 32-bit copy of their logits; an adapter's widest matrix at the largest rank."""
    failed = asked_for("logits")
    assert abs(failed - 8000 * 128256 * 4) < 0.01 * failed
    kind = kind_of(recorded("logits", tmp_path), "prompt_logprobs")
    assert kind.phase.bytes_of(8000) >= 2.5 * failed
    kind = kind_of(recorded("lora", tmp_path), "adapter")
    assert asked_for("lora") <= kind.phase.bytes_of(1) <= 1.05 * asked_for("lora")


def test_the_encoder_is_counted_wider_than_what_failed(tmp_path: Path) -> None:
    """One tensor of 154 MiB could not be had for a picture of 15,625 tokens; the kind counts many of that width."""
    found = recorded("multimodal", tmp_path)
    kind = kind_of(found, "pictures")
    assert kind.phase.bytes_of(15625) > 5 * asked_for("multimodal")
    assert found.step.item_tokens == 16384  # the processor's own limit; films are not admitted


def test_a_prompt_in_the_second_runner_costs_two_chunks_whatever_its_length() -> None:
    """Logits of all rows of the step are made 1,024 at a time, and the last chunk lives until the next is there."""
    kind = kind_of(certificate("vllm", "serve", LLAMA), "prompt_logprobs")
    assert kind.phase.fixed_bytes >= 2 * 1024 * 128256 * 2
    assert kind.phase.bytes_of(2) < 1.01 * kind.phase.bytes_of(200)


def test_a_prompt_that_is_read_in_turns_holds_more() -> None:
    """With a threshold for long prompts a chunk is smaller than its step, and each keeps all rows of that step."""
    words = ("vllm", "serve", LLAMA)
    plain = kind_of(certificate(*words), "prompt_logprobs").phase.bytes_per_unit
    assert (
        kind_of(certificate(*words, "--long-prefill-token-threshold", "512"), "prompt_logprobs").phase.bytes_per_unit
        > 4 * plain
    )


def test_the_profile_s_reserve_is_not_taken_for_more_than_it_is() -> None:
    """Since 0.28 the second runner's profile does not copy its logits: a peak that was the sampler's reserves less."""
    words = ("vllm", "serve", LLAMA, "--max-num-batched-tokens", "2048", "--max-num-seqs", "2048", "--enforce-eager")
    old, new = certificate(*words, vllm="0.27.1"), certificate(*words)
    assert old.ledger.activation.why.startswith("sampler")
    assert new.ledger.activation.low < old.ledger.activation.low


def test_penalties_cost_their_padding_in_the_first_runner_alone() -> None:
    """One long sequence pads every row's ids; the second runner keeps counters instead."""
    short = kind_of(certificate(*FIRST, "vllm", "serve", LLAMA, "--max-model-len", "4096"), "penalties")
    long = kind_of(certificate(*FIRST, "vllm", "serve", LLAMA, "--max-model-len", "131072"), "penalties")
    assert long.phase.bytes_per_unit - short.phase.bytes_per_unit == 24 * (131072 - 4096)
    assert all(kind.phase.kind != "penalties" for kind in certificate("vllm", "serve", LLAMA).kinds)


def test_expandable_segments_leave_no_half_used_piece() -> None:
    """With them torch maps pages, not pieces: the first runner's logits cost two bytes an entry less."""
    words = ("vllm", "serve", LLAMA, "--max-model-len", "8192")
    plain = kind_of(certificate(*FIRST, *words), "prompt_logprobs").phase.bytes_per_unit
    paged = kind_of(certificate(*FIRST, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", *words), "prompt_logprobs")
    assert plain - paged.phase.bytes_per_unit == 2 * 128256
