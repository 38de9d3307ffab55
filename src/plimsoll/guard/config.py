"""Reads guard's configuration, a TOML file. Whatever is wrong in it is one line with the file and the line."""

from __future__ import annotations

import json
import re
import tomllib
import zoneinfo
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.discovery import Kubernetes, Target, named
from plimsoll.guard.config_values import Lines, Values
from plimsoll.net.http_get import address

# Every key of guard's configuration: what it takes, what it is unless set, between what it may lie, and what it is for.
#
# The readers ask this table for names, defaults and bounds, and docs/guard-config.md is made of it. What stands under
# [policy] is
# the judge's own (guard/judge/policy.py, docs/guard.md).

DAY_S = 86_400.0


class Key(NamedTuple):
    """One key. `default` is what stands there unless it is set; None where that is nothing, or told in `says`."""

    table: str  # "act"; "engine.balancer" is a table inside an [[engine]]
    name: str
    kind: str  # "time", "count", "share", "switch", "text", "texts", "words", "path", "url", "table", "one of"
    default: object
    says: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()


def _time(table: str, name: str, default: float | None, low: float, high: float, says: str) -> Key:
    return Key(table, name, "time", default, says, low, high)


def _count(table: str, name: str, default: int | None, low: int, high: int, says: str) -> Key:
    return Key(table, name, "count", default, says, low, high)


def _off(table: str, name: str, says: str) -> Key:
    return Key(table, name, "switch", default=False, says=says)


RUNGS = ("shed", "compact", "restart")

_ENGINE = (
    Key("engine", "url", "url", None, "what stands before /metrics; needed"),
    Key("engine", "name", "text", None, "what it is called; default: host and port"),
    Key("engine", "token_file", "path", None, "of its gate; without it guard does nothing at the gate"),
    Key("engine", "gate", "url", None, "where the gate has a port of its own; or a socket: unix:/PATH"),
    _time("engine", "canary", None, 5.0, 60.0, "how often a request of one token is sent; true is 30s"),
    Key("engine", "api_key_file", "path", None, "vLLM's own --api-key, for test requests and for warming up"),
    Key("engine", "plan", "path", None, "what `plimsoll plan --json` printed: a start that differs is said"),
    Key("engine", "instance", "text", None, "what Prometheus calls it; default: that of [prometheus]"),
    Key("engine", "group", "text", "", "engines of one group carry each other's load; those without one are a group, too"),
    Key("engine", "balancer", "table", None, 'what sends requests to it (below); or "readiness": it asks /plimsoll/ready'),
    Key("engine", "restart", "table", None, "how it is stopped and started (below)"),
    Key("engine", "log", "path", None, "its log: for evidence, and to see that a start goes on"),
    _off("engine", "kv_connector", "it shares its KV cache with others: it is only observed"),
    _count("engine", "nodes", 1, 1, 1_000, "machines that it runs on: with more than one it is only observed"),
    Key("engine.balancer", "haproxy", "path", None, "the path of HAProxy's admin socket"),
    Key("engine.balancer", "backend", "texts", None, "HAProxy's backend; needed with haproxy; several in a list"),
    Key("engine.balancer", "server", "text", None, "this engine's server line there; needed with haproxy"),
    _off("engine.balancer", "may_be_last", "it is taken out also where no other server of the backend is up"),
    Key("engine.balancer", "command", "words", None, "a command of yours, with {verb} and {engine}: docs/balancers.md"),
    Key("engine.balancer", "webhook", "url", None, "an address of yours: docs/balancers.md"),
    Key("engine.balancer", "token_file", "path", None, "shown to the webhook as Authorization: Bearer"),
    Key("engine.restart", "systemd", "text", None, "a unit; it needs KillMode=mixed"),
    _off("engine.restart", "user", "the unit is one of this user's own manager"),
    Key("engine.restart", "stop", "words", None, "a command that stops it: SIGTERM to the server alone"),
    Key("engine.restart", "start", "words", None, "a command that starts it and returns"),
    Key("engine.restart", "is_running", "words", None,
        "whether it runs: exit code 0 yes, 3 no, 150 no: somebody stopped it, 151 no: it ended by itself"),
    Key("engine.restart", "pids", "words", None, "a command that prints its processes, for evidence"),
    Key("engine.restart", "docker", "text", None, "a container by its name"),
    Key("engine.restart", "socket", "path", "/var/run/docker.sock", "where Docker listens"),
    Key("engine.restart", "kubernetes", "text", None, "a pod by its name, which is evicted"),
    Key("engine.restart", "namespace", "text", "", "of the pod; default: guard's own"),
    Key("engine.restart", "selector", "text", "", "labels by which the pod that takes its place is known"),
)  # fmt: skip

_WATCHING = (
    Key("discover", "file_sd", "texts", (), "files in Prometheus's own form, .json, .yml or .yaml"),
    Key("discover", "http_sd", "texts", (), "addresses that answer with such a list"),
    Key("discover", "kubernetes", "table", None, "pods of this cluster (below); or a label selector alone"),
    _time("discover", "every", 30.0, 1.0, 3_600.0, "how often http_sd and kubernetes are asked"),
    Key("discover", "token_file", "path", None, "of the gates of what is found"),
    _time("discover", "canary", None, 5.0, 60.0, "as for an engine"),
    Key("discover", "api_key_file", "path", None, "as for an engine"),
    Key("discover.kubernetes", "selector", "text", None, "labels of the pods; needed"),
    Key("discover.kubernetes", "namespace", "text", "", "default: guard's own"),
    _count("discover.kubernetes", "port", None, 1, 65_535, "default: the port called http, else the only one, else 8000"),
    Key("prometheus", "url", "url", None, "asked once for each engine for what was before guard began; needed"),
    Key("prometheus", "labels", "table", None, "that its series must have"),
    Key("prometheus", "instance", "text", "{host}:{port}", "the label of that name; {host}, {port}, {name} are the engine's"),
    Key("notify", "webhook", "url", None, "where changes are sent, as Alertmanager takes them"),
    _time("notify", "repeat", 3_600.0, 60.0, DAY_S, "how often what still holds is sent again"),
    Key("api", "listen", "text", "127.0.0.1:9790", "where its API listens; another address than this machine's needs a token"),
    Key("api", "token_file", "path", None, "the API's token; default: one is drawn"),
    Key("api", "read_token_file", "path", None, "a second token that reads everything and can do nothing: for Prometheus"),
    Key("api", "hosts", "texts", (), "further names that a Host header may hold"),
)  # fmt: skip

_ACT = (
    Key("act", "rungs", "texts", RUNGS, "what guard may do at all", choices=RUNGS),
    _count("act", "restarts_per_hour", 2, 0, 20, "of one engine, whoever made them"),
    _count("act", "restarts_per_day", 6, 0, 100, "of one engine, whoever made them"),
    _count("act", "fleet_restarts_per_hour", 4, 0, 100, "of all engines together"),
    _count("act", "fleet_restarts_per_day", 20, 0, 500, "of all engines together"),
    _time("act", "backoff", 300.0, 30.0, DAY_S, "between two restarts of an engine, doubled with each of the same day"),
    _time("act", "longest_backoff", 14_400.0, 60.0, DAY_S, "what that grows to at most"),
    _count("act", "most_away", 1, 1, 100, "engines of a group that are out of service at a time, for whatever reason"),
    Key("act", "carries", "share", 0.8, "of the others' KV cache, that their load with this engine's may fill", 0.1, 1.0),
    Key("act", "hours", "texts", (), 'when engines may be restarted, such as "22:00-06:00"; none: at any time'),
    Key("act", "timezone", "text", "UTC", "whose hours those are, such as Europe/Berlin"),
    _off("act", "broken_any_time", "the hours do not hold for an engine that serves nobody"),
    _off("act", "may_be_last", "the only engine of a group may be restarted, too"),
    _time("act", "rollout", 900.0, 0.0, DAY_S, "after an engine's version or flags changed, its group is left alone"),
    _time("act", "drain_within", 300.0, 10.0, 7_200.0, "until it must be idle"),
    _time("act", "lease", 60.0, 15.0, 600.0, "of a drain; should guard be gone, the gate ends the drain after it"),
    Key("act", "stragglers", "one of", "undo", "what becomes of one that is not idle in time: it serves on, or is stopped",
        choices=("undo", "stop")),
    _time("act", "stop_within", 120.0, 5.0, 1_800.0, "from SIGTERM until SIGKILL"),
    _time("act", "gone_within", 120.0, 5.0, 1_800.0, "until the device's memory must be back"),
    _time("act", "start_still", 600.0, 30.0, 7_200.0, "a start that shows no progress for so long has failed"),
    _time("act", "start_within", 7_200.0, 60.0, DAY_S, "until it must be ready at all"),
    _time("act", "probation", 600.0, 10.0, DAY_S, "how long it is watched before its restart counts as a success"),
    _time("act", "shed_wait", 20.0, 1.0, 3_600.0, "new work that would wait longer is refused while it sheds"),
    _time("act", "shed_lease", 120.0, 15.0, 3_600.0, "should guard be gone, the gate sheds no longer after it"),
    Key("act", "journal", "path", None, "default: guard.journal in $STATE_DIRECTORY, else in $XDG_STATE_HOME/plimsoll"),
    Key("act", "evidence", "path", None, "a folder; default: evidence beside the journal"),
    Key("lock", "file", "path", None, "for guards on one host; without [lock]: fleet.lock beside the journal"),
    Key("lock", "etcd", "texts", None, "etcd's addresses, for guards on several hosts"),
    Key("lock", "key", "text", "plimsoll/guard", "the lock's key there; one for each fleet"),
    Key("lock", "user", "text", "", "of etcd"),
    Key("lock", "password_file", "path", None, "of that user"),
    Key("lock", "ca_file", "path", "", "who vouches for etcd's certificate"),
    Key("lock", "cert_file", "path", "", "guard's own certificate for etcd"),
    Key("lock", "key_file", "path", "", "its key"),
    Key("lock", "lease", "text", None, "the name of a Kubernetes Lease"),
    Key("lock", "namespace", "text", "", "of the Lease; default: guard's own"),
    _time("lock", "ttl", 30.0, 15.0, 300.0, "of etcd's key and the Lease: so long after a guard died another may act"),
    Key("own", "log", "path", None, "of the server behind --; default: engine.log beside the journal"),
    Key("own", "state", "path", None, "who it is, to find it again; default: engine.state beside the journal"),
    Key("own", "cgroup", "path", None, "a folder under /sys/fs/cgroup that guard may make cgroups in; default: none"),
)  # fmt: skip

KEYS: tuple[Key, ...] = (*_ENGINE, *_WATCHING, *_ACT)
_BY_PLACE: Mapping[tuple[str, str], Key] = {(key.table, key.name): key for key in KEYS}


def names(table: str) -> tuple[str, ...]:
    """What may stand in a table."""
    return tuple(key.name for key in KEYS if key.table == table)


def key(table: str, name: str) -> Key:
    """One of them."""
    return _BY_PLACE[table, name]


def keys(table: str) -> tuple[Key, ...]:
    """All of a table."""
    return tuple(key for key in KEYS if key.table == table)


# What guard's configuration says of acting, as plain values, and where guard keeps what must survive it.

JOURNAL, EVIDENCE, LOCK, LOG, STATE = "guard.journal", "evidence", "fleet.lock", "engine.log", "engine.state"


class Act(NamedTuple):
    """[act]: of the whole fleet. Times are seconds, hours are minutes after midnight; None is a path that was not named."""

    rungs: tuple[str, ...] = ("shed", "compact", "restart")
    restarts_per_hour: int = 2
    restarts_per_day: int = 6
    fleet_restarts_per_hour: int = 4
    fleet_restarts_per_day: int = 20
    backoff_s: float = 300.0
    longest_backoff_s: float = 14_400.0
    most_away: int = 1
    carries: float = 0.8
    hours: tuple[tuple[int, int], ...] = ()
    timezone: str = "UTC"
    broken_any_time: bool = False
    may_be_last: bool = False
    rollout_s: float = 900.0
    drain_within_s: float = 300.0
    lease_s: float = 60.0
    stragglers: str = "undo"
    stop_within_s: float = 120.0
    gone_within_s: float = 120.0
    start_still_s: float = 600.0
    start_within_s: float = 7_200.0
    probation_s: float = 600.0
    shed_wait_s: float = 20.0
    shed_lease_s: float = 120.0
    journal: str | None = None
    evidence: str | None = None


class FileLockAt(NamedTuple):
    """A lock in a file."""

    path: str


class EtcdLockAt(NamedTuple):
    """A lock in etcd."""

    endpoints: tuple[str, ...]
    key: str = "plimsoll/guard"
    ttl_s: int = 30
    user: str = ""
    password: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def __repr__(self) -> str:
        return f"EtcdLockAt({self.endpoints!r}, {self.key!r})"


class LeaseLockAt(NamedTuple):
    """A lock in a Kubernetes Lease; without a namespace in guard's own."""

    name: str
    namespace: str = ""
    ttl_s: int = 30


LockAt = FileLockAt | EtcdLockAt | LeaseLockAt


class HaproxyAt(NamedTuple):
    """One engine behind HAProxy: the admin socket, and its backends and server there."""

    socket: str
    places: tuple[tuple[str, str], ...]
    may_be_last: bool = False


class CommandAt(NamedTuple):
    """A balancer that a command speaks to."""

    command: tuple[str, ...]


class WebhookAt(NamedTuple):
    """A balancer that something behind an address speaks to."""

    url: str
    token: str | None = None

    def __repr__(self) -> str:
        return "WebhookAt(...)"


class ReadinessAt(NamedTuple):
    """A balancer that asks /plimsoll/ready by itself."""


BalancerAt = HaproxyAt | CommandAt | WebhookAt | ReadinessAt


class SystemdAt(NamedTuple):
    """A unit."""

    unit: str
    is_user: bool = False


class CommandsAt(NamedTuple):
    """Commands of the user's own."""

    stop: tuple[str, ...]
    start: tuple[str, ...]
    is_running: tuple[str, ...]
    pids: tuple[str, ...] = ()


class DockerAt(NamedTuple):
    """A container."""

    container: str
    socket: str = "/var/run/docker.sock"


class PodAt(NamedTuple):
    """A pod."""

    pod: str
    namespace: str = ""
    selector: str = ""


RestartAt = SystemdAt | CommandsAt | DockerAt | PodAt


class EngineAct(NamedTuple):
    """What may be done to one engine, and how; None is what nobody told."""

    group: str = ""
    balancer: BalancerAt | None = None
    restart: RestartAt | None = None
    log: str | None = None
    has_connector: bool = False  # a KV connector
    nodes: int = 1

    @property
    def only_observed(self) -> str:
        """Why guard keeps its hands off it; empty where it need not."""
        if self.has_connector:
            return "it has a KV connector: guard only observes it"
        return f"it runs on {self.nodes} machines: guard only observes it" if self.nodes > 1 else ""


class Own(NamedTuple):
    """[own]: of the server that guard starts itself; None is a file beside the journal, or no cgroup."""

    log: str | None = None
    state: str | None = None
    cgroup: str | None = None


class Files(NamedTuple):
    """Where guard keeps what must survive it."""

    journal: Path
    evidence: Path
    lock: Path
    own_log: Path
    own_state: Path


def files_of(act: Act | None, own: Own, environ: Mapping[str, str]) -> Files | None:
    """As the configuration says, else in the folder for such things; None where this user has none."""
    named = None if act is None or act.journal is None else Path(act.journal)
    folder = named.parent if named is not None else state_folder(environ)
    if folder is None:
        return None
    evidence = None if act is None or act.evidence is None else Path(act.evidence)
    return Files(
        named or folder / JOURNAL, evidence or folder / EVIDENCE, folder / LOCK,
        Path(own.log) if own.log else folder / LOG, Path(own.state) if own.state else folder / STATE,
    )  # fmt: skip


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """systemd's StateDirectory= (the first of them), else this user's own."""
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given.startswith("/"):
        return Path(given)
    state, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if state.startswith("/"):
        return Path(state) / "plimsoll"
    return Path(home) / ".local" / "state" / "plimsoll" if home.startswith("/") else None


# Reads what guard's configuration says of acting: how often, when, under which lock, and how each engine is taken out of
# service, stopped and started. Plain values: who acts makes of them what it needs.

Spot = tuple[str | int, ...]  # a place in the file

MOST_HOURS = 24
NOT_LESS = (
    ("backoff_s", "longest_backoff_s"), ("start_still_s", "start_within_s"), ("restarts_per_hour", "restarts_per_day"),
    ("fleet_restarts_per_hour", "fleet_restarts_per_day"),
)  # fmt: skip
_PLACE = r"[A-Za-z0-9_.:-]{1,200}"  # as HAProxy names its backends and servers
_UNIT = r"[A-Za-z0-9:_.\\][A-Za-z0-9:_.\\@-]{0,240}\.service"
_CONTAINER = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,250}"
_OBJECT = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"  # a name in Kubernetes
_NAMESPACE = r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)?"
_SELECTOR = r"[A-Za-z0-9_./=!,() -]{0,512}"
_LONGEST_SOCKET = 107  # bytes of a path that the kernel takes


class ActReader(Values):
    """The tables about acting, of one file."""

    def act(self) -> Act | None:
        """[act]; None where there is none."""
        if "act" not in self._tables:
            return None
        row = self._table(("act",), self._tables["act"], names("act"))
        found = {about.name + ("_s" if about.kind == "time" else ""): self._one(("act",), about, row) for about in keys("act")}
        act = Act(**{**found, "hours": self._hours(("act", "hours"), found["hours"])})
        self._zone(("act", "timezone"), act.timezone)
        for less, more in NOT_LESS:
            if getattr(act, less) > getattr(act, more):
                few, many = less.removesuffix("_s"), more.removesuffix("_s")
                raise self._wrong(("act", many if many in row else few), f"{many} must not be less than {few}")
        return act

    def lock(self) -> LockAt | None:
        """[lock]; None where there is none."""
        if "lock" not in self._tables:
            return None
        row = self._table(("lock",), self._tables["lock"], names("lock"))
        kind = self._only(("lock",), row, ("file", "etcd", "lease"))
        if kind == "file":
            self._belongs(("lock",), row, kind, ())
            return FileLockAt(self._path(("lock", "file"), row["file"]))
        ttl_s = int(self._one(("lock",), key("lock", "ttl"), row))
        if kind == "lease":
            self._belongs(("lock",), row, kind, ("namespace", "ttl"))
            name = self._named(("lock", "lease"), row["lease"], _OBJECT, "the name of a Lease")
            return LeaseLockAt(name, self._namespace(("lock", "namespace"), row), ttl_s)
        return self._etcd(row, ttl_s)

    def own(self) -> Own:
        """[own]."""
        row = self._table(("own",), self._tables.get("own", {}), names("own"))
        return Own(*(self._one(("own",), about, row) for about in keys("own")))

    def engine(self, place: Spot, table: Mapping[str, Any]) -> EngineAct:
        """What an [[engine]] says of acting."""
        row = {name: self._one(place, key("engine", name), table) for name in ("group", "log", "kv_connector", "nodes")}
        balancer = self._balancer((*place, "balancer"), table["balancer"]) if "balancer" in table else None
        restart = self._restart((*place, "restart"), table["restart"]) if "restart" in table else None
        return EngineAct(row["group"].strip(), balancer, restart, row["log"], row["kv_connector"], row["nodes"])

    # One value, as its row of the table says

    def _one(self, place: Spot, about: Key, row: Mapping[str, Any]) -> Any:
        if about.name not in row:
            return about.default
        spot, value = (*place, about.name), row[about.name]
        match about.kind:
            case "time":
                return self._seconds(spot, value, about.low, about.high)
            case "count":
                return self._count(spot, value, about.low, about.high)
            case "share":
                return self._share(spot, value, about.low, about.high)
            case "switch":
                return self._switch(spot, value)
            case "path":
                return self._path(spot, value)
            case "words":
                return self._words(spot, value)
            case "texts":
                return tuple(dict.fromkeys(self._chosen(spot, one, about.choices) for one in self._texts(spot, value)))
            case _:
                return self._chosen(spot, self._text(spot, value), about.choices)

    def _chosen(self, spot: Spot, text: str, choices: tuple[str, ...]) -> str:
        if choices and text not in choices:
            raise self._wrong(spot, f"{spot[-1]} has no {text[:40]!r}; there is: {', '.join(choices)}")
        return text

    def _hours(self, spot: Spot, texts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
        found = []
        if len(texts) > MOST_HOURS:
            raise self._wrong(spot, f"at most {MOST_HOURS} times of day")
        for text in texts:
            parts = re.fullmatch(r"([0-9]{1,2}):([0-5][0-9])-([0-9]{1,2}):([0-5][0-9])", text.replace(" ", ""))
            begin, end = (int(parts[1]) * 60 + int(parts[2]), int(parts[3]) * 60 + int(parts[4])) if parts else (0, 0)
            if begin == end or begin >= 1_440 or end > 1_440:
                raise self._wrong(spot, f'{text[:40]!r} is no time of day from and to; write "22:00-06:00"')
            found.append((begin, end))
        return tuple(found)

    def _zone(self, spot: Spot, name: str) -> None:
        if name == "UTC":
            return  # known also where the machine has no list of them
        try:
            zoneinfo.ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            raise self._wrong(spot, f"{name[:60]!r} is no time zone that this machine knows; such as Europe/Berlin") from None

    # Which of several

    def _only(self, place: Spot, row: Mapping[str, Any], kinds: tuple[str, ...]) -> str:
        found = [kind for kind in kinds if kind in row]
        if len(found) != 1:
            raise self._wrong(place, f"{place[-1]} is exactly one of: {', '.join(kinds)}")
        return found[0]

    def _belongs(self, place: Spot, row: Mapping[str, Any], kind: str, others: tuple[str, ...]) -> None:
        """What is said for another kind is a mistake, not to be passed over."""
        for name in row:
            if name != kind and name not in others:
                raise self._wrong((*place, name), f"{name} does not go with {kind}")

    def _needed(self, place: Spot, row: Mapping[str, Any], names_: tuple[str, ...]) -> None:
        for name in names_:
            if name not in row:
                raise self._wrong(place, f"{place[-1]} also needs {name}")

    def _named(self, spot: Spot, value: Any, pattern: str, what: str) -> str:
        text = self._text(spot, value)
        if not re.fullmatch(pattern, text):
            raise self._wrong(spot, f"{text[:60]!r} is not {what}")
        return text

    def _namespace(self, spot: Spot, row: Mapping[str, Any]) -> str:
        return self._named(spot, row.get("namespace", ""), _NAMESPACE, "the name of a namespace")

    def _socket(self, spot: Spot, value: Any) -> str:
        path = self._path(spot, value)
        if len(path.encode("utf-8", "replace")) > _LONGEST_SOCKET:
            raise self._wrong(spot, f"the path of a socket has {_LONGEST_SOCKET} letters at most")
        return path

    def _etcd(self, row: Mapping[str, Any], ttl_s: int) -> EtcdLockAt:
        self._belongs(("lock",), row, "etcd", ("key", "ttl", "user", "password_file", "ca_file", "cert_file", "key_file"))
        endpoints = tuple(self._url(("lock", "etcd"), one) for one in self._texts(("lock", "etcd"), row["etcd"]))
        name, user = (self._one(("lock",), key("lock", word), row) for word in ("key", "user"))
        if not endpoints or not name:
            raise self._wrong(("lock", "etcd" if not endpoints else "key"), "etcd needs an address and a key")
        if ("user" in row) != ("password_file" in row) or ("cert_file" in row) != ("key_file" in row):
            raise self._wrong(("lock",), "user and password_file go together, and so do cert_file and key_file")
        password = self._token(("lock", "password_file"), row.get("password_file"), shortest=1) or ""
        files = (self._one(("lock",), key("lock", word), row) for word in ("ca_file", "cert_file", "key_file"))
        return EtcdLockAt(endpoints, name, ttl_s, user, password, *files)

    def _balancer(self, place: Spot, value: Any) -> BalancerAt:
        if value == "readiness":
            return ReadinessAt()
        if not isinstance(value, dict):
            raise self._wrong(place, 'balancer is "readiness", or a table with haproxy, command or webhook')
        row = self._table(place, value, names("engine.balancer"))
        kind = self._only(place, row, ("haproxy", "command", "webhook"))
        if kind == "command":
            self._belongs(place, row, kind, ())
            return CommandAt(self._words((*place, kind), row[kind]))
        if kind == "webhook":
            self._belongs(place, row, kind, ("token_file",))
            token = self._token((*place, "token_file"), row.get("token_file"), shortest=1)
            return WebhookAt(self._url((*place, kind), row[kind]), token)
        self._belongs(place, row, kind, ("backend", "server", "may_be_last"))
        self._needed(place, row, ("backend", "server"))
        backends = [
            self._named((*place, "backend"), one, _PLACE, "the name of a backend")
            for one in self._texts((*place, "backend"), row["backend"])
        ]
        if not backends:
            raise self._wrong((*place, "backend"), "backend is one at least")
        server = self._named((*place, "server"), row["server"], _PLACE, "the name of a server")
        may_be_last = self._one(place, key("engine.balancer", "may_be_last"), row)
        return HaproxyAt(self._socket((*place, kind), row[kind]), tuple((one, server) for one in backends), may_be_last)

    def _restart(self, place: Spot, value: Any) -> RestartAt:
        if not isinstance(value, dict):
            raise self._wrong(place, "restart is a table with systemd, stop and start, docker or kubernetes")
        row = self._table(place, value, names("engine.restart"))
        kind = self._only(place, row, ("systemd", "stop", "docker", "kubernetes"))
        if kind == "stop":
            self._belongs(place, row, kind, ("start", "is_running", "pids"))
            self._needed(place, row, ("start", "is_running"))
            stop, start, is_running, pids = (
                self._one(place, key("engine.restart", name), row) for name in ("stop", "start", "is_running", "pids")
            )
            return CommandsAt(stop, start, is_running, pids or ())
        if kind == "systemd":
            self._belongs(place, row, kind, ("user",))
            unit = self._named((*place, kind), row[kind], _UNIT, "the name of a service, such as vllm.service")
            return SystemdAt(unit, self._one(place, key("engine.restart", "user"), row))
        if kind == "docker":
            self._belongs(place, row, kind, ("socket",))
            name = self._named((*place, kind), row[kind], _CONTAINER, "the name of a container")
            socket = key("engine.restart", "socket").default if "socket" not in row else row["socket"]
            return DockerAt(name, self._socket((*place, "socket"), socket))
        self._belongs(place, row, kind, ("namespace", "selector"))
        pod = self._named((*place, kind), row[kind], _OBJECT, "the name of a pod")
        selector = self._named((*place, "selector"), row.get("selector", ""), _SELECTOR, "a label selector")
        return PodAt(pod, self._namespace((*place, "namespace"), row), selector)


MOST_BYTES = 4 << 20
_TABLES = ("engine", "discover", "prometheus", "policy", "notify", "api", "act", "lock", "own")
_BLANKS = ("host", "port", "name")  # that a template may hold in braces


class Discover(NamedTuple):
    """Where engines are found."""

    file_sd: tuple[str, ...] = ()
    http_sd: tuple[str, ...] = ()
    kubernetes: Kubernetes | None = None
    every_s: float = 30.0
    token: str | None = None  # of the gates of what is found
    canary_s: float | None = None
    api_key: str | None = None  # vLLM's own, for test requests to what is found


class Prometheus(NamedTuple):
    """Who remembers more than guard does, and how an engine is called there."""

    url: str
    labels: Mapping[str, str] = {}
    instance: str = "{host}:{port}"  # a template for the label of that name
    instances: Mapping[str, str] = {}  # by the engine's name, where it has a template of its own

    def match(self, target: Target) -> dict[str, str]:
        """The labels of one engine's series."""
        parts = urlsplit(address(target.url).url)
        host = parts.hostname or ""
        blanks = {
            "host": f"[{host}]" if ":" in host else host,
            "port": str(parts.port or (443 if parts.scheme == "https" else 80)),
            "name": target.name,
        }
        text = self.instances.get(target.name, self.instance)
        return {**self.labels, "instance": re.sub(r"\{(\w+)\}", lambda found: blanks.get(found[1], found[0]), text)}


class Api(NamedTuple):
    """Where guard's own API listens, and what must be shown there."""

    host: str = "127.0.0.1"
    port: int = 9790
    token: str | None = None
    hosts: tuple[str, ...] = ()  # further names that a Host header may hold
    is_asked: bool = False  # it was asked for: that it cannot be had is an error
    read_token: str | None = None  # that reads, and can do nothing


class GuardConfig(NamedTuple):
    """All of it. The policy is left as it was read: who judges knows what may stand in it."""

    name: str = ""
    engines: tuple[Target, ...] = ()
    discover: Discover = Discover()
    policy: Mapping[str, Any] = {}
    webhook: str | None = None
    repeat_s: float = 3600.0
    api: Api = Api()
    lines: Lines = Lines("")
    prometheus: Prometheus | None = None
    warnings: tuple[str, ...] = ()  # what is not wrong and still should be said
    act: Act | None = None  # None: nothing is said of acting
    lock: LockAt | None = None  # None: a file beside the journal
    acting: Mapping[str, EngineAct] = {}  # by the engine's name: what may be done to it, and how
    own: Own = Own()

    def refuse(self, message: str, *path: str | int) -> BadInput:
        """An error about a place in the file."""
        return BadInput(f"{self.name}, line {self.lines.of(*path)}: {message}")


def read_guard_config(path: str) -> GuardConfig:
    """The configuration in a file; BadInput, with its line, for whatever is wrong."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or 'cannot be read'}") from None
    if len(data) > MOST_BYTES:
        raise BadInput(f"{path}: more than {MOST_BYTES >> 20} MiB: no configuration")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}, line {data[: error.start].count(10) + 1}: not UTF-8") from None
    return config_in(text, path)


def config_in(text: str, name: str) -> GuardConfig:
    """The configuration in a text; paths in it are relative to the folder of `name`."""
    try:
        tables = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and Python's own for a number of thousands of digits
        raise BadInput(_not_toml(name, str(error), text)) from None
    except RecursionError:
        raise BadInput(f"{name}, line 1: nested too deeply") from None
    return _Reader(name, tables, Lines(text)).config()


def _not_toml(name: str, said: str, text: str) -> str:
    found = re.search(r"\(at line (\d+), column \d+\)", said)
    line = int(found[1]) if found else text.count("\n") + 1
    reason = re.sub(r"\s*\(at [^()]*\)$", "", said)
    return f"{name}, line {line}: not TOML: {reason[:200]}"


class _Reader(Values):
    """One file."""

    def config(self) -> GuardConfig:
        self._known((), self._tables, _TABLES)
        engines = self._list(("engine",), self._tables.get("engine", []))
        notify = self._table(("notify",), self._tables.get("notify", {}), names("notify"))
        policy = self._table(("policy",), self._tables.get("policy", {}))
        targets = [self._engine(("engine", number), table) for number, table in enumerate(engines)]
        self._unique(targets)
        webhook = self._url(("notify", "webhook"), notify["webhook"]) if "webhook" in notify else None
        repeat_s = self._usual_seconds("notify", "repeat", notify)
        discover, api, prometheus = self._discover(), self._api(), self._prometheus(engines, targets)
        acts = ActReader(self._name, self._tables, self._lines, self._warnings)
        act, lock, own = acts.act(), acts.lock(), acts.own()
        acting = {target.name: acts.engine(("engine", number), engines[number]) for number, target in enumerate(targets)}
        return GuardConfig(
            self._name, tuple(targets), discover, policy, webhook, repeat_s, api, self._lines, prometheus,
            tuple(self._warnings), act, lock, acting, own,
        )  # fmt: skip

    def _usual_seconds(self, table: str, name: str, row: Mapping[str, Any]) -> float:
        about = key(table, name)
        return self._seconds((table, name), row.get(name, about.default), about.low, about.high)

    def _engine(self, place: tuple[str | int, ...], table: Any) -> Target:
        row = self._table(place, table, names("engine"))
        if "url" not in row:
            raise self._wrong(place, 'an [[engine]] needs its url = "http://HOST:PORT"')
        url = self._url((*place, "url"), row["url"])
        name = self._text((*place, "name"), row["name"]).strip() if "name" in row else named(url)
        if not name:
            raise self._wrong((*place, "name"), "an empty name is none; leave it out for host and port")
        token = self._token((*place, "token_file"), row.get("token_file"))
        plan = self._plan((*place, "plan"), row["plan"]) if "plan" in row else None
        gate = self._gate((*place, "gate"), row["gate"]) if "gate" in row else None
        key = self._token((*place, "api_key_file"), row.get("api_key_file"), shortest=1)
        return Target(name, url, token, self._canary((*place, "canary"), row.get("canary")), plan, gate, key)

    def _unique(self, targets: Sequence[Target]) -> None:
        seen: dict[str, int] = {}
        for number, target in enumerate(targets):
            if target.name in seen:
                first = self._lines.of("engine", seen[target.name])
                key = "name" if "name" in self._tables["engine"][number] else "url"
                raise self._wrong(("engine", number, key), f"{target.name!r} is an engine already, in line {first}")
            seen[target.name] = number

    def _discover(self) -> Discover:
        row = self._table(("discover",), self._tables.get("discover", {}), names("discover"))
        files = self._texts(("discover", "file_sd"), row.get("file_sd", []))
        for one in files:
            if not one.endswith((".json", ".yml", ".yaml")):
                raise self._wrong(("discover", "file_sd"), f"{one!r}: file_sd reads .json, .yml and .yaml")
        urls = self._texts(("discover", "http_sd"), row.get("http_sd", []))
        return Discover(
            tuple(str(self._folder / one) for one in files),
            tuple(self._url(("discover", "http_sd"), one) for one in urls),
            self._kubernetes(row["kubernetes"]) if "kubernetes" in row else None,
            self._usual_seconds("discover", "every", row),
            self._token(("discover", "token_file"), row.get("token_file")),
            self._canary(("discover", "canary"), row.get("canary")),
            self._token(("discover", "api_key_file"), row.get("api_key_file"), shortest=1),
        )

    def _prometheus(self, engines: Sequence[Any], targets: Sequence[Target]) -> Prometheus | None:
        instances = {
            target.name: self._template(("engine", number, "instance"), engines[number]["instance"])
            for number, target in enumerate(targets) if "instance" in engines[number]
        }  # fmt: skip
        if "prometheus" not in self._tables:
            for number, row in enumerate(engines):
                if "instance" in row:
                    raise self._wrong(("engine", number, "instance"), "instance is a label of [prometheus], and there is none")
            return None
        row = self._table(("prometheus",), self._tables["prometheus"], names("prometheus"))
        if "url" not in row:
            raise self._wrong(("prometheus",), '[prometheus] needs its url = "http://HOST:PORT"')
        labels = self._table(("prometheus", "labels"), row.get("labels", {}))
        for name, value in labels.items():
            if not name.isascii() or not name.isidentifier():
                raise self._wrong(("prometheus", "labels", name), f"{name[:40]!r} is not the name of a label")
            self._text(("prometheus", "labels", name), value)
        usual = self._template(("prometheus", "instance"), row.get("instance", "{host}:{port}"))
        return Prometheus(self._url(("prometheus", "url"), row["url"]), labels, usual, instances)

    def _template(self, place: tuple[str | int, ...], value: Any) -> str:
        text = self._text(place, value)
        for blank in re.findall(r"\{(\w+)\}", text):
            if blank not in _BLANKS:
                raise self._wrong(place, f"{{{blank[:40]}}} stands for nothing; there is: {{host}}, {{port}}, {{name}}")
        return text

    def _kubernetes(self, value: Any) -> Kubernetes:
        place = ("discover", "kubernetes")
        if isinstance(value, str):
            value = {"selector": value}
        row = self._table(place, value, names("discover.kubernetes"))
        selector = self._text((*place, "selector"), row.get("selector", ""))
        if not selector:
            raise self._wrong(place, 'kubernetes needs a label selector: selector = "app=vllm"')
        namespace = self._text((*place, "namespace"), row.get("namespace", ""))
        if not re.fullmatch(r"[a-z0-9]?(?:[a-z0-9-]{0,61}[a-z0-9])?", namespace):
            raise self._wrong((*place, "namespace"), f"{namespace[:70]!r} is not the name of a namespace")
        port = row.get("port")
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65_536):
            raise self._wrong((*place, "port"), "port is a number from 1 to 65535")
        return Kubernetes(selector, namespace, port)

    def _api(self) -> Api:
        row = self._table(("api",), self._tables.get("api", {}), names("api"))
        token = self._token(("api", "token_file"), row.get("token_file"))
        reads = self._token(("api", "read_token_file"), row.get("read_token_file"))
        if reads is not None and reads == token:
            raise self._wrong(("api", "read_token_file"), "the token that only reads must be another one than the API's own")
        host, port = Api().host, Api().port
        if "listen" in row:
            found = listen_of(self._text(("api", "listen"), row["listen"]))
            if found is None:
                raise self._wrong(("api", "listen"), 'listen is "HOST:PORT", for instance "127.0.0.1:9790"')
            host, port = found
        if not is_loopback(host) and token is None:
            raise self._wrong(("api", "listen"), f"{host} is not this machine alone: that needs a token_file")
        hosts = tuple(one.lower() for one in self._texts(("api", "hosts"), row.get("hosts", [])))
        return Api(host, port, token, hosts, "listen" in row, reads)

    def _gate(self, place: tuple[str | int, ...], value: Any) -> str:
        """Where a gate listens: an address, or a socket of this machine."""
        text = self._text(place, value)
        if not text.startswith("unix:"):
            return self._url(place, text)
        path = text.removeprefix("unix:")
        if not path.startswith("/") or not path.isascii() or len(path) > _LONGEST_SOCKET:
            raise self._wrong(place, f"a socket is unix:/PATH, of {_LONGEST_SOCKET} letters at most")
        return text

    def _canary(self, place: tuple[str | int, ...], value: Any) -> float | None:
        if value is None or value is False:
            return None
        about = key("engine", "canary")
        return 30.0 if value is True else self._seconds(place, value, about.low, about.high)

    def _plan(self, place: tuple[str | int, ...], value: Any) -> tuple[float, float, float]:
        path = self._folder / self._text(place, value)
        try:
            body = json.loads(path.read_bytes()[:MOST_BYTES])
            kv, band = body["kv"], body["ledger"]["kv"]
            each = float(kv["tokens"]) / float(kv["num_blocks"]) / float(kv["bytes_per_block"])
            found = (float(kv["tokens"]), float(band["low"]) * each, float(band["high"]) * each)
        except OSError as error:
            raise self._wrong(place, f"{path}: {error.strerror or 'cannot be read'}") from None
        except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError):
            raise self._wrong(place, f"{path}: not a plan with a KV cache, as plimsoll plan --json prints it") from None
        return found


def listen_of(text: str) -> tuple[str, int] | None:
    """The host and port in "HOST:PORT" or ":PORT"; None if it is neither."""
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"\d{1,5}", port) or not int(port) < 65_536:
        return None
    host = host.removeprefix("[").removesuffix("]")
    return (host or "127.0.0.1", int(port)) if re.fullmatch(r"[A-Za-z0-9.:_-]*", host) else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))
