"""The flags of a server, from the lines in which several releases print them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.facts import LONGEST_NAME, LONGEST_VALUE, MOST_FLAGS, command_words, flags_of
from plimsoll.launch.command_line import read_command_line

V0_9 = (
    "non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 8192, 'gpu_memory_utilization': 0.95, "
    "'enable_prefix_caching': True, 'compilation_config': {\"level\":3,\"cudagraph_capture_sizes\":[1,2,4]}, "
    "'served_model_name': ['llama', 'm'], 'limit_mm_per_prompt': {'image': 1}}"
)
V0_15 = (
    "non-default args: {'model_tag': 'Qwen/Qwen3-32B', 'api_server_count': 1, 'port': 8001, 'model': 'Qwen/Qwen3-32B', "
    "'tensor_parallel_size': 2, 'structured_outputs_config': OutputsConfig(backend='auto', reasoning_parser='qwen3'), "
    "'compilation_config': {'mode': <Mode.VLLM_COMPILE: 3>, 'cudagraph_mode': <CUDAGraphMode.FULL: (2, 1)>}, "
    "'enforce_eager': False, 'max_num_seqs': 128}"
)
V0_25 = (
    "non-default args: {'host': '0.0.0.0', 'model': '/models/llama-4-layers', 'api_key': ['sk-do-not-print-me'], "
    "'hf_token': 'hf_abcdefghijklmnopqrstuvwxyz', 'kv_cache_memory_bytes': 1073741824, 'enable_lora': True, "
    "'kv_transfer_config': KVTransferConfig(kv_connector='Nixl', kv_role='kv_both', extra={'a': [1, (2, 3)]}), 'max_loras': 4}"
)
NAMESPACE = (
    "args: Namespace(host=None, port=8000, allow_credentials=False, allowed_origins=['*'], api_key='sk-hidden', "
    "model='facebook/opt-125m', tokenizer=None, dtype='auto', max_model_len=2048, tensor_parallel_size=2, "
    "gpu_memory_utilization=0.9, swap_space=4, enforce_eager=True, quantization=None, max_num_seqs=256, ssl_ca_certs=None)"
)
CONFIG = (
    "Initializing a V1 LLM engine (v0.25.1) with config: model='/models/m', speculative_config=None, tokenizer='/models/m', "
    "tokenizer_mode=auto, dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=4, pipeline_parallel_size=1, "
    "quantization=fp8, enforce_eager=False, kv_cache_dtype=auto, structured_outputs_config=StructuredOutputsConfig("
    "backend='auto', model='inner'), seed=0"
)


@pytest.mark.parametrize(
    ("line", "some"),
    [
        (V0_9, {"model": "meta-llama/Llama-3.1-8B-Instruct", "max_model_len": "8192", "gpu_memory_utilization": "0.95",
                "enable_prefix_caching": "True", "limit_mm_per_prompt": "{'image': 1}", "served_model_name": "['llama', 'm']",
                "compilation_config": '{"level":3,"cudagraph_capture_sizes":[1,2,4]}'}),
        (V0_15, {"model": "Qwen/Qwen3-32B", "tensor_parallel_size": "2", "enforce_eager": "False", "max_num_seqs": "128",
                 "structured_outputs_config": "OutputsConfig(backend='auto', reasoning_parser='qwen3')",
                 "compilation_config": "{'mode': <Mode.VLLM_COMPILE: 3>, 'cudagraph_mode': <CUDAGraphMode.FULL: (2, 1)>}"}),
        (V0_25, {"model": "/models/llama-4-layers", "kv_cache_memory_bytes": "1073741824", "enable_lora": "True",
                 "max_loras": "4"}),
        (NAMESPACE, {"model": "facebook/opt-125m", "dtype": "auto", "max_model_len": "2048", "tensor_parallel_size": "2",
                     "gpu_memory_utilization": "0.9", "swap_space": "4", "enforce_eager": "True", "max_num_seqs": "256"}),
        (CONFIG, {"model": "/models/m", "max_model_len": "8192", "tensor_parallel_size": "4", "pipeline_parallel_size": "1",
                  "quantization": "fp8"}),
    ],
)  # fmt: skip
def test_real_lines_give_their_flags(line: str, some: dict[str, str]) -> None:
    """Dictionaries inside, enums and objects stay whole, whatever stands around the line."""
    found = flags_of(f"(APIServer pid=7) INFO 11-15 09:18:05 [utils.py:1] {line}")
    assert {name: found.get(name) for name in some} == some


def test_what_is_a_default_in_the_old_form_is_left_out() -> None:
    """`Namespace` prints every argument: None is none given, and what tells nothing is not kept."""
    assert not {"quantization", "tokenizer", "port", "allowed_origins", "api_key"} & set(flags_of(NAMESPACE))
    assert not {"kv_cache_dtype", "enforce_eager"} & set(flags_of(CONFIG))


@pytest.mark.parametrize("line", [V0_25, NAMESPACE, V0_25.replace("['sk-do-not-print-me']", "'sk-do-not-print-me'")])
def test_secrets_are_hidden(line: str) -> None:
    """Neither key nor token comes out, in flags or command."""
    found = flags_of(line)
    shown = str(found) + str(command_words(found))
    assert "sk-" not in shown
    assert "hf_abc" not in shown


@pytest.mark.parametrize("line", ["", "INFO something else", "non-default args: ", "non-default args: {}", "with config: "])
def test_other_lines_give_nothing(line: str) -> None:
    """A line that states no flags is another line."""
    assert flags_of(line) == {}


@pytest.mark.parametrize(
    "line",
    [
        "non-default args: {'model': 'm', 'max_model_len': 81",
        "non-default args: {'model': 'm', 'a': {'b': [",
        "non-default args: {'model': 'm', 'x': 'it\\'s open",
    ],
)
def test_a_line_cut_short_keeps_what_was_whole(line: str) -> None:
    """The last value of a cut line may be half a number: a bracket or quote left open is not taken."""
    assert flags_of(line)["model"] == "m"
    assert not {"a", "x"} & set(flags_of(line))


def test_hostile_lines_stay_small() -> None:
    """Endless flags, names and values are cut."""
    many = "non-default args: {" + ", ".join(f"'a{n}': 1" for n in range(1_000)) + "}"
    assert len(flags_of(many)) == MOST_FLAGS
    long = flags_of(f"non-default args: {{'{'n' * 5_000}': 1, 'model': '{'m' * 9_000}'}}")
    assert all(len(name) <= LONGEST_NAME and len(value) <= LONGEST_VALUE + 3 for name, value in long.items())
    assert list(long) == ["model"]


@given(st.text(alphabet="'\"{}[]()<>,:=\\ab1 \n", max_size=200))
def test_any_text_after_the_mark_is_survived(text: str) -> None:
    """Quotes and brackets in any order neither raise nor loop."""
    for mark in ("non-default args: {", "args: Namespace(", "with config: "):
        assert all(name.isidentifier() for name in flags_of(mark + text))


@pytest.mark.parametrize(
    ("line", "release", "values"),
    [
        (V0_9, "0.9.0", {"--max-model-len": ("8192",), "--gpu-memory-utilization": ("0.95",), "--enable-prefix-caching": ()}),
        (V0_15, "0.15.0", {"--tensor-parallel-size": ("2",), "--max-num-seqs": ("128",)}),
        (V0_25, "0.25.1", {"--kv-cache-memory-bytes": ("1073741824",), "--enable-lora": (), "--max-loras": ("4",)}),
    ],
)
def test_the_command_is_one_that_release_takes(line: str, release: str, values: dict[str, tuple[str, ...]]) -> None:
    """Flags printed by a release, put back into words, are read by its parser as the same flags."""
    words = command_words(flags_of(line))
    assert words is not None
    assert words[:2] == ["vllm", "serve"]
    read = read_command_line(words[2:], release)
    given = {argument.spelling: argument.values for argument in read.arguments if not argument.is_negated}
    assert read.model == flags_of(line)["model"]
    assert not read.leftovers
    assert all(argument.row is not None for argument in read.arguments)
    assert {name: given.get(name) for name in values} == values
    assert not {"--host", "--port", "--api-key", "--served-model-name"} & set(given)


def test_false_becomes_the_negated_flag() -> None:
    """What was switched off stays off."""
    assert command_words({"model": "m", "enforce_eager": "False", "seed": "None"}) == [
        "vllm",
        "serve",
        "m",
        "--no-enforce-eager",
    ]


@pytest.mark.parametrize("flags", [{}, {"max_model_len": "8"}, {"model": ""}, {"model": "a\nb"}, {"model": "--help"}])
def test_without_a_model_there_is_no_command(flags: dict[str, str]) -> None:
    """No model, or one that is none, gives no command."""
    assert command_words(flags) is None
