"""What every stage of measure_inside.py shares: the servers, the neighbours, how much of everything, and where results go."""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lab.gpu.inside_server import INSIDE, GpuServer, Served, inside_env
from lab.gpu.provoke_failures import Ballast, used_mib, wait_for_gpu
from lab.streams import Shape

PORT = 8123
GIB_MIB = 1024


class Scale(NamedTuple):
    """How much of everything: one for the GPU, one for a dry run on the CPU engine."""

    model_name: str
    flags: tuple[str, ...]
    overhead_flags: tuple[str, ...]
    mixed: Shape
    """Long prompts among short ones: what makes torch's reserve grow."""
    short: Shape
    long: Shape
    steady: Shape
    """For the overhead: many streams, no long prompts."""
    pairs_a_moment: int
    load_s: float
    compactions: int
    compact_every_s: float
    neighbour_pairs: int
    alone_pairs: int
    neighbour_run_s: float
    overhead_pairs: int
    overhead_run_s: float


ON_GPU = Scale(
    model_name="m",
    # 48 GiB of cache are 393,216 tokens of a Llama-3.1-8B; the utilisation only has to pass the check at the start.
    flags=("--enforce-eager", "--max-model-len", "32768", "--max-num-batched-tokens", "16384", "--max-num-seqs", "128",
           "--kv-cache-memory-bytes", str(48 << 30), "--gpu-memory-utilization", "0.5"),
    overhead_flags=("--max-model-len", "8192", "--max-num-seqs", "128", "--kv-cache-memory-bytes", str(16 << 30),
                    "--gpu-memory-utilization", "0.3"),
    mixed=Shape(64, (64, 512), (128, 256), long_prompt=(6000, 20000), long_every=16),
    short=Shape(8, (64, 512), (32, 64)),
    long=Shape(8, (12000, 24000), (16, 32)),
    steady=Shape(64, (200, 600), (100, 160)),
    pairs_a_moment=6, load_s=25.0, compactions=20, compact_every_s=3.0,
    neighbour_pairs=3, alone_pairs=8, neighbour_run_s=15.0, overhead_pairs=5, overhead_run_s=20.0,
)  # fmt: skip
ON_CPU = Scale(
    model_name="tiny", flags=(), overhead_flags=(),
    mixed=Shape(8, (16, 64), (16, 32), long_prompt=(400, 800), long_every=8),
    short=Shape(2, (16, 64), (8, 16)), long=Shape(2, (400, 800), (8, 16)), steady=Shape(8, (16, 64), (24, 48)),
    pairs_a_moment=2, load_s=6.0, compactions=3, compact_every_s=2.0,
    neighbour_pairs=2, alone_pairs=2, neighbour_run_s=4.0, overhead_pairs=2, overhead_run_s=4.0,
)  # fmt: skip


class Bench:
    """The servers of this command and the folders; `end` stops whatever runs."""

    def __init__(self, model: Path, work: Path, out: Path, scale: Scale) -> None:
        self.model, self.work, self.out, self.scale = model, work, out, scale
        self.is_cpu = scale.model_name == ON_CPU.model_name
        self._servers: dict[str, Served] = {}
        self._baseline_mib = used_mib()

    def make(self, name: str, *, is_inside: bool = True, flags: tuple[str, ...]) -> Served:
        """A server that is not started yet."""
        flags = (*(INSIDE if is_inside else ()), *flags)
        env = inside_env(self.work, name) if is_inside else {}
        if not self.is_cpu:
            env["VLLM_CACHE_ROOT"] = str(self.work / f"cache-{name}")  # two that compile at once must not share it
        log = self.work / f"{name}.log"
        if self.is_cpu:
            from lab.engine.server import EngineServer

            return EngineServer(flags, env, log_path=log)
        return GpuServer(self.model, PORT + len(self._servers), flags, env, log)

    def shared(self) -> Served:
        """The server of the first three stages: started once, and again only if it has died."""
        server = self._servers.get("shared")
        if server is None or server.exit_code() is not None:
            self.stop(*list(self._servers))
            server = self.make("shared", flags=self.scale.flags)
            server.start()
            self._servers["shared"] = server
        server.wait_ready()  # also where an earlier stage ran out of time while it started
        return server

    def two(self) -> tuple[Served, Served]:
        """Two servers at once, with and without what is measured; both started before either is waited for."""
        self.stop(*list(self._servers))
        for name in ("with", "without"):
            server = self.make(name, is_inside=name == "with", flags=self.scale.overhead_flags)
            server.start()
            self._servers[name] = server
            if self.is_cpu:
                server.wait_ready()
        for server in self._servers.values():
            server.wait_ready()
        return self._servers["with"], self._servers["without"]

    def stop(self, *names: str) -> None:
        """End these servers and wait until their memory is back."""
        self._end(*names)
        if names:
            wait_for_gpu(self._baseline_mib)

    def _end(self, *names: str) -> None:
        for name in names:
            self._servers.pop(name).stop()

    def end(self) -> None:
        """End everything and put the logs beside the results."""
        self._end(*list(self._servers))
        with tarfile.open(self.out / "logs.tar.gz", "w:gz", compresslevel=6) as archive:
            for path in sorted(self.work.glob("*.log")):
                archive.add(path, path.name)

    @contextlib.contextmanager
    def neighbour(self) -> Iterator[Ballast | None]:
        """Another process on the same GPU, with its context open; None on a machine without one."""
        if self.is_cpu:
            yield None
            return
        ballast = Ballast(self.work / "ballast.log")
        try:
            ballast.tell("free")
            yield ballast
        finally:
            ballast.end()


class Kept:
    """The result of one stage, on the disk after every step: a stage that is cut off leaves what it had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {}

    def put(self, **found: Any) -> None:
        """Add what was found and write all of it."""
        self.data |= found
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self.data, indent=1, default=str), encoding="utf-8")
        os.replace(fresh, self.path)  # noqa: PTH105

    def add(self, name: str, found: Any) -> None:
        """Append to the list of this name, and write."""
        self.data.setdefault(name, []).append(found)
        self.put()
