"""Every failure that is recorded: how the server is started, what is done to it, and what doctor should say."""

from __future__ import annotations

from lab.engine import failure_actions as acts
from lab.engine.failure_faults import OUT_AT_RUN, OUT_AT_START
from lab.engine.failure_parts import CANNOT_SAY, COMPILED, LINEAR, MEMORY, NO_KV, NOT_MEMORY, Case, Fault

REFUSED: tuple[Case, ...] = (
    Case(
        "context-too-long",
        ("startup.context-too-long",),
        MEMORY,
        env=NO_KV,
        flags="--max-model-len 4096 --kv-cache-memory-bytes 1048576",
    ),
    Case(
        "context-too-long-gib",
        ("startup.context-too-long",),
        MEMORY,
        model="long-context",
        flags="--max-model-len 2000000 --max-num-seqs 2",
    ),
    Case("no-cache-blocks", ("startup.no-cache-blocks",), MEMORY, env=NO_KV, flags="--kv-cache-memory-bytes 0"),
    Case(
        "auto-fit",
        ("startup.context-too-long", "startup.no-cache-blocks"),
        MEMORY,
        env=NO_KV,
        flags="--max-model-len auto --kv-cache-memory-bytes 1024",
    ),
    Case(
        "less-than-desired",
        ("host.out-of-memory",),
        MEMORY,
        env=NO_KV,
        flags="--gpu-memory-utilization 0.99",
    ),
    Case(
        "kv-space-too-large",
        ("host.out-of-memory",),
        MEMORY,
        env={"VLLM_CPU_KVCACHE_SPACE": "500"},
    ),
    Case("unrecognized-argument", ("startup.bad-flag",), NOT_MEMORY, flags="--swap-space 4"),
    Case("invalid-value", ("startup.bad-flag",), NOT_MEMORY, flags="--gpu-memory-utilization plenty"),
    Case("invalid-choice", ("startup.bad-flag",), NOT_MEMORY, flags="--kv-cache-dtype int3"),
    Case("utilization-above-one", ("other.bad-config",), NOT_MEMORY, flags="--gpu-memory-utilization 1.5"),
    Case("max-model-len-above-model", ("other.bad-config",), NOT_MEMORY, flags="--max-model-len 100000"),
    Case(
        "batched-tokens-too-few",
        ("other.bad-config",),
        NOT_MEMORY,
        flags="--max-num-batched-tokens 64 --no-enable-chunked-prefill",
    ),
    Case("quantization-unknown", ("other.bad-config",), NOT_MEMORY, flags="--quantization awq"),
    Case("chat-template-missing", ("other.bad-config",), NOT_MEMORY, flags="--chat-template /nowhere/template.jinja"),
    Case("heads-not-divisible", ("other.bad-config",), NOT_MEMORY, flags="--tensor-parallel-size 3"),
    Case("v2-runner-refused", ("other.bad-config",), NOT_MEMORY, env={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    Case("unknown-architecture", ("other.bad-model",), NOT_MEMORY, model="unknown-architecture"),
    Case("unknown-model-type", ("other.bad-model",), NOT_MEMORY, model="unknown-model-type"),
    Case("remote-code", ("other.bad-model",), NOT_MEMORY, model="remote-code"),
    Case("package-missing", ("other.installation",), NOT_MEMORY, model="vision", why="The model needs torchvision."),
    Case("config-not-json", ("other.bad-model",), NOT_MEMORY, model="config-not-json"),
    Case("model-folder-missing", ("other.bad-model",), NOT_MEMORY, model="/models/missing"),
    Case("hub-offline", ("other.download",), NOT_MEMORY, model="acme/kestrel-4b"),
    Case("no-tokenizer", ("other.bad-model",), NOT_MEMORY, model="no-tokenizer"),
    Case("no-weights", ("other.bad-model",), NOT_MEMORY, model="no-weights", flags="--load-format auto"),
    Case("truncated-weights", ("other.bad-model",), NOT_MEMORY, model="truncated-weights", flags="--load-format auto"),
    Case("missing-tensor", ("other.bad-model",), NOT_MEMORY, model="missing-tensor", flags="--load-format auto"),
    Case("wrong-shape", ("other.bad-model",), NOT_MEMORY, model="wrong-shape", flags="--load-format auto"),
    Case("port-in-use", ("other.port-in-use",), NOT_MEMORY, under="taken port"),
    Case("no-permission", ("other.bad-model",), NOT_MEMORY, model="unreadable", under="no privilege"),
    Case("disk-full", (), NOT_MEMORY, flags=COMPILED, under="full disk"),
)

SMALL = "--num-gpu-blocks-override 18 --max-num-seqs 8"
LIVES: tuple[Case, ...] = (
    Case("kill-engine-core", ("engine.dead", "host.out-of-memory"), CANNOT_SAY, acts.kill_engine_core),
    Case("kill-worker", ("engine.dead", "host.out-of-memory"), CANNOT_SAY, acts.kill_worker),
    Case("kill-idle-worker", ("engine.dead", "host.out-of-memory"), CANNOT_SAY, acts.kill_idle_worker),
    Case("kill-api-server", (), CANNOT_SAY, acts.kill_api_server, why="the log just stops"),
    Case("terminate", ("other.stopped-by-operator",), NOT_MEMORY, acts.terminate),
    Case(
        "terminate-while-starting",
        (),
        NOT_MEMORY,
        acts.terminate_while_starting,
        why="The first signal is lost: the server starts and serves.",
    ),
    Case("terminate-at-first", ("other.stopped-by-operator",), NOT_MEMORY, acts.terminate_at_first),
    Case("terminate-group", ("other.stopped-by-operator",), NOT_MEMORY, acts.terminate_group),
    Case(
        "terminate-with-queue", ("other.stopped-by-operator",), NOT_MEMORY, acts.terminate_with_queue, flags="--max-num-seqs 2"
    ),
    Case("interrupt", ("other.stopped-by-operator",), NOT_MEMORY, acts.interrupt),
    Case("preemption-storm", ("kv.preemption-storm", "kv.saturated"), MEMORY, acts.preemption_storm, flags=SMALL),
    Case("queue", (), NOT_MEMORY, acts.queue, flags="--num-gpu-blocks-override 33 --max-num-seqs 2"),
    Case("full-cache", ("kv.saturated",), MEMORY, acts.full_cache, flags="--num-gpu-blocks-override 18 --max-num-seqs 64"),
    Case(
        "large-prompts", ("kv.saturated",), MEMORY, acts.large_prompts, flags="--num-gpu-blocks-override 18 --max-num-seqs 64"
    ),
    Case("healthy", (), NOT_MEMORY, acts.serve),
    Case("healthy-debug", (), NOT_MEMORY, acts.serve, env={"VLLM_LOGGING_LEVEL": "DEBUG"}),
    Case("healthy-json", (), NOT_MEMORY, acts.serve, under="JSON log"),
    Case(
        "oom-forward-json",
        ("runtime.forward",),
        MEMORY,
        acts.fault_under_load,
        under="JSON log",
        fault=Fault(LINEAR, "execute_model"),
    ),
    Case("bad-requests", (), NOT_MEMORY, acts.only_bad_requests),
    Case("hung-worker", ("engine.wedged",), NOT_MEMORY, acts.hang_worker),
    Case(
        "hung-worker-timeout",
        ("other.timeout",),
        NOT_MEMORY,
        acts.hang_worker,
        env={"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "30"},
    ),
)

CASES = (*REFUSED, *OUT_AT_START, *OUT_AT_RUN, *LIVES)
