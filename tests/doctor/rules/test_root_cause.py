"""What ended a server: the rules that tell a cause from its noise, each on the words vLLM and torch really print."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.out_of_memory import MOST_PROCESSES, OomFigures, parse_oom
from plimsoll.doctor.rules.root_cause import LogVerdict, find_symptoms, is_consequence, judge
from plimsoll.doctor.rules.timeline import read_timeline
from plimsoll.findings import Code
from plimsoll.units import GIB, KIB, MIB
from tests.doctor.log_maker import (
    ARGS,
    ENGINE_DEAD,
    FAILED_START,
    FATAL,
    ILLEGAL,
    KILLER,
    LOADED,
    LOADING,
    MEASURED,
    MOON,
    NOT_STARTED,
    OOM,
    REQUEST,
    STARTED,
    STEP,
    STOP,
    VERSION,
    log,
    traceback,
)
from tests.doctor.pasted_text import printed
from tests.each import each

Lines = str | list[str]
WORKER = "(Worker_TP0 pid=10) "
LOGGED = [
    "--- Logging error ---",
    *traceback("logging/__init__.py:emit", who=""),
    "Call stack:",
    "Message: 'x'",
    "Arguments: ()",
]
EVENTS = "[W1115 09:10:00.1 CUDAGuardImpl.h:119] Warning: CUDA warning: out of memory (function destroyEvent)"
NVML = 'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131'
SHELL_KILLED = "run.sh: line 12: 77 Killed    vllm serve m"
WAITS = "(EngineCore pid=2) INFO 11-15 09:09:00 [shm.py:1] No available shared memory broadcast block found in 60 s."
INVALID = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig"
ARCHITECTURE = "  Value error, Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: a, b"
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error"
NCCL_LINES = [
    *traceback("distributed/device_communicators/pynccl.py:all_reduce", error=NCCL, who=WORKER),
    f"{WORKER}ncclUnhandledCudaError: Call to CUDA function failed.", f"{WORKER}Last error:",
]  # fmt: skip
TOO_LONG = "ValueError: This model's maximum context length is 2048 tokens. However, you requested 4096 tokens."
PASTED = "Received request cmpl-1: prompt: 'Why? {}', params: SamplingParams(n=1)".format("\\n".join(traceback(STEP, who="")))
SHARED = OOM.replace("Including non-PyTorch", "Process 99 has 40.00 GiB memory in use. Including non-PyTorch").replace(
    "77.85", "37.85"
)
ARENA = "RuntimeError: could not reserve the arena: allocation of 1048576 units was refused"
BANKS = "RuntimeError: bank manager: Out of Memory: not enough space to allocate 268435456 B across 12 banks"
GATHERED = ("model_executor/layers/logits_processor.py:_gather_logits", "distributed/device_communicators/base.py:all_gather")
RAY_DIED = [
    "(raylet) A worker died or was killed while executing a task by an unexpected system error.",
    "Traceback (most recent call last):", '  File "/x/main.py", line 1, in main', "    ray.get(task)",
    "ray.exceptions.RayTaskError(ActorDiedError): ray::main_task() (pid=1)",
]  # fmt: skip
RAY_ADVICE = "To adjust the kill threshold, set the environment variable `RAY_memory_usage_threshold` when starting Ray."


def crashed(*frames: str, error: str = OOM) -> list[Lines]:
    """A server that served until this traceback."""
    return [STARTED, FATAL, traceback(*(frames or (STEP,)), error=error), ENGINE_DEAD]


def refused(place: str, error: str = OOM, reached: Lines = LOADING) -> list[Lines]:
    """A server that never came up."""
    return [VERSION, ARGS, reached, traceback(*place.split(), error=error), NOT_STARTED]


def verdict(*parts: Lines) -> LogVerdict:
    return judge(read_timeline(log(*parts)))


@each(("promise", "lines", "code", "memory"), [
    ("the engine's own traceback is the cause", crashed(), Code.RUNTIME_FORWARD, True),
    ("who stops a broken server did not break it", [*crashed(), STOP], Code.RUNTIME_FORWARD, True),
    ("what breaks on the way out broke on the way out", [STARTED, STOP, traceback(STEP), ENGINE_DEAD],
     Code.OTHER_STOPPED_BY_OPERATOR, False),
    ("also where the engine alone tells of the stop",
     [STARTED, "(EngineCore pid=2) INFO 11-15 09:10:00 [core.py:1] Received SIGTERM, shutting down", traceback(STEP),
      ENGINE_DEAD],
     Code.OTHER_STOPPED_BY_OPERATOR, False),
    ("or the terminal", [STARTED, "^C", traceback(STEP), ENGINE_DEAD], Code.OTHER_STOPPED_BY_OPERATOR, False),
    ("an error while a record was written is noise", [STARTED, LOGGED, [REQUEST] * 5], None, False),
    ("torch warns of destroyed events whenever a process ends in disorder", [STARTED, EVENTS, [REQUEST] * 5], None, False),
    ("beside a cause too", [STARTED, FATAL, traceback(STEP, error=ILLEGAL), EVENTS, ENGINE_DEAD], Code.OTHER_ILLEGAL_ACCESS,
     False),
    ("where NVML cannot be asked, torch fails to say that memory ran out", crashed(error=NVML), Code.RUNTIME_FORWARD, True),
    ("a script that stops the server is no killer", [STARTED, "Stopping vLLM server (PID 77)...", SHELL_KILLED],
     Code.OTHER_STOPPED_BY_OPERATOR, False),
    ("the shell's Killed alone may be the kernel or anybody", [STARTED, SHELL_KILLED], None, None),
    ("workers hear SIGTERM when their engine fails",
     [STARTED, f"{WORKER}INFO 11-15 09:10:00 [mp.py:1] Received SIGTERM, parent process exited", *crashed()[1:]],
     Code.RUNTIME_FORWARD, True),
    ("workers wait for the one that broke", [STARTED, WAITS, WAITS, *crashed()[1:]], Code.RUNTIME_FORWARD, True),
    ("a wait that was overcome is nothing", [STARTED, WAITS, [REQUEST] * 5], None, False),
    ("the line below a validation error decides",
     [VERSION, ARGS, traceback("config/model.py:create_engine_config", error=INVALID, who=""), ARCHITECTURE],
     Code.OTHER_BAD_MODEL, False),
    ("NCCL may name memory in its last line", [STARTED, NCCL_LINES, f"{WORKER}Cuda failure 2 'out of memory'", FATAL,
      ENGINE_DEAD],
     Code.RUNTIME_COLLECTIVES, True),
    ("or another reason", [STARTED, NCCL_LINES, f"{WORKER}Cuda failure 700", FATAL, ENGINE_DEAD], Code.OTHER_COLLECTIVES,
     False),
    ("the kernel's words in a console log settle it", [STARTED, KILLER, ENGINE_DEAD], Code.HOST_OUT_OF_MEMORY, True),
    ("nothing wrong in the middle proves nothing", [[REQUEST] * 5], None, None),
    ("from the start on it does", [STARTED, [REQUEST] * 5], None, False),
    ("a start that breaks off leaves open of what", [VERSION, ARGS, LOADING], None, None),
    ("so does a traceback that breaks off", [STARTED, traceback(STEP)[:-1]], None, None),
    ("a client's mistake ended nothing",
     [STARTED, traceback("entrypoints/openai/serving_completion.py:create_completion", error=TOO_LONG,
       who="(APIServer pid=1) "),
      [REQUEST] * 5], None, False),
    ("a traceback that a user pasted is nobody's failure",
     [STARTED, f"INFO 11-15 09:05:00 [logger.py:39] {PASTED}", [REQUEST] * 5], None, False),
    ("without frames the progress names the step",
     [VERSION, ARGS, LOADING, LOADED, f"(EngineCore pid=2) {OOM}", NOT_STARTED], Code.STARTUP_PROFILE_RUN, True),
    ("memory of another process is its fault", crashed(error=SHARED), Code.RUNTIME_NEIGHBOUR, True),
    ("at the start too", refused("model_executor/model_loader/base_loader.py:load_model", SHARED),
     Code.STARTUP_FREE_MEMORY_CHECK, True),
    ("an unknown exception that smells of memory is left open", crashed(error=ARENA), Code.OTHER_ENGINE_ERROR, None),
    ("one that does not is not memory's", crashed(error=MOON), Code.OTHER_ENGINE_ERROR, False),
    ("a device of which nobody knows the words runs out too", refused("v1/worker/x.py:_allocate_kv_cache", BANKS, LOADED),
     Code.STARTUP_KV_ALLOCATION, True),
    ("what is gathered belongs to the one who gathers it", crashed(STEP, *GATHERED), Code.RUNTIME_LOGITS, True),
    ("a dead actor says nothing of why", [VERSION, ARGS, LOADING, RAY_DIED], None, None),
    ("Ray's advice on its threshold names the node's memory", [VERSION, ARGS, LOADING, RAY_ADVICE], Code.HOST_OUT_OF_MEMORY,
     True),
    *((f"serving: {place}", crashed("v1/engine/core.py:run_engine_core", STEP, place), code, True) for place, code in [
        ("v1/worker/gpu_worker.py:wake_up", Code.RUNTIME_WAKE_UP),
        ("v1/worker/gpu_model_runner.py:_execute_mm_encoder", Code.RUNTIME_MULTIMODAL),
        ("v1/sample/sampler.py:compute_logprobs", Code.RUNTIME_LOGITS),
        ("lora/worker_manager.py:add_adapter", Code.RUNTIME_LORA),
        ("distributed/device_communicators/custom_all_reduce.py:all_reduce", Code.RUNTIME_COLLECTIVES),
        ("model_executor/models/llama.py:forward", Code.RUNTIME_FORWARD),
    ]),
    *((f"starting: {place}", refused(place, reached=reached), code, True) for place, reached, code in [
        ("model_executor/model_loader/base_loader.py:load_model", [LOADING], Code.STARTUP_WEIGHTS_DO_NOT_FIT),
        ("v1/worker/gpu_model_runner.py:profile_run", [LOADING, LOADED], Code.STARTUP_PROFILE_RUN),
        ("v1/worker/gpu_model_runner.py:capture_model", [LOADING, LOADED, MEASURED], Code.STARTUP_GRAPH_CAPTURE),
        ("v1/worker/gpu_model_runner.py:_allocate_kv_cache_tensors", [LOADED, MEASURED], Code.STARTUP_KV_ALLOCATION),
        ("v1/worker/gpu_model_runner.py:_dummy_sampler_run", [LOADED, MEASURED], Code.STARTUP_SAMPLER_WARMUP),
        ("v1/worker/gpu_worker.py:compile_or_warm_up_model v1/sample/ops/topk_topp_sampler.py:apply_top_k_top_p",
         [LOADED, MEASURED], Code.STARTUP_SAMPLER_WARMUP),
    ]),
    *((f"not memory: {error}", refused(place, error), code, False) for place, error, code in [
        ("transformers_utils/config.py:get_config", "OSError: You are trying to access a gated repo.", Code.OTHER_GATED_MODEL),
        (STEP, "RuntimeError: CUDA error: no kernel image is available for execution on the device",
         Code.OTHER_UNSUPPORTED_GPU),
        ("compilation/backends.py:compile", "torch._inductor.exc.InductorError: CalledProcessError", Code.OTHER_COMPILER),
        ("v1/worker/gpu_worker.py:init_device", "ImportError: libcudart.so.12: cannot open shared object file",
         Code.OTHER_INSTALLATION),
        ("entrypoints/openai/api_server.py:run_server", "OSError: [Errno 98] Address already in use", Code.OTHER_PORT_IN_USE),
        ("v1/attention/x.py:forward", "RuntimeError: XAttention only supports Hopper GPUs or newer.",
         Code.OTHER_UNSUPPORTED_GPU),
        ("x.py:f", "RuntimeError: this device does not support querying its free memory", Code.OTHER_ENGINE_ERROR),
        (STEP, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", Code.OTHER_HARDWARE),
        ("model_executor/model_loader/weight_utils.py:download", "OSError: [Errno 28] No space left on device",
         Code.OTHER_DISK),
    ]),
], ids=lambda row: row[0])  # fmt: skip
def test_the_cause_of_a_log(promise: str, lines: list[Lines], code: Code | None, memory: bool | None) -> None:
    """One root cause or none, and whether memory is to blame: yes, no or not to be told."""
    found = verdict(*lines)
    assert (found.root.code if found.root is not None else None, found.memory_failure) == (code, memory), promise
    assert found.stopped is (code is Code.OTHER_STOPPED_BY_OPERATOR)


def test_what_came_after_a_stop_or_within_logging_is_listed_as_noise() -> None:
    """Whoever sees the words in the log learns that they mean nothing."""
    for lines in ([STARTED, STOP, traceback(STEP)], [STARTED, LOGGED, [REQUEST] * 5]):
        assert any("OutOfMemory" in hit.text.needle or "out of memory" in hit.text.needle for hit in verdict(*lines).noise)


def test_the_last_life_that_failed_is_judged_and_failures_are_counted() -> None:
    """Also where a restart has cured it."""
    thrice, cured = verdict(FAILED_START, FAILED_START, FAILED_START), verdict(FAILED_START, STARTED)
    assert (thrice.runs_failed, cured.runs_failed) == (3, 1)
    assert thrice.root is not None
    assert cured.root is not None
    assert thrice.root.at > 2 * len(FAILED_START)
    assert {thrice.root.code, cured.root.code} == {Code.STARTUP_WEIGHTS_DO_NOT_FIT}


def symptoms(*parts: Lines) -> list[tuple[Code, float]]:
    """What these lines complain of, in the order of the log."""
    timeline = read_timeline(log(*parts))
    found, _ = find_symptoms(timeline, timeline.hits, timeline.exceptions)
    assert [one.at for one in found] == sorted(one.at for one in found)
    return list(dict.fromkeys((one.code, one.confidence) for one in found))  # two texts may tell of one


ECHO = "RuntimeError: Worker failed with error 'the moon is in the wrong place', please check the stack trace above"
QUOTED = [
    *traceback(STEP, error=MOON)[:-1], '(EngineCore pid=2)     raise ValueError("No available memory for the cache blocks.")',
    f"(EngineCore pid=2) {MOON}",
]  # fmt: skip
METHOD = "(EngineCore pid=2) ERROR 11-15 09:00:04 [a.py:1] Error executing method 'determine_num_available_blocks'."
OF_A_REQUEST = traceback(
    "entrypoints/openai/serving_chat.py:create_chat_completion", error="TypeError: no", who="(APIServer pid=1) "
)
WARNED = [f"(EngineCore pid=2) WARNING 11-15 09:00:00 [a.py:1] {line}" for line in traceback(STEP, who="")]


@each(("promise", "lines", "expected"), [
    ("an echo of a worker's error counts only alone", [STARTED, traceback(STEP, error=ECHO)], [(Code.OTHER_ENGINE_ERROR, 0.5)]),
    ("not beside the worker's own words", [STARTED, traceback(STEP, who=WORKER), traceback(STEP, error=ECHO)],
     [(Code.RUNTIME_FORWARD, 0.9)]),
    ("an unknown exception in the engine is a complaint", [STARTED, traceback(STEP, error=MOON)],
     [(Code.OTHER_ENGINE_ERROR, 0.6)]),
    ("while loading it is the model's",
     [VERSION, LOADING, traceback("model_executor/model_loader/loader.py:load_weights",
       error="AssertionError: shape mismatch")],
     [(Code.OTHER_BAD_MODEL, 0.6)]),
    ("one request's own failure ends nothing", [STARTED, OF_A_REQUEST, [REQUEST] * 5], []),
    ("code that a traceback quotes is no complaint", [STARTED, QUOTED], [(Code.OTHER_ENGINE_ERROR, 0.6)]),
    ("vLLM names the method", [VERSION, ARGS, LOADING, LOADED, METHOD,
      f"(EngineCore pid=2) ERROR 11-15 09:00:04 [a.py:1] {OOM}"],
     [(Code.STARTUP_PROFILE_RUN, 0.95)]),
    ("the same error told twice names its step",
     [STARTED, f"(EngineCore pid=2) {OOM}", traceback("v1/sample/sampler.py:compute_logprobs", who=WORKER), ENGINE_DEAD],
     [(Code.RUNTIME_LOGITS, 0.8), (Code.RUNTIME_LOGITS, 0.9)]),
    ("a step of a server that never came up is the trial run's", [VERSION, ARGS, LOADING, LOADED, traceback(STEP), NOT_STARTED],
     [(Code.STARTUP_PROFILE_RUN, 0.75)]),
    ("pinned memory is the host's",
     [STARTED, traceback("worker/cache_engine.py:pin_memory", error="RuntimeError: CUDA error: out of memory")],
     [(Code.HOST_OUT_OF_MEMORY, 0.7)]),
    ("what a warning printed was overcome", [STARTED, WARNED, [REQUEST] * 5], []),
    ("the first is the first", [STARTED, traceback(STEP), traceback("a.py:run_busy_loop", error="KeyError: 'b'")],
     [(Code.RUNTIME_FORWARD, 0.9), (Code.OTHER_ENGINE_ERROR, 0.6)]),
    *((error, [STARTED, traceback(STEP, error=error)], []) for error in (
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "EOFError",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "BrokenPipeError: [Errno 32] Broken pipe", "RuntimeError: cannot schedule new futures after shutdown",
        "asyncio.exceptions.CancelledError",
    )),
], ids=lambda row: row[0])  # fmt: skip
def test_what_is_a_complaint_and_what_passes_one_on(
    promise: str, lines: list[Lines], expected: list[tuple[Code, float]]
) -> None:
    """Known texts, allocations that failed and at which step, exceptions nobody has words for; a consequence is none."""
    assert symptoms(*lines) == expected, promise
    raised = read_timeline(log(*lines)).exceptions
    assert expected or not raised or any(is_consequence(one) or one.warned or one.process.startswith("API") for one in raised)


NEWEST, IN_A_CONTAINER, CANNOT_TELL, HIP, TORCH_2_0, TORCH_2_1 = printed(
    "NEWEST", "IN_A_CONTAINER", "CANNOT_TELL", "HIP", "TORCH_2_0", "TORCH_2_1"
)


def _gib(number: float) -> int:
    return round(number * GIB)


ALL = OomFigures(64 * MIB, _gib(139.80), round(17.56 * MIB), 0, _gib(125.10), _gib(1.5), 457 * KIB, _gib(125.83),
                 ((1875, _gib(13.94)),))  # fmt: skip
CONTAINER = OomFigures(
    896 * MIB, _gib(79.19), round(552.5 * MIB), 1, _gib(75.90), None, _gib(1.20), None, ((4021, _gib(78.63)),)
)


@each(("message", "figures"), [
    (NEWEST, ALL), (NEWEST.replace(". ", ".\n   "), ALL), (NEWEST.replace(" ", "  "), ALL), (IN_A_CONTAINER, CONTAINER),
    (HIP, OomFigures(2 * GIB, _gib(63.98), _gib(1.10), 3, _gib(60.12), None, 512 * KIB)),
    (TORCH_2_0, OomFigures(4 * GIB, _gib(23.69), _gib(1.31), 0, 17 * GIB, None, 5 * GIB)),
    (TORCH_2_1, OomFigures(136 * MIB, _gib(23.69), round(18.62 * MIB), 0, _gib(23.10), None, round(10.11 * MIB), None,
                           ((77, _gib(23.60)),))),
    ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0", OomFigures(512)),
    ("CUDA out of memory. Tried to allocate 20.50 KiB", OomFigures(round(20.5 * KIB))),
    *((CANNOT_TELL.format(unknown), OomFigures(2 * GIB, _gib(23.99), 0, 0, 21 * GIB, None, GIB))
      for unknown in ("0 bytes", "17179869184.00 GiB")),  # NVML did not know
    *((bare, OomFigures()) for bare in ("CUDA error: out of memory", "CUDA driver error: out of memory", "", "ALLOC_FAILED")),
])  # fmt: skip
def test_every_wording_of_an_allocation_that_failed_is_read(message: str, figures: OomFigures) -> None:
    """Nothing torch states is lost, however old, broken over lines or cut; what is not said stays unknown."""
    assert parse_oom(message) == figures


@each(("oom", "own", "others", "blamed", "in_pieces"), [
    (OomFigures(), None, 0, False, False),
    (parse_oom(TORCH_2_0), 22 * GIB, 0, False, True),
    (parse_oom(HIP), _gib(60.12) + 512 * KIB, 0, False, False),
    (CONTAINER, _gib(78.63), 0, False, True),  # torch lists itself, by its number outside
    (parse_oom(CANNOT_TELL.format("0 bytes")), 22 * GIB, 0, False, False),
    *((OomFigures(GIB, 79 * GIB, 100 * MIB, 0, 79 * GIB - others - 100 * MIB - GIB, None, MIB, 79 * GIB - others - 100 * MIB,
       listed),
       79 * GIB - others - 100 * MIB, others, blamed, False) for listed, others, blamed in [
        (((9, 250 * MIB),), 250 * MIB, False), (((9, 41 * GIB),), 41 * GIB, True),
        (((9, 2 * GIB), (10, 2 * GIB)), 4 * GIB, True),
        (((9, 300 * MIB), (10, 300 * MIB), (11, 300 * MIB)), 900 * MIB, False),
        ((), 3 * GIB, False), ((), 30 * GIB, True),  # listed nowhere: of a process that torch cannot see
    ]),
    (OomFigures(GIB, 79 * GIB, 100 * MIB, 0, 70 * GIB, None, MIB, 77 * GIB - 100 * MIB), 77 * GIB - 100 * MIB, 0, False, False),
    (OomFigures(42 * GIB, 79 * GIB, 2 * GIB, 0, 70 * GIB, None, MIB, 74 * GIB, ((5, 4 * GIB),)), 74 * GIB, 4 * GIB, False,
     False),
])  # fmt: skip
def test_a_neighbour_matters_by_what_it_holds(
    oom: OomFigures, own: int | None, others: int, blamed: bool, in_pieces: bool
) -> None:
    """A desktop's 250 MiB, 2 GiB that the driver may hold, or little against what was missing are no reason; 41 GiB are."""
    assert (oom.own, oom.others, oom.has_neighbour, oom.is_fragmented) == (own, others, blamed, in_pieces)


_PIECES = st.lists(
    st.one_of(st.sampled_from([*NEWEST.split(". "), *TORCH_2_0.split(";"), *IN_A_CONTAINER.split(" ")]), st.text())
)


@given(_PIECES.map(" ".join))
def test_nothing_makes_it_raise_or_give_less_than_nothing(message: str) -> None:
    """Whatever the text, every figure is unknown or at least zero; endless processes are cut."""
    oom = parse_oom(message + "Process 1 has 1.00 GiB memory in use. " * 100)
    assert len(oom.processes) <= MOST_PROCESSES
    sizes = [oom.tried, oom.total, oom.free, oom.allocated, oom.private, oom.reserved_unallocated, oom.this_process, oom.own]
    assert all(size is None or size >= 0 for size in (*sizes, oom.others, *(size for _, size in oom.processes)))
    assert set(oom.neighbours) <= set(oom.processes)
