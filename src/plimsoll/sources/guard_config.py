"""Reads guard's configuration, a TOML file. Whatever is wrong in it is one line with the file and the line."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from plimsoll.errors import BadInput
from plimsoll.sources.discovery import Kubernetes, Target, named
from plimsoll.sources.http_get import address
from plimsoll.sources.toml_lines import Lines

MOST_BYTES = 4 << 20
MOST_TOKEN_BYTES = 4_096
SHORTEST_TOKEN = 16
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_TABLES = ("engine", "discover", "prometheus", "policy", "notify", "api")
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
    except tomllib.TOMLDecodeError as error:
        raise BadInput(_not_toml(name, str(error), text)) from None
    except RecursionError:
        raise BadInput(f"{name}, line 1: nested too deeply") from None
    return _Reader(name, tables, Lines(text)).config()


def _not_toml(name: str, said: str, text: str) -> str:
    found = re.search(r"\(at line (\d+), column \d+\)", said)
    line = int(found[1]) if found else text.count("\n") + 1
    reason = re.sub(r"\s*\(at [^()]*\)$", "", said)
    return f"{name}, line {line}: not TOML: {reason[:200]}"


class _Reader:
    """One file: every question it asks of a value knows the value's place."""

    def __init__(self, name: str, tables: dict[str, Any], lines: Lines) -> None:
        self._name, self._tables, self._lines = name, tables, lines
        self._folder = Path(name).parent
        self._warnings: dict[str, None] = {}

    def config(self) -> GuardConfig:
        self._known((), self._tables, _TABLES)
        engines = self._list(("engine",), self._tables.get("engine", []))
        notify = self._table(("notify",), self._tables.get("notify", {}), ("webhook", "repeat"))
        policy = self._table(("policy",), self._tables.get("policy", {}))
        targets = [self._engine(("engine", number), table) for number, table in enumerate(engines)]
        self._unique(targets)
        webhook = self._url(("notify", "webhook"), notify["webhook"]) if "webhook" in notify else None
        repeat_s = self._seconds(("notify", "repeat"), notify.get("repeat", 3600.0), 60.0, 86_400.0)
        discover, api, prometheus = self._discover(), self._api(), self._prometheus(engines, targets)
        return GuardConfig(
            self._name, tuple(targets), discover, policy, webhook, repeat_s, api, self._lines, prometheus, tuple(self._warnings)
        )

    def _engine(self, place: tuple[str | int, ...], table: Any) -> Target:
        row = self._table(place, table, ("url", "name", "token_file", "canary", "plan", "gate", "api_key_file", "instance"))
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
        known = ("file_sd", "http_sd", "kubernetes", "every", "token_file", "canary", "api_key_file")
        row = self._table(("discover",), self._tables.get("discover", {}), known)
        files = self._texts(("discover", "file_sd"), row.get("file_sd", []))
        for one in files:
            if not one.endswith((".json", ".yml", ".yaml")):
                raise self._wrong(("discover", "file_sd"), f"{one!r}: file_sd reads .json, .yml and .yaml")
        urls = self._texts(("discover", "http_sd"), row.get("http_sd", []))
        return Discover(
            tuple(str(self._folder / one) for one in files),
            tuple(self._url(("discover", "http_sd"), one) for one in urls),
            self._kubernetes(row["kubernetes"]) if "kubernetes" in row else None,
            self._seconds(("discover", "every"), row.get("every", 30.0), 1.0, 3600.0),
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
        row = self._table(("prometheus",), self._tables["prometheus"], ("url", "labels", "instance"))
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
        row = self._table(place, value, ("selector", "namespace", "port"))
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
        row = self._table(("api",), self._tables.get("api", {}), ("listen", "token_file", "hosts"))
        token = self._token(("api", "token_file"), row.get("token_file"))
        host, port = Api().host, Api().port
        if "listen" in row:
            found = listen_of(self._text(("api", "listen"), row["listen"]))
            if found is None:
                raise self._wrong(("api", "listen"), 'listen is "HOST:PORT", for instance "127.0.0.1:9790"')
            host, port = found
        if not is_loopback(host) and token is None:
            raise self._wrong(("api", "listen"), f"{host} is not this machine alone: that needs a token_file")
        hosts = tuple(one.lower() for one in self._texts(("api", "hosts"), row.get("hosts", [])))
        return Api(host, port, token, hosts, "listen" in row)

    # Values

    def _wrong(self, place: Sequence[str | int], message: str) -> BadInput:
        return BadInput(f"{self._name}, line {self._lines.of(*place)}: {message}")

    def _known(self, place: tuple[str | int, ...], table: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                where = f"[{'.'.join(str(part) for part in place if isinstance(part, str))}] has" if place else "there is"
                raise self._wrong((*place, key), f"{where} no {key[:40]!r}; known: {', '.join(known)}")

    def _table(self, place: tuple[str | int, ...], value: Any, known: Sequence[str] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(place, f"[{place[0]}] is a table")
        if known is not None:
            self._known(place, value, known)
        return value

    def _list(self, place: tuple[str | int, ...], value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self._wrong(place, f"write [[{place[0]}]], once for each")
        return value

    def _text(self, place: tuple[str | int, ...], value: Any) -> str:
        if not isinstance(value, str) or len(value) > 1_000 or not value.isprintable():
            raise self._wrong(place, f"{place[-1]} is a text on one line")
        return value

    def _texts(self, place: tuple[str | int, ...], value: Any) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise self._wrong(place, f"{place[-1]} is a text or a list of texts")
        return tuple(self._text(place, one) for one in values)

    def _url(self, place: tuple[str | int, ...], value: Any) -> str:
        text = self._text(place, value)
        try:
            address(text)
        except BadInput as error:
            raise self._wrong(place, str(error)) from None
        return text.strip()

    def _gate(self, place: tuple[str | int, ...], value: Any) -> str:
        """Where a gate listens: an address, or a socket of this machine."""
        text = self._text(place, value)
        if not text.startswith("unix:"):
            return self._url(place, text)
        path = text.removeprefix("unix:")
        if not path.startswith("/") or not path.isascii() or len(path) > _LONGEST_SOCKET:
            raise self._wrong(place, f"a socket is unix:/PATH, of {_LONGEST_SOCKET} letters at most")
        return text

    def _seconds(self, place: tuple[str | int, ...], value: Any, low: float, high: float) -> float:
        try:
            seconds = seconds_in(value)
        except BadInput as error:
            raise self._wrong(place, f"{place[-1]}: {error}") from None
        if not low <= seconds <= high:
            raise self._wrong(place, f"{place[-1]} must lie between {low:g} and {high:g} s, not {seconds:g}")
        return seconds

    def _canary(self, place: tuple[str | int, ...], value: Any) -> float | None:
        if value is None or value is False:
            return None
        return 30.0 if value is True else self._seconds(place, value, 5.0, 60.0)

    def _token(self, place: tuple[str | int, ...], value: Any, shortest: int = SHORTEST_TOKEN) -> str | None:
        if value is None:
            return None
        path = self._folder / Path(self._text(place, value)).expanduser()
        try:
            token = read_token(str(path), shortest)
        except BadInput as error:
            raise self._wrong(place, str(error)) from None
        if is_open_to_all(str(path)):
            self._warnings[open_to_all(str(path))] = None
        return token

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


def read_token(path: str, shortest: int = SHORTEST_TOKEN) -> str:
    """The token in a file: one word, not short; BadInput never shows any of it."""
    try:
        with Path(path).open("rb") as file:
            token = file.read(MOST_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or 'cannot be read'}") from None
    if len(token) > MOST_TOKEN_BYTES or not re.fullmatch(rb"[\x21-\x7e]+", token):
        raise BadInput(f"{path}: holds no token: one word of printable letters")
    if len(token) < shortest:
        raise BadInput(f"{path}: a token has {shortest} letters at least")
    return token.decode("ascii")


def is_open_to_all(path: str) -> bool:
    """Whether every user of this machine can read it."""
    try:
        return bool(Path(path).stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def open_to_all(path: str) -> str:
    """What is said of such a file."""
    return f"{path}: every user of this machine can read this secret; chmod 600, or systemd's LoadCredential="


def seconds_in(value: Any) -> float:
    """5, "5s", "2m" or "1h" in seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]{0,2})\s*", value) if isinstance(value, str) else None
    factor = None if found is None else {**_SECONDS, "": 1.0}.get(found[2])
    if found is None or factor is None:
        raise BadInput(f"{str(value)[:40]!r} is no time; write 30s, 5m or 2h")
    return float(found[1]) * factor


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
