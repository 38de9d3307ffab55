"""Starts that other people reported as refused for want of memory, and what plan says of them.

Inputs and outcomes are figures from the reports named beside each; models are described by their public shapes.
"""

from __future__ import annotations

import shlex

import pytest

from plimsoll.findings import Code, Severity
from plimsoll.hardware.cards import gpu_named
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.files import read_model
from plimsoll.models.shape import ModelShape
from plimsoll.plan.findings import findings_of
from plimsoll.plan.ledger import Ledger, ModelFacts, plan_ledger
from plimsoll.plan.settings import Card, Flags, read_settings
from plimsoll.units import GIB
from tests.each import each


def _plan(model: str, gpu: str, release: str, command: str) -> tuple[Ledger, list[Code]]:
    facts = ModelFacts(model, ModelShape.from_config(read_model(model, hub=None).config))
    card = gpu_named(gpu)
    seen = Card(card.name, card.total_bytes, card.total_low_bytes, card.total_high_bytes, card.compute_capability)
    line = read_command_line(["m", *shlex.split(command)], release)
    ledger = plan_ledger(facts, read_settings(Flags(line, release), {}, facts.shape, seen), seen)
    return ledger, [finding.code for finding in findings_of(ledger, facts.shape, (), {})]


@pytest.mark.parametrize(
    ("model", "gpu", "release", "command", "code", "kv_gib"),
    [
        # vllm#27508 and vllm#23278: "Available KV cache memory" -2.28 and -2.14 GiB.
        ("openai/gpt-oss-120b", "H100", "0.11.0", "", Code.STARTUP_NO_CACHE_BLOCKS, -2.28),
        ("openai/gpt-oss-120b", "H100", "0.10.2", "", Code.STARTUP_NO_CACHE_BLOCKS, -2.14),
        # Our own start on an H200: -4.76 GiB.
        ("Qwen/Qwen2.5-72B-Instruct", "H200", "0.25.1", "--gpu-memory-utilization 0.95", Code.STARTUP_NO_CACHE_BLOCKS, -4.76),
        # vllm#10517: 131072 tokens of a 70B model on two H100.
        ("meta-llama/Llama-3.1-70B-Instruct", "H100", "0.5.4", "-tp 2", Code.STARTUP_CONTEXT_TOO_LONG, None),
        # llm-d-planner's log of gpt-oss-20b at 0.95: the sampler's warm-up with 1024 rows found no memory.
        ("openai/gpt-oss-20b", "H100", "0.19.0", "--gpu-memory-utilization 0.95 --max-model-len 8192",
         Code.STARTUP_SAMPLER_WARMUP, None),
    ],
)  # fmt: skip
def test_reported_refusals_are_foreseen_by_code(
    model: str, gpu: str, release: str, command: str, code: Code, kv_gib: float | None
) -> None:
    """The first finding names the step that failed, and where the log printed the KV figure the band holds it."""
    ledger, codes = _plan(model, gpu, release, command)
    assert codes[0] is code
    if kv_gib is not None:
        assert ledger.kv.low <= kv_gib * GIB <= ledger.kv.high


@each(
    ("gpu", "command", "unquantised", "code"),
    [
        ("T4", "--dtype bfloat16", False, Code.OTHER_UNSUPPORTED_GPU),
        ("T4", "--dtype half", False, None),
        ("T4", "", False, None),  # vLLM takes float16 by itself
        ("L4", "--dtype bfloat16", False, None),
        ("L4", "--quantization awq", True, Code.OTHER_BAD_CONFIG),
        ("L4", "--quantization gptq", True, Code.OTHER_BAD_CONFIG),
        ("L4", "--quantization awq", False, None),  # the checkpoint may have a file that says how it was made
        ("L4", "--quantization fp8", True, None),  # made while it loads
        ("L4", "--enable-lora --max-loras 8 --max-cpu-loras 4", False, Code.OTHER_BAD_CONFIG),
        ("L4", "--enable-lora --max-loras 8 --max-cpu-loras 8", False, None),
        ("L4", "--enable-lora --max-loras 8 --max-cpu-loras 0", False, None),  # vLLM reads 0 as not given
        ("L4", "--max-loras 8 --max-cpu-loras 4", False, None),  # LoRA is off
    ],
)
def test_settings_that_vllm_refuses_whatever_the_memory(gpu: str, command: str, unquantised: bool, code: Code | None) -> None:
    """Only what is certain: a type the card has not, a method that reads packed weights, too few LoRAs in the host."""
    ledger, _ = _plan("Qwen/Qwen3-0.6B", gpu, "0.32.0", command)
    shape = ModelShape.from_config(read_model("Qwen/Qwen3-0.6B", hub=None).config)
    found = findings_of(ledger, shape, (), {}, unquantised=unquantised)
    assert [finding.code for finding in found if finding.severity is Severity.CRITICAL] == ([] if code is None else [code])
