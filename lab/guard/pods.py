"""A Deployment of stand-ins as pods: a toy controller, a toy kubelet, and clients that balance over the ready ones.

Each pod is a real `plimsoll standin` process with the gate and the probe, on an address of its own in 127.0.0.0/8.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from lab.guard.farm import TOKEN

PORT = 8000
GRACE_S = 20.0
PROBE_S = 0.3


class Lost(NamedTuple):
    """A request that failed, the pod it was with, and when it began."""

    pod: str
    began_s: float
    why: str


class StandIns:
    """Keeps `replicas` pods of one Deployment running in an API server that a test plays."""

    def __init__(
        self, api: Any, folder: Path, *, replicas: int = 3, name: str = "vllm", namespace: str = "llm", net: int = 11
    ) -> None:
        self.api, self.folder, self.replicas, self.name, self.namespace = api, folder, replicas, name, namespace
        self._addresses = (f"127.0.{net}.{last}" for last in itertools.count(1))
        self._names = itertools.count(1)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.killed: list[str] = []  # pods that did not end within their grace period
        about = {"name": name, "namespace": namespace, "generation": 1}
        made = api.put(
            "apps/deployments", {"kind": "Deployment", "metadata": about, "spec": {"replicas": replicas}, "status": {}}
        )
        owner = {"kind": "Deployment", "name": name, "uid": made["metadata"]["uid"], "controller": True}
        about = {"name": f"{name}-5f7", "namespace": namespace, "ownerReferences": [owner]}
        made = api.put("apps/replicasets", {"kind": "ReplicaSet", "metadata": about, "spec": {"replicas": replicas}})
        self._owner = {"kind": "ReplicaSet", "name": f"{name}-5f7", "uid": made["metadata"]["uid"], "controller": True}
        api.put("/nodes", {"kind": "Node", "metadata": {"name": "node-1"}, "spec": {}})

    def _object(self, resource: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.kind(f"apps/{resource}")[self.namespace, name]
        return found

    def pods(self) -> list[dict[str, Any]]:
        return [
            pod
            for (space, _), pod in self.api.kind("/pods").items()
            if space == self.namespace and pod["metadata"]["labels"].get("app") == self.name
        ]

    def endpoints(self) -> dict[str, str]:
        """Pods that are ready and not ending, and where they are: what a Service would send to."""
        return {
            pod["metadata"]["name"]: pod["status"]["podIP"] for pod in self.pods()
            if pod["status"].get("conditions", [{}])[0].get("status") == "True" and "deletionTimestamp" not in pod["metadata"]
        }  # fmt: skip

    async def run(self) -> None:
        """For ever: a pod for each that is wanted and missing, and the Deployment's status."""
        while True:
            living = [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]
            for _ in range(self.replicas - len(living)):
                self._create()
            for pod in living[self.replicas :]:
                pod["metadata"]["deletionTimestamp"] = "now"
                self.api.put("/pods", pod)
            deployment = self._object("deployments", self.name)
            count = len([pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]])
            status = {
                "replicas": count,
                "updatedReplicas": count,
                "readyReplicas": len(self.endpoints()),
                "observedGeneration": 1,
            }
            if deployment["status"] != status or deployment["spec"]["replicas"] != self.replicas:
                self.api.put("apps/deployments", {**deployment, "status": status, "spec": {"replicas": self.replicas}})
            await asyncio.sleep(0.1)

    def _create(self) -> None:
        name = f"{self.name}-5f7-{next(self._names)}"
        labels = {"app": self.name}
        pod = {
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels, "ownerReferences": [self._owner]},
            "spec": {"nodeName": "node-1", "containers": [{"name": "vllm", "ports": [{"containerPort": PORT}]}]},
            "status": {"phase": "Pending"},
        }
        self.api.put("/pods", pod)
        self._tasks[name] = asyncio.create_task(self._kubelet(name, next(self._addresses)))

    async def _kubelet(self, name: str, address: str) -> None:
        """Starts a pod, probes it, and ends it when it is deleted."""
        folder = self.folder / name
        folder.mkdir(mode=0o700, parents=True)
        words = [sys.executable, "-m", "plimsoll", "standin", "--host", address, "--port", str(PORT)]
        words += [
            "--middleware",
            "plimsoll.inside.Gate",
            "--worker-extension-cls",
            "plimsoll.inside.Probe",
            "--shutdown-timeout",
            "15",
        ]
        with (folder / "engine.log").open("wb") as log:
            process = self.processes[name] = await asyncio.create_subprocess_exec(
                *words, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PLIMSOLL_TOKEN": TOKEN, "TMPDIR": str(folder), "PLIMSOLL_QUIET_S": "1"},
            )  # fmt: skip
        self._set(name, {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "False"}]})
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(2)) as session:
            while "deletionTimestamp" not in self.api.kind("/pods")[self.namespace, name]["metadata"]:
                is_ready = False
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"http://{address}:{PORT}/plimsoll/ready") as answer:
                        is_ready = answer.status == 200
                conditions = [{"type": "Ready", "status": str(is_ready)}]
                if self.api.kind("/pods")[self.namespace, name]["status"]["conditions"] != conditions:
                    self._set(name, {"phase": "Running", "podIP": address, "conditions": conditions})
                await asyncio.sleep(PROBE_S)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), GRACE_S)
        except TimeoutError:
            self.killed.append(name)
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        self.api.drop("/pods", self.namespace, name)

    def _set(self, name: str, status: dict[str, Any]) -> None:
        pod = self.api.kind("/pods")[self.namespace, name]
        self.api.put("/pods", {**pod, "status": status})

    async def until_ready(self, count: int, within_s: float = 300.0) -> None:
        end_s = time.monotonic() + within_s
        while len(self.endpoints()) < count:
            assert time.monotonic() < end_s, f"only {self.endpoints()} are ready"
            await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[StandIns]:
        controller = asyncio.create_task(self.run())
        try:
            await self.until_ready(self.replicas)
            yield self
        finally:
            for task in (controller, *self._tasks.values()):
                task.cancel()
            await asyncio.gather(controller, *self._tasks.values(), return_exceptions=True)
            for process in self.processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    async def fault(self, name: str, kind: str) -> None:
        """Makes a stand-in fail."""
        url = f"http://{self.api.kind('/pods')[self.namespace, name]['status']['podIP']}:{PORT}/standin/faults"
        async with aiohttp.ClientSession() as session, session.post(
            url, json={"kind": kind}, headers={"Authorization": f"Bearer {TOKEN}"}
        ) as answer:  # fmt: skip
            assert answer.status == 200, await answer.text()


class Clients:
    """Clients that send each request to a pod that is ready, as a Service would; one that is refused goes to another pod."""

    def __init__(self, fleet: StandIns, count: int = 8, *, tokens: int = 24, pause_s: float = 0.1, seed: int = 1) -> None:
        self._fleet, self._tokens, self._pause_s, self._dice = fleet, tokens, pause_s, random.Random(seed)
        self.done, self.lost = 0, list[Lost]()
        self.by_pod: Counter[str] = Counter()
        self._is_over = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(count)]

    async def _client(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
            while not self._is_over:
                began_s = time.monotonic()
                pod, why = "", "no pod is ready"
                for _ in range(20):
                    ready = self._fleet.endpoints()
                    if not ready:
                        await asyncio.sleep(0.25)
                        continue
                    pod = self._dice.choice(sorted(ready))
                    status, why = await self._ask(session, ready[pod])
                    if status not in (0, 503):  # refused, or nobody listens yet: nothing was begun there
                        break
                    await asyncio.sleep(0.05)
                if why:
                    self.lost.append(Lost(pod, began_s, why))
                else:
                    self.done += 1
                    self.by_pod[pod] += 1
                await asyncio.sleep(self._pause_s)

    async def _ask(self, session: aiohttp.ClientSession, address: str) -> tuple[int, str]:
        body = {"prompt": "a tale", "max_tokens": self._tokens, "ignore_eos": True, "stream": self._dice.random() < 0.5}
        try:
            async with session.post(f"http://{address}:{PORT}/v1/completions", json=body) as answer:
                text = await answer.text()
                is_whole = (
                    answer.status == 200 and '"finish_reason":"length"' in text.replace(": ", ":") and '"error"' not in text
                )
                return answer.status, "" if is_whole else f"{answer.status} {text[-200:]}"
        except aiohttp.ClientConnectorError:
            return 0, "refused"
        except (aiohttp.ClientError, TimeoutError) as problem:
            return -1, type(problem).__name__

    async def end(self) -> list[Lost]:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.lost
