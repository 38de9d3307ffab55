"""What plimsoll.inside relies on in vLLM: the files by era, the symbols, their arguments, and what is lost without them."""

from __future__ import annotations

from plimsoll.engine.extension_points import Look, Need, Part, Way, Weight

_PROBE, _GATE, _DRAIN, _SHED, _RECORDER = Part.PROBE, Part.GATE, Part.DRAIN, Part.SHED, Part.RECORDER
_MUST, _HELPS, _DETAIL = Weight.MUST, Weight.HELPS, Weight.DETAIL

_WORKER_BASE = ("v1/worker/worker_base.py", "worker/worker_base.py")  # the second holds the wrapper up to 0.11.0
_WORKERS = ("v1/worker", "worker")
_SERVER = (
    "entrypoints/launchers/api_server/app_state.py",  # 0.29.0 on
    "entrypoints/serve/middleware/register.py",  # 0.29.0 on
    "entrypoints/openai/api_server.py",
)
_CLIENT = ("v1/engine/async_llm.py",)
_OUTPUT = ("v1/engine/output_processor.py",)
_LOGGERS = ("v1/metrics/loggers.py",)
_STATS = ("v1/metrics/stats.py",)
_RESPONSES = ("entrypoints/openai/responses/serving.py", "entrypoints/openai/serving_responses.py")

_GPU_WORKER = Look(("v1/worker/gpu_worker.py",), "Worker")
_BUDGET = ("init_snapshot", "requested_memory", "peak_activation_memory")
_PLUGIN_FACTORIES = "load_stat_logger_plugin_factories"
_BY_THE_GATE = "by the gate, into the engine client's own loggers"
_RECORD = Look(_LOGGERS, "StatLoggerBase", methods=(("record", ("scheduler_stats", "iteration_stats")),))
_QUEUES = Look(_STATS, "SchedulerStats", attributes=("num_running_reqs", "num_waiting_reqs"))


def _as(*looks: Look, says: str = "") -> Way:
    return Way(says, looks)


NEEDS: tuple[Need, ...] = (
    Need(
        "worker extension",
        "adds the probe to vLLM's worker class (--worker-extension-cls)",
        "no figures of the allocator, no compaction, no snapshot",
        (_as(Look(_WORKER_BASE, words=("worker_extension_cls", "__bases__"))),),
        {_PROBE: _MUST},
    ),
    Need(
        "free names",
        "vLLM refuses an extension whose names its worker has already",
        "vLLM refuses to start with the probe: a name is taken",
        (),
        {_PROBE: _MUST},
        none_in=_WORKERS,
        forbidden="plimsoll_",
    ),
    Need(
        "first call of a worker",
        "starts the sampling thread together with the worker",
        "figures start with the first call into the workers instead of with the worker",
        (),
        {_PROBE: _DETAIL},
        none_in=_WORKERS,
        forbidden="__new__",
    ),
    Need(
        "general plugins",
        "adds the probe where another worker extension is in use (PLIMSOLL_PROBE=plugin)",
        "no probe beside another worker extension",
        (
            _as(
                Look(_WORKER_BASE, words=("load_general_plugins",)),
                Look(("plugins/__init__.py",), words=("vllm.general_plugins",)),
                Look(("v1/worker/worker_base.py",), "WorkerBase"),
            ),
        ),
        {_PROBE: _DETAIL},
    ),
    Need(
        "end of a worker's start",
        "tells a worker that starts from one that serves",
        "a worker counts as serving a minute after its KV cache is there",
        (_as(_GPU_WORKER._replace(methods=(("compile_or_warm_up_model", ()), ("load_model", ())))),),
        {_PROBE: _DETAIL},
    ),
    Need(
        "start-up budget",
        "what the worker measured and asked for when it started",
        "part of the start-up budget is not shown",
        (
            _as(_GPU_WORKER._replace(attributes=(*_BUDGET, "total_consumed"))),
            _as(_GPU_WORKER._replace(attributes=(*_BUDGET, "non_torch_memory"))),
        ),
        {_PROBE: _DETAIL},
    ),
    Need(
        "sleeping memory",
        "keeps compaction away from memory that sleeps (--enable-sleep-mode)",
        "with --enable-sleep-mode compaction is refused",
        (_as(Look(("device_allocator/cumem.py",), words=("is_asleep",))),),
        {_PROBE: _DETAIL},
    ),
    Need(
        "middleware",
        "puts the gate in front of the server (--middleware)",
        "no endpoints, no readiness, no drain",
        (_as(Look(_SERVER, words=("middleware", "add_middleware", "isclass"))),),
        {_GATE: _MUST, _DRAIN: _MUST, _SHED: _MUST},
    ),
    Need(
        "engine client",
        "reaches the engine from the gate (app.state.engine_client)",
        "the gate cannot see the engine: it knows neither when it starts nor when it dies",
        (_as(Look(_SERVER, assigned=("engine_client",))),),
        {_GATE: _MUST, _SHED: _MUST},
    ),
    Need(
        "dead engine",
        "what vLLM knows of its engine's death",
        "readiness does not tell a dead engine",
        (_as(Look(_CLIENT, "AsyncLLM", methods=(("errored", ()),))),),
        {_GATE: _HELPS},
    ),
    Need(
        "calls into workers",
        "compaction and snapshots, without a timeout and one at a time",
        "no /plimsoll/compact and no /plimsoll/snapshot",
        (_as(Look(_CLIENT, "AsyncLLM", methods=(("collective_rpc", ("method", "timeout", "args", "kwargs")),))),),
        {_GATE: _HELPS},
    ),
    Need(
        "test request",
        "one token, to prove that a stuck engine is wedged",
        "a wedged engine is suspected but not proven, so it stays ready",
        (_as(Look(_CLIENT, "AsyncLLM", methods=(("generate", ("prompt", "sampling_params", "request_id")),))),),
        {_GATE: _HELPS},
    ),
    Need(
        "requests with the engine",
        "counts what the engine still holds, and the tokens that wait",
        "requests that live on in the engine are not counted, nor the tokens that wait",
        (
            _as(
                Look(_CLIENT, "AsyncLLM", attributes=("output_processor",)),
                Look(_OUTPUT, "OutputProcessor", attributes=("request_states",)),
                Look(_OUTPUT, "RequestState", attributes=("prompt_len", "is_prefilling")),
            ),
        ),
        {_SHED: _MUST, _DRAIN: _HELPS},
    ),
    Need(
        "background responses",
        "counts answers of /v1/responses that run on after their request",
        "responses in the background are not in the count in flight",
        (_as(Look(_RESPONSES, attributes=("background_tasks",))),),
        {_GATE: _HELPS, _DRAIN: _HELPS},
        unneeded_without=Look(_RESPONSES, words=("background",)),
        unneeded_because="this vLLM has none",
    ),
    Need(
        "stat loggers",
        "tells of every step and every finished request",
        "no step is seen: nothing is recorded, no rate is known, and no wedge",
        (
            _as(
                Look(_LOGGERS, methods=((_PLUGIN_FACTORIES, ()),)),
                Look(_CLIENT, words=(_PLUGIN_FACTORIES,)),
                says="by the entry point vllm.stat_logger_plugins",
            ),
            _as(Look(_LOGGERS, "StatLoggerManager", attributes=("stat_loggers",)), says=_BY_THE_GATE),
            _as(Look(_LOGGERS, "StatLoggerManager", attributes=("per_engine_logger_dict",)), says=_BY_THE_GATE),
            _as(Look(_CLIENT, "AsyncLLM", attributes=("stat_loggers",)), says=_BY_THE_GATE),
        ),
        {_RECORDER: _MUST, _SHED: _MUST, _GATE: _HELPS, _DRAIN: _HELPS},
    ),
    Need(
        "figures of a step",
        "running and waiting requests, and how full the KV cache is",
        "running and waiting requests are not known",
        (
            _as(_RECORD, _QUEUES, Look(_STATS, "SchedulerStats", attributes=("kv_cache_usage",))),
            _as(
                _RECORD,
                _QUEUES,
                Look(_STATS, "SchedulerStats", attributes=("gpu_cache_usage",)),
                says="the cache's share under its old name",
            ),
        ),
        {_RECORDER: _MUST, _SHED: _MUST, _GATE: _HELPS, _DRAIN: _HELPS},
    ),
    Need(
        "sleep",
        "is told when the engine is put to sleep",
        "readiness learns of sleep only from calls that pass through the gate",
        (
            _as(
                Look(_LOGGERS, "AggregateStatLoggerBase"),
                Look(_LOGGERS, "StatLoggerBase", methods=(("record_sleep_state", ("level",)),)),
            ),
        ),
        {_GATE: _DETAIL},
    ),
    Need(
        "finished requests",
        "lengths and times of each finished request",
        "nothing is recorded of a finished request",
        (
            _as(
                Look(_STATS, "IterationStats", attributes=("finished_requests", "iteration_timestamp")),
                Look(
                    _STATS,
                    "FinishedRequestStats",
                    attributes=(
                        "finish_reason",
                        "e2e_latency",
                        "num_prompt_tokens",
                        "num_generation_tokens",
                        "max_tokens_param",
                        "queued_time",
                        "prefill_time",
                        "inference_time",
                        "decode_time",
                    ),
                ),
            ),
        ),
        {_RECORDER: _MUST, _SHED: _HELPS},
    ),
    Need(
        "cached tokens of a request",
        "how much of a prompt came out of the prefix cache",
        "cached tokens of a request are not recorded",
        (_as(Look(_STATS, "FinishedRequestStats", attributes=("num_cached_tokens",))),),
        {_RECORDER: _DETAIL},
    ),
    Need(
        "preemptions of a request",
        "how often a request had to start again",
        "preemptions of a request are not recorded",
        (_as(Look(_STATS, "FinishedRequestStats", attributes=("num_preemptions",))),),
        {_RECORDER: _DETAIL},
    ),
    Need(
        "requests as they come and go",
        "sees priorities, the blocks of a prompt (PLIMSOLL_RECORD_PREFIXES=1) and requests that a client gives up",
        "recorded without priorities, without hashes of prompts and without requests that clients gave up",
        (
            _as(
                Look(
                    _OUTPUT,
                    "OutputProcessor",
                    begins=(
                        ("add_request", ("self", "request", "prompt")),
                        ("_update_stats_from_finished", ("self", "req_state", "finish_reason", "iteration_stats")),
                        ("abort_requests", ("self", "request_ids")),
                    ),
                ),
                Look(_OUTPUT, "RequestState", attributes=("prompt_token_ids", "stats")),
            ),
        ),
        {_RECORDER: _HELPS},
    ),
    Need(
        "limits of the scheduler",
        "how many requests run at once",
        "how many requests run at once is not known",
        (_as(Look(_CLIENT, "AsyncLLM", attributes=("vllm_config",))),),
        {_SHED: _DETAIL},
    ),
    Need(
        "metrics page",
        "shows our gauges and counters on /metrics, also with several API servers",
        "our metrics are not on /metrics",
        (
            _as(
                Look(
                    ("v1/metrics/prometheus.py", "entrypoints/openai/api_server.py"),
                    words=("PROMETHEUS_MULTIPROC_DIR", "MultiProcessCollector"),
                )
            ),
        ),
        {_GATE: _HELPS},
    ),
)

# Variables that keep parts of it from working where a release reads them.
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"
FIRST_ENGINE = "VLLM_USE_V1"
PLUGIN_LIST = "VLLM_PLUGINS"

# What was run and not only read.
TESTED = {"0.32.0": "tested on CPU", "0.25.1": "tested on an H200"}
BY_SIGNATURE = "by signature, read from the wheel"
