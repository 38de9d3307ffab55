"""Puts guard together: who finds engines, who looks, who judges, who is told; and runs it until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from plimsoll.actuators import guard_token
from plimsoll.actuators.guard_server import GuardServer
from plimsoll.actuators.lines_out import LinesOut
from plimsoll.actuators.systemd_notify import Notifier
from plimsoll.actuators.webhook import Counts, Webhook
from plimsoll.cli.guard import Asked
from plimsoll.cli.guard_acting import Acting, make
from plimsoll.cli.guard_api import Api, Own
from plimsoll.cli.guard_lists import Lists
from plimsoll.cli.guard_loop import Facts, Fleet, Ports
from plimsoll.cli.guard_recall import Recaller
from plimsoll.cli.guard_said import Said
from plimsoll.cli.guard_trouble import Troubles
from plimsoll.domain.asking import bearer
from plimsoll.domain.finding import Severity
from plimsoll.domain.look import Reach
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.guard.findings import severity_of
from plimsoll.report.doctor import clean
from plimsoll.report.guard import Told, What, alert, line_json, sentence, status_line
from plimsoll.sources.discovery import FileSd, Finder, Target
from plimsoll.sources.engine_canary import CanaryPlan
from plimsoll.sources.engine_http import Client
from plimsoll.sources.engine_look import Watcher
from plimsoll.sources.figures_page import LabelSets
from plimsoll.sources.guard_act_types import files_of
from plimsoll.sources.http_get import address
from plimsoll.sources.same_host import SameHost

FILES_EVERY_S = 5.0
STATUS_EVERY_S = 10.0
TROUBLE_EVERY_S = 2.0
WEBHOOK_PATIENCE_S = 10.0  # a receiver that is restarted is no news: what waits is sent again
TAKE_BACK_S = 30.0
LAST_WORDS_S = 5.0  # for notifications that wait when guard is stopped


def watch(asked: Asked) -> int:
    """Until it is stopped; the exit code."""
    out = LinesOut()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # each engine keeps a connection or two
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        return asyncio.run(Daemon(asked, out).run())
    finally:
        out.close()


class Daemon:
    """One guard."""

    def __init__(self, asked: Asked, out: LinesOut) -> None:
        self._asked, self._out, self._config = asked, out, asked.config
        for target in asked.config.engines:  # of those that were named by hand a mistake is the user's, and ends guard
            Client(target.url.rstrip("/").removesuffix("/metrics"))
            if target.token is not None:
                bearer(target.token)
        self._labels = LabelSets()
        self._troubles = Troubles(warn, time.monotonic)
        self._lists = Lists(asked.config, self._troubles.note)
        self._recaller = None if asked.config.prometheus is None else Recaller(asked.config.prometheus)
        recall = None if self._recaller is None else self._recaller.fill
        ports = Ports(self._watcher, self._tell, facts=self._facts, recall=recall)
        self._fleet = Fleet(asked.policy, ports, looks=asked.looks)
        self._acting = self._make_acting()
        self._webhook = _webhook(asked.config.webhook)
        self._alerts: dict[tuple[str, str], float] = {}  # what fires, and since when
        self._is_begun = False  # whether what an earlier guard could not mend was told
        self._systemd = Notifier()
        self._server: GuardServer | None = None
        self._own_token = ""

    def _make_acting(self) -> Acting | None:
        """The half that acts, or only says what it would do; None for a guard that nobody told anything of acting."""
        asked, config = self._asked, self._config
        if not asked.is_acting and not asked.says_what_it_would_do and not asked.command:
            return None
        files = files_of(config.act, config.own, os.environ)
        if files is None:
            raise BadInput("where to keep the journal is not known: set [act] journal = PATH, or HOME")
        made = make(config, config.engines, files, asked.command)
        return Acting(made, config, files, self._fleet, self._acted, is_dry=not asked.is_acting)

    def _acted(self, said: Said) -> None:
        self._fleet.tell(said.engine, What.NEEDS if said.is_urgent else What.ACTED, said.says)

    def _facts(self, name: str) -> Facts:
        """What whoever found it, or whoever runs it, knows of it."""
        found = self._lists.facts(name)
        ended = "" if self._acting is None else self._acting.ended.get(name, "")
        return found._replace(ended=ended) if ended else found

    async def run(self) -> int:
        """Until a signal, or until every engine had its looks."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.set)
        for said in self._config.warnings:
            warn(said)
        if self._asked.has_api:
            await self._open_api()
        await asyncio.gather(*(self._lists.ask(finder) for finder in self._lists.finders))
        self._fleet.watch(self._lists.targets())
        self._systemd.ready(status_line(self._fleet.views()))
        jobs = [asyncio.create_task(job) for job in self._jobs()]
        ended = [asyncio.create_task(stop.wait()), asyncio.create_task(self._fleet.wait()), asyncio.create_task(self._unread())]
        try:
            await asyncio.wait([*ended, *jobs], return_when=asyncio.FIRST_COMPLETED)
            for job in jobs:
                if job.done():
                    job.result()  # none of them ends: it failed, and that is a mistake of ours
        finally:
            self._systemd.stopping()
            code = self._code() if self._asked.looks is not None and not stop.is_set() else 0
            for task in (*ended, *jobs):
                task.cancel()
            with contextlib.suppress(TimeoutError):  # a drain that is under way is taken back before the journal is closed
                await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), TAKE_BACK_S)
            await self._close()
        if code == 3:
            raise WorldFailed("no engine answered")
        return code

    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        jobs = [self._keep_well()]
        jobs += [self._acting.run()] if self._acting is not None else []
        jobs += [self._keep_status()] if self._systemd.is_there else []
        jobs += [self._find_again(finder) for finder in self._lists.finders]
        jobs += [self._webhook.run(), self._repeat()] if self._webhook is not None else []
        return jobs

    async def _close(self) -> None:
        if self._acting is not None:
            runs_on = await self._acting.runs_on()
            await self._acting.close()
            if runs_on:
                warn(runs_on)
        await self._fleet.close()
        if self._recaller is not None:
            self._recaller.close()
        if self._webhook is not None:
            await self._webhook.flush(LAST_WORDS_S)
        if self._server is not None:
            await self._server.close()
            if self._own_token:
                guard_token.forget(self._server.port, self._own_token)

    def _code(self) -> int:
        views = self._fleet.views()
        if views and not any(view.look is not None and view.look.reach is Reach.ANSWERS for view in views):
            held = any(view.holding for view in views)
            return 1 if held else 3
        return int(any(severity_of(one.kind) is not Severity.INFO for view in views for one in view.holding))

    # Its parts

    def _watcher(self, target: Target) -> Watcher:
        canary = None if target.canary_s is None else CanaryPlan(target.canary_s, api_key=target.api_key)
        return Watcher(
            target.url, target.token, canary, gate_url=target.gate_url, labels=self._labels, same_host=_same_host(target.url)
        )

    async def _open_api(self) -> None:
        api, token = self._config.api, self._config.api.token
        own = "" if token is not None else secrets.token_urlsafe(32)
        answers = Api(self._fleet, time.time(), self._own, lambda: None if self._acting is None else self._acting.desk)
        server = GuardServer(answers.answer, token or own, api.hosts, answers.post, api.read_token, answers.files)
        try:
            await server.open(api.host, api.port)
            if own:  # only now: a port that is taken has a token of its own there
                guard_token.keep(server.port, own)
            self._server, self._own_token = server, own
            self._say_where(api.host, server.port)
        except OSError as error:
            await server.close()
            why = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                why = "somebody listens there already, another guard perhaps (plimsoll guardctl status asks it)"
            reason = f"the API cannot be served at {api.host}:{api.port}: {why}"
            if api.is_asked:
                raise WorldFailed(reason) from None
            warn(f"{reason}; it watches without one")

    def _say_where(self, host: str, port: int) -> None:
        """Where its page is and what opens it, to a person who has just started it."""
        if self._asked.looks is not None or not sys.stderr.isatty():
            return
        token = guard_token.place(port) if self._own_token else None
        opens = "the token that it was given" if token is None else f"the token in {token}"
        name = f"[{host}]" if ":" in host else host
        warn(f"its page is at http://{name}:{port}/ and wants {opens}; plimsoll guardctl status asks it from another terminal")

    def _own(self) -> Own:
        counts = Counts() if self._webhook is None else self._webhook.counts
        return Own(counts, self._troubles.now(), self._out.dropped)

    async def _find_again(self, finder: Finder) -> None:
        every_s = min(FILES_EVERY_S, self._config.discover.every_s) if isinstance(finder, FileSd) else None
        while True:
            await asyncio.sleep(every_s or self._config.discover.every_s)
            await self._lists.ask(finder)
            try:
                self._fleet.watch(self._lists.targets())
            except Exception as problem:  # those that are watched still are
                self._fleet.mistakes[f"list {type(problem).__name__}"] += 1

    async def _keep_well(self) -> None:
        """Say what goes wrong with guard itself, where nobody would see it else."""
        while True:
            await asyncio.sleep(TROUBLE_EVERY_S)
            self._troubles.note("standard output", self._out.trouble)
            self._troubles.note("this machine", self._fleet.host_note)
            if self._webhook is not None and self._config.webhook is not None:
                # Its host alone: the path of such an address is often the secret.
                said = f"webhook {urlsplit(self._config.webhook).hostname or ''}"
                self._troubles.note(said, self._webhook.trouble, patience_s=WEBHOOK_PATIENCE_S)
            self._keep_needs()
            if self._recaller is not None:
                self._recaller.keep(self._fleet.names())
                self._troubles.note(self._recaller.said, self._recaller.trouble)

    def _keep_needs(self) -> None:
        """Which engines need a person. That one begins to is told by whoever acted; what an earlier guard left, here."""
        before, needs = self._fleet.needs, {} if self._acting is None else self._acting.conductor.needs()
        self._fleet.needs = needs
        for name in before.keys() - needs.keys():
            self._fleet.tell(name, What.MENDED, "nobody is needed for it any more")
            self._end_need(name, before[name])
        if not self._is_begun:
            for name, says in needs.items():
                self._fleet.tell(name, What.NEEDS, says)
        self._is_begun = True

    async def _keep_status(self) -> None:
        """Tell systemd that guard lives, as long as it looks: a loop that runs and sees nothing is not alive."""
        every_s = self._systemd.watchdog_s
        while True:
            await asyncio.sleep(STATUS_EVERY_S if every_s is None else min(every_s, STATUS_EVERY_S))
            status = status_line(self._fleet.views(), self._troubles.now())
            if every_s is not None and self._fleet.is_looking(self._fleet.stale_after_s):
                self._systemd.alive(status)
            else:
                self._systemd.status(status)

    async def _unread(self) -> None:
        """Until whoever read our lines has gone."""
        while not self._out.is_gone:
            await asyncio.sleep(0.2)

    # Telling

    def _tell(self, told: Told) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told.unix_s))
        self._out.say(line_json(told) if self._asked.is_json else f"{stamp} {sentence(told)}")
        self._notify([told])

    async def _repeat(self) -> None:
        """What still holds is sent again: a receiver that was restarted has forgotten it."""
        while True:
            await asyncio.sleep(self._config.repeat_s)
            self._notify(self._fleet.firing())

    def _notify(self, changes: Sequence[Told]) -> None:
        if self._webhook is None:
            return
        alerts: list[Mapping[str, Any]] = []
        for told in changes:
            key = _key(told)
            starts = self._alerts.get(key, told.unix_s)
            if told.what in (What.BEGINS, What.UNREACHABLE, What.NEEDS):
                self._alerts[key] = starts
            elif told.what in (What.OVER, What.REACHED) and self._alerts.pop(key, None) is None:
                continue  # nobody was told that it began
            found = alert(told, starts_unix_s=starts, lasts_s=3 * self._config.repeat_s)
            alerts += [] if found is None else [found]
        if alerts:
            self._webhook.put(alerts)

    def _end_need(self, engine: str, says: str) -> None:
        told = Told(time.time(), engine, What.NEEDS, says)
        starts = self._alerts.pop(_key(told), None)
        found = None if starts is None else alert(told, starts_unix_s=starts, lasts_s=0.0)
        if found is not None and self._webhook is not None:
            self._webhook.put([found])


def _key(told: Told) -> tuple[str, str]:
    """What is one and the same alert; the name of no condition has brackets."""
    if told.condition is not None:
        return told.engine, told.condition.kind
    return told.engine, f"({told.what})" if told.what is What.NEEDS else ""


def _webhook(url: str | None) -> Webhook | None:
    if url is None:
        return None
    where = address(url)
    return Webhook(where.url, where.login)


def warn(message: str) -> None:
    """A line about guard itself, beside what it says of engines."""
    with contextlib.suppress(OSError, ValueError):
        print(f"plimsoll: {clean(message)[:1000]}", file=sys.stderr, flush=True)


def _same_host(url: str) -> SameHost | None:
    """What this machine itself knows of an engine on it."""
    parts = urlsplit(url)
    is_here = parts.hostname in ("localhost", "::1") or (parts.hostname or "").startswith("127.")
    return SameHost(parts.port) if is_here and parts.port is not None else None
