"""Reads what guard's configuration says of acting: how often, when, under which lock, and how each engine is taken out of
service, stopped and started. Plain values: who acts makes of them what it needs.
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Mapping
from typing import Any

from plimsoll.sources.guard_act_types import (
    Act,
    BalancerAt,
    CommandAt,
    CommandsAt,
    DockerAt,
    EngineAct,
    EtcdLockAt,
    FileLockAt,
    HaproxyAt,
    LeaseLockAt,
    LockAt,
    Own,
    PodAt,
    ReadinessAt,
    RestartAt,
    SystemdAt,
    WebhookAt,
)
from plimsoll.sources.guard_keys import Key, key, keys, names
from plimsoll.sources.guard_values import Values

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
