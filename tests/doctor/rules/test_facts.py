"""What a log states about its server, the figures around one failure, the values computed from them, and cures that suit it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.doctor.rules.facts import (
    LONGEST_NAME,
    LONGEST_VALUE,
    MOST_FLAGS,
    FailureCase,
    LogFacts,
    PlanFigures,
    command_words,
    facts_of,
    fitting,
    flags_of,
    more_room,
)
from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.out_of_memory import OomFigures
from plimsoll.doctor.rules.timeline import read_timeline
from plimsoll.findings import Code, Finding, Remedy, Severity
from plimsoll.launch.command_line import read_command_line
from plimsoll.plan.findings import Advice
from plimsoll.units import GIB
from plimsoll.vllm.log_lines import Measured
from tests.doctor.case_maker import case_of, facts_with
from tests.doctor.pasted_text import pasted, scrambled
from tests.each import each

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


SOME_FLAGS = {
    V0_9: {"model": "meta-llama/Llama-3.1-8B-Instruct", "max_model_len": "8192", "gpu_memory_utilization": "0.95",
           "enable_prefix_caching": "True", "limit_mm_per_prompt": "{'image': 1}", "served_model_name": "['llama', 'm']",
           "compilation_config": '{"level":3,"cudagraph_capture_sizes":[1,2,4]}'},
    V0_15: {"model": "Qwen/Qwen3-32B", "tensor_parallel_size": "2", "enforce_eager": "False", "max_num_seqs": "128",
            "structured_outputs_config": "OutputsConfig(backend='auto', reasoning_parser='qwen3')",
            "compilation_config": "{'mode': <Mode.VLLM_COMPILE: 3>, 'cudagraph_mode': <CUDAGraphMode.FULL: (2, 1)>}"},
    V0_25: {"model": "/models/llama-4-layers", "kv_cache_memory_bytes": "1073741824", "enable_lora": "True", "max_loras": "4"},
    NAMESPACE: {"model": "facebook/opt-125m", "dtype": "auto", "max_model_len": "2048", "tensor_parallel_size": "2",
                "gpu_memory_utilization": "0.9", "swap_space": "4", "enforce_eager": "True", "max_num_seqs": "256"},
    CONFIG: {"model": "/models/m", "max_model_len": "8192", "tensor_parallel_size": "4", "pipeline_parallel_size": "1",
             "quantization": "fp8"},
}  # fmt: skip


@each(("line", "some"), SOME_FLAGS.items())
def test_real_lines_give_their_flags(line: str, some: dict[str, str]) -> None:
    """Dictionaries inside, enums and objects stay whole; defaults of the old form are left out, secrets are hidden."""
    found = flags_of(f"(APIServer pid=7) INFO 11-15 09:18:05 [utils.py:1] {line}")
    assert {name: found.get(name) for name in some} == some
    if line in (NAMESPACE, CONFIG):
        assert not {"tokenizer", "port", "allowed_origins", "api_key", "kv_cache_dtype"} & set(found)
    shown = str(found) + str(command_words(found))
    assert "sk-" not in shown
    assert "hf_abc" not in shown


CUT = ["'max_model_len': 81", "'a': {'b': [", "'x': 'it\\'s open"]


def test_other_cut_and_hostile_lines_give_little() -> None:
    """A line that states no flags gives none; of a cut one what was whole; endless flags, names and values are cut."""
    for line in ("", "INFO something else", "non-default args: ", "non-default args: {}", "with config: "):
        assert flags_of(line) == {}
    for rest in CUT:
        found = flags_of(f"non-default args: {{'model': 'm', {rest}")
        assert found["model"] == "m"
        assert not {"a", "x"} & set(found)
    assert len(flags_of("non-default args: {" + ", ".join(f"'a{n}': 1" for n in range(1_000)) + "}")) == MOST_FLAGS
    long = flags_of(f"non-default args: {{'{'n' * 5_000}': 1, 'model': '{'m' * 9_000}'}}")
    assert [(name, len(value)) for name, value in long.items()] == [("model", LONGEST_VALUE + 3)]
    assert LONGEST_NAME < 5_000


@given(st.text(alphabet="'\"{}[]()<>,:=\\ab1 \n", max_size=200))
def test_any_text_after_the_mark_is_survived(text: str) -> None:
    """Quotes and brackets in any order neither raise nor loop."""
    for mark in ("non-default args: {", "args: Namespace(", "with config: "):
        assert all(name.isidentifier() for name in flags_of(mark + text))


@each(("line", "release", "values"), [
    (V0_9, "0.9.0", {"--max-model-len": ("8192",), "--gpu-memory-utilization": ("0.95",), "--enable-prefix-caching": ()}),
    (V0_15, "0.15.0", {"--tensor-parallel-size": ("2",), "--max-num-seqs": ("128",)}),
    (V0_25, "0.25.1", {"--kv-cache-memory-bytes": ("1073741824",), "--enable-lora": (), "--max-loras": ("4",)}),
])  # fmt: skip
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


@each(("flags", "words"), [
    ({"model": "m", "enforce_eager": "False", "seed": "None"}, "vllm serve m --no-enforce-eager"),
    *(({**flags}, None) for flags in ({}, {"max_model_len": "8"}, {"model": ""}, {"model": "a\nb"}, {"model": "--help"})),
])  # fmt: skip
def test_what_was_off_stays_off_and_without_a_model_there_is_no_command(flags: dict[str, str], words: str | None) -> None:
    """No model, or one that is none, gives no command."""
    assert command_words(flags) == (words.split() if words is not None else None)


DUMP = (
    "Dumping scheduler stats: SchedulerStats(num_running_reqs=12, num_waiting_reqs=3, step_counter=0, current_wave=0, "
    "kv_cache_usage=0.42, prefix_cache_stats=PrefixCacheStats(reset=False, requests=1))"
)
START = """
    INFO 11-15 [api_server.py:1] vLLM API server version 0.15.1
    INFO non-default args: {'model': 'm', 'max_model_len': 8192, 'gpu_memory_utilization': 0.9}
    INFO Initializing a V1 LLM engine (v0.15.1) with config: model='m', max_seq_len=4096, tensor_parallel_size=2, seed=0
    INFO Model loading took 14.99 GiB memory and 3.521 seconds
    INFO Available KV cache memory: 9.50 GiB
    ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.
"""


def facts(log: Log) -> LogFacts:
    """The facts of the log's last life."""
    timeline = read_timeline(log)
    return facts_of(timeline, timeline.runs[-1])


@each(("line", "fact", "value"), [
    ("vLLM API server version 0.6.3.post1", "version", "0.6.3.post1"),
    ("Initializing a V1 LLM engine (v0.25.1) with config: model='m'", "version", "0.25.1"),
    ("Initializing an LLM engine (v0.5.4) with config: model='m'", "version", "0.5.4"),
    ("   █▄█▀ █     █     █     █  version 0.32.0", "version", "0.32.0"), ("vLLM API server version dev", "version", None),
    ("CUDA version 12.4", "version", None),
    ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", "worker_exit_code", -9),
    ("Worker VllmWorkerProcess pid 812 died, exit code: -15", "worker_exit_code", -15),
    ("Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", "worker_exit_code", None),
    ("the job died", "worker_exit_code", None),
    ("Config file not found at E=8,N=3584,device_name=NVIDIA_H100_80GB_HBM3.json", "gpu_name", "NVIDIA H100 80GB HBM3"),
    ("Using configuration from E=8,device_name=NVIDIA_A100-SXM4-80GB,dtype=fp8_w8a8.json", "gpu_name", "NVIDIA A100-SXM4-80GB"),
    ("GPU name: NVIDIA A100-SXM4-80GB", "gpu_name", "NVIDIA A100-SXM4-80GB"), ("Using device: cuda", "gpu_name", None),
    (DUMP, "scheduler", {"num_running_reqs": 12.0, "num_waiting_reqs": 3.0, "step_counter": 0.0, "kv_cache_usage": 0.42}),
    ("SchedulerStats(num_running_reqs=1.2.3, num_waiting_reqs=.)", "scheduler", {}),
])  # fmt: skip
def test_a_fact_is_read_where_it_is_stated(line: str, fact: str, value: object) -> None:
    """Banners, exit codes, cards and the scheduler's last figures, in old and new words; what is none of them is unknown."""
    assert getattr(facts(pasted(line)), fact) == value


@given(scrambled(START, DUMP))
def test_any_log_is_survived(log: Log) -> None:
    """Whatever the lines, facts are found or absent."""
    found = facts(log)
    assert found.version is None or found.version[0].isdigit()


ADVICE = Advice("--max-model-len", "8192", "fits", "leaves 2 GiB", Code.STARTUP_CONTEXT_TOO_LONG)
PLAN = PlanFigures(15 * GIB, 50 * GIB, GIB, 80 * GIB, 72 * GIB, 128_256, (ADVICE,))
SIZED = Measured(total_bytes=79 * GIB)


def _case(**known: object) -> FailureCase:
    return case_of(Code.RUNTIME_FORWARD, **known)  # type: ignore[arg-type]


@each(("known", "field", "value"), [
    # The share of the card: as asked for, as the log says, or the release's default; nonsense is unknown.
    *(({"version": version}, "utilization", share) for version, share in
      [("0.9.1", 0.9), ("0.19.1", 0.9), ("0.20.0", 0.92), ("0.32.0", 0.92), ("nonsense", None), (None, None)]),
    *(({"flags": {"gpu_memory_utilization": given}, "measured": Measured(utilization=0.5)}, "utilization", share)
      for given, share in [("0.85", 0.85), ("nan", None), ("nonsense", None), ("7", None)]),
    ({"measured": Measured(utilization=0.5)}, "utilization", 0.5),
    *(({"flags": {"max_num_seqs": value}}, "max_num_seqs", number) for value, number in
      [("64", 64), ("0x40", None), ("²", None), ("-1", None), ("", None), ("9" * 40, None), ("1e9", None)]),
    # The card's size: torch's message first, then the log, then the plan.
    ({}, "total", None), ({"plan": PLAN}, "total", 80 * GIB), ({"plan": PLAN, "measured": SIZED}, "total", 79 * GIB),
    ({"plan": PLAN, "measured": SIZED, "oom": OomFigures(total=78 * GIB)}, "total", 78 * GIB),
    ({"measured": Measured(max_num_seqs=256), "flags": {"max_num_seqs": "64"}}, "max_num_seqs", 64),
    ({"measured": Measured(max_num_batched_tokens=8192)}, "max_num_batched_tokens", 8192),
    ({"measured": Measured(tensor_parallel=4)}, "parallel", 4), ({}, "parallel", 1),
    # Never less than nothing, and unknown where the message does not say.
    *(({"oom": OomFigures(tried, 80 * GIB, free)}, "missing", missing) for tried, free, missing in
      [(2 * GIB, GIB, GIB), (GIB, 2 * GIB, 0), (None, GIB, None), (GIB, None, None)]),
])  # fmt: skip
def test_the_figures_around_a_failure(known: dict[str, object], field: str, value: object) -> None:
    """From whoever states them first; what nobody states is unknown."""
    assert getattr(_case(**known), field) == value


FITS = 10 * GIB - GIB - GIB // 4


@each(("known", "flag", "value", "do"), [
    ({"flags": {"kv_cache_memory_bytes": str(10 * GIB)}}, "--kv-cache-memory-bytes", str(FITS), f"{FITS}, not {10 * GIB}"),
    ({"measured": Measured(total_bytes=80 * GIB), "version": "0.25.1"}, "--gpu-memory-utilization", "0.90", "0.90"),
    ({}, "--gpu-memory-utilization", None, "by 0.02 to 0.05"),
])  # fmt: skip
def test_a_cache_set_by_hand_is_lowered_by_hand(known: dict[str, object], flag: str, value: str | None, do: str) -> None:
    """`--kv-cache-memory-bytes` overrules the utilisation, so only it helps."""
    room = more_room(_case(**known), GIB)
    assert (room.flag, room.value) == (flag, value)
    assert room.do.endswith(do)


CAPTURES = Path(__file__).parents[2] / "captures" / "vllm-0.25.1-h200-failures"


@each(("name", "first", "offered", "not_offered"), [
    ("lora.log", "--max-lora-rank", "--max-lora-rank", "--max-loras"),  # it has the only slot already
    ("multimodal.log", "leave out --skip-mm-profiling and --kv-cache-memory-bytes", "--mm-processor", "--limit-mm-per-prompt"),
])  # fmt: skip
def test_recorded_servers_are_not_offered_what_they_have(name: str, first: str, offered: str, not_offered: str) -> None:
    """vLLM prints only what differs from its defaults; what kept it from leaving room comes first."""
    cures = [one.do for one in diagnose([read_log(str(CAPTURES / name))]).findings[0].remedy]
    assert cures[0].startswith(first)
    assert any(cure.startswith(offered) for cure in cures)
    assert not any(cure.startswith(not_offered) for cure in cures)


LIMIT = "limit_mm_per_prompt"


@each(("flag", "value", "flags", "is_offered"), [
    ("--max-loras", "1", {"max_loras": "4"}, True), ("--max-loras", "1", {"max_loras": "1"}, False),
    ("--max-loras", "1", {"enable_lora": "True"}, False), ("--max-loras", "1", {}, True),
    ("--max-loras", "1", {"max_model_len": "2048"}, True), ("--limit-mm-per-prompt", None, {}, True),
    ("--limit-mm-per-prompt", None, {LIMIT: "{'image': 4}"}, True),
    ("--limit-mm-per-prompt", None, {LIMIT: "{'image': 1, 'video': 0}"}, False),
    ("--limit-mm-per-prompt", None, {LIMIT: "{'image': {'count': 1, 'width': 512}}"}, True),
    ("--limit-mm-per-prompt", None, {LIMIT: "{'video': 1}"}, True),
    ("--limit-mm-per-prompt", None, {LIMIT: '{"image":0,"audio":0}'}, False),
    ("--limit-mm-per-prompt", None, {LIMIT: "{}"}, True),
    ("--max-num-seqs", "32", {"max_num_seqs": "16"}, False), ("--max-num-seqs", "32", {"max_num_seqs": "64"}, True),
])  # fmt: skip
def test_what_it_has_already_is_not_offered(flag: str, value: str | None, flags: dict[str, str], is_offered: bool) -> None:
    """A cure stays unless the server was started that way; where its flags are not known, it stays."""
    remedy = Remedy("do", "why", flag, value)
    found = Finding(Code.RUNTIME_LORA, Severity.CRITICAL, 0.9, "title", "because", (), (remedy,), ())
    assert (fitting(found, facts_with(flags=flags)).remedy == (remedy,)) is is_offered
