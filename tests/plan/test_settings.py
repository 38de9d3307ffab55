"""The values in force for a command."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from plimsoll.errors import BadInput
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.shape import ModelShape, Tower
from plimsoll.plan.settings import AUTO_FIT, Card, Flags, Settings, read_settings
from plimsoll.units import GIB
from tests.each import each

LLAMA = ModelShape.from_config(
    {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }
)  # fmt: skip


def _settings(command: str = "", release: str = "0.32.0", gib: float = 79.2, **environment: str) -> Settings:
    line = read_command_line(["m", *shlex.split(command)], release)
    size = int(gib * GIB)
    return read_settings(Flags(line, release), environment, LLAMA, Card("NVIDIA H100 80GB HBM3", size, size, size))


def test_defaults_of_the_release_and_the_card() -> None:
    """Nothing given: the release's utilisation, the model's context, the card's batch limits."""
    now, then = _settings(), _settings(release="0.19.0")
    assert (now.utilization, now.max_model_len, now.max_num_seqs, now.max_num_batched_tokens) == (0.92, 131072, 1024, 8192)
    assert (then.utilization, then.estimates_graphs, then.v2_runner) == (0.9, False, False)
    assert (now.estimates_graphs, now.v2_runner, now.prefix_caching, now.async_scheduling) == (True, True, True, True)


def test_the_first_engine_is_gone() -> None:
    """VLLM_USE_V1=0 changes nothing from 0.11.0 on, as `flags` says of it; before, it brings the first engine's batch."""
    assert _settings(VLLM_USE_V1="0") == _settings()
    assert _settings(release="0.10.2", VLLM_USE_V1="0") != _settings(release="0.10.2")


def test_what_the_command_says_wins() -> None:
    """Every spelling of the parser reaches the value."""
    settings = _settings(
        "-tp 4 --max-model-len 32k --max-num-seqs=64 --gpu_memory_util 0.88 --kv-cache-dtype fp8 --enforce-eager"
        " --kv-cache-memory-bytes 4G --block-size 32 --no-enable-prefix-caching --enable-lora --max-loras 2"
    )
    assert (settings.tensor_parallel, settings.max_model_len, settings.max_num_seqs) == (4, 32000, 64)
    assert (settings.utilization, settings.kv_cache_dtype, settings.enforce_eager) == (0.88, "fp8", True)
    assert (settings.kv_cache_memory_bytes, settings.block_size, settings.prefix_caching) == (4 * GIB, 32, False)
    assert (settings.max_loras, settings.gpus) == (2, 4)


def test_limits_bound_each_other() -> None:
    """Sequences never outnumber tokens, and a short context bounds the default token budget."""
    assert _settings("--max-num-batched-tokens 512").max_num_seqs == 512
    assert _settings("--max-num-seqs 2 --max-model-len 1000").max_num_batched_tokens == 2000
    assert _settings("--performance-mode throughput").max_num_batched_tokens == 16384


def test_the_first_engine_batches_whole_prompts() -> None:
    """0.7.3 holds a whole prompt in a batch up to 32k, and chunks above."""
    assert _settings("--max-model-len 16384", "0.7.3").max_num_batched_tokens == 16384
    assert _settings("", "0.7.3").max_num_batched_tokens == 2048


def test_json_and_dotted_settings() -> None:
    """Speculative decoding and connectors are found in JSON and behind dots."""
    settings = _settings('--speculative-config.num_speculative_tokens 3 --kv-transfer-config \'{"kv_connector": "X"}\'')
    assert (settings.speculative_tokens, settings.kv_connector) == (3, "X")


def test_variables_count() -> None:
    """The graph estimate and the layer partition are set by variables."""
    settings = _settings(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS="0", VLLM_PP_LAYER_PARTITION="20,12")
    assert (settings.estimates_graphs, settings.pipeline_partition) == (False, (20, 12))


def test_auto_fit() -> None:
    """--max-model-len auto leaves the choice to vLLM."""
    assert _settings("--max-model-len auto").max_model_len == AUTO_FIT


@pytest.mark.parametrize("command", ["--gpu-memory-utilization 1.5", "--gpu-memory-utilization x", "--max-num-seqs many",
                                     "--speculative-config {", "-tp 0 --gpu-memory-utilization 0"])  # fmt: skip
def test_nonsense_is_one_line(command: str) -> None:
    """A value that makes no sense is the user's mistake."""
    with pytest.raises(BadInput):
        _settings(command)


@each(
    ("model_type", "towers", "limits", "release", "text_alone"),
    [
        ("qwen3_vl", ("vision",), '--limit-mm-per-prompt \'{"image": 0, "video": 0}\'', "0.32.0", True),
        ("qwen3_vl", ("vision",), "--limit-mm-per-prompt.image 0 --limit-mm-per-prompt.video 0", "0.32.0", True),
        ("qwen3_vl", ("vision",), "--limit-mm-per-prompt.image.count 0 --limit-mm-per-prompt.video 0", "0.32.0", True),
        ("qwen3_vl", ("vision",), '--limit-mm-per-prompt \'{"image": {"count": 0}, "video": 0}\'', "0.32.0", True),
        ("qwen3_vl", ("vision",), "--limit-mm-per-prompt '{\"image\": 0}'", "0.32.0", False),
        ("qwen3_vl", ("vision",), '--limit-mm-per-prompt \'{"image": 0, "video": 1}\'', "0.32.0", False),
        ("qwen3_vl", ("vision",), '--limit-mm-per-prompt \'{"image": 0, "video": 0}\'', "0.16.0", False),
        ("qwen3_vl", ("vision",), "", "0.32.0", False),
        ("gemma3", ("vision",), "--limit-mm-per-prompt '{\"image\": 0}'", "0.32.0", True),
        ("kimi_k25", ("vision",), '--limit-mm-per-prompt \'{"image": 0, "video": 0}\'', "0.32.0", False),
        ("gemma4", ("vision", "audio"), '--limit-mm-per-prompt \'{"image": 0, "video": 0}\'', "0.32.0", False),
        ("gemma4", ("vision", "audio"), '--limit-mm-per-prompt \'{"image": 0, "video": 0, "audio": 0}\'', "0.32.0", True),
    ],
)
def test_encoders_that_nothing_may_reach_are_left_out(
    model_type: str, towers: tuple[str, ...], limits: str, release: str, text_alone: bool
) -> None:
    """A limit of 0 for every kind of input that the encoders read is --language-model-only; for a part of them it is not."""
    shape = replace(LLAMA, model_type=model_type, towers=tuple(Tower(what) for what in towers))
    line = read_command_line(["m", *shlex.split(limits)], release)
    card = Card("NVIDIA H100 80GB HBM3", 79 * GIB, 79 * GIB, 79 * GIB)
    found = read_settings(Flags(line, release), {}, shape, card)
    assert found.language_model_only is text_alone
