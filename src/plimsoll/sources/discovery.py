"""Where the engines are: Prometheus's own lists (file_sd, http_sd) or the pods of a Kubernetes cluster.

Each finder answers with all it knows now, or raises: then what it said before holds. Labels other than those named here are
not looked at, and relabelling is Prometheus's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode, urlsplit

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.sources import http_get
from plimsoll.sources.kubernetes_api import Cluster

MOST_TARGETS = 5_000
MOST_BYTES = 16 << 20
MOST_PAGES = 100
PAGE_PODS = 500
TIMEOUT_S = 10.0
LIST_S = 30.0  # for all pages of a list
_USUAL_PORT = 8000
_LONGEST_NAME = 200


class Target(NamedTuple):
    """One engine to look at."""

    name: str
    url: str
    token: str | None = None  # of its gate
    canary_s: float | None = None  # how often a test request is made; None: never
    plan: tuple[float, float, float] | None = None  # tokens of KV cache that were planned, and their band
    gate_url: str | None = None  # where the gate has a port of its own
    api_key: str | None = None  # vLLM's own, for test requests


class Kubernetes(NamedTuple):
    """Which pods are engines. Without a namespace it is the one that guard runs in."""

    selector: str
    namespace: str = ""
    port: int | None = None


class Finder(Protocol):
    """One way to find engines. `find` may wait for disk or network, so it is called from a thread."""

    said: str  # what it is called in a sentence

    def find(self) -> tuple[Target, ...]:
        """All that there are now."""


def named(url: str) -> str:
    """What an engine is called that has no name: its host and port."""
    parts = urlsplit(http_get.address(url).shown)
    return f"{parts.netloc}{parts.path.rstrip('/')}"[:_LONGEST_NAME]


class FileSd:
    """Files in Prometheus's file_sd form; each is read again when it changes, and kept as it was while it is broken."""

    def __init__(self, pattern: str) -> None:
        self.said = f"file_sd {pattern}"
        self._pattern = Path(pattern)
        self._known: dict[Path, tuple[tuple[int, int, int], tuple[Target, ...]]] = {}

    def find(self) -> tuple[Target, ...]:
        """The targets of every file there is; raises only after all were looked at."""
        paths = sorted(self._pattern.parent.glob(self._pattern.name))
        if not paths:
            raise WorldFailed(f"{self._pattern}: no such file")
        self._known = {path: known for path, known in self._known.items() if path in paths}
        wrong: Exception | None = None
        for path in paths:
            try:
                self._read(path)
            except (BadInput, WorldFailed) as error:
                wrong = error
        if wrong is not None:
            raise wrong
        return tuple(target for _, targets in self._known.values() for target in targets)

    def _read(self, path: Path) -> None:
        try:
            now = path.stat()
            mark = (now.st_mtime_ns, now.st_size, now.st_ino)
            if path in self._known and self._known[path][0] == mark:
                return
            if now.st_size > MOST_BYTES:
                raise TooLarge(f"{path}: more than {MOST_BYTES >> 20} MiB")
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise WorldFailed(f"{path}: {error.strerror or 'cannot be read'}") from None
        except UnicodeDecodeError:
            raise BadInput(f"{path}: not UTF-8") from None
        self._known[path] = (mark, groups_in(_tree(text, str(path)), str(path)))


class HttpSd:
    """An address that answers with a list in Prometheus's http_sd form."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._where = http_get.address(url)
        self._timeout_s = timeout_s
        self.said = f"http_sd {self._where.shown}"

    def find(self) -> tuple[Target, ...]:
        """The targets it names."""
        reply = http_get.get(self._where, most_bytes=MOST_BYTES, timeout_s=self._timeout_s)
        if reply.status != 200:
            raise WorldFailed(f"{self._where.shown}: answers {reply.status}")
        try:
            tree = json.loads(reply.body)
        except (ValueError, RecursionError):
            raise WorldFailed(f"{self._where.shown}: answers something that is not JSON") from None
        return groups_in(tree, self._where.shown)


class Pods:
    """The pods of a label selector that have an address, asked of the cluster's own API."""

    def __init__(self, asked: Kubernetes, cluster: Cluster) -> None:
        self._asked, self._cluster = asked, cluster
        self.said = f"kubernetes {asked.selector}"

    def find(self) -> tuple[Target, ...]:
        """Running pods, named namespace/pod; those that are being deleted are left out."""
        namespace = self._asked.namespace or self._cluster.namespace()
        query = {"labelSelector": self._asked.selector, "limit": str(PAGE_PODS)}
        found: list[Target] = []
        end_s = time.monotonic() + LIST_S
        for _ in range(MOST_PAGES):
            if time.monotonic() > end_s:
                raise TimedOut(f"{self.said}: the list of pods was not there within {LIST_S:g} s")
            page = self._cluster.get(f"/api/v1/namespaces/{namespace}/pods?{urlencode(query)}")
            items, more = page.get("items"), page.get("metadata")
            if not isinstance(items, list):
                raise WorldFailed(f"{self.said}: the cluster answers no list of pods")
            found += [target for item in items if (target := self._target(item)) is not None]
            if len(found) > MOST_TARGETS:
                raise TooLarge(f"{self.said}: more than {MOST_TARGETS:,} pods")
            onward = more.get("continue") if isinstance(more, dict) else None
            if not onward:
                return tuple(found)
            query["continue"] = str(onward)
        raise TooLarge(f"{self.said}: the list of pods does not end")

    def _target(self, item: Any) -> Target | None:
        about, spec, status = (_dict(item).get(key) for key in ("metadata", "spec", "status"))
        about, status = _dict(about), _dict(status)
        address = status.get("podIP")
        if not isinstance(address, str) or not address or status.get("phase") != "Running" or about.get("deletionTimestamp"):
            return None
        port = self._asked.port or _port(_dict(spec))
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{port}"
        try:
            http_get.address(url)
        except BadInput:
            return None
        return Target(f"{about.get('namespace', '')}/{about.get('name', '')}"[:_LONGEST_NAME], url)


def _port(spec: Mapping[str, Any]) -> int:
    """The port called http, else the only one there is, else vLLM's own."""
    ports = [
        (str(_dict(port).get("name", "")), number)
        for container in spec.get("containers") or []
        for port in _dict(container).get("ports") or []
        if isinstance(number := _dict(port).get("containerPort"), int)
    ]
    by_name = [number for name, number in ports if name == "http"]
    return by_name[0] if by_name else ports[0][1] if len(ports) == 1 else _USUAL_PORT


def groups_in(tree: Any, name: str) -> tuple[Target, ...]:
    """The targets of a list in Prometheus's form: [{"targets": ["host:port"], "labels": {...}}]."""
    if not isinstance(tree, list):
        raise BadInput(f'{name}: not a list of {{"targets": [...], "labels": {{...}}}}')
    found: list[Target] = []
    for number, group in enumerate(tree):
        targets, labels = _dict(group).get("targets"), _dict(_dict(group).get("labels"))
        if not isinstance(group, dict) or not isinstance(targets, list):
            raise BadInput(f"{name}: group {number + 1} has no list of targets")
        found += [_target(one, labels, f"{name}: group {number + 1}", len(targets) == 1) for one in targets]
        if len(found) > MOST_TARGETS:
            raise TooLarge(f"{name}: more than {MOST_TARGETS:,} targets")
    return tuple(found)


def _target(text: Any, labels: Mapping[str, Any], where: str, is_alone: bool) -> Target:  # noqa: FBT001
    """`__scheme__`, `__metrics_path__` and, where it can be meant for one engine only, `instance` or `name` are heeded."""
    if not isinstance(text, str) or not text:
        raise BadInput(f"{where}: a target is a text, host:port")
    scheme, path = labels.get("__scheme__", "http"), str(labels.get("__metrics_path__", "/metrics"))
    url = text if "://" in text else f"{scheme}://{text}{path.removesuffix('/metrics')}"
    try:
        url = http_get.address(url).url
    except BadInput as error:
        raise BadInput(f"{where}: {text[:80]!r}: {error}") from None
    called = next((labels[key] for key in ("name", "instance") if is_alone and isinstance(labels.get(key), str)), "")
    return Target(called[:_LONGEST_NAME] if called.isprintable() and called else named(url), url)


def _tree(text: str, name: str) -> Any:
    if name.endswith(".json"):
        try:
            return json.loads(text)
        except ValueError as error:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
            raise BadInput(f"{name}, line {line}: not JSON") from None
        except RecursionError:
            raise BadInput(f"{name}: nested too deeply") from None
    from plimsoll.sources.yaml_tree import documents_in

    documents = documents_in(text, name)
    return documents[0] if len(documents) == 1 else documents or None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
