"""Offers keep what they promise: nothing stops the start after any of them, and no warning where that can be had."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from plimsoll.findings import Code, Finding, Severity
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.shape import ModelShape
from plimsoll.plan.findings import Advice, advise, findings_of
from plimsoll.plan.ledger import Ledger, ModelFacts, plan_ledger
from plimsoll.plan.settings import Card, Flags, Settings, read_settings
from plimsoll.units import GIB

QWEN = ModelShape.from_config(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }
)  # fmt: skip
L40S = Card("L40S", int(44.4 * GIB), int(44.3 * GIB), int(44.5 * GIB), (8, 9))
L4 = Card("L4", int(22.04 * GIB), int(22.0 * GIB), int(22.2 * GIB), (8, 9))


def _planned(command: str, card: Card, environment: dict[str, str]) -> tuple[Ledger, list[Finding], list[Advice]]:
    def replan(settings: Settings) -> tuple[Ledger, list[Finding]]:
        ledger = plan_ledger(ModelFacts("m", QWEN), settings, card)
        return ledger, findings_of(ledger, QWEN, (), environment)

    line = read_command_line(["m", *shlex.split(command)], "0.32.0")
    ledger, findings = replan(read_settings(Flags(line, "0.32.0"), {}, QWEN, card))
    return ledger, findings, advise(ledger, QWEN, findings, replan)


@pytest.mark.parametrize(
    ("command", "card", "first"),
    [
        ("--max-model-len 400k", L40S, "--max-model-len 40960"),
        ("--max-model-len 400k", L4, "--max-model-len 2"),
        ("--gpu-memory-utilization 1.0", L40S, "--gpu-memory-utilization 0.9"),
        ("--max-model-len 400k --gpu-memory-utilization 1.0", L40S, "--max-model-len 40960 --gpu-memory-utilization 0.9"),
        ("--max-loras 8 --enable-lora --max-cpu-loras 4", L40S, "--max-cpu-loras 8"),
        ("--max-loras 8 --enable-lora --max-cpu-loras 4 --max-model-len 50k", L40S, "--max-model-len 40960 --max-cpu-loras 8"),
    ],
)
def test_nothing_stops_the_start_after_any_offer(command: str, card: Card, first: str) -> None:
    """A context beyond the model's own is never offered, and what one change leaves the next one of the offer clears."""
    advised = _planned(command, card, {})[2]
    assert advised[0].words.startswith(first)
    for offer in advised:
        left = _planned(f"{command} {offer.words}", card, {})[1]
        assert not [finding for finding in left if finding.severity is Severity.CRITICAL], offer.words
    assert not _planned(f"{command} {advised[0].words}", card, {})[1]


def test_a_longer_context_is_offered_where_the_user_allows_it() -> None:
    """VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 lifts the model's limit, and then memory is the only one."""
    advised = _planned("--max-model-len 400k", L40S, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})[2]
    assert int(advised[0].value) > QWEN.max_context


def test_the_same_cache_has_the_same_tokens() -> None:
    """vLLM rounds down from a quotient, by which one token of the very same blocks gets lost: the advice shows the plan's."""
    ledger, _, advised = _planned("", L4, {})
    assert ledger.kv_plan.tokens % 16 == 0
    assert f"{ledger.kv_plan.tokens:,} tokens" in advised[0].effect


def test_what_no_value_clears_hides_no_offer() -> None:
    """A checkpoint that is not quantised has to be left to the user; the context is cleared all the same."""
    settings = read_settings(Flags(read_command_line(["m", "--quantization", "awq"], "0.32.0"), "0.32.0"), {}, QWEN, L4)

    def replan(changed: Settings) -> tuple[Ledger, list[Finding]]:
        ledger = plan_ledger(ModelFacts("m", QWEN), changed, replace(L4, total_bytes=10 * GIB, low_bytes=10 * GIB))
        return ledger, findings_of(ledger, QWEN, (), {}, unquantised=True)

    ledger, findings = replan(settings)
    assert {finding.code for finding in findings} >= {Code.OTHER_BAD_CONFIG, Code.STARTUP_CONTEXT_TOO_LONG}
    assert advise(ledger, QWEN, findings, replan)[0].flag == "--max-model-len"
