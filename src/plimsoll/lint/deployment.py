"""Reads how a vLLM server is deployed, beside its command: probes, grace, shared memory, limits, restarts, the card.

A Compose service, a container of a Kubernetes manifest and a systemd unit all become one `Deployment`; a setting that a file
lacks is None, and each check knows its default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plimsoll.errors import BadInput
from plimsoll.hardware.cards import gpu_named
from plimsoll.launch.command_line import Launch
from plimsoll.launch.files import kind_of, read_launches, read_text, unit_settings
from plimsoll.launch.manifests import LLM_SERVICE, LinedMapping, ManifestStart, Tree, mapping_at, starts_in_manifest, text_at

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(hours?|hr|h|minutes?|min|ms|m|seconds?|sec|s|us)?", re.IGNORECASE)
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "us": 0.000001}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# Labels by which a cluster names a node's card.
_CARD_LABELS = re.compile(
    r"gpu\.product|gke-accelerator|instance-type|gpu-name|accelerator|gpu\.nvidia\.com/model", re.IGNORECASE
)
_SHM = "/dev/shm"  # noqa: S108 - where it is mounted, not a file of ours
_LEAVE = "plimsoll.inside.leave"
_SLEEP = re.compile(rf"(?:\bsleep|{re.escape(_LEAVE)})\s+(\d+)")


@dataclass(frozen=True, slots=True)
class HealthProbe:
    """A check that ends or marks a server that does not answer."""

    line: int
    delay_s: float  # before the first look
    patience_s: float  # from the first failed look to the last tolerated one


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One vLLM server as a file deploys it."""

    file: str
    launch: Launch
    kind: str  # compose, kubernetes, systemd or script
    line: int  # begin of the server's own part of the file
    liveness: HealthProbe | None = None
    startup: HealthProbe | None = None
    grace_s: float | None = None  # from SIGTERM to SIGKILL
    before_stop_s: float = 0.0  # of a preStop hook or ExecStop=
    drains_first: bool = False  # whether that hook drains the gate
    shm_bytes: int | None = None  # of /dev/shm; None: the container's default
    has_host_shm: bool = False
    memory_limit_bytes: int | None = None
    restart: str | None = None
    is_job: bool = False
    unit_type: str | None = None
    kill_mode: str | None = None
    card: str | None = None
    has_template: bool = False  # a controller's template brings probes, shared memory and the drain
    machines: int = 1  # machines that one server is spread over
    text: str = field(default="", repr=False)  # the whole file
    lines: Mapping[str, int] = field(default_factory=dict)  # lines of the settings, by the field's name


def deployments_in(path: str) -> list[Deployment]:
    """Returns every vLLM server that a file deploys, in order; BadInput where it has none."""
    text, name = read_text(path), Path(path).name
    launches = read_launches(path)
    kind = kind_of(text, name)
    if kind == "unit":
        deployments = [_unit(path, text, launch) for launch in launches]
    elif kind in ("script", "supervisor"):
        deployments = [_script(path, launch) for launch in launches]
    else:
        deployments = [
            replace(_script(path, launch), card=_named(start.card))
            if start.kind == "task"
            else (_service if start.kind == "compose" else _container)(path, start, launch)
            for start, launch in zip(starts_in_manifest(text, name), launches, strict=True)
        ]
    return [replace(deployment, text=text) for deployment in deployments]


def _script(path: str, launch: Launch) -> Deployment:
    tail = launch.source.rpartition(":")[2]
    return Deployment(file=path, launch=launch, kind="script", line=int(tail) if tail.isdigit() else 1, **_of_run(launch))


def _of_run(launch: Launch) -> dict[str, Any]:
    """Returns the shared memory of a start by a command: the container's own under `docker run`, else the machine's."""
    return {"has_host_shm": launch.image is None or launch.shm in ("host", "shareable"), "shm_bytes": size(launch.shm)}


def seconds(value: Tree) -> float | None:
    """Reads a duration of Compose, systemd or Kubernetes: 90, 90s, 1m30s, 2min 30s, infinity; None for anything else."""
    if not isinstance(value, str) or not value.strip():
        return None
    if value.strip().lower() == "infinity":
        return float("inf")
    if _DURATION.sub("", value).strip():
        return None
    parts = [(float(number), unit.lower()) for number, unit in _DURATION.findall(value)]
    return sum(number * _SECONDS[word if word in ("ms", "us") else word[:1] or "s"] for number, word in parts)


def size(value: Tree) -> int | None:
    """Reads a size of Compose or Kubernetes: 16gb, 16Gi, 64m, 1073741824; None for anything else. Units are binary."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    return int(float(match.group(1)) * 1024 ** _UNITS[match.group(2).lower()]) if match else None


def _lines(*places: tuple[str, Tree, str]) -> dict[str, int]:
    """Returns the line of each name's key; leaves out names without a key."""
    return {name: tree.lines[key] for name, tree, key in places if isinstance(tree, LinedMapping) and key in tree.lines}


def _first_line(tree: dict[str, Tree]) -> int:
    return min(tree.lines.values(), default=1) if isinstance(tree, LinedMapping) else 1


# Compose


def _service(path: str, start: ManifestStart, launch: Launch) -> Deployment:
    body = start.body
    check = mapping_at(body, "healthcheck")
    interval, retries = seconds(text_at(check, "interval")) or 30.0, seconds(text_at(check, "retries")) or 3.0
    is_checked = bool(check) and text_at(check, "disable") not in ("true", "True")
    liveness = None
    if is_checked and isinstance(body, LinedMapping):
        delay = seconds(text_at(check, "start_period")) or 0.0
        liveness = HealthProbe(body.lines.get("healthcheck", 1), delay, interval * retries)
    deploy = mapping_at(body, "deploy")
    limits = mapping_at(mapping_at(deploy, "resources"), "limits")
    restart = text_at(mapping_at(deploy, "restart_policy"), "condition") or text_at(body, "restart")
    return Deployment(
        file=path, launch=launch, kind="compose", line=_first_line(body), liveness=liveness,
        grace_s=seconds(text_at(body, "stop_grace_period")),
        shm_bytes=size(text_at(body, "shm_size")), has_host_shm=text_at(body, "ipc") in ("host", "shareable"),
        memory_limit_bytes=size(text_at(limits, "memory")) or size(text_at(body, "mem_limit")),
        restart={"any": "always"}.get(restart or "", restart),
        lines=_lines(
            ("grace_s", body, "stop_grace_period"), ("shm_bytes", body, "shm_size"), ("restart", body, "restart"),
            ("restart", deploy, "restart_policy"), ("memory", limits, "memory"), ("memory", body, "mem_limit"),
            ("secrets", body, "environment"), ("command", body, "command"),
        ),
    )  # fmt: skip


# Kubernetes


def _container(path: str, start: ManifestStart, launch: Launch) -> Deployment:
    body, pod = start.body, start.pod
    hook = mapping_at(mapping_at(body, "lifecycle"), "preStop")
    command = mapping_at(hook, "exec").get("command")
    words = " ".join(word for word in command if isinstance(word, str)) if isinstance(command, list) else ""
    slept = _SLEEP.search(words)
    before_stop = seconds(text_at(mapping_at(hook, "sleep"), "seconds")) or (float(slept.group(1)) if slept else 0.0)
    shm, mounted = _shared_memory(body, pod)
    limits = mapping_at(mapping_at(body, "resources"), "limits")
    group = mapping_at(mapping_at(start.owner, "spec"), "leaderWorkerTemplate")
    return Deployment(
        file=path, launch=launch, kind="kubernetes", line=_first_line(body),
        liveness=_probe(body, "livenessProbe"), startup=_probe(body, "startupProbe"),
        grace_s=seconds(text_at(pod, "terminationGracePeriodSeconds")), before_stop_s=before_stop, drains_first=_LEAVE in words,
        shm_bytes=shm, has_host_shm=mounted and shm is None, memory_limit_bytes=size(text_at(limits, "memory")),
        restart=text_at(pod, "restartPolicy") or "Always", is_job=start.kind in ("Job", "CronJob"),
        card=_card(pod), has_template=start.kind == LLM_SERVICE, machines=size(text_at(group, "size")) or 1,
        lines=_lines(
            ("grace_s", pod, "terminationGracePeriodSeconds"), ("restart", pod, "restartPolicy"), ("memory", limits, "memory"),
            ("secrets", body, "env"), ("command", body, "command"), ("command", body, "args"),
            ("shm_bytes", body, "volumeMounts"),
        ),
    )  # fmt: skip


def _probe(body: dict[str, Tree], key: str) -> HealthProbe | None:
    probe = mapping_at(body, key)
    if not probe or not isinstance(body, LinedMapping):
        return None
    period = seconds(text_at(probe, "periodSeconds")) or 10.0
    failures = seconds(text_at(probe, "failureThreshold")) or 3.0
    return HealthProbe(body.lines[key], seconds(text_at(probe, "initialDelaySeconds")) or 0.0, period * failures)


def _shared_memory(body: dict[str, Tree], pod: dict[str, Tree]) -> tuple[int | None, bool]:
    """Returns the size of /dev/shm (None: no limit is set), and True if it is the host's or has a volume mounted."""
    mounts, volumes = body.get("volumeMounts"), pod.get("volumes")
    if text_at(pod, "hostIPC") in ("true", "True"):
        return None, True
    listed = mounts if isinstance(mounts, list) else ()
    named = [text_at(mount, "name") for mount in listed if text_at(mount, "mountPath") == _SHM]
    for volume in volumes if isinstance(volumes, list) and named else ():
        if text_at(volume, "name") in named:
            return size(text_at(mapping_at(volume, "emptyDir"), "sizeLimit")), True
    return None, bool(named)


def _card(pod: dict[str, Tree]) -> str | None:
    """Returns the card that the pod requires, by the labels in nodeSelector and affinity; None without one."""
    waiting: list[tuple[str, Tree]] = [("", pod.get("nodeSelector")), ("", pod.get("affinity"))]
    while waiting:
        label, tree = waiting.pop()
        if isinstance(tree, dict):
            own = text_at(tree, "key") or ""
            waiting += [(own if key == "values" else key, value) for key, value in tree.items()]
        elif isinstance(tree, list):
            waiting += [(label, value) for value in tree]
        elif isinstance(tree, str) and _CARD_LABELS.search(label) and (card := _named(tree)):
            return card
    return None


def _named(text: str) -> str | None:
    """Returns the card of that name; None where none is known."""
    with suppress(BadInput):
        return gpu_named(text).name if text else None
    return None


# systemd


def _unit(path: str, text: str, launch: Launch) -> Deployment:
    settings = {key: (line, value) for line, key, value in unit_settings(text)}
    value_of = {key: value for key, (_, value) in settings.items()}
    names = {"grace_s": "TimeoutStopSec", "restart": "Restart", "memory": "MemoryMax", "unit_type": "Type",
             "kill_mode": "KillMode", "secrets": "Environment", "command": "ExecStart"}  # fmt: skip
    slept = _SLEEP.search(value_of.get("ExecStop", ""))
    return Deployment(
        file=path, launch=launch, kind="systemd", line=min(line for line, _ in settings.values()), **_of_run(launch),
        grace_s=seconds(value_of.get("TimeoutStopSec") or value_of.get("TimeoutSec")),
        before_stop_s=float(slept.group(1)) if slept else 0.0, drains_first=_LEAVE in value_of.get("ExecStop", ""),
        memory_limit_bytes=size(value_of.get("MemoryMax")),
        restart=value_of.get("Restart", "no"), unit_type=value_of.get("Type"), kill_mode=value_of.get("KillMode"),
        lines={name: settings[key][0] for name, key in names.items() if key in settings},
    )  # fmt: skip
