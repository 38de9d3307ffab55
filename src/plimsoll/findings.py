"""A finding: a code that never changes its meaning, the evidence for it, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Code(StrEnum):
    """Printed, exported and alerted on; each has a page docs/findings/<code>.md. Append only, never reused."""

    # The server did not start.
    STARTUP_WEIGHTS_DO_NOT_FIT = "startup.weights-do-not-fit"
    STARTUP_FREE_MEMORY_CHECK = "startup.free-memory-check"
    STARTUP_PROFILE_RUN = "startup.profile-run"
    STARTUP_PROFILE_NEIGHBOUR = "startup.profile-neighbour"
    STARTUP_NO_CACHE_BLOCKS = "startup.no-cache-blocks"
    STARTUP_CONTEXT_TOO_LONG = "startup.context-too-long"
    STARTUP_KV_ALLOCATION = "startup.kv-allocation"
    STARTUP_GRAPH_CAPTURE = "startup.graph-capture"
    STARTUP_SAMPLER_WARMUP = "startup.sampler-warmup"
    STARTUP_BAD_FLAG = "startup.bad-flag"
    STARTUP_DIFFERS_FROM_PLAN = "startup.differs-from-plan"
    # It ran out of GPU memory while serving.
    RUNTIME_FORWARD = "runtime.forward"
    RUNTIME_LOGITS = "runtime.logits"
    RUNTIME_MULTIMODAL = "runtime.multimodal"
    RUNTIME_LORA = "runtime.lora"
    RUNTIME_NEIGHBOUR = "runtime.neighbour"
    RUNTIME_WAKE_UP = "runtime.wake-up"
    RUNTIME_COLLECTIVES = "runtime.collectives"
    RUNTIME_CONTAINED = "runtime.contained"
    # Memory that creeps.
    ALLOCATOR_FRAGMENTATION = "allocator.fragmentation"
    GPU_GROWTH = "gpu.growth"
    GPU_THIN_SLACK = "gpu.thin-slack"
    HOST_OUT_OF_MEMORY = "host.out-of-memory"
    HOST_GROWTH = "host.growth"
    # The KV cache.
    KV_SATURATED = "kv.saturated"
    KV_PREEMPTION_STORM = "kv.preemption-storm"
    KV_INTERNAL_FRAGMENTATION = "kv.internal-fragmentation"
    PREFIX_CACHE_LOW_HIT_RATE = "prefix-cache.low-hit-rate"
    # The engine itself.
    ENGINE_DEAD = "engine.dead"
    ENGINE_WEDGED = "engine.wedged"
    ENGINE_STALLED = "engine.stalled"
    ENGINE_SLOW = "engine.slow"
    ENGINE_GARBAGE = "engine.garbage"
    ENGINE_SATURATED = "engine.saturated"
    ENGINE_CRASH_LOOP = "engine.crash-loop"
    ENGINE_CHANGED = "engine.changed"
    # Not a memory failure.
    OTHER_BAD_MODEL = "other.bad-model"
    OTHER_GATED_MODEL = "other.gated-model"
    OTHER_PORT_IN_USE = "other.port-in-use"
    OTHER_STOPPED_BY_OPERATOR = "other.stopped-by-operator"
    OTHER_ILLEGAL_ACCESS = "other.illegal-access"
    OTHER_COLLECTIVES = "other.collectives"
    OTHER_COMPILER = "other.compiler"
    OTHER_HARDWARE = "other.hardware"
    OTHER_INSTALLATION = "other.installation"
    OTHER_UNSUPPORTED_GPU = "other.unsupported-gpu"
    OTHER_BAD_CONFIG = "other.bad-config"
    OTHER_DOWNLOAD = "other.download"
    OTHER_DISK = "other.disk"
    OTHER_ENGINE_ERROR = "other.engine-error"
    OTHER_TIMEOUT = "other.timeout"
    OTHER_PROBE = "other.probe"
    OTHER_KILLED = "other.killed"

    @property
    def is_memory(self) -> bool:
        """True if the code itself says that memory was the cause."""
        others = (Code.STARTUP_BAD_FLAG, Code.STARTUP_DIFFERS_FROM_PLAN)
        return not self.startswith(("other.", "engine.", "prefix-cache.")) and self not in others


class Severity(StrEnum):
    """How soon a person should look."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Evidence(NamedTuple):
    """One line of the user's own input that supports a finding."""

    source: str
    text: str
    line: int | None = None


class Remedy(NamedTuple):
    """One change, why it helps, and the flag that makes it (where a flag does)."""

    do: str
    why: str
    flag: str | None = None
    value: str | None = None


class Finding(NamedTuple):
    """One problem, with its evidence and its remedies."""

    code: Code
    severity: Severity
    confidence: float  # a share, from 0 to 1
    title: str
    because: str
    evidence: tuple[Evidence, ...] = ()
    remedy: tuple[Remedy, ...] = ()
    not_a_remedy: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.code}: {self.title}"
