"""From the configuration to what can be done: the adapters of each engine, the lock, and the numbers of acting."""

from __future__ import annotations

import datetime
import os
import zoneinfo
from collections.abc import Callable, Mapping
from pathlib import Path

from plimsoll.actuators.command_restart import CommandRestart
from plimsoll.actuators.docker_api import DockerContainer
from plimsoll.actuators.etcd_lock import EtcdLock, Login
from plimsoll.actuators.evidence import EvidenceKeeper
from plimsoll.actuators.file_lock import FileLock
from plimsoll.actuators.gate_door import GateDoor
from plimsoll.actuators.haproxy import HAProxy, Place
from plimsoll.actuators.hooks import CommandBalancer, ReadinessOnly, WebhookBalancer
from plimsoll.actuators.kubernetes_evict import PodEviction
from plimsoll.actuators.lease_lock import LeaseLock
from plimsoll.actuators.own_process import OwnProcess
from plimsoll.actuators.systemd import SystemdUnit
from plimsoll.cli.guard_deeds import EngineEvidence, EngineMemory, environment_of, log_progress
from plimsoll.cli.guard_light_steps import Parts
from plimsoll.cli.guard_sight import Told
from plimsoll.guard.act_policy import ActPolicy, Hours
from plimsoll.guard.grades import Grade
from plimsoll.guard.ports import Balancer, Lock, Restarter
from plimsoll.sources.device_memory import DeviceMemory
from plimsoll.sources.discovery import Target
from plimsoll.sources.engine_models import served, warm
from plimsoll.sources.guard_act_types import (
    Act,
    BalancerAt,
    CommandAt,
    CommandsAt,
    DockerAt,
    EngineAct,
    EtcdLockAt,
    FileLockAt,
    Files,
    HaproxyAt,
    LeaseLockAt,
    LockAt,
    Own,
    ReadinessAt,
    RestartAt,
    SystemdAt,
    WebhookAt,
)  # fmt: skip
from plimsoll.sources.process_tree import boot_mark, read_processes

_NAMES = {
    "restarts_per_hour": "engine_hour", "restarts_per_day": "engine_day", "fleet_restarts_per_hour": "fleet_hour",
    "fleet_restarts_per_day": "fleet_day",
}  # fmt: skip
_OTHERS = ("rungs", "hours", "timezone", "journal", "evidence")


def policy_of(act: Act | None) -> ActPolicy:
    """The numbers of acting."""
    if act is None:
        return ActPolicy()
    plain = {_NAMES.get(name, name): value for name, value in act._asdict().items() if name not in _OTHERS}
    return ActPolicy(
        rungs=frozenset(Grade(rung) for rung in act.rungs), hours=tuple(Hours(*hours) for hours in act.hours), **plain
    )


def minute_in(timezone: str) -> Callable[[], int]:
    """The minute of the day there, now."""
    zone = datetime.UTC if timezone == "UTC" else zoneinfo.ZoneInfo(timezone)

    def minute() -> int:
        now = datetime.datetime.now(zone)
        return now.hour * 60 + now.minute

    return minute


def lock_of(where: LockAt | None, files: Files) -> Lock:
    """The fleet's lock; without one that is named, a file beside the journal."""
    if isinstance(where, EtcdLockAt):
        login = Login(where.user, where.password, where.ca_file, where.cert_file, where.key_file)
        return EtcdLock(where.endpoints, where.key, ttl_s=where.ttl_s, login=login)
    if isinstance(where, LeaseLockAt):
        return LeaseLock(where.name, where.namespace, ttl_s=where.ttl_s)
    return FileLock(Path(where.path) if isinstance(where, FileLockAt) else files.lock)


def balancer_of(where: BalancerAt | None, engine: str) -> Balancer | None:
    """What sends requests to one engine."""
    match where:
        case HaproxyAt():
            return HAProxy(where.socket, tuple(Place(*place) for place in where.places), may_be_last=where.may_be_last)
        case CommandAt():
            return CommandBalancer(where.command, engine)
        case WebhookAt():
            return WebhookBalancer(where.url, engine, None if where.token is None else f"Bearer {where.token}")
        case ReadinessAt():
            return ReadinessOnly()
        case None:
            return None


def restarter_of(where: RestartAt | None) -> Restarter | None:
    """What stops and starts one engine."""
    match where:
        case SystemdAt():
            return SystemdUnit(where.unit, is_user=where.is_user)
        case CommandsAt():
            return CommandRestart(where.stop, where.start, where.is_running, where.pids)
        case DockerAt():
            return DockerContainer(where.container, where.socket)
        case None:
            return None
        case _:
            return PodEviction(where.pod, where.namespace, selector=where.selector)


def own_process(command: tuple[str, ...], own: Own, files: Files, environ: Mapping[str, str] = os.environ) -> OwnProcess:
    """The server that guard starts itself."""
    return OwnProcess(
        command, environment=environment_of(environ), state_path=files.own_state, log_path=files.own_log,
        processes=read_processes, boot=boot_mark(), cgroup_parent=Path(own.cgroup) if own.cgroup else None,
    )  # fmt: skip


def parts_of(target: Target, acting: EngineAct, files: Files, own: OwnProcess | None = None) -> Parts:
    """All that can be done to one engine."""
    restarter = own or restarter_of(acting.restart)
    log = str(files.own_log) if own is not None else acting.log
    door = None if target.token is None else GateDoor(target.gate_url or target.url, target.token)
    evidence = EngineEvidence(
        EvidenceKeeper(files.evidence), target.url, log=log, restarter=restarter, gate_url=target.gate_url, token=target.token
    )

    async def context() -> float | None:
        model = await served(target.url, target.api_key)
        return None if model is None else model.context

    return Parts(
        target.name, door, balancer_of(acting.balancer, target.name), restarter, evidence,
        None if restarter is None else EngineMemory(restarter, DeviceMemory()),
        lambda: warm(target.url, target.api_key), context, None if log is None else log_progress(log),
    )  # fmt: skip


def told_of(acting: EngineAct, parts: Parts) -> Told:
    """What may be done to it, for whoever decides."""
    return Told(acting.group, acting.only_observed, has_gate=parts.door is not None, has_restarter=parts.restarter is not None)
