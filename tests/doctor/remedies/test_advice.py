"""Every code's words and cures: the value is computed from this server's own figures, and what does not help is named."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.diagnose import build_finding
from plimsoll.doctor.rules.facts import FailureCase, PlanFigures
from plimsoll.doctor.rules.out_of_memory import OomFigures, parse_oom
from plimsoll.doctor.rules.timeline import TracebackFrame
from plimsoll.findings import Code, Finding, Severity
from plimsoll.plan.findings import Advice
from plimsoll.units import GIB, MIB
from plimsoll.vllm.failure_texts import TEXTS, FailureText
from plimsoll.vllm.flags import flags_of, history_of
from plimsoll.vllm.log_lines import Measured
from plimsoll.vllm.versions import newest
from tests.doctor.case_maker import case_of
from tests.doctor.pasted_text import printed
from tests.each import each

GONE_BUT_REAL = {"--swap-space"}  # an offer for the first engine only
NOT_FREE, TOO_LONG, ESTIMATE, TOO_LONG_V0, PROFILED = printed("NOT_FREE", "TOO_LONG", "ESTIMATE", "TOO_LONG_V0", "PROFILED")
HOSTILE = [
    "(1.2.3/0 GiB) on startup (9.9.9, .. GiB)",
    "(5/0 GiB) on startup is less than desired GPU memory utilization (0.9, 4 GiB)",
    "(99999999/1 GiB) on startup is less than (0.9, 1 GiB)",
    "(0.00 GiB KV cache is needed, available KV cache memory (0 GiB) max seq len (000000000)",
    "estimated maximum model length is 0",
    "max_num_seqs (0) exceeds available Mamba cache blocks (0)",
    "Initial free memory: ..., current free memory: ...",
    "with 0 dummy requests error: \x1b[31m\x00 --api-key sk-hush",
    "%s {0} {x} None nan inf",
]
OOM = OomFigures(2 * GIB, 79 * GIB, 512 * MIB, 0, 70 * GIB, GIB, 3 * GIB, 76 * GIB, ((9, 2 * GIB),))
MODEST = OomFigures(2 * GIB, 80 * GIB, GIB, 0, 60 * GIB, None, 0, 62 * GIB)
MORE_CARDS = Advice("--tensor-parallel-size", "4", "spread the weights", "20 GiB a GPU", Code.STARTUP_WEIGHTS_DO_NOT_FIT)
PLAN = PlanFigures(15 * GIB, 50 * GIB, GIB, 80 * GIB, 72 * GIB, 128_256, (MORE_CARDS,))


def finding(case: FailureCase) -> Finding:
    """The finding with no evidence: it is not what these tests are about."""
    return build_finding(case, [])


def offers(found: Finding) -> dict[str, str | None]:
    """Flag to value, of the offers that have one first."""
    return {one.flag: one.value for one in reversed(found.remedy) if one.flag}


def _checked(found: Finding) -> Finding:
    """Words fit to print, and flags that exist."""
    said = [found.title, found.because, *found.not_a_remedy]
    said += [words for one in found.remedy for words in (one.do, one.why)]
    for words in said:
        assert words.strip() == words
        assert words.isprintable(), repr(words)
        assert not re.search(r"%[sd]|\bNone\b|\bnan\b|\{\}|  ", words), words
    for one in found.remedy:
        if one.flag is not None:
            assert one.flag in flags_of(newest()) or (one.flag in GONE_BUT_REAL and history_of(one.flag)), one.flag
            assert one.value is None or one.value in one.do
    return found


@each("code", Code)
def test_every_code_has_words_when_nothing_is_known(code: Code) -> None:
    """Facts may all be missing: there is a finding still, and it blames no memory where memory is not the trouble."""
    found = _checked(finding(case_of(code)))
    assert found.code is code
    assert found.severity is Severity.CRITICAL
    if code.startswith("other.") or code is Code.STARTUP_BAD_FLAG:
        assert any("memory setting" in words for words in found.not_a_remedy)
    if code.is_memory:
        assert not any("not a memory failure" in words for words in found.not_a_remedy)


@each("code", Code)
@each("oom", [OOM, MODEST, OomFigures(), OomFigures(0, 0, 0, 0, 0, 0, 0, 0)])
@each("version", ["0.6.3", "0.32.0"])
def test_every_code_has_words_with_all_figures(code: Code, oom: OomFigures, version: str) -> None:
    """Whatever figures are known, the words hold together."""
    measured = Measured(total_bytes=79 * GIB, kv_bytes=-GIB, weights_bytes=15 * GIB, graphs_estimated_bytes=GIB,
                        max_num_seqs=1024, max_num_batched_tokens=8192)  # fmt: skip
    flags = {"enable_lora": "True", "tensor_parallel_size": "2", "kv_cache_memory_bytes": str(20 * GIB)}
    frames = (
        TracebackFrame("vllm/v1/worker/gpu_model_runner.py", "_get_prompt_logprobs_dict"),
        TracebackFrame("a/vision.py", "pin_memory"),
    )
    _checked(finding(case_of(code, oom=oom, version=version, measured=measured, flags=flags, plan=PLAN, frames=frames,
                             step="profile", scheduler={"num_running_reqs": 12.0})))  # fmt: skip


@each("code", Code)
@each("line", HOSTILE)
def test_no_line_breaks_the_words(code: Code, line: str) -> None:
    """Numbers that are none, zeros and control characters neither raise nor get through."""
    found = finding(case_of(code, line=line, frames=(TracebackFrame("a/\x1b[0m.py", "f\x00"),)))
    assert "sk-hush" not in found.because
    assert found.because.isprintable()


@given(code=st.sampled_from(Code), line=st.text(max_size=120), name=st.sampled_from([None, *(text.name for text in TEXTS)]),
       flag=st.text(max_size=12), oom=st.one_of(st.none(), st.text(max_size=60).map(parse_oom)))  # fmt: skip
def test_anything_gives_a_finding(code: Code, line: str, name: str | None, flag: str, oom: OomFigures | None) -> None:
    """Any text, any flags, any figures."""
    flags = dict.fromkeys(("gpu_memory_utilization", "max_num_seqs", "kv_cache_memory_bytes", "tensor_parallel_size"), flag)
    assert finding(case_of(code, line=line, text=name, flags=flags, oom=oom, version=flag)).title


@each("text", [text for text in TEXTS if text.code is not None], ids=lambda text: text.name)
def test_every_text_that_names_a_cause_leads_to_words(text: FailureText) -> None:
    """No text of the table is explained as something it is not."""
    assert text.code is not None
    found = _checked(finding(case_of(text.code, text=text.name)))
    assert found.remedy
    assert text.code is Code.OTHER_ENGINE_ERROR or found.title != "the engine failed with an error of its own"


KV, SHARE, LENGTH = "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--max-model-len"
SEQS, TOKENS, CARDS = "--max-num-seqs", "--max-num-batched-tokens", "--tensor-parallel-size"
BY_HAND = {"kv_cache_memory_bytes": str(70 * GIB)}
PEAKS = round(0.03 * 80 * GIB)
IN_ONE = OomFigures(70 * GIB, 80 * GIB, 60 * GIB, 0, 16 * GIB, None, 0, 17 * GIB)
BY_LAYER = OomFigures(2 * GIB, 80 * GIB, GIB, 0, 76 * GIB, None, 0, 78 * GIB)
NEIGHBOUR = OomFigures(GIB, 79 * GIB, 100 * MIB, 0, 30 * GIB, None, 0, 31 * GIB, ((1875, 41 * GIB),))
MAMBA = "max_num_seqs (256) exceeds available Mamba cache blocks (97). Each decode sequence requires one Mamba cache block"
ON_CPU = (
    "Available memory on node 0 (12.10/31.30 GiB) on startup is less than desired CPU memory utilization (0.92, 28.80 GiB)."
)
REFUSED = "vllm serve: error: unrecognized arguments: --swap-spaces 4 --api-key sk-hush"
IMAGES = (TracebackFrame("vllm/model_executor/models/qwen2_5_vl.py", "_process_image_input"),)
LOGPROBS = (TracebackFrame("vllm/v1/worker/gpu_model_runner.py", "_get_prompt_logprobs_dict"),)
GRAPHS = Measured(kv_bytes=870 * MIB, graphs_estimated_bytes=round(4.8 * GIB))


def _no_blocks(weights: int, kv: int, share: str = "0.9") -> dict[str, object]:
    measured = Measured(total_bytes=80 * GIB, weights_bytes=weights, kv_bytes=kv)
    return {"measured": measured, "flags": {"gpu_memory_utilization": share}}


@each(("promise", "code", "known", "offered", "words"), [
    ("the share that was free, rounded down", Code.STARTUP_FREE_MEMORY_CHECK, {"line": NOT_FREE}, {SHARE: "0.76"},
     ["14.90 GiB are missing", "18.86 GiB were held by others"]),
    *(("figures that contradict each other are not subtracted", Code.STARTUP_FREE_MEMORY_CHECK,
       {"line": NOT_FREE.replace("79.19", total)}, {SHARE: ...}, ["contradict each other"]) for total in ("23.50", "60.00")),
    ("a neighbour is named with what it holds", Code.STARTUP_FREE_MEMORY_CHECK, {"oom": NEIGHBOUR, "step": "weights"}, {},
     ["process 1875 with 41.0 GiB", "31.0 GiB when it failed while loading weights"]),
    ("also while serving", Code.RUNTIME_NEIGHBOUR, {"oom": NEIGHBOUR}, {}, ["process 1875 with 41.0 GiB"]),
    *(("the longest context that fits", Code.STARTUP_CONTEXT_TOO_LONG, {"line": line}, {LENGTH: fits}, []) for line, fits in [
        (f"{TOO_LONG} {ESTIMATE}", "77824"), (TOO_LONG, str(131072 * 95 // 160 // 16 * 16)), (TOO_LONG_V0, "12336"),
        ("cut", None)]),
    ("one GiB short of a share of 0.5 on a card of 80", Code.STARTUP_NO_CACHE_BLOCKS, _no_blocks(30 * GIB, -GIB, "0.5"),
     {SHARE: "0.53"}, []),
    *(("no more of the card where it is not there", Code.STARTUP_NO_CACHE_BLOCKS, _no_blocks(weights, -10 * GIB),
      {SHARE: ...}, [])
      for weights in (75 * GIB, 60 * GIB)),
    ("states of Mamba layers bound the requests", Code.STARTUP_NO_CACHE_BLOCKS, {"line": MAMBA, "text": "mamba-blocks"},
     {SEQS: "97"}, []),
    *(("a cache set by hand is the flag to lower", code, {"oom": MODEST, "flags": {"kv_cache_memory_bytes": str(50 * GIB)},
       "version": "0.25.1"}, {SHARE: ...}, []) for code in
      (Code.STARTUP_KV_ALLOCATION, Code.STARTUP_GRAPH_CAPTURE, Code.STARTUP_SAMPLER_WARMUP, Code.RUNTIME_FORWARD)),
    ("a cache in one piece: what was free, less the peaks", Code.STARTUP_KV_ALLOCATION, {"oom": IN_ONE, "flags": BY_HAND},
     {KV: str(60 * GIB - PEAKS), SHARE: ...}, []),
    ("layer by layer: what the first ones took counts too", Code.STARTUP_KV_ALLOCATION,
     {"oom": BY_LAYER, "flags": BY_HAND, "measured": Measured(weights_bytes=16 * GIB)},
     {KV: str(61 * GIB - PEAKS), SHARE: ...}, []),
    *(("the sampler's warm-up wants fewer requests", Code.STARTUP_SAMPLER_WARMUP, {"line": line, "plan": PLAN}, {SEQS: seqs},
      words)
      for line, seqs, words in [
          ("when warming up sampler with 1024 dummy requests", "256", ["1,024 x 128,256 words x 4 bytes = 501 MiB"]),
          ("with 256 dummy requests", "64", []), ("with 16 dummy requests", "8", []), ("cut", "256", [])]),
    ("weights want as many cards as the plan says", Code.STARTUP_WEIGHTS_DO_NOT_FIT, {"plan": PLAN, "oom": OOM}, {CARDS: "4"},
     []),
    ("without a plan twice may not do", Code.STARTUP_WEIGHTS_DO_NOT_FIT, {"flags": {"tensor_parallel_size": "4"}},
     {CARDS: None}, []),
    *(("the trial run wants smaller batches, not below 512", Code.STARTUP_PROFILE_RUN,
       {"measured": Measured(max_num_batched_tokens=tokens), "oom": MODEST}, {TOKENS: smaller}, []) for tokens, smaller in
      [(8192, "2048"), (16384, "4096"), (1024, "512"), (512, ...), (None, "2048")]),
    ("in the encoder it wants fewer images", Code.STARTUP_PROFILE_RUN, {"frames": IMAGES, "oom": MODEST},
     {"--limit-mm-per-prompt": None}, ["largest images"]),
    *(("a flag that came with 0.11.1", Code.STARTUP_GRAPH_CAPTURE, {"oom": MODEST, "version": version},
       {"--max-cudagraph-capture-size": value}, []) for version, value in [("0.25.1", "64"), (None, "64"), ("0.10.2", ...)]),
    ("one that came with 0.10.2", Code.STARTUP_PROFILE_NEIGHBOUR, {"line": PROFILED, "version": "0.8.5"}, {KV: ...},
     ["70.10 GiB free before, 75.20 after"]),
    *(("a missing module is named with what brings it", Code.OTHER_INSTALLATION,
       {"line": f"ModuleNotFoundError: No module named '{module}'", "frames": ()}, {do: "do"}, [f"has no module {module}"])
      for module, do in [("plimsoll", "plimsoll inside wheel"), ("plimsoll.inside", "plimsoll inside wheel"),
                         ("flashinfer", "what brings flashinfer"), ("vllm.v1", "the same vLLM")]),
    ("graphs larger than the cache are made smaller first", Code.STARTUP_GRAPH_CAPTURE,
     {"version": "0.19.1", "measured": GRAPHS},
     {"--max-cudagraph-capture-size": "do", "--gpu-memory-utilization, beside": "last"}, []),
    ("else the estimate is set aside", Code.STARTUP_GRAPH_CAPTURE,
     {"version": "0.19.1", "measured": GRAPHS._replace(kv_bytes=40 * GIB)},
     {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1": "do"}, []),
    ("which later releases do themselves", Code.STARTUP_GRAPH_CAPTURE,
     {"version": "0.25.1", "measured": GRAPHS._replace(kv_bytes=40 * GIB)}, {"a lower --gpu-memory-utilization": "do"}, []),
    ("a step while serving lowers the share by what was missing", Code.RUNTIME_FORWARD,
     {"oom": MODEST, "version": "0.25.1", "scheduler": {"num_running_reqs": 12.0}}, {SHARE: "0.90", TOKENS: "4096"},
     ["12 requests were running"]),
    ("prompt_logprobs are named where the traceback shows them", Code.RUNTIME_LOGITS,
     {"frames": LOGPROBS, "oom": MODEST, "plan": PLAN}, {}, ["prompt_logprobs", "4,186 rows of 128,256 words"]),
    *(("the host's memory is told apart", Code.HOST_OUT_OF_MEMORY, {"text": text}, {}, [words]) for text, words in [
        ("shm-segment", "shared memory of the container"), ("swap-too-large", "swap space"),
        ("ray-oom", "Ray's memory monitor"),
        ("host-alloc", "page-locked"), ("kernel-oom", "machine's own memory")]),
    ("on the CPU the share is of the host's memory", Code.HOST_OUT_OF_MEMORY, {"text": "cpu-memory-check", "line": ON_CPU},
     {SHARE: "0.38"}, ["12.10 of 31.30 GiB were free"]),
    ("a refused command is quoted without its secrets", Code.STARTUP_BAD_FLAG, {"line": REFUSED}, {},
     ["unrecognized arguments: --swap-spaces"]),
    ("an unknown exception is named with its place", Code.OTHER_ENGINE_ERROR,
     {"frames": (TracebackFrame("/x/vllm/v1/engine/core.py", "step"),), "kind": "builtins.KeyError"}, {},
     ["KeyError was raised in step (core.py), and nothing in the log points to memory"]),
    *(("a text may know better than its code", next(one.code for one in TEXTS if one.name == text), {"text": text}, {}, [words])
      for text, words in [("too-few-gpus", "more ranks"), ("must-be-divisible", "does not divide"),
          ("shared-memory-limit", "on-chip")]),
], ids=lambda row: row[0])  # fmt: skip
def test_values_are_computed_from_this_servers_figures(
    promise: str, code: Code, known: dict[str, object], offered: dict[str, object], words: list[str]
) -> None:
    """The value of each flag (... where it must not be offered), what the first or last remedy is, and what the reason says."""
    found = _checked(finding(case_of(code, **known)))  # type: ignore[arg-type]
    for flag, value in offered.items():
        if value in ("do", "last"):
            assert flag in found.remedy[0 if value == "do" else -1].do, promise
        else:
            assert offers(found).get(flag, ...) == value, promise
    assert all(word in found.because for word in words), found.because
    assert "sk-hush" not in found.because
    assert not any(
        useless.startswith(flag)
        for useless in found.not_a_remedy
        for flag, value in offered.items()
        if value not in (..., None)
    )


def test_auto_is_offered_where_vllm_has_it() -> None:
    """`--max-model-len auto` came with 0.14."""
    versions = ("0.13.0", "0.14.0", None)
    found = [finding(case_of(Code.STARTUP_CONTEXT_TOO_LONG, line=TOO_LONG, version=version)) for version in versions]
    assert [any(one.value == "auto" for one in each.remedy) for each in found] == [False, True, False]


@each(("code", "known", "useless"), [
    (Code.STARTUP_NO_CACHE_BLOCKS, _no_blocks(75 * GIB, -10 * GIB), "raising --gpu-memory-utilization"),
    (Code.STARTUP_NO_CACHE_BLOCKS, _no_blocks(60 * GIB, -10 * GIB), "raising --gpu-memory-utilization"),
    (Code.STARTUP_WEIGHTS_DO_NOT_FIT, {}, "--gpu-memory-utilization"),
    (Code.HOST_OUT_OF_MEMORY, {}, "--gpu-memory-utilization and every"),
])  # fmt: skip
def test_what_vllm_or_habit_advises_in_vain_is_named(code: Code, known: dict[str, object], useless: str) -> None:
    """Weights that fill the card, or more than all of it: what vLLM advises would not help."""
    assert any(words.startswith(useless) for words in finding(case_of(code, **known)).not_a_remedy)  # type: ignore[arg-type]
