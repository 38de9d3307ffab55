"""The values in force for a command, and the batch that each release takes by default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.errors import BadInput
from plimsoll.models.shape import Tower
from plimsoll.plan.settings import AUTO_FIT, batch_limits
from plimsoll.units import GIB
from tests.each import cases, each
from tests.plan.planning import LLAMA, settings_of


def test_defaults_of_the_release_and_the_card() -> None:
    """Nothing given: the release's utilisation, the model's context, the card's batch limits."""
    now, then = settings_of(), settings_of(release="0.19.0")
    assert (now.utilization, now.max_model_len, now.max_num_seqs, now.max_num_batched_tokens) == (0.92, 131072, 1024, 8192)
    assert (then.utilization, then.estimates_graphs, then.v2_runner) == (0.9, False, False)
    assert (now.estimates_graphs, now.v2_runner, now.prefix_caching, now.async_scheduling) == (True, True, True, True)


def test_the_first_engine_is_gone() -> None:
    """VLLM_USE_V1=0 changes nothing from 0.11.0 on, as `flags` says of it; before, it brings the first engine's batch."""
    assert settings_of(environment={"VLLM_USE_V1": "0"}) == settings_of()
    assert settings_of(release="0.10.2", environment={"VLLM_USE_V1": "0"}) != settings_of(release="0.10.2")


def test_what_the_command_says_wins() -> None:
    """Every spelling of the parser reaches the value."""
    settings = settings_of(
        "-tp 4 --max-model-len 32k --max-num-seqs=64 --gpu_memory_util 0.88 --kv-cache-dtype fp8 --enforce-eager"
        " --kv-cache-memory-bytes 4G --block-size 32 --no-enable-prefix-caching --enable-lora --max-loras 2"
    )
    assert (settings.tensor_parallel, settings.max_model_len, settings.max_num_seqs) == (4, 32000, 64)
    assert (settings.utilization, settings.kv_cache_dtype, settings.enforce_eager) == (0.88, "fp8", True)
    assert (settings.kv_cache_memory_bytes, settings.block_size, settings.prefix_caching) == (4 * GIB, 32, False)
    assert (settings.max_loras, settings.gpus) == (2, 4)


def test_limits_bound_each_other() -> None:
    """Sequences never outnumber tokens, and a short context bounds the default token budget."""
    assert settings_of("--max-num-batched-tokens 512").max_num_seqs == 512
    assert settings_of("--max-num-seqs 2 --max-model-len 1000").max_num_batched_tokens == 2000
    assert settings_of("--performance-mode throughput").max_num_batched_tokens == 16384
    assert settings_of("--no-enable-chunked-prefill --max-model-len 32000").max_num_batched_tokens == 32000


def test_the_first_engine_batches_whole_prompts() -> None:
    """0.7.3 holds a whole prompt in a batch up to 32k, and chunks above or where it is told to."""
    for command, tokens in (
        ("--max-model-len 16384", 16384), ("", 2048), ("--max-model-len 1024", 2048), ("--max-model-len 32768", 32768),
        ("--enable-chunked-prefill --max-model-len 16384", 2048),
    ):  # fmt: skip
        assert settings_of(command, "0.7.3").max_num_batched_tokens == tokens, command
    assert batch_limits("0.7.3", "NVIDIA H100", 79 * GIB) is None


def test_json_and_dottedsettings_of() -> None:
    """Speculative decoding and connectors are found in JSON and behind dots."""
    settings = settings_of('--speculative-config.num_speculative_tokens 3 --kv-transfer-config \'{"kv_connector": "X"}\'')
    assert (settings.speculative_tokens, settings.kv_connector) == (3, "X")


def test_variables_count() -> None:
    """The graph estimate and the layer partition are set by variables."""
    settings = settings_of(environment={"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0", "VLLM_PP_LAYER_PARTITION": "20,12"})
    assert (settings.estimates_graphs, settings.pipeline_partition) == (False, (20, 12))


def test_auto_fit() -> None:
    """--max-model-len auto leaves the choice to vLLM."""
    assert settings_of("--max-model-len auto").max_model_len == AUTO_FIT


@each("command", ["--gpu-memory-utilization 1.5", "--gpu-memory-utilization x", "--max-num-seqs many",
                                     "--speculative-config {", "-tp 0 --gpu-memory-utilization 0"])  # fmt: skip
def test_nonsense_is_one_line(command: str) -> None:
    """A value that makes no sense is the user's mistake."""
    with pytest.raises(BadInput):
        settings_of(command)


@each(
    ("model_type", "towers", "limits", "release", "text_alone"), cases("plan", "encoders_that_nothing_may_reach_are_left_out")
)
def test_encoders_that_nothing_may_reach_are_left_out(
    model_type: str, towers: tuple[str, ...], limits: str, release: str, text_alone: bool
) -> None:
    """A limit of 0 for every kind of input that the encoders read is --language-model-only; for a part of them it is not."""
    shape = replace(LLAMA.shape, model_type=model_type, towers=tuple(Tower(what) for what in towers))
    assert settings_of(limits, release, replace(LLAMA, shape=shape)).language_model_only is text_alone


@each(("release", "gpu", "gib", "expected"), cases("plan", "limits_by_release_and_card"))
def test_limits_by_release_and_card(release: str, gpu: str, gib: int, expected: tuple[int, int]) -> None:
    """Each row was read in that release's source."""
    assert batch_limits(release, gpu, gib * GIB) == expected
