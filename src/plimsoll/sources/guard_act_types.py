"""What guard's configuration says of acting, as plain values, and where guard keeps what must survive it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
