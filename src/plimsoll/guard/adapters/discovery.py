"""Where the engines are: Prometheus's own lists (file_sd, http_sd) or the pods of a Kubernetes cluster.

Each finder answers with all it knows now. What goes wrong is in its `trouble`, and then what it said before holds, as far as it
is not known to be gone. Labels other than those named here are not looked at, and relabelling is Prometheus's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import urlencode

from plimsoll.errors import BadInput, PlimsollError, TimedOut, TooLarge, WorldFailed
from plimsoll.guard import config_fields as key
from plimsoll.guard.adapters.cluster import ClusterClient, namespace_key
from plimsoll.guard.engine_config import LONGEST_NAME, EngineConfig, host_and_port
from plimsoll.launch.manifests import documents_in
from plimsoll.net.address import address, server_address
from plimsoll.net.client import table

USUAL_PORT = 8000
RUNNING, OVER = "Running", ("Failed", "Succeeded")
WORDS_MAX = 100


class Pod(NamedTuple):
    """A pod as the cluster's API shows it: where it is, how often it was started again, and whether it is over."""

    name: str  # namespace/name
    address: str
    port: int
    phase: str
    is_going: bool  # it is being deleted
    restarts: int | None  # of the container that serves the port, or else of the one that was started most often
    ended: str  # why it has ended for good, in words; empty if it has not, or if somebody may start it again


def read_pod(item: Any, port: int | None = None) -> Pod:
    """A pod of a list; `port` where the user has named it."""
    about, spec, status = (table(table(item).get(key)) for key in ("metadata", "spec", "status"))
    address, phase = status.get("podIP"), str(status.get("phase", ""))
    port = port or port_of(spec)
    states = _statuses(spec, status, port)
    counts = [count for state in states if isinstance(count := state.get("restartCount"), int) and not isinstance(count, bool)]
    return Pod(
        f"{about.get('namespace', '')}/{about.get('name', '')}",
        address if isinstance(address, str) else "",
        port,
        phase,
        bool(about.get("deletionTimestamp")),
        max((count for count in counts if count >= 0), default=None),
        _ended(about, spec, status, states) if phase in OVER else "",
    )


def port_of(spec: Mapping[str, Any]) -> int:
    """The port called http, else the only one there is, else vLLM's own."""
    ports = [
        (str(port.get("name", "")), number)
        for container in _dicts(spec.get("containers"))
        for port in _dicts(container.get("ports"))
        if isinstance(number := port.get("containerPort"), int) and 0 < number < 65_536
    ]
    by_name = [number for name, number in ports if name == "http"]
    return by_name[0] if by_name else ports[0][1] if len(ports) == 1 else USUAL_PORT


def _statuses(spec: Mapping[str, Any], status: Mapping[str, Any], port: int) -> list[dict[str, Any]]:
    """Those of the container that has the port; of all where none says so."""
    states = _dicts(status.get("containerStatuses"))
    serving = {
        container.get("name") for container in _dicts(spec.get("containers"))
        if any(entry.get("containerPort") == port for entry in _dicts(container.get("ports")))
    }  # fmt: skip
    return [state for state in states if state.get("name") in serving] or states


def _ended(about: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any], states: list[dict[str, Any]]) -> str:
    """Only where nobody starts it again: the node may not, and there is no controller that would put another in its place."""
    if spec.get("restartPolicy") != "Never" or any(owner.get("controller") for owner in _dicts(about.get("ownerReferences"))):
        return ""
    for state in states:
        over = table(table(state.get("state")).get("terminated"))
        if isinstance(code := over.get("exitCode"), int):
            reason = str(over.get("reason") or "")[:WORDS_MAX]
            words = f" ({reason})" if reason and reason.isprintable() and reason not in ("Error", "Completed") else ""
            return f"its container ended with exit code {code}{words} and is not started again: restartPolicy is Never"
    why = str(status.get("reason") or status.get("phase"))[:WORDS_MAX]
    return f"its pod is over ({why if why.isprintable() else 'no reason given'}), and restartPolicy is Never"


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


MOST_TARGETS = 5_000
MOST_BYTES = 16 << 20
MOST_PAGES = 100
PAGE_PODS = 500
TIMEOUT_S = 10.0
LIST_S = 30.0  # for all pages of a list
TROUBLES_SAID = 3


@dataclass(frozen=True, slots=True)
class PodsConfig(key.ConfigTable):
    """[discover.kubernetes]: which pods are engines."""

    short_key: ClassVar[str] = "selector"

    selector: str = key.word(
        None, "labels of the pods; needed", example='"app=vllm"', pattern=".+", pattern_name="a label selector"
    )
    namespace: str = namespace_key("default: guard's own")
    port: int | None = key.count(None, 1, 65_535, "default: the port called http, else the only one, else 8000")


def _lists(files: tuple[str, ...]) -> tuple[str, ...]:
    for file in files:
        if not file.endswith((".json", ".yml", ".yaml")):
            raise ValueError(f"{file!r}: file_sd reads .json, .yml and .yaml")
    return files


@dataclass(frozen=True, slots=True)
class DiscoverConfig(key.ConfigTable):
    """[discover]: where engines are found, and what guard uses for those that it finds."""

    file_sd: tuple[str, ...] = key.other("files", "files in Prometheus's own form, .json, .yml or .yaml", (), convert=_lists)
    http_sd: tuple[str, ...] = key.other("urls", "addresses that answer with such a list", ())
    kubernetes: PodsConfig | None = key.table("pods of this cluster (below); or a label selector alone", PodsConfig)
    every_s: float = key.duration(30.0, 1.0, 3_600.0, "how often http_sd and kubernetes are asked")
    token: str | None = key.secret("of the gates of what is found")
    canary_s: float | None = key.canary("as for an engine")
    api_key: str | None = key.secret("as for an engine", shortest=1)

    def finders(self) -> list[Finder]:
        """One for each place where engines are found; BadInput for pods where guard runs in no cluster."""
        pods = [] if self.kubernetes is None else [PodFinder(self.kubernetes, ClusterClient())]
        return [*map(FileFinder, self.file_sd), *map(HttpFinder, self.http_sd), *pods]


class Finder(Protocol):
    """One way to find engines. `find` may wait for disk or network, so it is called from a thread."""

    label: str  # what it is called in a sentence
    trouble: str  # what was wrong at the last time, in words; empty if nothing was
    restarts: Mapping[str, int]  # how often what runs an engine was started again, by the target's name, where that is known
    ended: Mapping[str, str]  # why a target will not come back, by its name, where that is known

    def find(self) -> tuple[EngineConfig, ...]:
        """All that there are now; what is wrong is in `trouble`, and is never raised."""


class TargetList(NamedTuple):
    """What a list names, and what of it is no engine's address."""

    targets: tuple[EngineConfig, ...] = ()
    troubles: tuple[str, ...] = ()


class FileFinder:
    """Files in Prometheus's file_sd form; each is read again when it changes, and kept as it was while it is broken."""

    def __init__(self, pattern: str) -> None:
        self.label = f"file_sd {pattern}"
        self.trouble = ""
        self.restarts: Mapping[str, int] = {}
        self.ended: Mapping[str, str] = {}
        self._pattern = Path(pattern)
        self._known: dict[Path, tuple[tuple[int, int, int], TargetList]] = {}

    def find(self) -> tuple[EngineConfig, ...]:
        """The targets of every file there is; a file that goes takes its own with it."""
        try:
            paths = sorted(self._pattern.parent.glob(self._pattern.name))
        except OSError as error:
            self.trouble = f"{self._pattern.parent}: {error.strerror or 'cannot be read'}; the last list stays in use"
            return self._targets()
        self._known = {path: known for path, known in self._known.items() if path in paths}
        troubles = [] if paths else [f"{self._pattern}: no such file"]
        for path in paths:
            try:
                self._read(path)
            except PlimsollError as error:
                troubles.append(f"{error}; what it said before stays" if path in self._known else str(error))
        troubles += [trouble for _, listed in self._known.values() for trouble in listed.troubles]
        self.trouble = _words(troubles)
        return self._targets()

    def _targets(self) -> tuple[EngineConfig, ...]:
        return tuple(target for path in sorted(self._known) for target in self._known[path][1].targets)

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


class HttpFinder:
    """An address that answers with a list in Prometheus's http_sd form."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._where = address(url)
        self._timeout_s = timeout_s
        self._known: tuple[EngineConfig, ...] = ()
        self.label = f"http_sd {self._where.shown}"
        self.trouble = ""
        self.restarts: Mapping[str, int] = {}
        self.ended: Mapping[str, str] = {}

    def find(self) -> tuple[EngineConfig, ...]:
        """The targets it names; those that it named last while it names none."""
        try:
            found = self._ask()
        except PlimsollError as error:
            self.trouble = f"{error}; the last list stays in use"
        else:
            self._known, self.trouble = found.targets, _words(found.troubles)
        return self._known

    def _ask(self) -> TargetList:
        reply = self._where.get(most_bytes=MOST_BYTES, timeout_s=self._timeout_s)
        if reply.status != 200:
            raise WorldFailed(f"{self._where.shown}: answers {reply.status}")
        try:
            tree = json.loads(reply.body)
        except (ValueError, RecursionError):
            raise WorldFailed(f"{self._where.shown}: answers something that is not JSON") from None
        return groups_in(tree, self._where.shown)


class PodFinder:
    """The pods of a label selector that have an address, asked of the cluster's own API."""

    def __init__(self, asked: PodsConfig, cluster: ClusterClient) -> None:
        self._asked, self._cluster = asked, cluster
        self._known: dict[str, EngineConfig] = {}
        self.label = f"kubernetes {asked.selector}"
        self.trouble = ""
        self.restarts: Mapping[str, int] = {}
        self.ended: Mapping[str, str] = {}

    def find(self) -> tuple[EngineConfig, ...]:
        """Running pods, named namespace/pod; without those that are being deleted.

        A pod that was seen to run and has ended for good stays, with its end, until it is deleted.
        """
        try:
            pods = self._pods()
        except PlimsollError as error:
            self.trouble = f"{error}; the last list stays in use"
            return tuple(self._known.values())
        known, found = self._known, dict[str, EngineConfig]()
        troubles = []
        for pod in pods:
            name = pod.name[:LONGEST_NAME]
            if pod.is_going:
                continue
            if pod.ended and name in known:
                found[name] = known[name]
            elif pod.phase == RUNNING and pod.address:
                try:
                    found[name] = _of_pod(pod)
                except BadInput as error:
                    troubles.append(f"{name}: {error}")
        self._known, self.trouble = found, _words(troubles)
        self.restarts = {pod.name: pod.restarts for pod in pods if pod.restarts is not None and pod.name in found}
        self.ended = {pod.name: pod.ended for pod in pods if pod.ended and pod.name in found}
        return tuple(found.values())

    def _pods(self) -> list[Pod]:
        namespace = self._asked.namespace or self._cluster.namespace()
        if not namespace:
            raise WorldFailed(f"{self.label}: guard's own namespace cannot be read: is a service account mounted?")
        query = {"labelSelector": self._asked.selector, "limit": str(PAGE_PODS)}
        found: list[Pod] = []
        end_s = time.monotonic() + LIST_S
        for _ in range(MOST_PAGES):
            if time.monotonic() > end_s:
                raise TimedOut(f"{self.label}: the list of pods was not there within {LIST_S:g} s")
            page = self._cluster.get(f"/api/v1/namespaces/{namespace}/pods?{urlencode(query)}", TIMEOUT_S)
            items, more = page.get("items"), page.get("metadata")
            if not isinstance(items, list):
                raise WorldFailed(f"{self.label}: the cluster answers no list of pods")
            found += [read_pod(item, self._asked.port) for item in items]
            if len(found) > MOST_TARGETS:
                raise TooLarge(f"{self.label}: more than {MOST_TARGETS:,} pods")
            onward = more.get("continue") if isinstance(more, dict) else None
            if not onward:
                return found
            query["continue"] = str(onward)
        raise TooLarge(f"{self.label}: the list of pods does not end")


def _of_pod(pod: Pod) -> EngineConfig:
    url = f"http://{f'[{pod.address}]' if ':' in pod.address else pod.address}:{pod.port}"
    server_address(url)
    return EngineConfig(pod.name[:LONGEST_NAME], url)


def _words(troubles: list[str] | tuple[str, ...]) -> str:
    more = len(troubles) - TROUBLES_SAID
    return "; ".join([*troubles[:TROUBLES_SAID], *([f"and {more} more"] if more > 0 else [])])


def groups_in(tree: Any, name: str) -> TargetList:
    """The targets of a list in Prometheus's form: [{"targets": ["host:port"], "labels": {...}}]. BadInput if it is none.

    One target that is no address does not hide the others.
    """
    if not isinstance(tree, list):
        raise BadInput(f'{name}: not a list of {{"targets": [...], "labels": {{...}}}}')
    found: list[EngineConfig] = []
    troubles: list[str] = []
    for number, group in enumerate(tree):
        targets, labels = table(group).get("targets"), table(table(group).get("labels"))
        if not isinstance(group, dict) or not isinstance(targets, list):
            raise BadInput(f"{name}: group {number + 1} has no list of targets")
        for target in targets:
            try:
                found.append(_target(target, labels, is_alone=len(targets) == 1))
            except BadInput as error:
                troubles.append(f"{name}: group {number + 1}: {error}")
        if len(found) + len(troubles) > MOST_TARGETS:
            raise TooLarge(f"{name}: more than {MOST_TARGETS:,} targets")
    return TargetList(tuple(found), tuple(troubles))


def _target(text: Any, labels: Mapping[str, Any], *, is_alone: bool) -> EngineConfig:
    """`__scheme__`, `__metrics_path__` and, where it can be meant for one engine only, `instance` or `name` are heeded."""
    if not isinstance(text, str) or not text:
        raise BadInput("a target is a text, host:port")
    scheme, path = labels.get("__scheme__", "http"), str(labels.get("__metrics_path__", "/metrics"))
    url = text if "://" in text else f"{scheme}://{text}{path.removesuffix('/metrics')}"
    try:
        where = address(url)
        if where.login is not None:
            raise BadInput("a list may hold no user and password; name this engine in an [[engine]] of its own")
        server_address(where.url)
    except BadInput as error:
        raise BadInput(f"{text.rpartition('@')[2][:80]!r}: {error}") from None
    called = next((labels[key] for key in ("name", "instance") if is_alone and isinstance(labels.get(key), str)), "")
    return EngineConfig(called[:LONGEST_NAME] if called.isprintable() and called else host_and_port(where.url), where.url)


def _tree(text: str, name: str) -> Any:
    if name.endswith(".json"):
        try:
            return json.loads(text)
        except ValueError as error:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
            raise BadInput(f"{name}, line {line}: not JSON") from None
        except RecursionError:
            raise BadInput(f"{name}: nested too deeply") from None
    documents = documents_in(text, name)
    return documents[0] if len(documents) == 1 else documents or None
