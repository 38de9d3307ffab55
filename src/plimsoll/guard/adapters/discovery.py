"""Finds engines in Prometheus's own lists (file_sd, http_sd); pods.py finds pods.

Each finder returns all the engines it knows now. When a list cannot be read, `trouble` says why, and its last targets stay
unless they are known to be gone. Labels other than those named here are ignored, and there is no relabelling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from plimsoll.errors import BadInput, PlimsollError, TooLarge, WorldFailed
from plimsoll.guard import config_fields as key
from plimsoll.guard.adapters.cluster import ClusterClient
from plimsoll.guard.adapters.pods import PodFinder, PodsConfig, few_of
from plimsoll.guard.engine_config import LONGEST_NAME, EngineConfig, host_and_port
from plimsoll.launch.manifests import documents_in
from plimsoll.net.address import address, server_address
from plimsoll.net.client import table

MOST_TARGETS = 5_000
MOST_BYTES = 16 << 20
TIMEOUT_S = 10.0


def _lists(files: tuple[str, ...]) -> tuple[str, ...]:
    for file in files:
        if not file.endswith((".json", ".yml", ".yaml")):
            raise ValueError(f"{file!r}: file_sd reads .json, .yml and .yaml")
    return files


@dataclass(frozen=True, slots=True)
class DiscoverConfig(key.ConfigTable):
    """[discover]: the lists that name engines, and the settings of the engines they name."""

    file_sd: tuple[str, ...] = key.other("files", "files in Prometheus's own form, .json, .yml or .yaml", (), convert=_lists)
    http_sd: tuple[str, ...] = key.other("urls", "addresses that answer with such a list", ())
    kubernetes: PodsConfig | None = key.table("pods of this cluster (below); or a label selector alone", PodsConfig)
    every_s: float = key.duration(30.0, 1.0, 3_600.0, "how often http_sd is asked, and who owns the pods")
    token: str | None = key.secret("of the gates of what is found")
    canary_s: float | None = key.canary("as for an engine")
    api_key: str | None = key.secret("as for an engine", shortest=1)

    def finders(self) -> list[Finder]:
        """Returns one finder for each list of engines."""
        return [*map(FileFinder, self.file_sd), *map(HttpFinder, self.http_sd)]

    def pods(self) -> PodFinder | None:
        """Returns the finder of the cluster's pods, None where none is configured; BadInput outside a cluster."""
        return None if self.kubernetes is None else PodFinder(self.kubernetes, ClusterClient(), self.every_s)


class Finder(Protocol):
    """One way to find engines. `find` may wait for disk or network, so it is called from a thread."""

    label: str  # what it is called in a sentence
    trouble: str  # what was wrong the last time, in words; empty if nothing was

    def find(self) -> tuple[EngineConfig, ...]:
        """Returns all engines that there are now; problems go into `trouble` and are never raised."""


class TargetList(NamedTuple):
    """The targets of a list, and its entries that are no engine's address."""

    targets: tuple[EngineConfig, ...]
    troubles: tuple[str, ...]


class FileFinder:
    """Files in Prometheus's file_sd form; each is read again when it changes, and its last targets stay while it is broken."""

    def __init__(self, pattern: str) -> None:
        self.label = f"file_sd {pattern}"
        self.trouble = ""
        self._pattern = Path(pattern)
        self._known: dict[Path, tuple[tuple[int, int, int], TargetList]] = {}

    def find(self) -> tuple[EngineConfig, ...]:
        """Returns the targets of every file that exists; those of a deleted file are gone."""
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
        self.trouble = few_of(troubles)
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
            tree = json.loads(text) if path.suffix == ".json" else documents_in(text, str(path))
        except OSError as error:
            raise WorldFailed(f"{path}: {error.strerror or 'cannot be read'}") from None
        except UnicodeDecodeError:
            raise BadInput(f"{path}: not UTF-8") from None
        except RecursionError:
            raise BadInput(f"{path}: nested too deeply") from None
        except ValueError as error:
            raise BadInput(f"{path}, line {getattr(error, 'lineno', 1)}: not JSON") from None
        if path.suffix != ".json":
            tree = tree[0] if len(tree) == 1 else tree or None
        self._known[path] = (mark, groups_in(tree, str(path)))


class HttpFinder:
    """An address that answers with a list in Prometheus's http_sd form."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._where = address(url)
        self._timeout_s = timeout_s
        self._known: tuple[EngineConfig, ...] = ()
        self.label = f"http_sd {self._where.shown}"
        self.trouble = ""

    def find(self) -> tuple[EngineConfig, ...]:
        """Returns the targets it names; the last ones while it names none."""
        shown = self._where.shown
        try:
            reply = self._where.get(most_bytes=MOST_BYTES, timeout_s=self._timeout_s)
            if reply.status != 200:
                raise WorldFailed(f"{shown}: answers {reply.status}")
            found = groups_in(json.loads(reply.body), shown)
        except PlimsollError as error:
            self.trouble = f"{error}; the last list stays in use"
        except (ValueError, RecursionError):
            self.trouble = f"{shown}: answers something that is not JSON; the last list stays in use"
        else:
            self._known, self.trouble = found.targets, few_of(found.troubles)
        return self._known


def groups_in(tree: Any, name: str) -> TargetList:
    """Reads a list in Prometheus's form: [{"targets": ["host:port"], "labels": {...}}]. BadInput if it is none.

    A target that is no address does not hide the others.
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
    """Reads one target; uses `__scheme__`, `__metrics_path__` and, for a target on its own, `instance` or `name`."""
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
