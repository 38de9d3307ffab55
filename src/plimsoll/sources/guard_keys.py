"""Every key of guard's configuration: what it takes, what it is unless set, between what it may lie, and what it is for.

The readers ask this table for names, defaults and bounds, and docs/guard-config.md is made of it. What stands under [policy] is
the judge's own (guard/policy.py, docs/guard.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
