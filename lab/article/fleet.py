"""The demo's fleet under one of three watchers: nobody, the article's sidecar beside each engine, or guard.

Everything else is the same: three stand-ins with one command, and HAProxy (or the demo's own balancer) that asks /health, as
before any plain vLLM. Guard has its defaults; all times, everybody's, are divided by the same scale.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from lab.article.sidecar import EVERY_S
from lab.haproxy import Checks, RunningHAProxy
from plimsoll.demo.balancer import HOST, DemoBalancer
from plimsoll.demo.fleet import GPU, MODEL, NAMES, DemoFleet, end_process
from plimsoll.errors import WorldFailed
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.config_fields import declared
from plimsoll.guard.judge.policy import THRESHOLDS

ROOT = Path(__file__).resolve().parents[2]
NOBODY, SIDECAR, GUARD = WATCHERS = ("nobody", "sidecar", "guard")
# No --shutdown-timeout, as in the article's script: a stop ends what runs, as systemd's SIGTERM to every process does.
SERVE = (MODEL, "--max-model-len", "8192", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.85")
INSIDE = ("--middleware", "plimsoll.inside.Gate", "--worker-extension-cls", "plimsoll.inside.Probe")
START_S = 60.0  # that an engine needs until it serves
STOP_S = 90.0  # from SIGTERM to SIGKILL: systemd's own default
WEDGE_S, CANARY_S, SAMPLE_S, CANARY_EVERY_S, LOOK_S = 120.0, 30.0, 1.0, 30.0, 5.0  # the gate's and guard's own defaults
LEAST_EVERY_S = 1.0  # guard looks no more often


class WatchedFleet(DemoFleet):
    """`scale` is how many times as fast as on a real machine everything goes."""

    def __init__(self, folder: Path, watcher: str, scale: float, *, use_haproxy: bool) -> None:
        assert watcher in WATCHERS, watcher
        # HAProxy's own defaults; an answer may take longer than any client waits for it, and a check as long as it must.
        self.checks = Checks("/health", f"inter {max(500.0, 2_000 / scale):.0f}ms fall 3 rise 2", "10s", "600s")
        self._use_haproxy = use_haproxy
        super().__init__(folder, speed=scale)
        self.watcher, self._scale = watcher, scale
        self.start_s = 60.0 + 2 * START_S / scale
        self._sidecars: list[asyncio.subprocess.Process] = []

    def make_balancer(self, token: str) -> Any:
        """HAProxy, or the demo's own."""
        if self._use_haproxy:
            return RunningHAProxy(self.folder, self.ports, self.checks)
        return DemoBalancer(self.ports, token, self.checks.path)

    def words(self, name: str) -> list[str]:
        """The stand-in's command: the same for all three watchers."""
        speed = ["--speed", f"{self._scale:g}", "--start-seconds", f"{START_S:g}"]
        return ["standin", "--gpu", GPU, *speed, "--port", str(self.ports[name]), *INSIDE, *SERVE]

    def environment(self, name: str) -> dict[str, str]:
        """As the demo has it, with the gate's own times."""
        times = {"PLIMSOLL_WEDGE_S": WEDGE_S, "PLIMSOLL_CANARY_S": CANARY_S, "PLIMSOLL_SAMPLE_S": SAMPLE_S}
        return {**super().environment(name), **{key: f"{value / self._scale:g}" for key, value in times.items()}}

    def config(self) -> str:
        """Guard's: what it has without a word, divided by the scale; the journal, and a canary as `assets` writes it."""
        places = f'[api]\nlisten = "{HOST}:{self.guard.port}"\ntoken_file = "api.token"\n'
        return "\n".join([places, *scaled_numbers(self._scale), *(self._table(name) for name in NAMES)])

    def _table(self, name: str) -> str:
        return f'{super()._table(name)}canary = "{max(5.0, CANARY_EVERY_S / self._scale):g}s"\n'

    async def start(self) -> None:
        """Until the balancer, too, has found every engine."""
        await super().start()
        end_s = asyncio.get_running_loop().time() + self.start_s
        while sum((await self.balancer.takes_work()).values()) < len(NAMES):
            if asyncio.get_running_loop().time() > end_s:
                raise WorldFailed("the balancer did not find every engine in time")
            await asyncio.sleep(0.2)

    async def _watch(self) -> None:
        if self.watcher == GUARD:
            await super()._watch()
        for place, name in enumerate(NAMES if self.watcher == SIDECAR else ()):
            if place:  # nobody starts them in the same moment
                await asyncio.sleep(EVERY_S / len(NAMES) / self._scale)
            self._sidecars.append(await self._sidecar(name))

    async def _sidecar(self, name: str) -> asyncio.subprocess.Process:
        ctl = f"/bin/sh {shlex.quote(str(self.folder / 'ctl'))} {name}"
        words = [f"http://{HOST}:{self.ports[name]}", "--scale", f"{self._scale:g}", "--"]
        environment = {**os.environ, "PLIMSOLL_DEADLINE_S": f"{STOP_S / self._scale:g}"}
        with self.said_by_sidecar(name).open("ab") as out:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "lab.article.sidecar", *words, "/bin/sh", "-c", f"{ctl} stop; {ctl} start",
                stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=asyncio.subprocess.DEVNULL, cwd=ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def said_by_sidecar(self, name: str) -> Path:
        """Where its lines are."""
        return self.folder / name / "sidecar.said"

    async def stop(self) -> None:
        """The sidecars first, so that they start nothing any more."""
        for process in self._sidecars:
            await end_process(process, 1.0)
        await super().stop()


def scaled_numbers(scale: float) -> list[str]:
    """Every time of guard's policy and of its actions, divided by the scale, or the least that guard takes."""
    lines = ["[policy]", f'every = "{max(LEAST_EVERY_S, LOOK_S / scale):g}s"']
    for kind in dict.fromkeys(knob.kind for knob in THRESHOLDS):
        times = [knob for knob in THRESHOLDS if knob.kind == kind and knob.unit == "s"]
        lines += [f"[policy.{kind}]", *(f'{one.name} = "{max(one.low, one.default / scale):g}s"' for one in times)]
    lines += ["[act]", 'journal = "state/guard.journal"', 'evidence = "state/evidence"']
    for _, key in declared(ActPolicy):
        if key.kind == "time" and isinstance(key.default, float):
            lines.append(f'{key.name} = "{max(key.low, key.default / scale):g}s"')
    return lines
