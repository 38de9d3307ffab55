"""What this machine is, for an archive that goes with a ticket: versions, GPUs, memory and the limits on it.

Nothing is imported and nothing is changed; what is not there is said in a line. Names of users, hosts and cgroups stay out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from plimsoll.doctor.read.bundle import Part
from plimsoll.redaction import hide_homes, redact

NVIDIA_SMI = ("nvidia-smi",)
_SMI_SECONDS = 10.0
_SMI_BYTES = 256 << 10
_FILE_BYTES = 64 << 10
_MOST_LEVELS = 16
_PACKAGES = (
    "vllm", "torch", "transformers", "triton", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "flash-attn",
    "xformers", "ray", "numpy", "tokenizers", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cublas-cu12",
    "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12", "nvidia-ml-py",
)  # fmt: skip
_V2 = ("memory.max", "memory.high", "memory.current", "memory.peak", "memory.swap.max", "memory.swap.current", "memory.events")
_V1 = (
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt", "memory.oom_control",
    "memory.memsw.limit_in_bytes",
)  # fmt: skip


def collect_here(root: Path = Path("/"), *, nvidia_smi: Sequence[str] = NVIDIA_SMI, wait_s: float = _SMI_SECONDS) -> list[Part]:
    """What can be said of this machine, as parts of an archive; `root` is where its /proc, /sys, /etc and /dev are."""
    return [
        Part("machine/versions.json", "json", "Versions of plimsoll, Python, the system and of packages beside plimsoll.",
             json.dumps(_versions(root), indent=2).encode()),
        _text("machine/nvidia-smi.txt", "What nvidia-smi says of the GPUs now.", _smi(nvidia_smi, wait_s)),
        _text("machine/meminfo.txt", "The host's memory now.", _read(root / "proc/meminfo") or "/proc/meminfo: not there\n"),
        _text("machine/cgroup.txt", "Memory limits and events of the control groups plimsoll runs in.", _cgroup(root)),
        Part("machine/limits.json", "json", "How much memory may be locked, and the size of /dev/shm.",
             json.dumps(_limits(root), indent=2).encode()),
    ]  # fmt: skip


def _text(name: str, what: str, text: str) -> Part:
    return Part(name, "text", what, hide_homes(redact(text)).encode("utf-8", "replace"))


def _read(path: Path, most_bytes: int = _FILE_BYTES) -> str:
    """The start of a file; nothing where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        return os.read(descriptor, most_bytes).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _versions(root: Path) -> dict[str, object]:
    import platform
    from importlib import metadata

    from plimsoll import __version__

    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = redact(str(metadata.version(name)))[:100]
        except Exception:  # noqa: BLE001, PERF203, RUF100  (a broken installation raises anything)
            packages[name] = None
    release = dict(line.partition("=")[::2] for line in _read(root / "etc/os-release").splitlines() if "=" in line)
    kernel = os.uname()
    return {
        "plimsoll": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": redact(release.get("PRETTY_NAME", "").strip('"'))[:200] or None,
        "kernel": f"{kernel.sysname} {kernel.release} {kernel.machine}",
        "kernel_module_nvidia": _module(root),
        "packages": packages,
    }


def _module(root: Path) -> str | None:
    lines = _read(root / "proc/driver/nvidia/version").splitlines()
    return redact(lines[0].strip())[:300] if lines else None


def _smi(command: Sequence[str], wait_s: float) -> str:
    """What the program prints, as far as it does so in time; its absence is an answer, too."""
    import signal
    import subprocess

    name = Path(command[0]).name
    try:
        process = subprocess.Popen(  # noqa: S603
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except (OSError, ValueError):
        return f"{name}: not found on this machine\n"
    assert process.stdout is not None
    try:
        data, why = _until(process.stdout.fileno(), time.monotonic() + wait_s, wait_s)
        if not why:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1)
                why = f"{name} ended with exit code {code}" if code else ""
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):  # with all that it started: it leads a group of its own
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # held by the driver: it is left behind, we go on
                process.wait(timeout=1)
        process.stdout.close()
    text = data.decode("utf-8", "replace").replace("\0", " ")
    return text + (f"\n[{why}]\n" if why else "")


def _until(descriptor: int, deadline: float, wait_s: float) -> tuple[bytes, str]:
    """What comes before the deadline, and why there is no more of it."""
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    data = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        if not poll.poll(max(1, int(left * 1000))):
            break
        block = os.read(descriptor, 64 << 10)
        if not block:
            return bytes(data), ""
        data += block
        if len(data) > _SMI_BYTES:
            return bytes(data[:_SMI_BYTES]), "the rest of its output was left out"
    return bytes(data), f"it did not finish within {wait_s:g} s"


def _cgroup(root: Path) -> str:
    """Limits and events, from plimsoll's own control group upwards: the one that bites may be any of them."""
    lines: list[str] = []
    own = _read(root / "proc/self/cgroup").splitlines()[:64]
    for entry in own:
        number, _, rest = entry.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            lines += _levels(root / "sys/fs/cgroup", path, _V2)
        elif "memory" in controllers.split(","):
            lines += _levels(root / "sys/fs/cgroup/memory", path, _V1)
    if not lines:
        lines = [*_levels(root / "sys/fs/cgroup", "/", _V2), *_levels(root / "sys/fs/cgroup/memory", "/", _V1)]
    return "\n".join(lines or ["no memory control group found"]) + "\n"


def _levels(base: Path, path: str, names: Sequence[str]) -> Iterator[str]:
    pieces = [piece for piece in path.split("/") if piece not in ("", ".", "..")][:64]
    for level in range(min(len(pieces), _MOST_LEVELS) + 1):
        folder = base.joinpath(*pieces[: len(pieces) - level])
        found = [(name, " ".join(_read(folder / name, 4096).split())) for name in names]
        said = [f"  {name}: {value}" for name, value in found if value]
        if said:
            yield "own control group" if level == 0 else f"{level} above"
            yield from said


def _limits(root: Path) -> dict[str, object]:
    import resource

    limits = [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(resource.RLIMIT_MEMLOCK)]
    try:
        shm = os.statvfs(root / "dev/shm")
        size, free = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    except OSError:
        return {"locked_memory_bytes": _limit(limits), "dev_shm": "not there"}
    return {"locked_memory_bytes": _limit(limits), "dev_shm": {"size_bytes": size, "free_bytes": free}}


def _limit(limits: list[int | None]) -> dict[str, object]:
    soft, hard = ("unlimited" if value is None else value for value in limits)
    return {"soft": soft, "hard": hard}
