"""Every code's words and cures: the value is computed from this server's own figures, and what does not help is named."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.diagnose import build_finding
from plimsoll.doctor.rules.facts import FailureCase, PlanFigures
from plimsoll.doctor.rules.root_cause import OomFigures, parse_oom
from plimsoll.doctor.rules.timeline import TracebackFrame
from plimsoll.findings import Code, Evidence, Finding, Severity
from plimsoll.plan.findings import Advice
from plimsoll.units import GIB, MIB
from plimsoll.vllm.failure_texts import TEXTS, FailureText
from plimsoll.vllm.flags import flags_of, history_of
from plimsoll.vllm.log_lines import Measured
from plimsoll.vllm.versions import newest
from tests.doctor.case_maker import case_of
from tests.each import each

GONE_BUT_REAL = {"--swap-space"}  # an offer for the first engine only
NOT_FREE = (
    "Free memory on device cuda:1 (60.33/79.19 GiB) on startup is less than desired GPU memory utilization (0.95, 75.23 GiB)."
)
TOO_LONG = (
    "To serve at least one request with the model's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than "
    "the available KV cache memory (9.50 GiB). "
)
ESTIMATE = "Based on the available memory, the estimated maximum model length is 77824. Try increasing `gpu_memory_utilization`"
TOO_LONG_V0 = (
    "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (12336). "
    "Try increasing `gpu_memory_utilization`"
)
PROFILED = (
    "AssertionError: Error in memory profiling. Initial free memory 70.10 GiB, current free memory 75.20 GiB. This happens "
    "when other processes sharing the same container release GPU memory while vLLM is profiling during initialization."
)
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


def test_evidence_and_confidence_are_passed_on() -> None:
    """The lines that prove it stay with the finding."""
    proof = Evidence("a.log", "line", 3)
    found = build_finding(case_of(Code.OTHER_DISK), [proof], Severity.WARNING)
    assert (found.evidence, found.confidence, found.severity) == ((proof,), 0.9, Severity.WARNING)


def test_the_free_memory_check_offers_the_share_that_was_free() -> None:
    """60.33 of 79.19 GiB are 0.76, rounded down."""
    found = _checked(finding(case_of(Code.STARTUP_FREE_MEMORY_CHECK, line=NOT_FREE)))
    assert offers(found)["--gpu-memory-utilization"] == "0.76"
    assert "14.90 GiB are missing" in found.because
    assert "18.86 GiB were held by others" in found.because


@pytest.mark.parametrize("total", ["23.50", "60.00"])
def test_figures_that_contradict_each_other_are_not_subtracted(total: str) -> None:
    """A card smaller than what was free or wanted: no size is computed from it, and none is negative."""
    found = finding(case_of(Code.STARTUP_FREE_MEMORY_CHECK, line=NOT_FREE.replace("79.19", total)))
    assert "contradict each other" in found.because
    assert "-" not in found.because
    assert "--gpu-memory-utilization" not in offers(found)


def test_a_neighbour_is_named_with_what_it_holds() -> None:
    """Process, size, and what was left to this one."""
    oom = OomFigures(GIB, 79 * GIB, 100 * MIB, 0, 30 * GIB, None, 0, 31 * GIB, ((1875, 41 * GIB),))
    start = finding(case_of(Code.STARTUP_FREE_MEMORY_CHECK, oom=oom, step="weights"))
    assert "process 1875 with 41.0 GiB" in start.because
    assert "31.0 GiB when it failed while loading weights" in start.because
    serving = finding(case_of(Code.RUNTIME_NEIGHBOUR, oom=oom))
    assert "process 1875 with 41.0 GiB" in serving.because


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        (TOO_LONG + ESTIMATE, "77824"),
        (TOO_LONG, str(131072 * 95 // 160 // 16 * 16)),
        (TOO_LONG_V0, "12336"),
        ("cut short", None),
    ],
)
def test_a_context_too_long_gets_the_longest_that_fits(line: str, fits: str | None) -> None:
    """vLLM's own estimate, else in proportion and in whole blocks of 16."""
    found = _checked(finding(case_of(Code.STARTUP_CONTEXT_TOO_LONG, line=line)))
    assert found.remedy[0].flag == "--max-model-len"
    assert found.remedy[0].value == fits


@pytest.mark.parametrize(("version", "offered"), [("0.13.0", False), ("0.14.0", True), (None, False)])
def test_auto_is_offered_where_vllm_has_it(version: str | None, offered: bool) -> None:
    """`--max-model-len auto` came with 0.14."""
    found = finding(case_of(Code.STARTUP_CONTEXT_TOO_LONG, line=TOO_LONG, version=version))
    assert any(one.value == "auto" for one in found.remedy) is offered


def _no_blocks(weights: int, kv: int, share: str = "0.9") -> Finding:
    measured = Measured(total_bytes=80 * GIB, weights_bytes=weights, kv_bytes=kv)
    flags = {"gpu_memory_utilization": share}
    return _checked(finding(case_of(Code.STARTUP_NO_CACHE_BLOCKS, measured=measured, flags=flags)))


def test_more_of_the_card_is_offered_where_it_is_there() -> None:
    """One GiB short of a share of 0.5 on a card of 80: 0.53 gives it a GiB of cache."""
    assert offers(_no_blocks(30 * GIB, -GIB, "0.5"))["--gpu-memory-utilization"] == "0.53"


@pytest.mark.parametrize(("weights", "kv"), [(75 * GIB, -10 * GIB), (60 * GIB, -10 * GIB)])
def test_more_of_the_card_is_refused_where_it_is_not(weights: int, kv: int) -> None:
    """Weights that fill the card, or more than all of it: what vLLM advises would not help."""
    found = _no_blocks(weights, kv)
    assert "--gpu-memory-utilization" not in offers(found)
    assert any(words.startswith("raising --gpu-memory-utilization") for words in found.not_a_remedy)


def test_states_of_mamba_layers_bound_the_requests() -> None:
    """As many requests as the cache has blocks, and the length has no part in it."""
    line = "max_num_seqs (256) exceeds available Mamba cache blocks (97). Each decode sequence requires one Mamba cache block"
    found = _checked(finding(case_of(Code.STARTUP_NO_CACHE_BLOCKS, line=line, text="mamba-blocks")))
    assert offers(found)["--max-num-seqs"] == "97"


@pytest.mark.parametrize(
    "code", [Code.STARTUP_KV_ALLOCATION, Code.STARTUP_GRAPH_CAPTURE, Code.STARTUP_SAMPLER_WARMUP, Code.RUNTIME_FORWARD]
)
def test_a_cache_set_by_hand_is_the_flag_to_lower(code: Code) -> None:
    """The utilisation has no say there, so it is not offered."""
    found = _checked(finding(case_of(code, oom=MODEST, flags={"kv_cache_memory_bytes": str(50 * GIB)}, version="0.25.1")))
    assert "--kv-cache-memory-bytes" in offers(found)
    assert "--gpu-memory-utilization" not in offers(found)


def test_the_cache_that_would_have_fitted() -> None:
    """In one piece: what was free, less 3 % of the card for peaks. Layer by layer: what the first layers took counts too."""
    flags = {"kv_cache_memory_bytes": str(70 * GIB)}
    peaks = round(0.03 * 80 * GIB)
    whole = OomFigures(70 * GIB, 80 * GIB, 60 * GIB, 0, 16 * GIB, None, 0, 17 * GIB)
    assert offers(finding(case_of(Code.STARTUP_KV_ALLOCATION, oom=whole, flags=flags))) == {
        "--kv-cache-memory-bytes": str(60 * GIB - peaks)
    }
    layer = OomFigures(2 * GIB, 80 * GIB, GIB, 0, 76 * GIB, None, 0, 78 * GIB)
    found = finding(case_of(Code.STARTUP_KV_ALLOCATION, oom=layer, flags=flags, measured=Measured(weights_bytes=16 * GIB)))
    assert offers(found) == {"--kv-cache-memory-bytes": str(61 * GIB - peaks)}


@pytest.mark.parametrize(
    ("line", "seqs"),
    [
        ("when warming up sampler with 1024 dummy requests", "256"),
        ("with 256 dummy requests", "64"),
        ("with 16 dummy requests", "8"),
        ("cut", "256"),
    ],
)
def test_the_samplers_warm_up_wants_fewer_requests(line: str, seqs: str) -> None:
    """256 where there were more, a quarter where there were not."""
    found = _checked(finding(case_of(Code.STARTUP_SAMPLER_WARMUP, line=line, plan=PLAN)))
    assert found.remedy[0].flag == "--max-num-seqs"
    assert found.remedy[0].value == seqs
    if "1024" in line:
        assert "1,024 x 128,256 words x 4 bytes = 501 MiB" in found.because


def test_weights_that_do_not_fit_want_more_cards() -> None:
    """The number the plan computed; none where there is no plan, since twice may not do; the utilisation never."""
    without = finding(case_of(Code.STARTUP_WEIGHTS_DO_NOT_FIT, flags={"tensor_parallel_size": "4"}))
    assert [one.value for one in without.remedy if one.flag == "--tensor-parallel-size"] == [None]
    found = _checked(finding(case_of(Code.STARTUP_WEIGHTS_DO_NOT_FIT, plan=PLAN, oom=OOM)))
    assert offers(found)["--tensor-parallel-size"] == "4"
    assert found.remedy[0].do.startswith("PYTORCH_CUDA_ALLOC_CONF")
    assert any(words.startswith("--gpu-memory-utilization") for words in found.not_a_remedy)


@pytest.mark.parametrize(("tokens", "smaller"), [(8192, "2048"), (16384, "4096"), (1024, "512"), (512, None), (None, "2048")])
def test_the_trial_run_wants_smaller_batches(tokens: int | None, smaller: str | None) -> None:
    """A quarter, not below 512, and no offer that is none."""
    found = _checked(finding(case_of(Code.STARTUP_PROFILE_RUN, measured=Measured(max_num_batched_tokens=tokens), oom=MODEST)))
    assert offers(found).get("--max-num-batched-tokens") == smaller


def test_a_trial_run_in_the_encoder_wants_fewer_images() -> None:
    """The frames say that images were prepared."""
    frames = (TracebackFrame("vllm/model_executor/models/qwen2_5_vl.py", "_process_image_input"),)
    found = finding(case_of(Code.STARTUP_PROFILE_RUN, frames=frames, oom=MODEST))
    assert found.remedy[0].flag == "--limit-mm-per-prompt"


@pytest.mark.parametrize(("version", "flag"), [("0.25.1", True), (None, True), ("0.10.2", False)])
def test_flags_a_release_does_not_have_are_not_offered(version: str | None, flag: bool) -> None:
    """`--max-cudagraph-capture-size` came with 0.11.1."""
    found = finding(case_of(Code.STARTUP_GRAPH_CAPTURE, oom=MODEST, version=version))
    assert ("--max-cudagraph-capture-size" in offers(found)) is flag
    old = finding(case_of(Code.STARTUP_PROFILE_NEIGHBOUR, line=PROFILED, version="0.8.5"))
    assert "--kv-cache-memory-bytes" not in offers(old)
    assert "70.10 GiB free before, 75.20 after" in old.because


@pytest.mark.parametrize(
    ("module", "do"),
    [
        ("plimsoll", "plimsoll inside wheel"),
        ("plimsoll.inside", "plimsoll inside wheel"),
        ("flashinfer", "what brings flashinfer"),
    ],
)
def test_a_missing_module_is_named_with_what_brings_it(module: str, do: str) -> None:
    """Not with drivers: our own probe and gate are the likeliest, in an image to which nobody brought them."""
    line = f"ModuleNotFoundError: No module named '{module}'"
    found = finding(case_of(Code.OTHER_INSTALLATION, line=line, frames=()))
    assert found.because == f"the Python in which vLLM runs has no module {module}"
    assert do in found.remedy[0].do


def test_graphs_larger_than_the_cache_are_made_smaller_first() -> None:
    """870 MiB of cache cannot make room for graphs of 4.8 GiB: a lower share comes last, with the reason."""
    measured = Measured(kv_bytes=870 * MIB, graphs_estimated_bytes=round(4.8 * GIB))
    small = finding(case_of(Code.STARTUP_GRAPH_CAPTURE, version="0.19.1", measured=measured))
    assert small.remedy[0].flag == "--max-cudagraph-capture-size"
    assert small.remedy[-1].flag == "--gpu-memory-utilization"
    assert "its 870 MiB and no more, and they were estimated at 4.8 GiB" in small.remedy[-1].why
    large = finding(case_of(Code.STARTUP_GRAPH_CAPTURE, version="0.19.1", measured=measured._replace(kv_bytes=40 * GIB)))
    assert [one.do for one in large.remedy][:2] == [
        "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1", "a lower --gpu-memory-utilization, by 0.02 to 0.05",
    ]  # fmt: skip
    later = finding(case_of(Code.STARTUP_GRAPH_CAPTURE, version="0.25.1", measured=measured._replace(kv_bytes=40 * GIB)))
    assert later.remedy[0].flag == "--gpu-memory-utilization"


def test_a_step_while_serving_lowers_the_share_by_what_was_missing() -> None:
    """1 GiB missing and a quarter as margin on 80 GiB: 0.92 becomes 0.90; requests at that moment are told."""
    case = case_of(Code.RUNTIME_FORWARD, oom=MODEST, version="0.25.1", scheduler={"num_running_reqs": 12.0})
    found = _checked(finding(case))
    assert offers(found) == {"--gpu-memory-utilization": "0.90", "--max-num-batched-tokens": "4096"}
    assert "12 requests were running" in found.because


def test_prompt_logprobs_are_named_where_the_traceback_shows_them() -> None:
    """Rows of the vocabulary for every token of the prompt."""
    frames = (TracebackFrame("vllm/v1/worker/gpu_model_runner.py", "_get_prompt_logprobs_dict"),)
    found = finding(case_of(Code.RUNTIME_LOGITS, frames=frames, oom=MODEST, plan=PLAN))
    assert "prompt_logprobs" in found.because
    assert "4,186 rows of 128,256 words" in found.because


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shm-segment", "shared memory of the container"),
        ("swap-too-large", "swap space"),
        ("ray-oom", "Ray's memory monitor"),
        ("host-alloc", "page-locked"),
        ("kernel-oom", "machine's own memory"),
    ],
)
def test_the_hosts_memory_is_told_apart(text: str, words: str) -> None:
    """Shared memory, swap space, Ray and pinned memory each have their own cure."""
    found = _checked(finding(case_of(Code.HOST_OUT_OF_MEMORY, text=text)))
    assert words in found.because
    assert any("GPU" in one for one in found.not_a_remedy)


def test_on_the_cpu_the_share_is_of_the_hosts_memory() -> None:
    """12.10 of 31.30 GiB free are 0.38: there the flag with the GPU's name is the cure, and nothing says it is not."""
    line = (
        "Available memory on node 0 (12.10/31.30 GiB) on startup is less than desired CPU memory utilization (0.92, 28.80 GiB)."
    )
    found = _checked(finding(case_of(Code.HOST_OUT_OF_MEMORY, text="cpu-memory-check", line=line)))
    assert offers(found) == {"--gpu-memory-utilization": "0.38"}
    assert not any("--gpu-memory-utilization" in words for words in found.not_a_remedy)


def test_a_refused_command_is_quoted_without_its_secrets() -> None:
    """What the parser refused is said, but never the key that followed it."""
    line = "vllm serve: error: unrecognized arguments: --swap-spaces 4 --api-key sk-hush"
    found = _checked(finding(case_of(Code.STARTUP_BAD_FLAG, line=line)))
    assert "unrecognized arguments: --swap-spaces" in found.because
    assert "sk-hush" not in found.because


def test_an_unknown_exception_is_named_with_its_place() -> None:
    """Class, function and file."""
    frames = (TracebackFrame("/x/vllm/v1/engine/core.py", "step"),)
    found = finding(case_of(Code.OTHER_ENGINE_ERROR, frames=frames, kind="builtins.KeyError"))
    assert found.because == "KeyError was raised in step (core.py), and nothing in the log points to memory"


@pytest.mark.parametrize(
    ("text", "words"),
    [("too-few-gpus", "more ranks"), ("must-be-divisible", "does not divide"), ("shared-memory-limit", "on-chip")],
)
def test_a_text_may_know_better_than_its_code(text: str, words: str) -> None:
    """Where the line itself tells more, the words do."""
    code = next(one.code for one in TEXTS if one.name == text)
    assert code is not None
    assert words in finding(case_of(code, text=text)).because
