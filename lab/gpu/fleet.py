"""Two engines on one card behind HAProxy, and trouble: the same incidents with nothing, with a supervisor, with plimsoll.

    python3 -m lab.gpu.fleet --kind gpu --fleets nothing,supervisor,plimsoll,plimsoll,plimsoll --work DIR     on the card
    python -m lab.gpu.fleet --kind cpu --fleets plimsoll --incidents killer --work DIR                      vLLM's CPU build
    python -m lab.gpu.fleet --kind standin --fleets nothing,plimsoll --work DIR                             a dry run
    python -m lab.fleet_score                                                                               the tables

Each word of --fleets is one fleet of two engines. All play side by side, each its own sequence of incidents; a word that
stands there three times is three rounds. What is in DIR/rows already is not played again, so that a run that was cut short goes
on where it stopped. Every incident ends with one JSON file: DIR/rows/INCIDENT-WAY-ROUND.json, with every request of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.gpu.fleet_parts import (
    LONGEST_PAUSE_S,
    LOOK_S,
    NAMES,
    NOTHING,
    PLIMSOLL,
    WAYS,
    Asked,
    Clients,
    EngineKind,
    Fleet,
    StandinKind,
    VllmKind,
    core_pid,
    engine_state,
    guardctl,
    rows_of,
)
from lab.gpu.models import make_models
from lab.gpu.provoke_failures import HERE, Ballast
from lab.gpu.survive_host import Host
from plimsoll.demo.balancer import ask

SCHEMA = "plimsoll.lab.fleet/1"
CLIENTS = 24
LEAD_S = 15.0  # of calm before each incident, with every engine in service
SETTLE_S = 5.0  # so long every engine must be in service before an incident counts as over
GUARD_BACK_S = 3.0  # until a guard that was killed is started again
LEAVE_MIB = 250  # that the neighbour leaves: a step of 8,192 tokens does not fit into it
ASKED_MIB = 500  # that it then asks for beyond what is free
NEIGHBOURS = {"killer": ("take",), "asker": ("ask", "ask-again")}  # what a neighbour on the card does in these incidents
SHORT_STEP = 600  # on the CPU build; the other clients' steps are smaller
FLAGS = (
    "--max-model-len", "8192", "--max-num-seqs", "64", "--gpu-memory-utilization", "0.05", "--max-num-batched-tokens", "8192",
    "--kv-cache-memory-bytes", str(3 << 30), "--enforce-eager",
)  # fmt: skip
CPU_FLAGS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "1024")


class Stage:
    """One fleet with its clients."""

    def __init__(self, fleet: Fleet, clients: Clients) -> None:
        self.fleet, self.clients, self.is_standin = fleet, clients, isinstance(fleet.kind, StandinKind)

    async def fault(self, name: str, how: str) -> None:
        """Break one engine: `core` and `api` are killed, `stopped` is a core that makes no more steps."""
        fleet = self.fleet
        pid = fleet.pid(name)
        if self.is_standin and how != "api":
            body = {"kind": "oom" if how == "core" else "wedge"}
            told = await ask(fleet.ports[name], "/standin/faults", body, token=fleet.token)
            assert told.status == 200, told
            if how == "stopped":
                fleet.hung.add(pid)
            return
        core = core_pid(pid) or pid
        os.kill(pid if how == "api" else core, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)

    async def restart(self, name: str) -> str:
        """A planned restart: guard's, or an operator's."""
        if self.fleet.way != PLIMSOLL:
            await self.fleet.person_restarts(name)
            return "by hand"
        return await guardctl(self.fleet, "restart", name, "--yes")

    async def until_step(self, step: str, within_s: float) -> bool:
        """Wait until guard has written down that it begins this step."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if any(begun == step for _, _, begun in self.fleet.steps_begun()):
                return True
            await asyncio.sleep(0.05)
        return False


Happening = Callable[[Stage, str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Incident:
    """One incident: what happens to which engine, and how long it is watched.

    What must be true at its end is judged from its row: `broken` and `ENDS` of lab/fleet_score.py.
    """

    name: str
    says: str
    happens: Happening
    limit_s: float
    may_lose: str = "nothing"  # or "running": what had begun to run on the broken engine; or "waiting" to be sent there
    breaks: int = 1  # engines that it takes out of service
    plimsoll_only: bool = False
    needs_vllm: bool = False
    needs_card: bool = False

    def runs_on(self, kind: str) -> bool:
        """Whether engines of this kind can have it."""
        return kind == "gpu" or not (self.needs_card or (self.needs_vllm and kind == "standin"))


async def planned(stage: Stage, victim: str) -> str:
    """A restart that somebody asks for."""
    return await stage.restart(victim)


def broken(how: str, *, both: bool = False) -> Happening:
    """The engine, or both, broken in this way."""

    async def happens(stage: Stage, victim: str) -> str:
        for name in NAMES if both else (victim,):
            await stage.fault(name, how)
        return how

    return happens


def guard_killed(step: str) -> Happening:
    """Guard killed in this step of a planned restart, and started again by its supervisor."""

    async def happens(stage: Stage, victim: str) -> str:
        told = await stage.restart(victim)
        reached = await stage.until_step(step, 60.0)
        await stage.fleet.guard.kill()
        await asyncio.sleep(GUARD_BACK_S)
        await stage.fleet.start_guard()
        return f"{told}; killed {'in' if reached else 'NOT in'} step {step}"

    return happens


async def burst(stage: Stage, victim: str) -> str:
    """As many long requests at once as fill both engines."""
    del victim
    count = 16 if stage.is_standin else 128
    await asyncio.gather(*(stage.clients.send(400, 300) for _ in range(count)))
    return f"{count} requests at once"


async def knob(stage: Stage, victim: str) -> str:
    """A knob turned under load, and back when its lease ends."""
    told = await guardctl(stage.fleet, "set", victim, "max-num-seqs=2", "--for", "10s")
    await asyncio.sleep(14.0)
    return told


async def compact(stage: Stage, victim: str) -> str:
    """What the allocator keeps and nobody uses is given back, between two steps."""
    told = await guardctl(stage.fleet, "compact", victim, "--yes")
    await asyncio.sleep(10.0)
    return told


async def shed(stage: Stage, victim: str) -> str:
    """Requests wait on both engines; one then refuses what would wait there, and the balancer takes it to the other."""
    fleet, count = stage.fleet, 192 if stage.is_standin else 64
    full = [asyncio.create_task(stage.clients.send(400, 600)) for _ in range(count)]
    await asyncio.sleep(4.0)  # an engine's speed is known when work has waited there for a while
    told = await ask(fleet.ports[victim], "/plimsoll/shed", {"max_wait_s": 0.05, "lease_s": 20}, token=fleet.token)
    assert told.status == 200, told
    await asyncio.gather(*full, *(stage.clients.send(400, 100) for _ in range(count // 3)))
    state = await engine_state(fleet, victim)
    return f"{count} requests and {count // 3} more; refused by it: {state.get('refused', {}).get('shed')}"


async def killer(stage: Stage, victim: str) -> str:
    """Memory is short on both engines; long prompts come that no step has room for, and clients send them again.

    On the card a neighbour takes it. On vLLM's CPU build every step of more than SHORT_STEP tokens runs out of memory.
    """
    del victim
    fleet = stage.fleet
    if fleet.kind.is_cpu:
        fleet.set_faults({"site": "forward", "above": SHORT_STEP})
        await asyncio.gather(*(stage.clients.send(1500, 16, seed=0) for _ in range(4)))
        fleet.set_faults()
    else:
        if await neighbour_did(fleet, "take") is None:
            return "no neighbour came"
        await asyncio.gather(*(stage.clients.send(4000, 16, seed=0) for _ in range(16)))
    return f"contained: {await contained(fleet)}"


async def asker(stage: Stage, victim: str) -> str:
    """A neighbour asks for more than the card has free: it gets it once both engines gave back what nobody used.

    Long prompts come before it, so that there is unused memory, and after it, when no step of theirs may have room.
    """
    del victim
    fleet = stage.fleet
    long_prompts = [(4000, 16)] * 16
    await asyncio.gather(*(stage.clients.send(*prompt, seed=0) for prompt in long_prompts))
    before = await neighbour_did(fleet, "ask")
    if before is None:
        return "no neighbour came"
    told = [await guardctl(fleet, "compact", name, "--yes") for name in NAMES]
    await asyncio.sleep(10.0)
    after = await neighbour_did(fleet, "ask-again")
    await asyncio.gather(*(stage.clients.send(*prompt, seed=0) for prompt in long_prompts))
    return f"asked for {ASKED_MIB} MiB more: {before}; after {told}: {after}; contained: {await contained(fleet)}"


async def contained(fleet: Fleet) -> str:
    """How many steps each engine has survived without memory."""
    states = [(await engine_state(fleet, name)).get("survive") or {} for name in NAMES]
    return ", ".join(str(state.get("contained", "none can be")) for state in states)


async def neighbour_did(fleet: Fleet, what: str) -> str | None:
    """What the neighbour got, once every fleet waits for it; None where none comes."""
    (fleet.folder / f"at-{what}").touch()
    done, end = fleet.folder.parent / f"did-{what}", time.monotonic() + 600.0
    while not done.exists():
        if time.monotonic() > end:
            return None
        await asyncio.sleep(0.2)
    return done.read_text(encoding="utf-8")


INCIDENTS = (
    Incident("planned", "an operator restarts one engine", planned, 150.0),
    Incident("core", "one engine core is killed", broken("core"), 120.0, "running"),
    Incident("api", "one API server is killed", broken("api"), 120.0, "running"),
    Incident("both", "both engine cores are killed at once", broken("core", both=True), 150.0, "running", breaks=2),
    Incident("guard-drain", "guard is killed in a drain", guard_killed("drain"), 150.0, plimsoll_only=True),
    Incident("guard-stop", "guard is killed in a stop", guard_killed("stop"), 180.0, plimsoll_only=True),
    Incident("guard-start", "guard is killed while the engine starts", guard_killed("ready"), 180.0, plimsoll_only=True),
    Incident("burst", "a burst fills both engines", burst, 60.0, breaks=0),
    Incident("knob", "max-num-seqs is turned to 2 for ten seconds", knob, 60.0, breaks=0, plimsoll_only=True),
    Incident("compact", "unused memory is given back under load", compact, 60.0, breaks=0, plimsoll_only=True),
    Incident("shed", "one engine refuses what would wait", shed, 90.0, breaks=0, plimsoll_only=True),
    Incident("stopped", "one engine core makes no more steps", broken("stopped"), 240.0, "running"),
    Incident("killer", "long prompts that no step has memory for", killer, 90.0, breaks=0, needs_vllm=True),
    Incident("asker", "a neighbour asks for more than is free", asker, 90.0, breaks=0, plimsoll_only=True, needs_card=True),
)  # fmt: skip
BY_NAME = {incident.name: incident for incident in INCIDENTS}


class Round:
    """One fleet's sequence of incidents."""

    def __init__(self, stage: Stage, rows: Path, number: int) -> None:
        self._stage, self._rows, self._number = stage, rows, number
        self._service: list[tuple[float, dict[str, bool], dict[str, int]]] = []

    async def look_on(self) -> None:
        """Who is in service, four times a second."""
        fleet = self._stage.fleet
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                seen = await fleet.in_service()
                self._service.append((time.time(), seen, {name: fleet.pid(name) for name in NAMES}))
            await asyncio.sleep(LOOK_S)

    async def _whole(self, for_s: float, within_s: float) -> float | None:
        """When every engine had come into service to stay so long; None where that did not happen in time."""
        end, since = time.time() + within_s, None
        while time.time() < end:
            at, seen, _ = self._service[-1] if self._service else (0.0, {}, {})
            since = (since or at) if seen and all(seen.values()) else None
            if since is not None and at - since >= for_s:
                return since
            await asyncio.sleep(LOOK_S)
        return None

    async def play(self, incident: Incident, place: int) -> dict[str, Any]:
        """From calm to calm; what a person had to do is counted."""
        stage, fleet = self._stage, self._stage.fleet
        victim = NAMES[(place + self._number) % len(NAMES)]
        await fleet.renew_guard()
        if await self._whole(LEAD_S, 240.0) is None:
            return {"incident": incident.name, "way": fleet.way, "round": self._number, "wrong": "not whole before it"}
        before = {name: fleet.pid(name) for name in NAMES}
        fault_at = time.time()
        told = await asyncio.wait_for(incident.happens(stage, victim), incident.limit_s + 600.0)
        left_s = max(5.0, incident.limit_s * fleet.kind.slowness - (time.time() - fault_at))
        if incident.breaks:  # a fault is not seen at once
            end = time.time() + min(left_s, 60.0)
            while time.time() < end and all(all(seen.values()) for at, seen, _ in self._service if at >= fault_at):
                await asyncio.sleep(LOOK_S)
        back_at = await self._whole(SETTLE_S, left_s)
        persons = 0 if back_at is not None else await fleet.person_mends()
        persons += fleet.way != PLIMSOLL and incident.name == "planned"
        end_at = time.time()
        looks = [look for look in self._service if look[0] >= fault_at - LEAD_S]
        row = {
            "schema": SCHEMA, "incident": incident.name, "way": fleet.way, "round": self._number, "victim": victim,
            "told": told, "fault_at": fault_at, "end_at": end_at, "back_at": back_at, "persons": persons, "before": before,
            "breaks": incident.breaks, "may_lose": incident.may_lose,
            "steps": [step for step in fleet.steps_begun() if step[0] >= fault_at] if fleet.is_ours else [],
            "looks": [[round(at - fault_at, 2), list(seen.values()), list(pids.values())] for at, seen, pids in looks],
        }  # fmt: skip
        asked = [one for one in stage.clients.asked if one.sent >= fault_at - LEAD_S]
        await self._settle(asked)
        row["asked"] = rows_of(asked)
        path = self._rows / f"{incident.name}-{fleet.way}-{self._number}.json"
        path.write_text(json.dumps(row), encoding="utf-8")
        return row

    async def _settle(self, asked: Sequence[Asked]) -> None:
        """Wait for the requests that were sent in it."""
        end = time.monotonic() + LONGEST_PAUSE_S + 30.0 * self._stage.fleet.kind.slowness
        while any(not one.over for one in asked) and time.monotonic() < end:
            await asyncio.sleep(0.2)


def left_to_play(way: str, number: int, work: Path, incidents: Sequence[Incident]) -> list[Incident]:
    """The incidents of this fleet that have no row yet."""
    return [
        incident for incident in incidents
        if (way == PLIMSOLL or not incident.plimsoll_only)
        and not (work / "rows" / f"{incident.name}-{way}-{number}.json").exists()
    ]  # fmt: skip


async def play_fleet(way: str, number: int, kind: EngineKind, work: Path, incidents: Sequence[Incident]) -> None:
    """One fleet from its start to its last incident."""
    rows = work / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    wanted = left_to_play(way, number, work, incidents)
    if not wanted:
        return
    fleet = Fleet(work / f"{way}-{number}-{os.getpid()}", way, kind)
    is_standin = isinstance(kind, StandinKind)
    clients = None
    try:
        began = time.time()
        await fleet.start()
        print(f"{way}-{number}: two engines in service after {time.time() - began:.0f} s", flush=True)
        clients = Clients(fleet.balancer.port, kind, 8 if is_standin or kind.is_cpu else CLIENTS, 7 * number)
        play = Round(Stage(fleet, clients), rows, number)
        looking = asyncio.create_task(play.look_on())
        for place, incident in enumerate(wanted):
            row = await play.play(incident, place)
            ends = [one["end"] for one in row.get("asked", ())]
            whole = f"after {row['back_at'] - row['fault_at']:.1f} s" if row.get("back_at") else "never"
            told = f"{row.get('wrong') or row['told'][:100]}; whole again {whole}; persons {row.get('persons')}"
            counts = {end: ends.count(end) for end in sorted(set(ends))}
            print(f"{way}-{number} {incident.name}: {told}; {counts}", flush=True)
        looking.cancel()
    finally:
        if clients is not None:
            await clients.finish(5.0)
        await fleet.stop()


def kind_of(name: str, work: Path) -> EngineKind:
    """The engines of this run."""
    if name == "standin":
        return StandinKind()
    host = Host(work, is_cpu=name == "cpu")
    if name == "cpu":
        return VllmKind(host, host.model_folder(""), CPU_FLAGS)
    models = json.loads((HERE / "failure_runs.json").read_text(encoding="utf-8"))["models"]
    make_models({key: models[key] for key in ("llama-3.1-8b", "llama-4-layers")}, work / "models")
    return VllmKind(host, work / "models" / "llama-4-layers", FLAGS)


async def run(options: argparse.Namespace) -> int:
    """Every fleet in a process of its own; the neighbour comes when all that want it are there."""
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    incidents = [BY_NAME[name] for name in options.incidents if BY_NAME[name].runs_on(options.kind)]
    if options.one:
        way, _, number = options.one.partition(":")
        await play_fleet(way, int(number), kind_of(options.kind, work), work, incidents)
        return 0
    for old in [*work.glob("*/at-*"), *work.glob("did-*")]:
        old.unlink()
    rounds = [(way, options.fleets[: place + 1].count(way)) for place, way in enumerate(options.fleets)]
    playing = []
    for way, number in rounds:
        words = [sys.executable, "-m", "lab.gpu.fleet", "--kind", options.kind, "--work", str(work)]
        words += ["--one", f"{way}:{number}", "--incidents", ",".join(incident.name for incident in incidents)]
        playing.append(await asyncio.create_subprocess_exec(*words))
        await asyncio.sleep(options.stagger)
    neighbours = [
        asyncio.create_task(be_neighbour(work, waiting, steps))
        for name, steps in NEIGHBOURS.items()
        if options.kind == "gpu" and BY_NAME[name] in incidents
        and (waiting := sum(BY_NAME[name] in left_to_play(way, count, work, incidents) for way, count in rounds))
    ]  # fmt: skip
    codes = await asyncio.gather(*(process.wait() for process in playing))
    for neighbour in neighbours:
        neighbour.cancel()
    await asyncio.gather(*neighbours, return_exceptions=True)
    return max(codes)


async def be_neighbour(work: Path, fleets: int, steps: Sequence[str], hold_s: float = 40.0) -> None:
    """Take all memory but a little when every fleet waits for it, ask for more when they wait for that, and go."""
    ballast = None
    try:
        for step in steps:
            while sum(1 for _ in work.glob(f"*/at-{step}")) < fleets:
                await asyncio.sleep(0.5)
            if ballast is None:
                ballast = await asyncio.to_thread(Ballast, work / f"ballast-{step}.log")
                for _ in range(4):  # what was just given back may take a moment
                    await asyncio.to_thread(ballast.tell, f"leave {LEAVE_MIB}")
                    await asyncio.sleep(0.5)
            did = "taken"
            if step != "take":
                got = await asyncio.to_thread(ballast.tell, f"hold {LEAVE_MIB + ASKED_MIB}")
                did = f"{'refused' if got['wrong'] else 'given'} with {got['free_mib']} MiB free"
            (work / f"did-{step}").write_text(did, encoding="utf-8")
        await asyncio.sleep(hold_s)
    finally:
        if ballast is not None:
            ballast.end()


def words_of(text: str) -> list[str]:
    """Words between commas."""
    return [word for word in text.split(",") if word]


def main(words: Sequence[str]) -> int:
    """Play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("gpu", "cpu", "standin"), required=True)
    parser.add_argument(
        "--fleets", type=words_of, default=[NOTHING, PLIMSOLL], help=f"of {', '.join(WAYS)}; a word may stand twice"
    )
    parser.add_argument("--incidents", type=words_of, default=[incident.name for incident in INCIDENTS])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between the starts of two fleets")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    for name in options.incidents:
        if name not in BY_NAME:
            parser.error(f"no incident {name}; there are {', '.join(BY_NAME)}")
    return asyncio.run(run(options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
