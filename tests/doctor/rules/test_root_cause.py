"""What ended a server: the rules that tell a cause from its noise, each on the words vLLM really prints."""

from __future__ import annotations

import pytest

from plimsoll.doctor.rules.root_cause import LogVerdict, judge
from plimsoll.doctor.rules.timeline import read_timeline
from plimsoll.findings import Code
from tests.doctor.log_maker import (
    ARGS,
    ENGINE_DEAD,
    LOADED,
    LOADING,
    MEASURED,
    NOT_STARTED,
    OOM,
    REQUEST,
    STARTED,
    VERSION,
    log,
    traceback,
)

STOP = "(APIServer pid=1) INFO 11-15 09:10:00 [launcher.py:1] API server: shutdown triggered"
STEP = "v1/worker/gpu_model_runner.py:execute_model"
FATAL = "(EngineCore pid=2) ERROR 11-15 09:10:00 [core.py:1] EngineCore encountered a fatal error."
FAILED_START = [VERSION, ARGS, LOADING, *traceback("v1/worker/gpu_worker.py:load_model"), NOT_STARTED]


def verdict(*parts: str | list[str]) -> LogVerdict:
    """What is said of these lines."""
    return judge(read_timeline(log(*parts)))


def code(*parts: str | list[str]) -> Code | None:
    root = verdict(*parts).root
    return root.code if root is not None else None


def test_an_out_of_memory_error_while_serving_is_the_cause() -> None:
    """The engine's own traceback is the cause; the deaths that follow are not."""
    found = verdict(STARTED, FATAL, traceback(STEP), ENGINE_DEAD)
    assert found.root is not None
    assert found.root.code is Code.RUNTIME_FORWARD
    assert found.memory_failure is True
    assert len(found.deaths) >= 2
    assert not found.stopped


def test_an_out_of_memory_error_is_the_cause_unless_it_came_after_the_stop() -> None:
    """What breaks on the way out broke on the way out; who stops a broken server did not break it."""
    for stop in (STOP, "(EngineCore pid=2) INFO 11-15 09:10:00 [core.py:1] Received SIGTERM, shutting down", "^C"):
        found = verdict(STARTED, stop, traceback(STEP), ENGINE_DEAD)
        assert found.stopped
        assert found.root is not None
        assert found.root.code is Code.OTHER_STOPPED_BY_OPERATOR
        assert found.memory_failure is False
        assert any("OutOfMemory" in hit.text.needle or "out of memory" in hit.text.needle for hit in found.noise)
    found = verdict(STARTED, FATAL, traceback(STEP), ENGINE_DEAD, STOP)
    assert found.root is not None
    assert found.root.code is Code.RUNTIME_FORWARD
    assert found.memory_failure is True


def test_an_error_while_a_record_was_written_is_not_the_cause() -> None:
    """An out-of-memory error inside logging is noise: it is listed as such and blamed for nothing."""
    lines = [
        "--- Logging error ---",
        *traceback("logging/__init__.py:emit", who=""),
        "Call stack:",
        "Message: 'x'",
        "Arguments: ()",
    ]
    found = verdict(STARTED, lines, [REQUEST] * 5)
    assert found.root is None
    assert found.memory_failure is False
    assert found.noise


def test_the_warning_of_destroyed_events_is_noise() -> None:
    """torch says "out of memory (function destroyEvent)" whenever a process ends in disorder."""
    warning = "[W1115 09:10:00.1 CUDAGuardImpl.h:119] Warning: CUDA warning: out of memory (function destroyEvent)"
    found = verdict(STARTED, warning, [REQUEST] * 5)
    assert found.root is None
    assert found.memory_failure is False
    illegal = traceback(STEP, error="torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert code(STARTED, FATAL, illegal, warning, ENGINE_DEAD) is Code.OTHER_ILLEGAL_ACCESS


def test_torchs_assertion_about_nvml_is_an_out_of_memory_error() -> None:
    """Where NVML cannot be asked, torch fails to say that memory ran out."""
    assertion = 'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131'
    found = verdict(STARTED, FATAL, traceback(STEP, error=assertion), ENGINE_DEAD)
    assert found.root is not None
    assert found.root.code is Code.RUNTIME_FORWARD
    assert found.memory_failure is True


def test_a_script_that_stops_the_server_is_no_killer() -> None:
    """The shell's "Killed" alone may be the kernel or anybody, and cannot be told."""
    found = verdict(STARTED, "Stopping vLLM server (PID 77)...", "run.sh: line 12: 77 Killed    vllm serve m")
    assert found.stopped
    assert found.memory_failure is False
    found = verdict(STARTED, "run.sh: line 12: 77 Killed    vllm serve m")
    assert not found.stopped
    assert found.root is None
    assert found.deaths
    assert found.memory_failure is None


def test_a_worker_told_to_stop_by_its_engine_was_not_stopped_by_a_person() -> None:
    """Workers hear SIGTERM when their engine fails: the engine's failure is the cause."""
    told = "(Worker_TP0 pid=10) INFO 11-15 09:10:00 [multiproc_executor.py:1] Received SIGTERM, parent process exited"
    found = verdict(STARTED, told, FATAL, traceback(STEP), ENGINE_DEAD)
    assert not found.stopped
    assert found.root is not None
    assert found.root.code is Code.RUNTIME_FORWARD


def test_a_notice_of_waiting_is_no_cause_beside_one() -> None:
    """ "No available shared memory broadcast block" is said while workers wait for the one that broke."""
    said = "No available shared memory broadcast block found in 60 seconds."
    waits = f"(EngineCore pid=2) INFO 11-15 09:09:00 [shm_broadcast.py:1] {said}"
    assert code(STARTED, waits, waits, FATAL, traceback(STEP), ENGINE_DEAD) is Code.RUNTIME_FORWARD
    assert code(STARTED, waits, [REQUEST] * 5) is None
    assert code(STARTED, waits, waits) in (Code.ENGINE_WEDGED, None)


def test_the_second_line_of_a_validation_error_decides() -> None:
    """ "1 validation error for ModelConfig" says nothing; the line below does."""
    first = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
    second = "  Value error, Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: a, b"
    found = verdict(VERSION, ARGS, traceback("config/model.py:create_engine_config", error=first, who=""), second)
    assert found.root is not None
    assert found.root.code is Code.OTHER_BAD_MODEL
    assert found.memory_failure is False


def test_nccl_that_names_memory_in_its_last_line_is_memory() -> None:
    """ "unhandled cuda error" says nothing; "Last error: Cuda failure 2 'out of memory'" does."""
    first = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error"
    last = ["(Worker_TP0 pid=10) ncclUnhandledCudaError: Call to CUDA function failed.", "(Worker_TP0 pid=10) Last error:"]
    reason = "(Worker_TP0 pid=10) Cuda failure 2 'out of memory'"
    lines = traceback("distributed/device_communicators/pynccl.py:all_reduce", error=first, who="(Worker_TP0 pid=10) ")
    found = verdict(STARTED, lines, last, reason, FATAL, ENGINE_DEAD)
    assert found.root is not None
    assert found.root.code is Code.RUNTIME_COLLECTIVES
    assert found.memory_failure is True
    without = verdict(STARTED, lines, last, "(Worker_TP0 pid=10) Cuda failure 700", FATAL, ENGINE_DEAD)
    assert without.root is not None
    assert without.root.code is Code.OTHER_COLLECTIVES
    assert without.memory_failure is False


def test_the_kernels_line_inside_a_servers_log_is_the_cause() -> None:
    """A console log may hold both: the out-of-memory killer's own words settle it."""
    kernel = "[ 8123.4] Out of memory: Killed process 1854 (VLLM::EngineCor) total-vm:900kB, anon-rss:800kB, file-rss:0kB"
    found = verdict(STARTED, kernel, ENGINE_DEAD)
    assert found.root is not None
    assert found.root.code is Code.HOST_OUT_OF_MEMORY
    assert found.memory_failure is True


def test_a_log_without_its_head_or_its_end_cannot_be_told() -> None:
    """Nothing wrong in the middle proves nothing; a start or a traceback that breaks off leaves open of what."""
    assert verdict([REQUEST] * 5).memory_failure is None
    assert verdict(STARTED, [REQUEST] * 5).memory_failure is False
    found = verdict(VERSION, ARGS, LOADING)
    assert found.root is None
    assert found.memory_failure is None
    assert verdict(STARTED, traceback(STEP)[:-1]).memory_failure is None


def test_a_request_that_was_refused_ended_nothing() -> None:
    """A client's mistake is printed with a traceback, and the server serves on."""
    error = "ValueError: This model's maximum context length is 2048 tokens. However, you requested 4096 tokens."
    lines = traceback("entrypoints/openai/serving_completion.py:create_completion", error=error, who="(APIServer pid=1) ")
    found = verdict(STARTED, lines, [REQUEST] * 5)
    assert found.root is None
    assert found.memory_failure is False


def test_a_traceback_that_a_user_pasted_is_nobodys_failure() -> None:
    """People ask models about their errors: a prompt that is logged with its line ends escaped ended nothing."""
    pasted = "\\n".join(traceback(STEP, who=""))
    request = (
        f"INFO 11-15 09:05:00 [logger.py:39] Received request cmpl-1: prompt: 'Why? {pasted}', params: SamplingParams(n=1)"
    )
    found = verdict(STARTED, request, [REQUEST] * 5)
    assert found.root is None
    assert found.memory_failure is False


def test_the_last_life_that_failed_is_judged_and_failures_are_counted() -> None:
    """Also where a restart has cured it."""
    found = verdict(FAILED_START, FAILED_START, FAILED_START)
    assert found.runs_failed == 3
    assert found.root is not None
    assert found.root.code is Code.STARTUP_WEIGHTS_DO_NOT_FIT
    assert found.root.at > 2 * len(FAILED_START)
    found = verdict(FAILED_START, STARTED)
    assert found.root is not None
    assert found.root.code is Code.STARTUP_WEIGHTS_DO_NOT_FIT
    assert found.runs_failed == 1


@pytest.mark.parametrize(
    ("frames", "reached", "expected"),
    [
        (("model_executor/model_loader/base_loader.py:load_model",), [LOADING], Code.STARTUP_WEIGHTS_DO_NOT_FIT),
        (("v1/worker/gpu_model_runner.py:profile_run",), [LOADING, LOADED], Code.STARTUP_PROFILE_RUN),
        (("v1/worker/gpu_model_runner.py:capture_model",), [LOADING, LOADED, MEASURED], Code.STARTUP_GRAPH_CAPTURE),
        (("v1/worker/gpu_model_runner.py:_allocate_kv_cache_tensors",), [LOADED, MEASURED], Code.STARTUP_KV_ALLOCATION),
        (("v1/worker/gpu_model_runner.py:_dummy_sampler_run",), [LOADED, MEASURED], Code.STARTUP_SAMPLER_WARMUP),
        (
            ("v1/worker/gpu_worker.py:compile_or_warm_up_model", "v1/sample/ops/topk_topp_sampler.py:apply_top_k_top_p"),
            [LOADED, MEASURED],
            Code.STARTUP_SAMPLER_WARMUP,
        ),
    ],
)
def test_the_step_of_a_failed_start_is_named(frames: tuple[str, ...], reached: list[str], expected: Code) -> None:
    """By the function the traceback passed through."""
    assert code(VERSION, ARGS, reached, traceback(*frames), NOT_STARTED) is expected


def test_without_frames_the_progress_names_the_step() -> None:
    """The error's line alone, after the weights were loaded: the trial run, and less sure."""
    found = verdict(VERSION, ARGS, LOADING, LOADED, f"(EngineCore pid=2) {OOM}", NOT_STARTED)
    assert found.root is not None
    assert found.root.code is Code.STARTUP_PROFILE_RUN
    assert found.root.confidence < 0.8


def test_memory_of_another_process_is_its_fault() -> None:
    """The message lists another process with most of the card."""
    error = OOM.replace("Including non-PyTorch", "Process 99 has 40.00 GiB memory in use. Including non-PyTorch").replace(
        "77.85 GiB memory in use", "37.85 GiB memory in use"
    )
    assert code(STARTED, FATAL, traceback(STEP, error=error), ENGINE_DEAD) is Code.RUNTIME_NEIGHBOUR
    at_start = traceback("model_executor/model_loader/base_loader.py:load_model", error=error)
    assert code(VERSION, ARGS, LOADING, at_start, NOT_STARTED) is Code.STARTUP_FREE_MEMORY_CHECK


def test_an_exception_without_words_for_it_that_smells_of_memory_is_left_open() -> None:
    """Neither blamed nor cleared."""
    error = "RuntimeError: could not reserve the arena: allocation of 1048576 units was refused"
    found = verdict(STARTED, FATAL, traceback(STEP, error=error), ENGINE_DEAD)
    assert found.memory_failure is None
    other = traceback(STEP, error="RuntimeError: the moon is in the wrong place")
    assert verdict(STARTED, FATAL, other, ENGINE_DEAD).memory_failure is False


GATED = (
    "OSError: You are trying to access a gated repo.\nMake sure to have access to it at the hub. 403 Client Error. "
    "Access to model meta-llama/Llama-3.1-8B is restricted"
)


@pytest.mark.parametrize(
    ("place", "error", "expected"),
    [
        ("transformers_utils/config.py:get_config", GATED.partition("\n")[0], Code.OTHER_GATED_MODEL),
        (
            STEP,
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            Code.OTHER_UNSUPPORTED_GPU,
        ),
        ("compilation/backends.py:compile", "torch._inductor.exc.InductorError: CalledProcessError", Code.OTHER_COMPILER),
        (
            "v1/worker/gpu_worker.py:init_device",
            "ImportError: libcudart.so.12: cannot open shared object file",
            Code.OTHER_INSTALLATION,
        ),
        ("entrypoints/openai/api_server.py:run_server", "OSError: [Errno 98] Address already in use", Code.OTHER_PORT_IN_USE),
        (
            "v1/attention/x.py:forward",
            "RuntimeError: XAttention only supports Hopper GPUs or newer.",
            Code.OTHER_UNSUPPORTED_GPU,
        ),
        ("x.py:f", "RuntimeError: this device does not support querying its free memory", Code.OTHER_ENGINE_ERROR),
        (STEP, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", Code.OTHER_HARDWARE),
        (
            "model_executor/model_loader/weight_utils.py:download",
            "OSError: [Errno 28] No space left on device",
            Code.OTHER_DISK,
        ),
    ],
)
def test_what_is_no_memory_failure_is_named(place: str, error: str, expected: Code) -> None:
    """Known by its words, and memory is not blamed."""
    found = verdict(VERSION, ARGS, LOADING, traceback(place, error=error), NOT_STARTED)
    assert found.root is not None
    assert found.root.code is expected
    assert found.memory_failure is False


def test_a_device_of_which_nobody_knows_the_words_runs_out_of_memory_too() -> None:
    """The message says so, and the calls name the step."""
    error = "RuntimeError: bank manager: Out of Memory: not enough space to allocate 268435456 B across 12 banks"
    found = verdict(VERSION, ARGS, LOADED, traceback("v1/worker/x.py:_allocate_kv_cache", error=error), NOT_STARTED)
    assert found.root is not None
    assert (found.root.code, found.memory_failure) == (Code.STARTUP_KV_ALLOCATION, True)


def test_what_is_gathered_belongs_to_the_one_who_gathers_it() -> None:
    """Logits that a collective gathers are logits."""
    calls = ("model_executor/layers/logits_processor.py:_gather_logits", "distributed/device_communicators/base.py:all_gather")
    assert code(STARTED, FATAL, traceback(STEP, *calls), ENGINE_DEAD) is Code.RUNTIME_LOGITS


def test_what_ray_passes_on_is_no_cause_and_its_advice_on_memory_is_one() -> None:
    """A dead actor says nothing of why; where only the end of Ray's message is left, its threshold names the node's memory."""
    died = "(raylet) A worker died or was killed while executing a task by an unexpected system error."
    raised = ["Traceback (most recent call last):", '  File "/x/main.py", line 1, in main', "    ray.get(task)"]
    raised.append("ray.exceptions.RayTaskError(ActorDiedError): ray::main_task() (pid=1)")
    found = verdict(VERSION, ARGS, LOADING, died, raised)
    assert (found.root, found.memory_failure) == (None, None)
    advice = "To adjust the kill threshold, set the environment variable `RAY_memory_usage_threshold` when starting Ray."
    assert code(VERSION, ARGS, LOADING, advice) is Code.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("v1/worker/gpu_worker.py:wake_up", Code.RUNTIME_WAKE_UP),
        ("v1/worker/gpu_model_runner.py:_execute_mm_encoder", Code.RUNTIME_MULTIMODAL),
        ("v1/sample/sampler.py:compute_logprobs", Code.RUNTIME_LOGITS),
        ("lora/worker_manager.py:add_adapter", Code.RUNTIME_LORA),
        ("distributed/device_communicators/custom_all_reduce.py:all_reduce", Code.RUNTIME_COLLECTIVES),
        ("model_executor/models/llama.py:forward", Code.RUNTIME_FORWARD),
    ],
)
def test_the_step_of_a_serving_engine_is_named(place: str, expected: Code) -> None:
    """By the innermost call that says what ran."""
    found = verdict(STARTED, FATAL, traceback("v1/engine/core.py:run_engine_core", STEP, place), ENGINE_DEAD)
    assert found.root is not None
    assert found.root.code is expected
    assert found.memory_failure is True
