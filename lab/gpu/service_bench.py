"""Servers that are started together and loaded one at a time, and what is written down of each load.

Importing vLLM takes longer than everything else, so servers come as far as the GPU at once and wait there until their stage
begins. On a machine without a GPU the lab's CPU engine stands in, for a dry run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.arrivals import Traffic, as_recording, send, summary
from lab.gpu.inside_bench import Kept
from lab.gpu.inside_server import INSIDE, GpuServer, Served, allocator, ask, inside_env
from lab.gpu.provoke_failures import GATE, used_mib, wait_for_gpu

PORT = 8123
REACH_S = 240.0  # from the start to the GPU: the first start on a machine reads everything from a cold disk
TTFT_S, TPOT_S = 2.0, 0.05  # the promise that `good` counts by, unless a load has its own
COUNTERS = ("num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
MEMORY = ("reserved", "allocated", "releasable", "segments", "alloc_retries", "ooms")
WARM_UP = Traffic(16, (64, 512), (16, 32), seed=9_999)


def total(page: str, metric: str) -> float:
    """The sum over all rows of one of vLLM's metrics."""
    rows = (line for line in page.splitlines() if re.match(rf"vllm:{metric}[{{ ]", line))
    return sum(float(line.rsplit(" ", 1)[1]) for line in rows)


class Watch(threading.Thread):
    """Looks at a server once a second while it is loaded."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.rows: list[dict[str, float]] = []
        self._port, self._over, self._begin = port, threading.Event(), time.time()

    def run(self) -> None:
        """Until the load is over."""
        while True:
            status, page = ask(self._port, "GET", "/metrics")
            if status == 200:
                row = {"at": round(time.time() - self._begin, 3)} | {name: total(page, name) for name in (*COUNTERS, *GAUGES)}
                self.rows.append(row | {name: value for name, value in allocator(self._port).items() if name in MEMORY})
            if self._over.wait(1.0):
                return

    def end(self) -> list[dict[str, float]]:
        """What was seen."""
        self._over.set()
        self.join(30)
        return self.rows


class Service:
    """The servers of a plan, each by its name; `end` stops whatever runs."""

    def __init__(self, plan: dict[str, Any], work: Path, out: Path, *, is_cpu: bool) -> None:
        self.plan, self.work, self.out, self.is_cpu = plan, work, out, is_cpu
        self._servers: dict[str, Served] = {}
        self._ports = iter(range(PORT, PORT + 500))
        self._baseline_mib = used_mib()
        hook = work / "gates" / "hook"
        hook.mkdir(parents=True, exist_ok=True)
        (hook / "sitecustomize.py").write_text(GATE, encoding="utf-8")

    def begin(self, name: str, *, waits: bool) -> None:
        """Start a server; one that waits stops before it touches the GPU."""
        spec = self.plan["servers"][name]
        env = dict(inside_env(self.work, name)) if spec.get("inside", True) else {}
        flags = (*(INSIDE if spec.get("inside", True) else ()), *spec["flags"])
        if self.is_cpu:
            from lab.engine.server import EngineServer

            server: Served = EngineServer((*INSIDE, *spec.get("cpu_flags", ())), env, log_path=self.work / f"{name}.log")
        else:
            gate = self.work / "gates" / name
            gate.unlink(missing_ok=True)
            if waits:
                env["PLIMSOLL_LAB_GATE"] = str(gate)
                env["PYTHONPATH"] = f"{self.work / 'gates' / 'hook'}:{env.get('PYTHONPATH', '')}"
            env["VLLM_CACHE_ROOT"] = str(self.work / f"cache-{spec.get('cache', name)}")
            model = self.work / "models" / spec["model"]
            server = GpuServer(model, next(self._ports), flags, {**env, **spec.get("env", {})}, self.work / f"{name}.log")
        server.start()
        self._servers[name] = server

    def until_at_the_gate(self) -> None:
        """Wait until every server that was begun stands before the GPU, or has ended."""
        limit = time.monotonic() + REACH_S
        for name, server in self._servers.items():
            reached = self.work / "gates" / f"{name}.reached"
            while not self.is_cpu and not reached.exists() and server.exit_code() is None and time.monotonic() < limit:
                time.sleep(0.2)

    def ready(self, names: list[str]) -> dict[str, float]:
        """Let these servers through and wait until each serves; the seconds that each took from here."""
        began, found = time.monotonic(), {}
        for name in names:
            if name not in self._servers:
                self.begin(name, waits=False)
            (self.work / "gates" / name).touch()
        for name in names:
            self._servers[name].wait_ready()
            found[name] = round(time.monotonic() - began, 2)
        return found

    def runs(self, name: str) -> bool:
        """Whether it was begun and not stopped."""
        return name in self._servers

    def warm_up(self, name: str) -> None:
        """A few requests that nobody counts."""
        asyncio.run(send(self._servers[name].port, self._model_name(), self._scaled(WARM_UP)))

    def load(self, kept: Kept, name: str, label: str, spec: dict[str, Any]) -> dict[str, Any]:
        """One load on one server: every request in LABEL.requests.jsonl.gz, every second in the stage's file.

        The label's last word is the number of its round: each round has prompts of its own, so that none finds itself cached,
        unless the load says which words it has.
        """
        promise = spec.get("promise", [TTFT_S, TPOT_S])
        said = {key: value for key, value in spec.items() if key != "promise"}
        rule = Traffic(**{"words": int(label.rsplit("-", 1)[1]), **said})
        traffic = self._scaled(rule)
        server = self._servers[name]
        watch = Watch(server.port)
        _, before = ask(server.port, "GET", "/metrics")
        watch.start()
        began = time.time()
        outcomes = asyncio.run(send(server.port, self._model_name(), traffic))
        rows = watch.end()
        _, after = ask(server.port, "GET", "/metrics")
        lines = [as_recording(one) for one in outcomes if one.wrong is None]
        (self.out / f"{label}.requests.jsonl.gz").write_bytes(
            gzip.compress("".join(f"{one}\n" for one in lines).encode(), mtime=0)
        )
        counted = {metric: total(after, metric) - total(before, metric) for metric in COUNTERS}
        found = {
            "load": label, "server": name, "began": round(began, 3), "traffic": traffic._asdict(), "promise": promise,
            **summary(outcomes, *promise), **counted, "most_running": max((row[GAUGES[0]] for row in rows), default=None),
        }  # fmt: skip
        kept.add("loads", found)
        kept.add("series", {"load": label, "rows": rows})
        return found

    def say(self, name: str, path: str, body: object = None) -> Any:
        """A word to the gate of a server."""
        return ask(self._servers[name].port, "POST", path, body=body)[1]

    def stop(self, *names: str) -> None:
        """End these servers and wait until their memory is back."""
        for name in names:
            self._servers.pop(name).stop()
        if names and not self._servers:
            wait_for_gpu(self._baseline_mib)

    @contextlib.contextmanager
    def whatever_happens(self) -> Iterator[None]:
        """Ends every server on the way out."""
        try:
            yield
        finally:
            self.stop(*list(self._servers))

    def _model_name(self) -> str:
        return "tiny" if self.is_cpu else "m"

    def _scaled(self, traffic: Traffic) -> Traffic:
        if not self.is_cpu:
            return traffic
        return traffic._replace(requests=min(6, traffic.requests), prompt=(8, 32), output=(4, 12))
