"""The HTTP endpoints guard, doctor and the stand-in speak, what each does, and what it needs to be there.

Paths and the releases that have them come from the wheels (`data/endpoints.json`); meaning and conditions from reading
the handlers and from trying them on a live 0.32.0 engine.
"""

from __future__ import annotations

from dataclasses import dataclass

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"


@dataclass(frozen=True)
class Endpoint:
    """One route, what it does, and what must be set for it to work in 0.32.0 (older releases may ask for less)."""

    method: str
    path: str
    does: str
    needs: str | None = None
    trap: str | None = None


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("GET", "/health", "200 while the engine process lives, 503 when it is known dead",
             trap="stays 200 while paused, asleep, draining, saturated or wedged"),
    Endpoint("GET", "/ping", "the same as /health, for SageMaker"),
    Endpoint("GET", "/metrics", "the Prometheus page",
             trap="plain text; /metrics/ is gzip OpenMetrics; never behind --api-key; empty of vllm: with --disable-log-stats"),
    Endpoint("GET", "/version", "the vLLM version"),
    Endpoint("GET", "/load", "requests in flight in this API server", "--enable-server-load-tracking",
             "0 without the flag; one process only"),
    Endpoint("GET", "/v1/models", "the served model names and max_model_len"),
    Endpoint("POST", "/v1/completions", "generate from a prompt"),
    Endpoint("POST", "/v1/chat/completions", "generate from messages"),
    Endpoint("POST", "/v1/responses", "generate; with background=true it returns at once and runs on",
             trap="a background response is work that in-flight counts do not show"),
    Endpoint("POST", "/tokenize", "count tokens"),
    Endpoint("POST", "/v1/load_lora_adapter", "load an adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    Endpoint("POST", "/v1/unload_lora_adapter", "unload an adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    Endpoint("GET", "/kv_event_sources", "where KV events are published"),
    Endpoint("POST", "/reset_prefix_cache", "forget cached prefixes", DEV_MODE, "frees no GPU memory"),
    Endpoint("POST", "/reset_mm_cache", "forget processed multimodal inputs", DEV_MODE),
    Endpoint("POST", "/reset_encoder_cache", "drop encoder outputs held on the GPU", DEV_MODE),
    Endpoint("POST", "/pause", "stop scheduling: mode=abort, wait or keep", DEV_MODE,
             "new requests are accepted and queued, not refused"),
    Endpoint("POST", "/resume", "go on after a pause", DEV_MODE),
    Endpoint("GET", "/is_paused", "whether it is paused", DEV_MODE),
    Endpoint("POST", "/abort_requests", "abort some or all requests", DEV_MODE),
    Endpoint("POST", "/sleep", "level 1: weights to host memory, KV dropped; level 2: both dropped",
             f"{DEV_MODE} and --enable-sleep-mode", "weights are gone after level 2 and must be loaded again"),
    Endpoint("POST", "/wake_up", "come back from sleep", f"{DEV_MODE} and --enable-sleep-mode",
             "fails if another process took the memory"),
    Endpoint("GET", "/is_sleeping", "whether it sleeps", DEV_MODE, "true also when merely paused"),
    Endpoint("POST", "/release_kv_cache_memory", "give the KV cache's memory back until wake-up",
             f"{DEV_MODE} and the cumem allocator, after a completed pause"),
    Endpoint("POST", "/collective_rpc", "run a method on every worker", DEV_MODE,
             "never give it a timeout: a late reply is read as the next step's result and the engine dies"),
    Endpoint("GET", "/server_info", "the whole configuration and environment", DEV_MODE, "holds secrets"),
    Endpoint("POST", "/start_profile", "start the profiler", "--profiler-config"),
    Endpoint("POST", "/stop_profile", "stop the profiler", "--profiler-config"),
    Endpoint("POST", "/scale_elastic_ep", "change the number of data-parallel ranks", "--enable-elastic-ep",
             "every request gets 503 meanwhile"),
    Endpoint("GET", "/fault_tolerance/status", "state of the ranks", "--enable-fault-tolerance"),
    Endpoint("POST", "/fault_tolerance/apply", "retry after a fault", "--enable-fault-tolerance"),
)  # fmt: skip

# Paths that --api-key guards begin like this; everything else is open to whoever reaches the port.
GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")
