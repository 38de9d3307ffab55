"""The words that betray text which is not vLLM's own, so that a log without any of it costs no more than a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plimsoll.domain.log import Line, Log

_BATCH = 2048  # lines searched at once: fast, and a huge log is never copied whole

OOM_KILLER = ("oom-kill", "Killed process", "Kill process", "due to memory ", "sending SIG")
KERNEL = (
    "NVRM", "SXid", "segfault", "general protection", "trap invalid opcode", "blocked for more than", "amdgpu", "AER:",
    "severity=Uncorrect", "I/O error", "No space left", "Memory failure:", "EDAC", "controller is down",
)  # fmt: skip
POD = ("Restart Count:", "restartCount", "containerStatuses", "Last State:", "lastState")
POD_EVENT = ("Normal  ", "Warning  ")
POD_ROW = (
    "CrashLoopBackOff", " OOMKilled", " Evicted", "ImagePullBackOff", "ErrImagePull", " Error  ", " Completed  ",
    "ContainerConfigError",
)  # fmt: skip
DOCKER = ('"OOMKilled":', "Exited (", "Restarting (")
SYSTEMD = (".service", ".scope")
SMI_ERROR = ("device handle for", "GPU is lost", "fallen off", "NVML", "NVIDIA-SMI has failed", "No devices were found")
SMI = (
    "NVIDIA-SMI", "MiB |", "Memory-Usage", "NVSMI LOG", "FB Memory Usage", "ECC Errors", "Remapped Rows", "VRAM", "memory.used",
    "memory.total", "memory.free", "utilization.gpu", "used_memory", "used_gpu_memory", "process_name", "Processes:",
)  # fmt: skip
MEMORY_SUMMARY = (
    "memory summary, device ID",
    "CUDA OOMs:",
    "GPU reserved ",
    "Non-releasable ",
    "Allocated memory  ",
    "Active memory  ",
)

_KINDS = {
    "kernel": (*OOM_KILLER, *KERNEL),
    "supervisor": (*POD, *POD_EVENT, *POD_ROW, *DOCKER, *SYSTEMD),
    "nvidia-smi": (*SMI, *SMI_ERROR),
    "memory-summary": MEMORY_SUMMARY,
}


def kinds_in(log: Log) -> frozenset[str]:
    """Which judges are worth asking: of "kernel", "supervisor", "nvidia-smi" and "memory-summary"; most logs need none."""
    wanted = dict(_KINDS)
    for text in _batches(log.lines, vllm=True):
        for kind in [kind for kind, words in wanted.items() if any(word in text for word in words)]:
            del wanted[kind]
    return frozenset(_KINDS) - frozenset(wanted)


def holds(lines: Iterable[Line], words: Sequence[str], *, vllm: bool = False) -> bool:
    """Whether any line holds any of the words; lines that a vLLM process printed are asked only where `vllm` says so."""
    return any(word in text for text in _batches(lines, vllm=vllm) for word in words)


def _batches(lines: Iterable[Line], *, vllm: bool) -> Iterable[str]:
    batch: list[str] = []
    for line in lines:
        if vllm or not line.process:
            batch.append(line.text)
        if len(batch) == _BATCH:
            yield "\n".join(batch)
            batch = []
    yield "\n".join(batch)
