"""Runs guard: discovery, fleet, action runner, API, notifications and systemd, until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import re
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.findings import Severity
from plimsoll.guard.act.steps import Step
from plimsoll.guard.adapters.cluster import LEASE_NAME, ClusterClient
from plimsoll.guard.adapters.discovery import FileFinder, Finder
from plimsoll.guard.adapters.identities import ClusterIdentities
from plimsoll.guard.adapters.locks import LeaseLockConfig
from plimsoll.guard.adapters.pod_events import PodEvents
from plimsoll.guard.adapters.pods import PodFinder, PodStanding
from plimsoll.guard.adapters.webhook import DeliveryCounts
from plimsoll.guard.api.api import GuardApi, GuardHealth
from plimsoll.guard.api.token import remove_token, token_path, write_token
from plimsoll.guard.config import GuardConfig, files_of
from plimsoll.guard.daemon.acting import ActionRunner, set_up_acting
from plimsoll.guard.daemon.conductor import Announcement
from plimsoll.guard.daemon.engine_look import CanaryPlan, EngineWatcher
from plimsoll.guard.daemon.host import SameHost
from plimsoll.guard.daemon.knob_advice import KnobAdvisor
from plimsoll.guard.daemon.observer import SYSTEM, Clocks, DiscoveredFacts, Fleet, ObserverPorts
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.guard.judge.findings import severity_of
from plimsoll.guard.judge.look import Reach
from plimsoll.guard.judge.policy import Policy
from plimsoll.launch.check_flags import with_config
from plimsoll.launch.command_line import CommandLine, EntryPoint, UnresolvedWords, config_of, find_launch, read_command_line
from plimsoll.net.address import address
from plimsoll.net.client import bearer
from plimsoll.net.server import GuardServer, Identify
from plimsoll.redaction import clean
from plimsoll.render.guard import Event, EventKind, Trouble, alert, line_json, sentence, status_line
from plimsoll.render.journal import ACTING
from plimsoll.vllm.versions import engine_named

PORT = "8000"  # vLLM's own
CONNECTORS = ("--kv-transfer-config", "--ec-transfer-config")
SEVERAL = (
    "--data-parallel-address", "--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-hybrid-lb",
    "--data-parallel-external-lb",
)  # fmt: skip
"""Flags that only a server across several machines has."""
_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}  # noqa: S104  (what to ask, not where to listen)
_WHERE = "give its address: plimsoll guard --engine http://HOST:PORT -- COMMAND"


class OwnEngine(NamedTuple):
    """The server of `plimsoll guard -- vllm serve ...`, by its command line."""

    url: str
    has_connector: bool = False
    nodes: int = 1


def own_engine(command: Sequence[str], url: str | None) -> OwnEngine:
    """Reads the command that starts the server; `url` is its address if the user gave one."""
    if not command or not command[0].strip():
        raise BadInput("no command after --: plimsoll guard -- vllm serve MODEL")
    launch = find_launch(command, (), "command line")
    if launch is None:
        if url is None:
            raise BadInput(f"no vLLM start in `{' '.join(command[:3])[:100]} ...`; {_WHERE}")
        return OwnEngine(url)
    if launch.image is not None:
        raise BadInput(
            'a container is restarted through Docker, not as a process: restart = {docker = "NAME"} in an [[engine]]'
        )
    engine = engine_named(None)
    takes_model = launch.entry is not EntryPoint.API_SERVER
    line = read_command_line(
        launch.arguments, engine.release, takes_model=takes_model, unseen=UnresolvedWords(launch.unresolved)
    )
    line = with_config(line, config_of(launch, ""), engine)
    if _last(line, "--headless") is not None:
        raise BadInput("a --headless server has no API: run guard on the machine of the API server")
    said = _last(line, "--nnodes") or "1"
    nodes = int(said) if said.isascii() and said.isdecimal() and len(said) < 7 else 2  # unknown: then guard only observes
    if any(_last(line, name) is not None for name in SEVERAL):
        nodes = max(2, nodes)
    return OwnEngine(_url(line, url), any(_last(line, name) is not None for name in CONNECTORS), nodes)


def _url(line: CommandLine, url: str | None) -> str:
    """Returns its address by its own flags, else the user's."""
    host, port = _last(line, "--host") or "", _last(line, "--port") or PORT
    is_plain = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65_536 and re.fullmatch(r"[\w.:*-]*", host)
    if url is not None and (_last(line, "--uds") is not None or not is_plain):
        return url
    if _last(line, "--uds") is not None:
        raise BadInput(f"a server on a Unix socket cannot be watched; {_WHERE}")
    if not is_plain:
        raise BadInput(f"--host and --port of the command are unknown; {_WHERE}")
    host = _ANY.get(host, host)
    scheme = "https" if _last(line, "--ssl-certfile") is not None else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{int(port)}"


def _last(line: CommandLine, name: str) -> str | None:
    """Returns the last value of a flag, as vLLM does; "" for a flag without a value, None without the flag."""
    found = [one for one in line.arguments if one.row is not None and one.row.name == name and not one.is_negated]
    return None if not found else found[-1].values[-1] if found[-1].values else ""


MOST_WAITING = 10_000
STANDARD_OUTPUT = 1


class LineWriter:
    """Writes lines to standard output from its own thread, so that a stuck reader never stops the watching.

    If too many lines wait, new ones are dropped and counted.
    """

    def __init__(self, descriptor: int = STANDARD_OUTPUT) -> None:
        # Its own descriptor: if the other one is closed, its number may be reused for another file.
        self._file = os.fdopen(os.dup(descriptor), "wb", buffering=0)
        self._waiting: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self.dropped = 0
        self.is_gone = False  # the reader has closed the pipe
        self._trouble = ""
        self._is_full = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """The reason why lines are being lost; empty if none are."""
        return self._trouble or ("its reader does not read" if self._is_full else "")

    def say(self, line: str) -> None:
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self.dropped += 1
            self._is_full = True

    def close(self, seconds: float = 2.0) -> None:
        """Waits for the queued lines, but not for ever."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._file:
            while (line := self._waiting.get()) is not None:
                left = (line + "\n").encode(errors="replace")
                try:
                    while left:  # unbuffered: a buffer would keep what a full disk refuses
                        left = left[os.write(self._file.fileno(), left) :]
                    self._trouble = ""
                    self._is_full = self._is_full and self._waiting.qsize() > MOST_WAITING // 2
                except BrokenPipeError:
                    self.is_gone = True
                    return
                except OSError as problem:  # such as a full disk: the watch matters more than the output
                    self.dropped += 1
                    self._trouble = problem.strerror or str(problem)


class SystemdNotifier:
    """Tells systemd that guard is ready, alive or stopping, with a status line; a message that cannot be sent is lost."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        name = environ.get("NOTIFY_SOCKET", "")  # a path, or an abstract socket name, which systemd writes with an @
        self.address = "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else ""
        span, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        is_watched = bool(self.address) and span.isdecimal() and int(span) > 0 and pid in ("", str(os.getpid()))
        self.watchdog_s = int(span) / 2e6 if is_watched else None
        """How often systemd must hear from guard: half of its bound. None: no watchdog."""

    def send(self, state: str, status: str = "") -> None:
        """Sends a state such as READY=1, and the line that `systemctl status` shows."""
        if not self.address:
            return
        text = "\n".join(filter(None, (state, status and f"STATUS={' '.join(status.split())[:500]}")))
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
            one.settimeout(0.0)
            one.sendto(text.encode(), self.address)


class EngineLists:
    """The engines to watch: the configured ones and what each finder last found. `note` gets each finder's trouble, or ""."""

    def __init__(self, config: GuardConfig, note: Callable[[str, str], None]) -> None:
        self._config, self._note = config, note
        self._found: dict[str, tuple[EngineConfig, ...]] = {}
        self._pod_names: dict[str, str] = {}  # the pod's own name, by the engine's
        self.finders = config.discover.finders()
        try:
            self.pods = config.discover.pods()
        except BadInput as error:  # outside a cluster
            raise config.refuse(str(error), "discover", "kubernetes") from None

    async def ask(self, finder: Finder) -> None:
        """Asks one finder. If that fails, its last list stays in use; nothing it does ends guard."""
        try:
            found = await asyncio.to_thread(finder.find)
        except Exception as problem:  # an unreadable list must not stop the watch of known engines
            self._note(finder.label, f"internal error: {type(problem).__name__}; the last list stays in use")
            return
        self._found[finder.label] = found
        self._note(finder.label, finder.trouble)

    async def list_pods(self) -> None:
        if self.pods is not None:
            await self.pods.refresh()
            self.take_pods()

    def take_pods(self) -> None:
        """Takes over the current list of pods."""
        assert self.pods is not None
        self._found[self.pods.label] = self.pods.engines()
        self._note(self.pods.label, self.pods.trouble)

    def targets(self) -> list[EngineConfig]:
        """Returns all engines, each name and each address once."""
        discover = self._config.discover
        by_name = {target.name: target for target in self._config.engines}
        urls = {target.url.rstrip("/") for target in self._config.engines}
        pod_names: dict[str, str] = {}
        called = Counter(clean(target.name) for targets in self._found.values() for target in targets)
        for said, targets in self._found.items():
            for target in sorted(targets, key=lambda target: target.url):
                url = target.url.rstrip("/")
                if url not in urls:
                    urls.add(url)
                    name = clean(target.name) or address(url).shown
                    # A name that several engines have gets the address added: its owner would change with the order of a list.
                    is_own = name not in by_name and called[name] <= 1
                    name = name if is_own else f"{name} {address(url).shown}"
                    if self.pods is not None and said == self.pods.label:
                        pod_names[name] = target.name
                    by_name[name] = replace(
                        target, name=name, token=discover.token, canary_s=discover.canary_s, api_key=discover.api_key
                    )
        self._pod_names = pod_names
        return list(by_name.values())

    def facts(self, name: str) -> DiscoveredFacts:
        called = self._pod_names.get(name)
        if self.pods is None or called is None:
            return DiscoveredFacts()
        return DiscoveredFacts(self.pods.restarts.get(called), self.pods.ended.get(called, ""))

    def standing(self, name: str) -> PodStanding | None:
        """Returns the cluster's reasons for and against an action on an engine that is a pod; None for any other."""
        called = self._pod_names.get(name)
        return None if self.pods is None or called is None or not self.pods.is_acting else self.pods.standing(called)

    def pod_name(self, name: str) -> str:
        """Returns the cluster's name of an engine that is a pod."""
        return self._pod_names.get(name, name)

    def why_left(self, name: str) -> str:
        """Returns why an engine is no longer in the list; "" if unknown."""
        return "" if self.pods is None else self.pods.left.get(name, "")


MOST_TEXTS = 20  # reported texts of one trouble, whose text may change each time


@dataclass(slots=True)
class _Held:
    """A trouble that lasts."""

    text: str
    since_s: float
    told: set[str] = field(default_factory=set)


class TroubleLog:
    """Guard's own troubles by subject (the webhook, standard output, a finder): one line when one begins, one when it ends."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell, self._clock = tell, clock
        self._held: dict[str, _Held] = {}

    def note(self, what: str, text: str, *, patience_s: float = 0.0) -> None:
        """Records the state of one subject, "" if it is fine. A trouble is reported once it has lasted `patience_s`."""
        held, now_s = self._held.get(what), self._clock()
        if not text:
            if held is not None:
                del self._held[what]
                if held.told:
                    self._tell(f"{what}: recovered")
            return
        if held is None:
            held = self._held[what] = _Held(text, now_s)
        held.text = text
        if text not in held.told and len(held.told) < MOST_TEXTS and now_s - held.since_s >= patience_s:
            held.told.add(text)
            self._tell(f"{what}: {text}")

    def now(self) -> tuple[Trouble, ...]:
        return tuple(Trouble(what, held.text, held.since_s) for what, held in sorted(self._held.items()) if held.told)


FILES_EVERY_S = 5.0
PODS_S = 0.2  # changes of pods within this time are handled together
STATUS_EVERY_S = 10.0
TROUBLE_EVERY_S = 2.0
WEBHOOK_PATIENCE_S = 10.0  # a receiver that restarts is no news: notifications are retried
TAKE_BACK_S = 30.0
LAST_WORDS_S = 5.0  # for queued notifications when guard is stopped


def watch(options: GuardOptions) -> int:
    """Runs guard until it is stopped; returns the exit code."""
    out = LineWriter()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # each engine keeps a connection or two
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        return asyncio.run(Daemon(options, out).run())
    finally:
        out.close()


class Daemon:
    """One running guard."""

    def __init__(self, options: GuardOptions, out: LineWriter, clocks: Clocks = SYSTEM) -> None:
        self._options, self._out, self._config, self._clocks = options, out, options.config, clocks
        for target in options.config.engines:  # a bad address in the configuration ends guard
            address(target.url)
            if target.token is not None:
                bearer(target.token)
        self._troubles = TroubleLog(warn, clocks.clock)
        self._lists = EngineLists(options.config, self._troubles.note)
        ports = ObserverPorts(self._watcher, self._tell, *clocks[:3], facts=self._facts)
        self._fleet = Fleet(options.policy, ports, looks=options.looks)
        self._acting = self._make_acting()
        self._notifier = options.config.notify.build()
        self._alerts: dict[tuple[str, str], float] = {}  # firing alerts, and since when
        self._slow: frozenset[str] = frozenset()  # engines whose last start took longer than guard waits
        self._impaired: frozenset[str] = frozenset()  # subjects for which guard cannot or may not act
        self._is_begun = False  # whether engines that already needed attention were announced
        self._systemd = SystemdNotifier()
        self._server: GuardServer | None = None
        self._own_token = ""
        self._is_step = False
        pods = self._lists.pods
        self._pod_events = (
            None if pods is None else PodEvents(ClusterClient(), lambda name: pods.pod(self._lists.pod_name(name)))
        )

    def _make_acting(self) -> ActionRunner | None:
        """Returns the action runner, or its dry run; None if no action is configured."""
        options, config = self._options, self._config
        if not options.is_acting and not options.is_dry_run and not options.command:
            return None
        files = files_of(config.act, config.own, os.environ)
        if files is None:
            raise BadInput("no place for the journal: set [act] journal = PATH, or HOME")
        setup = set_up_acting(config, config.engines, files, options.command)
        return ActionRunner(
            setup, config, files, self._fleet, self._announce, is_dry=not options.is_acting, standing=self._lists.standing,
            pod=lambda name: None if self._lists.pods is None else self._lists.pods.pod(self._lists.pod_name(name)),
        )  # fmt: skip

    def _announce(self, announcement: Announcement) -> None:
        kind = EventKind.NEEDS if announcement.is_urgent else EventKind.ACTED
        self._is_step = "done" in announcement.fields  # a pod's Events show only the stop among an action's steps
        self._fleet.tell(announcement.engine, kind, announcement.message)
        self._is_step = False

    def _facts(self, name: str) -> DiscoveredFacts:
        listed = self._lists.facts(name)
        if self._acting is None:
            return listed
        facts = self._acting.facts(name)
        return facts._replace(container_restarts=listed.container_restarts, ended=facts.ended or listed.ended)

    async def run(self) -> int:
        """Runs until a signal, or until every engine had its looks."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(name, stop.set)
        for said in self._config.warnings:
            warn(said)
        if self._options.has_api:
            await self._open_api()
        await asyncio.gather(*(self._lists.ask(finder) for finder in self._lists.finders), self._lists.list_pods())
        self._watch()
        self._systemd.send("READY=1", status_line(self._fleet.views()))
        jobs = [asyncio.create_task(job) for job in self._jobs()]
        ended = [asyncio.create_task(end) for end in (stop.wait(), self._fleet.wait(), self._reader_gone())]
        try:
            await asyncio.wait([*ended, *jobs], return_when=asyncio.FIRST_COMPLETED)
            for job in jobs:
                if job.done():
                    job.result()  # no job ends by itself: this is an internal error
        finally:
            self._systemd.send("STOPPING=1")
            code = self._code() if self._options.looks is not None and not stop.is_set() else 0
            for task in (*ended, *jobs):
                task.cancel()
            with contextlib.suppress(TimeoutError):  # a drain in progress is undone before the journal is closed
                await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), TAKE_BACK_S)
            await self._close()
        if code == 3:
            raise WorldFailed("no engine answered")
        return code

    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        jobs = [self._report_troubles()]
        jobs += [self._acting.run()] if self._acting is not None else []
        if self._config.promise is not None:
            jobs += [KnobAdvisor(self._config.promise, self._config.engines, self._fleet.remark).run()]
        jobs += [self._keep_status()] if self._systemd.address else []
        jobs += [self._rediscover(finder) for finder in self._lists.finders]
        jobs += [self._follow(self._lists.pods)] if self._lists.pods is not None else []
        jobs += [self._pod_events.run()] if self._pod_events is not None else []
        jobs += [self._notifier.run(), self._repeat()] if self._notifier is not None else []
        return jobs

    async def _close(self) -> None:
        if self._acting is not None:
            runs_on = await self._acting.runs_on()
            await self._acting.close()
            if runs_on:
                warn(runs_on)
        await self._fleet.close()
        if self._notifier is not None:
            await self._notifier.flush(LAST_WORDS_S)
        if self._server is not None:
            await self._server.close()
            if self._own_token:
                remove_token(self._server.port, self._own_token)

    def _code(self) -> int:
        views = self._fleet.views()
        if views and not any(view.look is not None and view.look.reach is Reach.ANSWERS for view in views):
            return 1 if any(view.holding for view in views) else 3
        return int(any(severity_of(one.kind) is not Severity.INFO for view in views for one in view.holding))

    # Jobs

    def _watcher(self, target: EngineConfig) -> EngineWatcher:
        canary = None if target.canary_s is None else CanaryPlan(target.canary_s, api_key=target.api_key)
        return EngineWatcher(target.url, target.token, canary, gate_url=target.gate_url, same_host=_same_host(target.url))

    async def _open_api(self) -> None:
        api, token = self._config.api, self._config.api.token
        own = "" if token is not None else secrets.token_urlsafe(32)
        recordings = {engine.name: engine.recording for engine in self._config.engines if engine.recording is not None}
        desk = lambda: None if self._acting is None else self._acting.desk  # noqa: E731
        answers = GuardApi(self._fleet, time.time(), self._own, desk, recordings)
        server = GuardServer(
            answers.answer, token or own, api.hosts, answers.post, api.read_token, answers.files, self._identify()
        )
        try:
            await server.open(api.host, api.port)
            if own:  # only now: while the port is in use, that file has another guard's token
                write_token(server.port, own)
            self._server, self._own_token = server, own
            if self._options.looks is None and sys.stderr.isatty():
                opens = f"with the token in {token_path(server.port)}" if own else "with the configured token"
                name = f"[{api.host}]" if ":" in api.host else api.host
                warn(f"page: http://{name}:{server.port}/ {opens}; from another terminal: plimsoll guardctl status")
        except OSError as error:
            await server.close()
            why = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                why = "the address is in use, perhaps by another guard (see plimsoll guardctl status)"
            reason = f"cannot serve the API at {api.host}:{api.port}: {why}"
            if api.listen is not None:
                raise WorldFailed(reason) from None
            warn(f"{reason}; guard runs without an API")

    def _identify(self) -> Identify | None:
        """Returns the function that identifies users by cluster tokens; None if not configured, BadInput outside a cluster."""
        if not self._config.api.kubernetes:
            return None
        pods = self._lists.pods

        def asked_about(path: str) -> str:
            desk = None if self._acting is None else self._acting.desk
            waiting = {} if desk is None else {one.id: one.engine for one in desk.pending()}
            name = path.removeprefix("/v1/engines/").rpartition("/")[0]
            id_ = path.removeprefix("/v1/approvals/").partition("/")[0]
            return waiting.get(id_, "") if path.startswith("/v1/approvals/") else name

        try:
            cluster = ClusterClient()
        except BadInput as error:
            raise self._config.refuse(str(error), "api", "kubernetes") from None
        spaces = () if pods is None else pods.namespaces
        lock = self._config.lock
        lease = lock.name if isinstance(lock, LeaseLockConfig) else LEASE_NAME
        find = (lambda _: None) if pods is None else pods.pod
        return ClusterIdentities(cluster, spaces, asked_about, find, lease=lease).identify

    def _own(self) -> GuardHealth:
        counts = DeliveryCounts() if self._notifier is None else self._notifier.counts
        stopped = "" if self._acting is None else self._acting.conductor.stopped_acting
        return GuardHealth(counts, self._troubles.now(), self._out.dropped, stopped)

    async def _rediscover(self, finder: Finder) -> None:
        every_s = min(FILES_EVERY_S, self._config.discover.every_s) if isinstance(finder, FileFinder) else None
        while True:
            await asyncio.sleep(every_s or self._config.discover.every_s)
            await self._lists.ask(finder)
            self._watch()

    async def _follow(self, pods: PodFinder) -> None:
        changed = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pods.follow(changed.set))
            while True:
                await changed.wait()
                changed.clear()
                self._lists.take_pods()
                self._watch()
                await asyncio.sleep(PODS_S)

    def _watch(self) -> None:
        """Watches the engines of the current lists, and lets the action runner take up those it may act on."""
        try:
            targets = self._lists.targets()
            self._fleet.watch(targets, self._lists.why_left)
            if self._acting is not None:
                self._acting.watch(targets)
        except Exception as problem:  # the watched engines stay watched
            self._fleet.mistakes[f"list {type(problem).__name__}"] += 1

    async def _report_troubles(self) -> None:
        while True:
            await asyncio.sleep(TROUBLE_EVERY_S)
            self._troubles.note("standard output", self._out.trouble)
            self._troubles.note("this machine", self._fleet.host_note)
            if self._notifier is not None:
                self._troubles.note(self._notifier.label, self._notifier.trouble, patience_s=WEBHOOK_PATIENCE_S)
            if self._pod_events is not None:
                self._troubles.note("Events of pods", self._pod_events.trouble)
            self._track_attention()
            slow = {} if self._acting is None else self._acting.slow_starts()
            for name in self._slow | slow.keys():
                self._troubles.note(f"start of {name}", slow.get(name, ""))
            self._slow = frozenset(slow)

    def _track_attention(self) -> None:
        """Tracks which engines need attention; the conductor announces new ones, this the ones an earlier guard left."""
        before, needs = self._fleet.needs, {} if self._acting is None else self._acting.conductor.needs()
        impairments = {} if self._acting is None else self._acting.impairments()
        for subject in self._impaired - impairments.keys():
            self._troubles.note(f"{ACTING} ({subject})", "")
        for subject, text in impairments.items():
            self._troubles.note(f"{ACTING} ({subject})", text)
        new, self._impaired = impairments.keys() - self._impaired, frozenset(impairments)
        if impairments:
            needs = {**needs, "": "; ".join(impairments.values())}
        if new:
            self._fleet.tell("", EventKind.NEEDS, "; ".join(text for subject, text in impairments.items() if subject in new))
        self._fleet.needs = needs
        for name in before.keys() - needs.keys():
            self._fleet.tell(name, EventKind.MENDED, "no longer needs attention" if name else "guard can act again")
            event = Event(self._clocks.wall(), name, EventKind.NEEDS, before[name])
            starts = self._alerts.pop(_key(event), None)
            found = None if starts is None else alert(event, starts_unix_s=starts, lasts_s=0.0)
            if found is not None and self._notifier is not None:
                self._notifier.put([found])
        if not self._is_begun:
            for name, says in needs.items():
                if name:
                    self._fleet.tell(name, EventKind.NEEDS, says)
        self._is_begun = True

    async def _keep_status(self) -> None:
        """Tells systemd that guard is alive as long as looks end: a loop that runs without looks is not."""
        every_s = self._systemd.watchdog_s
        while True:
            await asyncio.sleep(STATUS_EVERY_S if every_s is None else min(every_s, STATUS_EVERY_S))
            status = status_line(self._fleet.views(), self._troubles.now())
            is_alive = every_s is not None and self._fleet.is_looking(self._fleet.stale_after_s)
            self._systemd.send("WATCHDOG=1" if is_alive else "", status)

    async def _reader_gone(self) -> None:
        while not self._out.is_gone:
            await asyncio.sleep(0.2)

    # Reports

    def _tell(self, event: Event) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.unix_s))
        self._out.say(line_json(event) if self._options.is_json else f"{stamp} {sentence(event)}")
        self._notify([event])
        if self._pod_events is not None and (not self._is_step or event.message.startswith(f"{Step.STOP}:")):
            self._pod_events.put(event)

    async def _repeat(self) -> None:
        """Sends active alerts again at intervals: a restarted receiver has forgotten them."""
        while True:
            await asyncio.sleep(self._config.notify.repeat_s)
            self._notify(self._fleet.firing())

    def _notify(self, changes: Sequence[Event]) -> None:
        if self._notifier is None:
            return
        alerts: list[Mapping[str, Any]] = []
        for event in changes:
            key = _key(event)
            starts = self._alerts.get(key, event.unix_s)
            if event.what in (EventKind.BEGINS, EventKind.UNREACHABLE, EventKind.NEEDS):
                self._alerts[key] = starts
            elif event.what in (EventKind.OVER, EventKind.REACHED) and (self._alerts.pop(key, None) is None or event.became):
                continue  # its begin was never sent, or a graver alert took its place, which is no recovery
            found = alert(event, starts_unix_s=starts, lasts_s=3 * self._config.notify.repeat_s)
            alerts += [] if found is None else [found]
        if alerts:
            self._notifier.put(alerts)


def _key(event: Event) -> tuple[str, str]:
    """Returns the identity of an alert; no condition's name has brackets."""
    if event.condition is not None:
        return event.engine, event.condition.kind
    return event.engine, f"({event.what})" if event.what is EventKind.NEEDS else ""


def warn(message: str) -> None:
    """Prints a line about guard itself to standard error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"plimsoll: {clean(message)[:1000]}", file=sys.stderr, flush=True)


def _same_host(url: str) -> SameHost | None:
    parts = urlsplit(url)
    is_here = parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127.")
    return SameHost(parts.port) if is_here and parts.port is not None else None


class GuardOptions(NamedTuple):
    """The command line and the configuration together."""

    config: GuardConfig
    policy: Policy
    looks: int | None
    has_api: bool
    is_json: bool
    is_acting: bool = False  # --act
    command: tuple[str, ...] = ()  # after --: guard's own server
    own: str = ""  # the name of that server, which is the first engine

    @property
    def is_dry_run(self) -> bool:
        """True with an [act] but no --act: decisions are announced and not carried out."""
        return self.config.act is not None and not self.is_acting
