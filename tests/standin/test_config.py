"""From a command to an engine: the plan's figures arrive unchanged, and what cannot be imitated is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from plimsoll.cli.main import parse
from plimsoll.plan.read import plan_command
from plimsoll.render.plan import as_json
from plimsoll.simulate.inputs import settings_of_plan
from plimsoll.simulate.options import ReplayOptions
from plimsoll.simulate.settings import StepTime
from plimsoll.simulate.silicon import sheet_clock
from plimsoll.standin.launch import ConfigRefused
from plimsoll.standin.memory import DeviceModel
from tests.each import sure
from tests.standin.launches import LLAMA, launchable

CAPTURES = Path(__file__).parents[1] / "captures"
GPT_OSS = "openai/gpt-oss-20b"


def plan_options(*words: str) -> ReplayOptions:
    """As `simulate --gpu X -- vllm serve ...` splits them."""
    return parse(ReplayOptions, words)


@pytest.mark.parametrize("model", [LLAMA, GPT_OSS])
def test_scheduler_and_times_are_those_of_simulate(model: str) -> None:
    """The stand-in has the scheduler of `simulate --gpu H100 -- vllm serve ...`, and its step times by the data sheet."""
    command = ["--gpu", "H100", "--vllm", "0.32.0", "--", "vllm", "serve", model, "--max-model-len", "8192"]
    planned = plan_command(plan_options(*command))
    settings, _ = settings_of_plan(json.loads(as_json(planned, None, None)))
    config = launchable("--gpu", "H100", "--vllm", "0.32.0", model, "--max-model-len", "8192").config
    assert config.settings == settings
    clock = sure(sheet_clock(planned.ledger, planned.shape, settings))
    assert config.step_time._replace(by_tokens=None) == clock.step_time._replace(by_tokens=None)
    most = settings.max_num_batched_tokens
    assert (config.step_time.table(most) == clock.step_time.table(most)).all()


def test_memory_is_the_ledger() -> None:
    """Every term of the plan is a term of the worker's memory, and what the plan leaves free is free."""
    launch = launchable("--gpu", "L4")
    ledger = plan_command(
        plan_options("--gpu", "L4", "--vllm", "0.32.0", "--", "vllm", "serve", LLAMA, "--max-model-len", "8192")
    ).ledger
    sizes = launch.config.sizes
    assert (sizes.total, sizes.requested, sizes.weights) == (
        ledger.card.total_bytes, ledger.requested.value, ledger.weights.value,
    )  # fmt: skip
    assert sizes.kv_cache == ledger.kv_plan.num_blocks * ledger.kv_plan.bytes_per_block
    assert (sizes.non_torch, sizes.activation_peak) == (ledger.non_torch.value, ledger.activation.value)
    assert DeviceModel(sizes).free > 0


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (("--vllm", "0.32.0"), "vllm-0.32.0-cpu/metrics.txt"),
        (("--vllm", "0.25.1"), "vllm-0.25.1-h200-failures/healthy.metrics-after.txt"),
    ],
)
def test_labels_of_the_cache_are_those_of_the_release(words: tuple[str, ...], page: str) -> None:
    """vllm:cache_config_info has exactly the labels that a real server of the release prints, `engine` aside."""
    found = sure(re.search(r"vllm:cache_config_info\{(.*)\}", (CAPTURES / page).read_text(encoding="utf-8")))
    real = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    del real["engine"]
    labels = launchable("--gpu", "L4", *words).config.cache_labels
    assert set(labels) == set(real)
    planned = {
        "block_size", "effective_attention_block_size", "gpu_memory_utilization", "kv_cache_max_concurrency",
        "kv_cache_memory_bytes", "kv_cache_size_tokens", "num_gpu_blocks",
    }  # fmt: skip
    assert {name: labels[name] for name in real.keys() - planned} == {name: real[name] for name in real.keys() - planned}
    assert int(labels["num_gpu_blocks"]) > 1000


def test_flags_of_the_server_arrive() -> None:
    """Port, keys, limits, names, gate and probe are as typed; the environment adds what vLLM reads from it."""
    words = (
        "--port 9001 --served-model-name a b --api-key k1 k2 --shutdown-timeout 30 --max-num-queued-reqs 7 "
        "--max-num-queued-tokens 2k --middleware plimsoll.inside.Gate --worker-extension-cls plimsoll.inside.Probe "
        "--disable-log-stats --enable-prompt-tokens-details --seed 5"
    ).split()
    launch = launchable("--gpu", "L4", *words, VLLM_SERVER_DEV_MODE="1", VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1")
    options = launch.options
    assert (options.host, options.port, options.api_keys) == ("127.0.0.1", 9001, ("k1", "k2"))
    assert launch.config.served_names == ("a", "b")
    assert launch.config.seed == 5
    assert (options.shutdown_timeout_s, options.max_num_queued_reqs, options.max_num_queued_tokens) == (30, 7, 2000)
    assert options.middleware == ("plimsoll.inside.Gate",)
    switches = "has_probe stays_when_dead has_prompt_tokens_details is_dev_mode has_stats"
    assert [getattr(options, name) for name in switches.split()] == [True, True, True, True, False]


def test_flags_and_layers_are_obeyed() -> None:
    """The number of blocks, a step time in place of the data sheet, and one group of blocks for each kind of layer."""
    launch = launchable("--gpu", "L4", "--num-gpu-blocks-override", "600")
    assert launch.failure is None
    assert launch.config.settings.num_blocks == 600
    assert launch.config.sizes.kv_cache < 2 << 30
    assert launchable("--gpu", "L4", "--base-ns", "5000000").config.step_time == StepTime(base_ns=5_000_000)
    groups = launchable("--gpu", "H100", GPT_OSS).config.settings.groups
    assert {group.kind for group in groups} == {"full", "sliding"}
    assert {group.window for group in groups} == {0, 128}


def test_what_vllms_configuration_refuses_is_refused_in_its_words() -> None:
    """The parser takes it: exit code 1, as there."""
    with pytest.raises(ConfigRefused, match=r"must be greater than or equal to max_num_seqs \(128\)"):
        launchable("--gpu", "H100", "--max-num-batched-tokens", "64", "--max-num-seqs", "128")
