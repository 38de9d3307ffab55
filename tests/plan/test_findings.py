"""What a real H200 taught plan to say before launch: lines that vLLM's own check does not draw."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.findings import Code, Finding, Severity
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.shape import ModelShape
from plimsoll.plan.findings import advise, findings_of
from plimsoll.plan.ledger import Ledger, ModelFacts, plan_ledger
from plimsoll.plan.settings import Card, Flags, Settings, read_settings
from plimsoll.plan.weights import weights_from_shape
from plimsoll.plan.weights_checkpoint import weights_from_tensors
from plimsoll.units import GIB, allocated_bytes

H200 = Card("H200 SXM 141GB", int(139.80 * GIB), int(139.7 * GIB), int(139.81 * GIB), (9, 0))
MIB = 1 << 20
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "torch_dtype": "float16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
                     "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
                "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
                "max_position_embeddings": 131072, "tie_word_embeddings": True}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def _planned(
    config: dict[str, Any], command: str, card: Card = H200, release: str = "0.25.1"
) -> tuple[Ledger, dict[Code, Severity]]:
    shape = ModelShape.from_config(json.loads(json.dumps(config)))
    line = read_command_line(["m", *shlex.split(command)], release)
    settings = read_settings(Flags(line, release), {}, shape, card)
    ledger = plan_ledger(ModelFacts("m", shape), settings, card)
    return ledger, {finding.code: finding.severity for finding in findings_of(ledger, shape, (), {})}


def test_a_trial_run_or_weights_that_do_not_fit_are_named() -> None:
    """24,576 tokens can be tried and 51,200 cannot; beside weights that do not fit the cache is not asked for."""
    flags = "--enforce-eager --max-model-len 4096 --max-num-seqs 64 --gpu-memory-utilization 0.97 --max-num-batched-tokens"
    assert next(iter(_planned(LLAMA_70B, f"{flags} 51200")[1])) is Code.STARTUP_PROFILE_RUN
    assert list(_planned(LLAMA_70B, f"{flags} 24576")[1]) == [Code.STARTUP_NO_CACHE_BLOCKS]
    card = replace(H200, used_bytes=80 * GIB)
    found = _planned(LLAMA_70B, "--enforce-eager --max-model-len 4096", card)[1]
    assert list(found) == [Code.STARTUP_WEIGHTS_DO_NOT_FIT, Code.STARTUP_FREE_MEMORY_CHECK]


@pytest.mark.parametrize(("blocks", "warned"), [(256, True), (257, False)])
def test_the_block_that_vllm_keeps(blocks: int, warned: bool) -> None:
    """With exactly the blocks of one full request the server starts and does not answer it; with one more it does."""
    ledger, found = _planned(LLAMA, f"--enforce-eager --max-model-len 4096 --kv-cache-memory-bytes {blocks * 8 * MIB}")
    assert ledger.fits
    assert (found.get(Code.KV_SATURATED) is Severity.WARNING) is warned


def test_the_first_engine_kept_no_block() -> None:
    """The null block came with the second engine."""
    found = _planned(LLAMA, "--enforce-eager --max-model-len 4096 --num-gpu-blocks-override 256", release="0.7.3")[1]
    assert Code.KV_SATURATED not in found


@pytest.mark.parametrize(("left_mib", "severity"), [(72416, Severity.CRITICAL), (73700, None)])
def test_what_comes_beside_a_granted_request(left_mib: int, severity: Severity | None) -> None:
    """A neighbour that leaves 0.3 GiB more than is asked for passes vLLM's check and stops the warm-up of the sampler."""
    card = replace(H200, used_bytes=H200.total_bytes - left_mib * MIB)
    found = _planned(QWEN, "--enforce-eager --max-model-len 4096 --gpu-memory-utilization 0.5", card)[1]
    assert found.get(Code.STARTUP_SAMPLER_WARMUP) is severity
    assert Code.STARTUP_FREE_MEMORY_CHECK not in found


def test_the_samplers_buffers_are_taken_off_once() -> None:
    """Until 0.26 they come off the slack; from 0.27 vLLM counts them itself, and they are in memory outside torch."""
    flags = "--enforce-eager --max-model-len 4096 --gpu-memory-utilization 0.5"
    before, after = _planned(QWEN, flags)[0], _planned(QWEN, flags, release="0.27.0")[0]
    buffers = 4.125 * 1024 * 151936
    assert after.slack.value - before.slack.value == pytest.approx(buffers, abs=1)
    assert after.non_torch.value - before.non_torch.value >= buffers


def test_a_tied_table_is_copied_too() -> None:
    """Compiled, Qwen2.5-1.5B peaks at 0.45 GiB: a second copy of its embedding, which is its head as well."""
    ledger = _planned(QWEN, "--max-model-len 16384 --max-num-batched-tokens 2048 --max-num-seqs 256")[0]
    assert ledger.activation.value / GIB == pytest.approx(0.45, abs=0.01)


def test_zero_points_grow_on_hopper() -> None:
    """Llama 3.3 70B in AWQ took 37.88 GiB on an H200; on a card without Machete, or before 0.19, it is 0.75 less."""
    config = LLAMA_70B | {"torch_dtype": "bfloat16", "quantization_config": AWQ}
    flags = "--enforce-eager --max-model-len 4096"
    here = _planned(config, flags)[0].weights.value / GIB
    assert here == pytest.approx(37.88, abs=0.1)
    assert _planned(config, flags, replace(H200, compute_capability=(8, 0)))[0].weights.value / GIB == pytest.approx(
        here - 0.75, abs=0.05
    )
    assert _planned(config, flags, release="0.18.0")[0].weights.value / GIB == pytest.approx(here - 0.75, abs=0.05)


def test_zero_points_of_a_checkpoint_grow_as_well() -> None:
    """Where the tensors are known by name, the packed zero points count four times."""
    shape = ModelShape.from_config(LLAMA | {"num_hidden_layers": 1, "quantization_config": AWQ})
    zeros = [("model.layers.0.mlp.down_proj.qzeros", "I32", (86, 512))]
    narrow = weights_from_tensors(zeros, shape).value
    assert (
        weights_from_tensors(zeros, shape, Settings(release="0.19.0", compute_capability=(9, 0))).value - narrow
        == 3 * 86 * 512 * 4
    )


def test_the_rest_of_a_large_segment_counts() -> None:
    """Under max_split_size_mb:20 a tensor of 26.25 MiB holds 28; a smaller one, or an older release, only its own size."""
    size = int(26.25 * MIB)
    assert allocated_bytes(size) == size
    assert allocated_bytes(size, whole_segments=True) == 28 * MIB
    assert allocated_bytes(int(12.5 * MIB), whole_segments=True) == allocated_bytes(int(12.5 * MIB))
    shape = ModelShape.from_config(QWEN)
    more = weights_from_shape(shape, Settings(release="0.21.0")).value - weights_from_shape(shape).value
    assert more == 28 * (1.75 + 1.5) * MIB  # down projection, and gate with up, of every layer


def test_a_cache_of_a_given_size_leaves_room_for_the_pieces_of_a_batch() -> None:
    """133.78 GB started on the H200 and died in its first full batch: plan warns of that there, and is sure again when what it
    might take in pieces is left too. A utilisation is not judged by it."""
    flags = "--enforce-eager --max-model-len 4096 --max-num-batched-tokens 16384 --max-num-seqs 256"
    ledger, found = _planned(LLAMA, f"{flags} --kv-cache-memory-bytes 133781520384")
    assert found[Code.RUNTIME_FORWARD] is Severity.WARNING
    assert ledger.slack.low < 0 < ledger.slack.value
    less = ledger.kv.value + ledger.slack.low
    after, found = _planned(LLAMA, f"{flags} --kv-cache-memory-bytes {less}")
    assert Code.RUNTIME_FORWARD not in found
    assert after.slack.low >= 0
    assert Code.RUNTIME_FORWARD not in _planned(LLAMA, f"{flags} --gpu-memory-utilization 0.985")[1]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("--enforce-eager --max-num-batched-tokens 16384 --kv-cache-memory-bytes 134704267264", Code.RUNTIME_FORWARD),
        ("--kv-cache-memory-bytes 135539811584", Code.STARTUP_GRAPH_CAPTURE),
        ("--enforce-eager --kv-cache-memory-bytes 141733920768", Code.STARTUP_KV_ALLOCATION),
    ],
)
def test_a_cache_that_is_too_large_fails_where_its_memory_is_first_missed(flags: str, code: Code) -> None:
    """vLLM tries nothing out beside a cache of a given size: it starts and dies in its first full batch, dies while graphs are
    captured, or has no room for the cache itself. Each was seen on the H200."""
    found = _planned(LLAMA, f"--max-model-len 4096 --max-num-seqs 256 {flags}")[1]
    assert found[code] is Severity.CRITICAL
    assert next(iter(found)) is code


def test_what_is_advised_instead_of_a_cache_that_is_too_large_clears_it() -> None:
    """Also where it is the first full batch, or the graphs, that finds nothing left."""
    for flags in ("--enforce-eager --max-num-batched-tokens 16384 --kv-cache-memory-bytes 134704267264",
                  "--kv-cache-memory-bytes 135539811584"):  # fmt: skip
        command = f"--max-model-len 4096 --max-num-seqs 256 {flags}"
        shape = ModelShape.from_config(json.loads(json.dumps(LLAMA)))

        def replan(settings: Settings, shape: ModelShape = shape) -> tuple[Ledger, list[Finding]]:
            ledger = plan_ledger(ModelFacts("m", shape), settings, H200)
            return ledger, findings_of(ledger, shape, (), {})

        ledger = _planned(LLAMA, command)[0]
        advised = advise(ledger, shape, findings_of(ledger, shape, (), {}), replan)
        assert [one.flag for one in advised][:1] == ["--kv-cache-memory-bytes"]
        after, left = replan(replace(ledger.settings, kv_cache_memory_bytes=int(advised[0].value)))
        assert not [finding for finding in left if finding.severity is Severity.CRITICAL]
        assert after.slack.low > 0
