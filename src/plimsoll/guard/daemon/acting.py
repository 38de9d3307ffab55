"""The action runner: builds the adapters of every engine and runs the conductor. Without --act it is a dry run."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import os
import sys
import zoneinfo
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plimsoll.doctor.rules.trend_growth import duration
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.guard.act.decide import BlockedAction, Decision, FleetView
from plimsoll.guard.act.journal_entry import RESTART, SEEN, SWITCH, Entry, needed
from plimsoll.guard.act.journal_replay import (
    FUTURE_S,
    PAUSE,
    EngineProcess,
    KnownProcess,
    foreign_restarts,
    known_processes,
    last_starts,
    open_actions,
)
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import (
    JournalWriter,
    KnowsExit,
    Lock,
    Outcome,
    Restarter,
    SeesTraffic,
    ServerHealth,
    TurnsKnobs,
    done,
    failed,
    unsure,
)
from plimsoll.guard.act.steps import ActionRun, Step
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.device_memory import CardMemory, DeviceMemory
from plimsoll.guard.adapters.file_lock import FileLock
from plimsoll.guard.adapters.gate import GateHttpClient
from plimsoll.guard.adapters.hooks import ReadinessBalancer
from plimsoll.guard.adapters.kubernetes import Pod, PodConfig
from plimsoll.guard.adapters.locks import LeaseLock
from plimsoll.guard.adapters.own_process import OwnProcess
from plimsoll.guard.adapters.pods import PodStanding
from plimsoll.guard.adapters.run_command import in_thread, run_command
from plimsoll.guard.api.actions import ActionDesk
from plimsoll.guard.config import Files, GuardConfig
from plimsoll.guard.daemon.conductor import ActionPorts, Announcement, Conductor
from plimsoll.guard.daemon.engine_look import served_model, warm_up
from plimsoll.guard.daemon.evidence import EvidenceSources, EvidenceStore, LogDeath, death_in_log
from plimsoll.guard.daemon.journal import ABSENT, DAMAGED, Journal, read_journal
from plimsoll.guard.daemon.knob_settings import KnobSettings
from plimsoll.guard.daemon.manual_drain import ManualDrains, ReturnToService
from plimsoll.guard.daemon.observer import SYSTEM, Clocks, DiscoveredFacts, EngineCapabilities, Fleet, FleetObserver
from plimsoll.guard.daemon.quarantine import Quarantine
from plimsoll.guard.daemon.shared_state import SharedState
from plimsoll.guard.daemon.steps import LEARNED, EngineAdapters, SharedLock
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.look import BalancerHealth
from plimsoll.guard.judge.witness import FLOWING_S, SILENT_S
from plimsoll.hardware.processes import Mark, boot_mark, read_process, read_processes
from plimsoll.net.address import address
from plimsoll.net.client import HttpClient, Lost, bearer

READ_EVERY_S = 10.0


class DryRunJournal:
    """The journal of a dry run: reads the real one from time to time, and keeps new entries in memory."""

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        self._path, self._wall = path, wall
        self._entries: list[Entry] = []
        self._signature: list[tuple[int, int, int]] | None = None
        self._next_s = 0.0
        self.trouble = ""  # why earlier actions are unknown

    async def refresh(self, now_s: float) -> None:
        """Reads the file again if it has changed: an acting guard may be writing it."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + READ_EVERY_S
        # Every entry changes the file, or SQLite's write-ahead log beside it.
        files = [one.stat() for one in (self._path, self._path.with_name(f"{self._path.name}-wal")) if one.exists()]
        signature = [(file.st_ino, file.st_size, file.st_mtime_ns) for file in files]
        if signature == self._signature:
            return
        self._signature = signature
        reading = await asyncio.to_thread(read_journal, self._path)
        self._entries = list(reading.entries)  # an acting guard writes its own version of the entries in memory
        self.trouble = next((one.message for one in reading.wrong if one.kind != ABSENT), "")
        if any(one.kind == DAMAGED for one in reading.wrong):  # as an acting guard would do
            self.append(SWITCH, step=PAUSE, fields={"on": True})

    def append(
        self, kind: str, *, engine: str = "", action: str = "", step: str = "", fields: Mapping[str, Any] | None = None
    ) -> Entry:
        number = self._entries[-1].number + 1 if self._entries else 1
        self._entries.append(Entry(number, self._wall(), kind, engine, action, step, fields or {}))
        return self._entries[-1]

    def kept(self) -> list[Entry]:
        self._entries = needed(self._entries, self._wall())
        return list(self._entries)


class DryRunLock:
    """The lock of a dry run: never granted."""

    label = "no lock"

    async def acquire(self, _: str = "") -> Outcome:
        return failed("dry run (no --act): the lock is not taken")

    renew = release = acquire


MOST_A_ROUND = 20  # entries: each is synced to disk before the next


class ForeignRestarts:
    """Counts restarts that guard did not make, also those while it was away, by which process answers.

    `counts`: how often an engine's supervisor has restarted it by itself; None if unknown.
    """

    def __init__(
        self, conductor: Conductor, journal: JournalWriter, observer: FleetObserver, counts: Callable[[str], int | None]
    ) -> None:
        self._conductor, self._journal, self._observer, self._counts = conductor, journal, observer, counts
        self._totals: dict[str, int] = {}
        self._read: tuple[list[Entry], dict[str, KnownProcess]] = ([], {})  # the journal's state at the last round

    def note(self) -> None:
        """Runs one round, without the engines that guard itself is restarting."""
        runs = self._conductor.runs.items()
        at_work = {name for name, run in runs if run.is_down and run.step is not Step.PROBATION}
        if (entries := self._conductor.kept()) != self._read[0]:
            self._read = entries, known_processes(entries)
        known, left = self._read[1], MOST_A_ROUND
        for name in self._observer.engines():
            if name in at_work or left <= 0:
                continue
            life, before = self._observer.life(name), known.get(name, KnownProcess())
            if life.is_shared:  # several servers answer in turn: the process says nothing
                self._totals[name] = life.total
                continue
            count = self._counts(name)
            seen = EngineProcess(life.started, life.restarts if count is None else count)
            found = foreign_restarts(before, seen, max(0, life.total - self._totals.get(name, 0)))
            if found.is_new:
                left -= 1
                fields = {"started": found.seen.started, "count": found.seen.restarts, "awaited": found.is_awaited}
                fields |= {"own": False, "times": found.times} if found.times else {}  # it counts against the budget
                self._journal.append(RESTART if found.times else SEEN, engine=name, fields=fields)
            self._totals[name] = life.total


PAGE_MAX = 16 << 20
PAGE_S = 5.0
DOCTOR_S = 30.0
_hanging: set[str] = set()  # files of which a read has not returned


async def asked_of_disk(path: str, work: Callable[[], Any], unknown: Any) -> Any:
    """Returns what `work` reads of a file; `unknown` if it cannot be read or its disk (a lost NFS server) does not answer."""
    if path in _hanging:
        return unknown

    def read() -> Any:
        try:
            return work()
        finally:
            _hanging.discard(path)

    _hanging.add(path)
    try:
        return await asyncio.wait_for(in_thread(read), PAGE_S)
    except (OSError, TimeoutError):
        return unknown


DOCTOR_MAX = 4 << 20


class EngineEvidence:
    """Saves the evidence of one engine: log tail, metrics, gate state, stacks, and doctor's findings on them."""

    def __init__(self, store: EvidenceStore, engine: EngineConfig, log: str | None, restarter: Restarter | None) -> None:
        self._store, self._engine, self._log, self._restarter = store, engine, log, restarter

    async def take(self, engine: str, action: str) -> Outcome:
        """Writes the folder, and adds the codes that doctor finds in it."""
        pids = () if self._restarter is None else await self._restarter.pids()
        about = self._engine
        pages = {"metrics.txt": functools.partial(self._fetch, about.url, "/metrics")}
        if about.token is not None:
            for name in ("state", "memory"):
                place = about.gate_url or about.url, f"/plimsoll/{name}", about.token
                pages[f"{name}.json"] = functools.partial(self._fetch, *place)
        outcome = await self._store.take(engine, action, EvidenceSources(self._log, pids, pages))
        folder = outcome.facts.get("folder")
        codes = await doctor_on(Path(folder)) if outcome.is_done and isinstance(folder, str) else ""
        if codes:
            outcome = outcome._replace(message=f"{outcome.message}; doctor: {codes}", facts={**outcome.facts, "doctor": codes})
        return outcome

    async def _fetch(self, url: str, path: str, token: str | None = None) -> bytes:
        base = url.rstrip("/").removesuffix("/metrics")
        client = HttpClient(base if base.startswith("unix:") else address(base))
        headers = None if token is None else bearer(token)
        reply = await client.call("GET", path, b"", headers, deadline_s=PAGE_S, most_bytes=PAGE_MAX)
        if isinstance(reply, Lost):
            raise OSError(0, reply.why)
        return reply.body


async def doctor_on(folder: Path, *, limit_s: float = DOCTOR_S) -> str:
    """Returns the codes that doctor finds in a folder, by a separate process: whatever the logs hold, guard goes on."""
    words = (sys.executable, "-m", "plimsoll", "doctor", str(folder), "--json")
    ran = await run_command(words, limit_s, os.environ, only_stdout=True, keep_bytes=DOCTOR_MAX)
    try:
        found = json.loads(ran.output)
        with contextlib.suppress(OSError):
            (folder / "doctor.json").touch(mode=0o600)
            (folder / "doctor.json").write_bytes(ran.output)
        return ", ".join([str(one["code"]) for one in found["findings"]][:5])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


class EngineMemory:
    """The device memory one engine held when it was stopped, and whether it is free again."""

    def __init__(self, restarter: Restarter, device: DeviceMemory) -> None:
        self._restarter, self._device = restarter, device
        self._old: frozenset[Mark] = frozenset()
        self._before: list[CardMemory] | None = None

    async def note(self) -> None:
        """Records, before the stop, what it holds."""
        pids = await self._restarter.pids()
        found = [process for pid in pids if (process := read_process(pid)) is not None]
        self._old = frozenset((process.pid, process.start_ticks) for process in found)
        look = asyncio.to_thread(self._device.look, [process.pid for process in found])
        with contextlib.suppress(TimeoutError):  # the driver of a sick card may never answer
            self._before = await asyncio.wait_for(look, PAGE_S)

    async def wait_back(self, deadline_s: float) -> Outcome:
        """Waits until it is free. A guard that took over has no earlier figure: free memory must then stop growing."""
        if not self._old and not await self._restarter.pids():
            return done("its processes are not visible from here, nor what they held")
        return await self._device.wait_back(self._old, self._before, deadline_s)


def adapters_of(engine: EngineConfig, files: Files, own: OwnProcess | None = None) -> EngineAdapters:
    restarter = own or (engine.restart.build() if engine.restart is not None else None)
    log = str(files.own_log) if own is not None else engine.log
    gate = None if engine.token is None else GateHttpClient(engine.gate_url or engine.url, engine.token)
    evidence = EngineEvidence(EvidenceStore(files.evidence), engine, log, restarter)

    async def context() -> float | None:
        model = await served_model(engine.url, engine.api_key)
        return None if model is None else model.context

    async def log_size() -> object:
        return await asked_of_disk(log or "", lambda: Path(log or "").stat().st_size, None)

    return EngineAdapters(
        engine.name, gate, None if engine.balancer is None else engine.balancer.build(engine.name), restarter, evidence,
        None if restarter is None else EngineMemory(restarter, DeviceMemory()),
        lambda: warm_up(engine.url, engine.api_key), context, None if log is None else log_size,
    )  # fmt: skip


ROUND_S = 1.0
ENDED_EVERY_S = 5.0
ASKED_AT_ONCE = 16  # restarters: each question may start a process
RUNNING_POLLS = 3  # after which a person is taken to have started again what was stopped by hand
LOG_EVERY_S = CHECK_EVERY_S = 60.0
MAINTAINED = "an operator has it in maintenance at the balancer"
FORGOTTEN_S = 86_400.0  # a pause that lasts longer was forgotten
CLOCK_TOLD_S = 3_600.0  # how long a jump of the clock is reported
OF_GUARDS_UNIT = frozenset({
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "INVOCATION_ID",
    "PLIMSOLL_GUARD_TOKEN",
})  # fmt: skip
"""Variables that guard's own server does not get."""


class ActingSetup(NamedTuple):
    """The adapters of all engines, and the policy; discovered pods come and go."""

    adapters: dict[str, EngineAdapters]
    capabilities: dict[str, EngineCapabilities]
    policy: ActPolicy
    own: OwnProcess | None

    def add(self, engine: EngineConfig, adapters: EngineAdapters) -> None:
        self.adapters[engine.name] = adapters
        self.capabilities[engine.name] = EngineCapabilities(
            engine.group, engine.only_observed, has_gate=adapters.gate is not None, has_restarter=adapters.restarter is not None
        )


def set_up_acting(
    config: GuardConfig, engines: tuple[EngineConfig, ...], files: Files, command: tuple[str, ...] = ()
) -> ActingSetup:
    """Builds the adapters of every engine. `command` starts guard's own server, which is the first engine."""
    own = None
    if command:
        environment = {name: value for name, value in os.environ.items() if name not in OF_GUARDS_UNIT}
        own = OwnProcess(
            command, environment=environment, state_path=files.own_state, log_path=files.own_log, processes=read_processes,
            boot=boot_mark(), cgroup_parent=Path(config.own.cgroup) if config.own.cgroup else None,
        )  # fmt: skip
    setup = ActingSetup({}, {}, config.act or ActPolicy(), own)
    for place, engine in enumerate(engines):
        setup.add(engine, adapters_of(engine, files, own if place == 0 else None))
    return setup


class ActionRunner:
    """Runs actions, or with `is_dry` only announces them."""

    def __init__(
        self,
        setup: ActingSetup,
        config: GuardConfig,
        files: Files,
        fleet: Fleet,
        tell: Callable[[Announcement], None],
        *,
        is_dry: bool,
        clocks: Clocks = SYSTEM,
        open_journal: Callable[[Path], Journal] = Journal,
        standing: Callable[[str], PodStanding | None] = lambda _: None,
        pod: Callable[[str], Pod | None] = lambda _: None,
    ) -> None:
        """`standing` returns the cluster's reasons for and against an action on an engine that is a pod."""
        self._setup, self._tell, self._is_dry, self._files, self._clocks = setup, tell, is_dry, files, clocks
        self._fleet, self._standing = fleet, standing
        self._pods: dict[str, EngineConfig] = {}  # discovered engines that may be acted on
        self.exits: dict[str, ExitReport] = {}
        self._running: dict[str, int] = {}  # polls in a row in which an engine that a person stopped ran again
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._polled_s: dict[str, float] = {}
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._traffic: dict[str, BalancerTraffic] = {}
        self._served: frozenset[str] | None = None  # engines that answered before guard began, by the journal
        self._logs = {engine.name: engine.log for engine in config.engines if engine.log}
        self._has_own_run = False
        zone = datetime.UTC if setup.policy.timezone == "UTC" else zoneinfo.ZoneInfo(setup.policy.timezone)

        def minute() -> int:
            now = datetime.datetime.fromtimestamp(clocks.wall(), zone)
            return now.hour * 60 + now.minute

        self.observer = FleetObserver(
            fleet,
            self._capabilities,
            fleet.every_s,
            clocks.clock,
            minute,
            lambda: self.conductor.last_ends(),  # noqa: PLW0108 - made below
        )
        self.shared: SharedState | None = None
        self._quarantine: Quarantine | None = None
        self.desk: ActionDesk | None = None
        self._drains: ManualDrains | None = None
        self._back: ReturnToService | None = None
        self._knobs: KnobSettings | None = None
        self._said: dict[str, str] = {}
        self._own_waits_for = ""
        self._clock_ahead_s = clocks.wall() - clocks.clock()
        self._jumped = (-CLOCK_TOLD_S, "")  # when the wall clock last jumped, and how
        self._well_since: dict[str, float] = {}  # engines that guard gave up on and that are healthy now
        self._returns: dict[str, asyncio.Task[Decision]] = {}
        self._dry = DryRunJournal(files.journal, clocks.wall)
        self.journal = None if is_dry else open_journal(files.journal)
        journal: JournalWriter = self.journal or self._dry
        fleet_lock: Lock = DryRunLock() if is_dry else FileLock(files.lock) if config.lock is None else config.lock.build()
        if isinstance(fleet_lock, FileLock):
            fleet_lock.above = self.observer.highest_epoch
        lock = SharedLock(fleet_lock)
        lease = fleet_lock if isinstance(fleet_lock, LeaseLock) else None
        if lease is not None and self.journal is not None:
            self.shared = SharedState(self.journal, lease, clocks.wall)
        ports = ActionPorts(
            journal, lock, self.observer, self._view, tell, clocks.wall, clocks.name, self.observer.is_quiet,
            (lambda: "") if lease is None else (lambda: lease.paused), self.shared, fleet.incidents.of,
        )  # fmt: skip
        adapters = setup.adapters
        for name, one in adapters.items():
            adapters[name] = one._replace(ask_balancer=functools.partial(self._ask_about, name))
        self.conductor = Conductor(adapters, setup.policy, ports, pause_s=ROUND_S, restore=self._restore)

        def count(name: str) -> int | None:
            return getattr(adapters[name].restarter, "restarts_seen", None) if name in adapters else None

        self._foreign = ForeignRestarts(self.conductor, journal, self.observer, count)
        if self.journal is not None:
            by_hand, back = ports._replace(lock=lock.other()), ports._replace(lock=lock.other())
            self._drains = ManualDrains(adapters, setup.policy, by_hand, self.conductor.runs)
            self._back = ReturnToService(adapters, setup.policy, back, self.conductor)
            gates = {name: one.gate if isinstance(one.gate, TurnsKnobs) else None for name, one in adapters.items()}
            self._knobs = KnobSettings(gates, self.journal, lock.other(), fleet.remark, clocks.wall)
            self.desk = ActionDesk(self.conductor, self._drains, self.journal, self.journal.path, self._back, self._knobs)
            found = config.discover.kubernetes
            if found is not None and found.quarantine_label and found.act:
                apart, kept = ports._replace(lock=lock.other()), self.conductor.kept
                self._quarantine = Quarantine(found.quarantine_label, apart, setup.policy, ClusterClient(), pod, kept)
                span_s, begin = found.quarantine_s, self._quarantine.begin
                self.desk.quarantines = lambda engine, who: begin(engine, span_s, who)

    def watch(self, targets: Sequence[EngineConfig]) -> None:
        """Takes up newly discovered pods, and drops those that are gone and have no action in progress."""
        found = {target.name: target for target in targets if isinstance(target.restart, PodConfig) and target.restart.uid}
        busy = self.conductor.engines_at_work()
        for name in [name for name, known in self._pods.items() if found.get(name) != known and name not in busy]:
            for table in (self._pods, self._setup.adapters, self._setup.capabilities, self._polled_s, self.exits):
                table.pop(name, None)
        for name, target in found.items():
            if name not in self._setup.adapters:
                ask_balancer = functools.partial(self._ask_about, name)
                self._setup.add(target, adapters_of(target, self._files)._replace(ask_balancer=ask_balancer))
                self._pods[name] = target

    def _restore(self, run: ActionRun) -> EngineAdapters | None:
        """Returns the adapters of a pod on which an earlier guard was acting and that has gone since; None if it is unknown."""
        known = {name: str(run.facts.get(LEARNED + name, "")) for name in ("pod", "namespace", "selector", "uid")}
        if not known["pod"] or not known["uid"]:
            return None
        try:
            restarter = PodConfig(**known, is_owner_checked=True).build()
        except BadInput:
            return None
        return EngineAdapters(run.engine, balancer=ReadinessBalancer(), restarter=restarter)

    def _capabilities(self, name: str) -> EngineCapabilities:
        found = self._setup.capabilities.get(name, EngineCapabilities(only_observed="no actions are configured for it"))
        return found._replace(pod=self._standing(name)) if name in self._pods else found

    def _view(self, at_work: frozenset[str]) -> FleetView:
        if self._is_dry:  # actions an earlier guard left would come first
            at_work |= {run.engine for run in open_actions(self.conductor.kept())}
        view = self.observer.view(at_work)
        stopped = {name: MAINTAINED for name, is_maintained in self.observer.maintained.items() if is_maintained}
        stopped |= {name: report.stopped for name, report in self.exits.items() if report.stopped}
        engines = [one._replace(only_observed=stopped.get(one.name, "") or one.only_observed) for one in view.engines]
        return view._replace(engines=engines) if stopped else view

    async def _mind_own(self, own: OwnProcess) -> None:
        """Starts guard's own server whenever it does not run and nobody stopped it.

        The first start is a plain start, a later one is a restart. WorldFailed if the first start fails.
        """
        name = next(name for name, adapters in self._setup.adapters.items() if adapters.restarter is own)
        is_running = await own.is_running()
        if is_running or name in self.conductor.runs:
            self._own_waits_for, self._has_own_run = "", self._has_own_run or bool(is_running)
            return
        last = await own.last_exit() if is_running is False else None
        has_ended = last is not None and bool(last.is_done)
        # A process that ended before guard began does not count against the budget.
        why = "" if self._is_dry else self.conductor.why_not_start(name, is_counted=self._has_own_run and has_ended)
        if why and why != self._own_waits_for:
            self._tell(Announcement(name, f"guard's own server is not started: {why}"))
        self._own_waits_for = why
        if why or (self._is_dry and self._has_own_run):
            return
        if last is not None and has_ended and not self._is_dry:
            self.conductor.start(name, f"guard's own server is not running: {last.message}")
            return
        outcome = await own.start()
        if not outcome.is_done:
            raise WorldFailed(f"the server did not start: {outcome.message}")
        self._has_own_run = True
        self._tell(Announcement(name, outcome.message))

    async def run(self) -> None:
        """Runs for ever: first takes over what an earlier guard left, then round after round."""
        if not self._is_dry:
            with self.conductor.stopping():
                if self.shared is not None:
                    await self.shared.begin()
                await self.conductor.take_over()  # what must wait for the lock is retried in later rounds
        log_s = check_s = 0.0
        turn: asyncio.Task[None] | None = None
        beside: dict[str, asyncio.Task[None]] = {}

        def keep_running(name: str, work: Callable[[], Awaitable[None]]) -> None:
            if not self.conductor.stopped_acting and (name not in beside or beside[name].done()):
                beside[name] = asyncio.create_task(self._tried(work))

        try:
            while True:
                now_s = self._clocks.clock()
                if self.shared is not None:
                    keep_running("sharing", self.shared.run)
                if self._setup.own is not None:
                    await self._mind_own(self._setup.own)
                    if now_s >= log_s:
                        await self._setup.own.rotate_log()
                        log_s = now_s + LOG_EVERY_S
                self._poll(now_s)
                await self._round()
                self._return_recovered(now_s)
                if self._quarantine is not None:
                    keep_running("quarantine", self._quarantine.look)
                if self._knobs is not None:
                    keep_running("knobs", functools.partial(self._knobs.look, now_s))
                if self.journal is not None and now_s >= check_s and not self.conductor.stopped_acting:
                    check_s = now_s + CHECK_EVERY_S
                    with self.conductor.stopping():
                        self.journal.check()  # known before it is needed
                if not self._is_dry and (turn is None or turn.done()):
                    if turn is not None:
                        turn.result()  # an internal error ends guard
                    turn = asyncio.create_task(self.conductor.turn())
                await asyncio.sleep(ROUND_S)
        finally:
            tasks = [*beside.values(), *self._polls.values(), *self._returns.values(), *([] if turn is None else [turn])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tried(self, work: Callable[[], Awaitable[None]]) -> None:
        with self.conductor.stopping():
            await work()

    async def _round(self) -> None:
        if self._is_dry:
            await self._dry.refresh(self._clocks.clock())
        if not self.conductor.stopped_acting:
            with self.conductor.stopping():
                self._foreign.note()
                if not self._is_dry:
                    self.conductor.help_broken()
        if self._is_dry:
            self._announce_decisions()

    def _return_recovered(self, now_s: float) -> None:
        """Puts an engine back in rotation that guard gave up on, once it has been healthy for as long as a probation lasts."""
        if self._back is None or self.conductor.stopped_acting:
            return
        held = [name for name, end in self.conductor.last_ends().items() if end.is_out]
        self._well_since = {
            name: self._well_since.get(name, now_s)
            for name in held
            if self.observer.is_well(name) and name not in self.conductor.runs and not self.conductor.is_off(name)
        }
        for name, since_s in self._well_since.items():
            if now_s - since_s >= self._setup.policy.probation_s:
                self._well_since[name] = now_s  # the next try comes after as long
                self._returns[name] = asyncio.create_task(self._back.put_back(name, is_recovered=True))

    def _announce_decisions(self) -> None:
        """Announces every decision once, a plan with all its steps."""
        said: dict[str, str] = {}
        if self._dry.trouble:
            said[""] = f"earlier actions are unknown and do not count: {self._dry.trouble}"
        lines: dict[str, list[str]] = {}
        for one in self.conductor.decisions():
            said[one.engine] = f"{one.kind}: {one.reason if isinstance(one, BlockedAction) else ''}"
            if isinstance(one, BlockedAction):
                lines[one.engine] = [f"{one.grade} blocked: {one.message}"]
            else:
                lines[one.engine] = [f"with --act guard would {one.grade} it: {one.why}", *one.lines()]
        for engine, what in said.items():
            if self._said.get(engine) != what:
                for line in lines.get(engine, [what]):
                    self._tell(Announcement(engine, line))
        self._said = said

    def _poll(self, now_s: float) -> None:
        """Asks restarters and balancers about every engine at intervals, and each second about one that does not answer."""
        if self._served is None:
            self._served = frozenset(name for name, known in known_processes(self.conductor.kept()).items() if known.seen)
        for name in self._setup.adapters:
            task = self._polls.get(name)
            is_lost = self.observer.is_lost(name)
            is_hurried = is_lost or self.conductor.is_draining  # guard must know at once if another engine leaves now
            if task is not None and task.done() and not task.cancelled():
                task.result()  # an internal error ends guard
            if (task is None or task.done()) and (is_hurried or now_s >= self._polled_s.get(name, 0.0) + ENDED_EVERY_S):
                self._polled_s[name] = now_s
                self._polls[name] = asyncio.create_task(self._ask_about(name))
            if is_lost and (self.exits.get(name, NO_EXIT).ended or self.exits.get(name, NO_EXIT).gone):
                self._fleet.hurry(name)  # an engine that has ended gets its look at once

    async def _ask_about(self, name: str) -> None:
        adapters, run = self._setup.adapters[name], self.conductor.runs.get(name)
        is_at_work = run is not None and run.step is not Step.PROBATION
        async with self._asking:
            if not is_at_work:  # guard's own action is no news: keep the earlier report
                self.exits[name] = await self._exit_of(name, adapters)
                self.observer.asked_s = {**self.observer.asked_s, name: self._clocks.clock()}
            balancer: object = adapters.balancer
            if not isinstance(balancer, SeesTraffic):
                return
            health = await balancer.health()
        if health is not None:  # as last known: a silent balancer does not end a maintenance
            self.observer.maintained = {**self.observer.maintained, name: health.is_maintained}
        before = self._traffic.get(name, BalancerTraffic())
        is_down = None if health is None else health.is_down
        if is_at_work:  # during guard's own drain a check proves nothing; one that passes takes back that it failed before
            is_down = None if health is None or is_down is False else before.is_down or None
        self.observer.failing = {**self.observer.failing, name: is_down is True}
        self._traffic[name] = before.seen(self._clocks.clock(), health, is_down=is_down)

    async def _exit_of(self, name: str, adapters: EngineAdapters) -> ExitReport:
        """Returns how it ended; a stop by hand stays known until the engine is seen again or is said to have crashed."""
        report, before = await exit_report(adapters, self._logs.get(name)), self.exits.get(name, NO_EXIT)
        if not before.stopped or report.ended or not self.observer.is_lost(name):
            return report
        # Somebody may have started it again; a supervisor that tells one thing and then another is not believed at once.
        is_running = adapters.restarter is not None and await adapters.restarter.is_running() is True
        self._running[name] = self._running.get(name, 0) + 1 if is_running else 0
        return report if self._running[name] >= RUNNING_POLLS else before

    def facts(self, name: str) -> DiscoveredFacts:
        """Returns the facts about an engine from its restarter, its balancer and the journal."""
        report, traffic = self.exits.get(name, NO_EXIT), self._traffic.get(name)
        health = None if traffic is None else traffic.health(self._clocks.clock())
        has_served = self._served is not None and name in self._served
        return DiscoveredFacts(None, report.ended, report.gone, report.failure, report.requests, has_served, health)

    def impairments(self) -> dict[str, str]:
        """Returns the reasons why guard cannot or may not act, by subject."""
        if self._is_dry:
            return {}
        conductor = self.conductor
        troubles = {"journal": conductor.stopped_acting, "lock": conductor.lock_trouble, "epoch": conductor.epoch_trouble}
        impairments = {subject: f"guard cannot act: {why}" for subject, why in troubles.items() if why}
        if self.shared is not None and self.shared.trouble:
            impairments["Lease"] = f"the next guard would not know of what is done: {self.shared.trouble}"
        if cut_off := self.observer.cut_off():
            impairments["network"] = cut_off
        now = self._clocks.wall()
        impairments |= self._clock_troubles(now, self._clocks.clock())
        for engine, (since, who) in self.conductor.pauses().items():
            if now - since >= FORGOTTEN_S:
                whom = f" {engine}" if engine else ""
                by = f" by {who}" if who else ""
                impairments[f"pause{whom}"] = f"paused{by} for more than a day: guardctl resume{whom} ends it"
        return impairments

    def slow_starts(self) -> dict[str, str]:
        """Returns engines whose next start guard would give up: the last one took longer than the configuration waits."""
        most_s, starts = self._setup.policy.start_within_s, last_starts(self.conductor.kept())
        took = {name: max(starts.get(name, 0.0), self.observer.longest_start_s(name)) for name in self._setup.adapters}
        return {
            name: f"its last start took {took_s:.0f} s, and guard gives one up after {most_s:.0f} s: set start_within in [act]"
            for name, took_s in took.items()
            if took_s > most_s
        }

    def _clock_troubles(self, now: float, now_s: float) -> dict[str, str]:
        """Returns why the wall clock is not to be trusted: it jumped lately, or the journal has later entries."""
        moved_s, troubles = now - now_s - self._clock_ahead_s, {}
        if abs(moved_s) > FUTURE_S:
            self._clock_ahead_s = now - now_s
            way = "ahead" if moved_s > 0 else "back"
            self._jumped = now_s, f"the clock of this machine jumped {way} by {duration(abs(moved_s))}"
        if now_s - self._jumped[0] < CLOCK_TOLD_S:
            troubles["clock"] = f"{self._jumped[1]}: restart budgets and cooldowns count by it; check the time"
        later_s = max((entry.at for entry in self.conductor.kept()), default=now) - now
        if later_s > FUTURE_S:
            troubles["journal's times"] = (
                f"the clock of this machine is {duration(later_s)} behind guard's journal: what was restarted then counts with"
                " what was before it; check the time"
            )
        return troubles

    async def runs_on(self) -> str:
        """Returns a line that says that guard's own server keeps running, and how to stop it; empty if there is none."""
        own = self._setup.own
        pids = () if own is None or not await own.is_running() else await own.pids()
        if not pids:
            return ""
        return f"guard's own server keeps running as pid {pids[0]}: the next guard finds it, kill {pids[0]} stops it"

    async def close(self) -> None:
        """Stops at once. Open actions are left to the next guard, or to their leases; the engines go on."""
        if self._drains is not None:
            await self._drains.close()
        if self._back is not None:
            await self._back.close()
        await self.conductor.close()
        if self.journal is not None:
            self.journal.close()


class ExitReport(NamedTuple):
    """The end of an engine: by itself (`ended`), by an operator (`stopped`), or without a known reason (`gone`)."""

    ended: str = ""
    stopped: str = ""
    gone: str = ""
    failure: str = ""  # the kind of failure, where known
    requests: str = ""  # the shapes of those that it had begun


NO_EXIT = ExitReport()
NO_CRASH = (0, 130, 137, 143)  # exit codes that a stop may cause
NATIVE_CRASHES = {132: "SIGILL", 134: "SIGABRT", 135: "SIGBUS", 136: "SIGFPE", 139: "SIGSEGV"}


async def exit_report(adapters: EngineAdapters, log: str | None = None) -> ExitReport:
    """Returns how its process ended, by its supervisor and the end of its log."""
    restarter = adapters.restarter
    if restarter is None:
        return NO_EXIT
    outcome = await restarter.last_exit() if isinstance(restarter, KnowsExit) else unsure("")
    facts = outcome.facts
    if facts.get("asked") or outcome.is_done is False:
        return NO_EXIT
    if outcome.is_done is None and (restarter.replaces or await restarter.is_running() is not False):
        return NO_EXIT
    line, failure, requests = await asked_of_disk(log, lambda: death_in_log(log), LogDeath()) if log else LogDeath()
    code = facts.get("exit_code")
    if not failure and isinstance(code, int):
        failure = NATIVE_CRASHES.get(code, "")
    if outcome.is_done and not facts.get("by_hand"):
        return ExitReport(outcome.message, failure=failure, requests=requests)
    if outcome.is_done and not (facts.get("inferred") and line):
        return ExitReport(stopped=outcome.message)
    if facts.get("oom_killed") is True or (isinstance(code, int) and code not in NO_CRASH):
        return ExitReport(f"its process ended with exit code {code}", failure=failure, requests=requests)
    if line:
        return ExitReport(f"its process has ended, and its log ends with {line!r}", failure=failure, requests=requests)
    return ExitReport(gone="its restarter says that it does not run")


class BalancerTraffic(NamedTuple):
    """A balancer's counts of one engine's answers, from poll to poll."""

    is_down: bool | None = None
    total: int | None = None  # bytes of answers
    since_s: float = 0.0  # when the count last changed
    has_changed: bool = False  # it was seen to change
    busy: int = 0  # requests with the engine
    ended: int | None = None  # requests that have ended
    is_live: bool = False  # the balancer counts bytes while a request lasts, as HAProxy does with `option contstats`

    def seen(self, now_s: float, found: ServerHealth | None, *, is_down: bool | None) -> BalancerTraffic:
        if found is None or found.total is None:
            return BalancerTraffic(is_down, None, now_s)
        if self.total is None or found.total < self.total:  # a reload of the balancer resets its counts
            return BalancerTraffic(is_down, found.total, now_s, busy=found.busy, ended=found.ended)
        has_grown = found.total > self.total
        is_within = bool(self.busy and found.busy and self.ended is not None and found.ended == self.ended)
        return BalancerTraffic(
            is_down, found.total, now_s if has_grown else self.since_s, self.has_changed or has_grown,
            found.busy, found.ended, self.is_live or (has_grown and is_within),
        )  # fmt: skip

    def health(self, now_s: float) -> BalancerHealth:
        silent_s, unseen = now_s - self.since_s, 0 if self.is_live else self.busy
        is_known = self.total is not None and (self.has_changed or silent_s >= SILENT_S)
        # Recent bytes prove a flow; their absence proves silence only if bytes are counted while a request lasts.
        if unseen and silent_s >= FLOWING_S:
            return BalancerHealth(self.is_down, None, unseen)
        return BalancerHealth(self.is_down, silent_s if is_known else None)
