"""The words by which failures are known, against the sources of vLLM's releases and lines that were really printed."""

from __future__ import annotations

import re
import time

import pytest

from plimsoll.findings import Code
from plimsoll.vllm import versions
from plimsoll.vllm.failure_texts import (
    CONSEQUENCE_WORDS,
    CONSEQUENCES,
    LIFE,
    MEMORY,
    OTHER,
    STEP_FRAMES,
    TEXTS,
    FailureText,
    Role,
    seen_in,
)
from tests.each import each

NOT_FREE = (
    "ValueError: Free memory on device cuda:0 (60.33/79.19 GiB) on startup is less than desired GPU memory utilization "
    "(0.95, 75.23 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
TOO_LONG_V0 = (
    "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (12336). "
    "Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
BY_NAME = {text.name: text for text in TEXTS}
CALLED_OFF = (Role.DEATH, Role.NOISE, Role.OUT_OF_MEMORY)  # these name no cause of their own


def _says(text: FailureText, line: str) -> bool:
    return text.needle in line and (text.pattern is None or re.search(text.pattern, line) is not None)


@each("text", TEXTS, ids=lambda text: text.name)
def test_every_text_of_vllms_was_seen_in_a_wheel_and_no_other_claims_to_be(text: FailureText) -> None:
    """No text rests on one log: vLLM's own stand in the source of at least one release."""
    assert bool(text.seen_in()) == (text.speaker == "vllm"), text.of_source()
    assert text.fragment is None or text.speaker == "vllm"


def test_every_row_of_the_table_is_a_text_of_today() -> None:
    """A name means one text, in one list."""
    assert set(versions.rows("failure_texts")) == {text.name for text in TEXTS if text.speaker == "vllm"}
    assert len(BY_NAME) == len(TEXTS)
    assert (*MEMORY, *OTHER, *LIFE) == TEXTS


@each("text", TEXTS, ids=lambda text: text.name)
def test_what_names_a_cause_has_a_code_and_what_does_not_has_none(text: FailureText) -> None:
    """Death is never the reason, and an allocation that failed gets its code from the step."""
    assert (text.code is None) == (text.role in CALLED_OFF)
    if text in OTHER:
        assert text.code is not None
        assert not text.code.is_memory


@each("text", [text for text in TEXTS if text.pattern], ids=lambda text: text.name)
def test_patterns_stay_quick_on_hostile_lines(text: FailureText) -> None:
    """A line of repeated words takes no pattern longer than a blink."""
    started = time.perf_counter()
    for word in ("compute capability ", "nccl ", "at least ", "rank ", f"{text.needle} ", "A.", ": line 1: "):
        re.search(text.pattern or "", (word * 16_000)[:16_000])
    assert time.perf_counter() - started < 5


@each(
    ("name", "line"),
    [
        ("free-memory-check", NOT_FREE),
        ("no-cache-blocks", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."),
        ("kv-negative", "Available KV cache memory: -4.76 GiB"),
        ("context-too-long-v0", TOO_LONG_V0),
        ("sampler-warmup", "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests."),
        ("cumem-oom", "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"),
        ("torch-oom", "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 63.98 GiB"),
        ("torch-oom-class", "torch.cuda.OutOfMemoryError: CUDA out of memory."),
        ("mamba-blocks", "max_num_seqs (256) exceeds available Mamba cache blocks (97). Each decode sequence"),
        ("kernel-oom", "Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:1kB"),
        ("shm-segment", "Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888)"),
        ("shm-bus", "It is possible that dataloader's workers are out of shared memory. Bus error"),
        ("rank-out-of-bounds", "AssertionError: DP adjusted local rank 2 is out of bounds. "),
        ("config-undetected", "ValueError: Could not detect config format for no config file found. With config_format 'auto'"),
        ("capability", "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."),
        ("quantization-capability", "The quantization method fp8 is not supported for the current GPU."),
        ("cuda-error-other", "RuntimeError: CUDA error: initialization error"),
        ("sigterm", "INFO: received SIGTERM, shutting down"),
        ("shell-killed", "/opt/run.sh: line 12:    31 Killed                  vllm serve m"),
        ("worker-died-v0", "Worker VllmWorkerProcess pid 812 died, exit code: -15"),
    ],
)  # fmt: skip
def test_real_lines_are_known(name: str, line: str) -> None:
    """A line as it was printed is known by its text."""
    assert _says(BY_NAME[name], line)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kv-negative", "Available KV cache memory: 4.76 GiB"),
        ("no-gpu-blocks", "# GPU blocks: 01234, # CPU blocks: 512"),
        ("cuda-error-other", "RuntimeError: CUDA error: out of memory"),
        ("disk-full", "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'"),
        ("torch-oom-class", "except torch.cuda.OutOfMemoryError as e:"),
        ("kernel-oom", "Out of memory: Killed process 77 (postgres) total-vm:1kB"),
        ("shell-killed", "(the last one was Killed by hand)"),
        ("validation-error", "1 validation error for ChatCompletionRequest"),
        ("sigterm", "SIGTERM is what systemd will use"),
    ],
)
def test_lines_that_only_look_like_it_are_not(name: str, line: str) -> None:
    """The same words in a harmless line do not count."""
    assert not _says(BY_NAME[name], line)


def test_consequences_are_class_names_and_words() -> None:
    """What passes a failure on is known by class or by message, and every code may still be given by a text."""
    assert all(name.isidentifier() for name in CONSEQUENCES)
    assert all(len(words) > 6 for words in CONSEQUENCE_WORDS)
    assert {text.code for text in TEXTS} >= {Code.OTHER_GATED_MODEL, Code.STARTUP_BAD_FLAG, Code.ENGINE_WEDGED}


FUNCTIONS = sorted({function for _, functions in STEP_FRAMES for function in functions})


@each("function", FUNCTIONS)
def test_every_function_is_defined_in_a_release(function: str) -> None:
    """No step is known by a function that vLLM never had."""
    assert seen_in(function)


def test_every_step_is_known_in_the_newest_release() -> None:
    """No function means two steps, and no row belongs to one that is gone."""
    assert set(versions.rows("frames")) == set(FUNCTIONS)
    assert seen_in("no_such_function") == ()
    newest = list(versions.wheels())[-1]
    for name, functions in STEP_FRAMES:
        assert any(str(seen_in(function)[-1].last) == newest for function in functions), name
    assert len(FUNCTIONS) == sum(len(functions) for _, functions in STEP_FRAMES)
