"""Reads guard's configuration, a TOML file. Whatever is wrong in it is one line with the file and the line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from plimsoll.errors import BadInput
from plimsoll.sources.discovery import Kubernetes, Target, named
from plimsoll.sources.guard_act_config import ActReader
from plimsoll.sources.guard_act_types import Act, EngineAct, LockAt, Own
from plimsoll.sources.guard_keys import key, names
from plimsoll.sources.guard_values import Values
from plimsoll.sources.http_get import address
from plimsoll.sources.toml_lines import Lines

MOST_BYTES = 4 << 20
_TABLES = ("engine", "discover", "prometheus", "policy", "notify", "api", "act", "lock", "own")
_LONGEST_SOCKET = 107  # bytes of a path that the kernel takes
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
