"""Guard's configuration: the tables of its TOML file, each one class, and the files that guard keeps."""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.act.ports import Lock
from plimsoll.guard.adapters.command import CommandRestarterConfig
from plimsoll.guard.adapters.discovery import DiscoverConfig
from plimsoll.guard.adapters.file_lock import FileLockConfig
from plimsoll.guard.adapters.haproxy import HaproxyConfig
from plimsoll.guard.adapters.locks import EtcdLockConfig, LeaseLockConfig
from plimsoll.guard.adapters.own_process import OwnProcessConfig
from plimsoll.guard.adapters.webhook import NotifyConfig
from plimsoll.guard.config_reader import MOST_BYTES, ConfigReader, KeyLines
from plimsoll.guard.engine_config import EngineConfig
from plimsoll.net.address import address

JOURNAL, EVIDENCE, LOCK, LOG, STATE = "guard.journal", "evidence", "fleet.lock", "engine.log", "engine.state"
LOCKS = (FileLockConfig, EtcdLockConfig, LeaseLockConfig)


class LockConfig(Protocol):
    """A table of LOCKS."""

    def build(self) -> Lock: ...  # the lock; BadInput where it cannot be


class Listen(NamedTuple):
    """Address of guard's API."""

    host: str = "127.0.0.1"
    port: int = 9790


def listen_of(text: str) -> Listen:
    """Returns the host and port in "HOST:PORT" or ":PORT"; BadInput if it is neither."""
    found = re.fullmatch(r"\[?([A-Za-z0-9.:_-]*?)\]?:(\d{1,5})", text)
    if found is None or not int(found[2]) < 65_536:
        raise BadInput('listen is "HOST:PORT", for instance "127.0.0.1:9790"')
    return Listen(found[1] or "127.0.0.1", int(found[2]))


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d{1,3}){3}", host))


@dataclass(frozen=True, slots=True)
class ApiConfig(key.ConfigTable):
    """[api]: the address of guard's own API and its tokens; without `listen` guard also runs if it cannot serve it."""

    listen: Listen | None = key.word(
        None, "where its API listens; another address than this machine's needs a token",
        shown_default="127.0.0.1:9790", convert=listen_of,
    )  # fmt: skip
    token: str | None = key.secret("the API's token; default: one is drawn")
    read_token: str | None = key.secret("a second token that reads everything and can do nothing: for Prometheus")
    hosts: tuple[str, ...] = key.words(
        (), "further names that a Host header may hold", convert=lambda hosts: tuple(map(str.lower, hosts))
    )
    kubernetes: bool = key.switch("a user's own token of the cluster is taken, too: who may evict the pod may act on it")

    @property
    def host(self) -> str:
        """The host it listens on, configured or default."""
        return (self.listen or Listen()).host

    @property
    def port(self) -> int:
        return (self.listen or Listen()).port

    def checked(self, given: Collection[str]) -> Self:
        """Returns itself; raises WrongKey for two equal tokens, or for none where other machines reach the API."""
        del given
        if self.read_token is not None and self.read_token == self.token:
            raise key.WrongKey("read_token_file", "the token that only reads must be another one than the API's own")
        if not is_loopback(self.host) and self.token is None:
            raise key.WrongKey("listen", f"{self.host} is not this machine alone: that needs a token_file")
        return self


@dataclass(frozen=True, slots=True)
class PromiseConfig(key.ConfigTable):
    """[promise]: the latency promised to requests; with it guard advises which knob would have kept it for more of them."""

    ttft_s: float = key.duration(10.0, 0.001, 3_600.0, "the first token comes within")
    tpot_s: float = key.duration(0.1, 0.000_1, 60.0, "and each one after it within, on average")
    window_s: float = key.duration(600.0, 30.0, 86_400.0, "so much of a recording is replayed")
    every_s: float = key.duration(300.0, 10.0, 86_400.0, "so often")


@dataclass(frozen=True, slots=True)
class TlsConfig(key.ConfigTable):
    """[tls]: the certificates that guard trusts where it speaks https to engines and gates."""

    ca_file: str | None = key.path("the authority that vouches for them; default: those of this machine")
    any_name: bool = key.switch("a certificate may bear another name than the address: pods are asked by their IP addresses")

    def checked(self, given: Collection[str]) -> Self:
        """Returns itself; raises WrongKey for an unreadable authority, or another name without the user's own authority."""
        del given
        if self.any_name and self.ca_file is None:
            raise key.WrongKey("any_name", "any_name needs a ca_file: else any server with any certificate would do")
        try:
            self.trust()
        except (OSError, ssl.SSLError):
            raise key.WrongKey("ca_file", f"{self.ca_file}: no certificates can be read from it") from None
        return self

    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        context.check_hostname = not self.any_name
        return context


@dataclass(frozen=True, slots=True)
class GuardConfig(key.ConfigTable):
    """The whole configuration. The policy stays as it was read: the judge checks it."""

    engines: tuple[EngineConfig, ...] = key.table("", EngineConfig, default=(), is_list=True, key="engine")
    discover: DiscoverConfig = key.table("", DiscoverConfig, default=DiscoverConfig())
    policy: Mapping[str, Any] = key.table("", default={})
    notify: NotifyConfig = key.table("", NotifyConfig, default=NotifyConfig())
    api: ApiConfig = key.table("", ApiConfig, default=ApiConfig())
    act: ActPolicy | None = key.table("", ActPolicy)  # None: there is no such table
    lock: LockConfig | None = key.table("", *LOCKS)  # None: a file beside the journal
    own: OwnProcessConfig = key.table("", OwnProcessConfig, default=OwnProcessConfig())
    promise: PromiseConfig | None = key.table("", PromiseConfig)  # None: no advice on knobs
    tls: TlsConfig | None = key.table("", TlsConfig)
    name: str = ""  # of the file
    lines: KeyLines = field(default_factory=lambda: KeyLines(""))
    warnings: tuple[str, ...] = ()  # about settings that are allowed and questionable

    def refuse(self, message: str, *path: str | int) -> BadInput:
        return BadInput(f"{self.name}, line {self.lines.of(*path)}: {message}")


def read_guard_config(path: str) -> GuardConfig:
    """Reads the configuration in a file; BadInput, with the line, for any mistake."""
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
    """Reads the configuration in a text; paths in it are relative to the folder of `name`."""
    reader = ConfigReader(name, text)
    config = reader.read((), reader.tables, GuardConfig)
    places: dict[str, int] = {}
    owners: dict[tuple[str, object], int] = {}
    for number, engine in enumerate(config.engines):
        if engine.name in places:
            first = reader.lines.of("engine", places[engine.name])
            place = "name" if "name" in reader.tables["engine"][number] else "url"
            raise reader.wrong(("engine", number, place), f"{engine.name!r} is an engine already, in line {first}")
        # Values that no two engines may share, by key: address, gate, restart and servers at HAProxy.
        owned: list[tuple[str, object]] = [("url", address(engine.url).url.rstrip("/"))]
        owned += [] if engine.gate_url is None else [("gate", engine.gate_url.rstrip("/"))]
        owned += [] if engine.restart is None else [("restart", engine.restart)]
        if isinstance(engine.balancer, HaproxyConfig):
            place_there = engine.balancer.socket, engine.balancer.server
            owned += [("balancer", (*place_there, backend)) for backend in engine.balancer.backends]
        for key_name, mine in owned:
            if (other := owners.setdefault((key_name, mine), number)) != number:
                first = reader.lines.of("engine", other, key_name)
                shown = {"url": "address", "gate": "gate", "restart": "restart", "balancer": "balancer server"}[key_name]
                message = f"the same {shown} as in line {first}: guard would stop one engine for the other"
                raise reader.wrong(("engine", number, key_name), message)
        if isinstance(engine.restart, CommandRestarterConfig) and engine.restart.stop == engine.restart.start:
            raise reader.wrong(("engine", number, "restart"), "stop and start are the same command")
        places[engine.name] = number
    return replace(config, name=name, lines=reader.lines, warnings=tuple(reader.warnings))


class Files(NamedTuple):
    """Paths of the files that outlive guard."""

    journal: Path
    evidence: Path
    lock: Path
    own_log: Path
    own_state: Path


def files_of(act: ActPolicy | None, own: OwnProcessConfig, environ: Mapping[str, str]) -> Files | None:
    """Returns the configured paths, else those in systemd's StateDirectory=, else in this user's own; None without any."""
    journal = None if act is None or act.journal is None else Path(act.journal)
    given, state, home = (environ.get(name, "") for name in ("STATE_DIRECTORY", "XDG_STATE_HOME", "HOME"))
    if journal is not None:
        folder = journal.parent
    elif given.startswith("/"):
        folder = Path(given.partition(":")[0])
    elif state.startswith("/"):
        folder = Path(state) / "plimsoll"
    elif home.startswith("/"):
        folder = Path(home) / ".local" / "state" / "plimsoll"
    else:
        return None
    evidence = None if act is None or act.evidence is None else Path(act.evidence)
    return Files(
        journal or folder / JOURNAL, evidence or folder / EVIDENCE, folder / LOCK,
        Path(own.log) if own.log else folder / LOG, Path(own.state) if own.state else folder / STATE,
    )  # fmt: skip
