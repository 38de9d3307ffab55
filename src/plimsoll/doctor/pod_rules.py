"""Judges the events of Kubernetes that keep a pod from running or take it away: evictions, images, scheduling, nodes."""

from __future__ import annotations

import re
from typing import NamedTuple

from plimsoll.doctor.host_memory import NOT_A_REMEDY
from plimsoll.doctor.quoting import quote
from plimsoll.doctor.supervised import PodFacts
from plimsoll.domain.finding import Code, Finding, Remedy, Severity
from plimsoll.domain.log import Line, Log


class _Rule(NamedTuple):
    """Events and states that all mean one thing."""

    pattern: str  # searched in "reason: message"
    code: Code
    confidence: float
    title: str
    remedy: tuple[Remedy, ...]
    severity: Severity = Severity.CRITICAL
    not_a_remedy: tuple[str, ...] = ("memory settings of vLLM: it did not run",)


_RULES = (
    _Rule(
        r"(?:low on resource: memory|Evict\w{1,12}:.{0,300}memory (?:available|pressure))",
        Code.HOST_OUT_OF_MEMORY,
        0.9,
        "the pod was evicted because its node ran out of RAM",
        (
            Remedy(
                "set the pod's memory request (and limit) to what it really uses", "evicted first is who exceeds the request"
            ),
            Remedy("move other pods off the node, or use a node with more RAM", "the node itself was full"),
            Remedy("hold fewer prepared images", "4 GiB for each API server and rank", "--mm-processor-cache-gb", "0"),
        ),
        not_a_remedy=NOT_A_REMEDY,
    ),
    _Rule(
        r"low on resource: (?:ephemeral-storage|nodefs|imagefs|inodes)|ephemeral local storage usage exceeds",
        Code.OTHER_DISK,
        0.95,
        "the pod was evicted because a disk was full",
        (
            Remedy(
                "put HF_HOME and the compile caches on a volume of their own, or raise the ephemeral-storage limit",
                "weights are big",
            ),
        ),
        not_a_remedy=("memory settings",),
    ),
    _Rule(
        r'Usage of EmptyDir volume "[^"]{1,80}" exceeds the limit',
        Code.OTHER_BAD_CONFIG,
        0.9,
        "the pod was evicted because an emptyDir volume passed its size limit",
        (Remedy("raise the sizeLimit of the volume that the line names", "a /dev/shm volume wants several GiB"),),
        not_a_remedy=("GPU memory settings",),
    ),
    _Rule(
        r"FailedScheduling:.{0,1500}Insufficient (?:nvidia|amd|gpu)\S{0,20}",
        Code.OTHER_BAD_CONFIG,
        0.85,
        "no node has as many free GPUs as the pod asks for",
        (
            Remedy("free GPUs, add a node, or ask for fewer GPUs", "the pod waits until then"),
            Remedy("check the device plugin on the nodes", "a node whose plugin is down offers no GPU"),
        ),
    ),
    _Rule(
        r"FailedScheduling:.{0,1500}(?:Insufficient (?:memory|cpu|ephemeral)|untolerated taint|didn't match)",
        Code.OTHER_BAD_CONFIG,
        0.7,
        "no node fits what the pod asks for",
        (Remedy("compare the pod's requests, tolerations and selectors with the nodes", "the line names what is missing"),),
    ),
    _Rule(
        r"ImagePullBackOff|ErrImagePull|ErrImageNeverPull|InvalidImageName|Failed to pull image|Back-off pulling image",
        Code.OTHER_DOWNLOAD,
        0.95,
        "the container image could not be pulled",
        (Remedy("check the image's name and tag, the pull secret and the way to the registry", "the event names the reason"),),
    ),
    _Rule(
        r"UnexpectedAdmissionError|requested number of devices unavailable",
        Code.OTHER_HARDWARE,
        0.7,
        "the node could not hand out a healthy GPU",
        (
            Remedy(
                "look at the node's kernel log for Xid lines and at the device plugin", "unhealthy GPUs are taken off the list"
            ),
        ),
    ),
    _Rule(
        r"CreateContainerConfigError|CreateContainerError|FailedMount|FailedAttachVolume",
        Code.OTHER_BAD_CONFIG,
        0.8,
        "the container could not be prepared (a volume, a secret or a setting is missing)",
        (Remedy("create or correct what the event names", "vLLM was not started"),),
    ),
    _Rule(
        r"RunContainerError|ContainerCannotRun|StartError|FailedCreatePodSandBox|failed to create (?:containerd|shim) task",
        Code.OTHER_INSTALLATION,
        0.8,
        "the container runtime could not start the container",
        (Remedy("check the command, the image and the NVIDIA container runtime", "the event names the reason"),),
    ),
    _Rule(
        r"[Pp]reempt(?:ed|ing)|imminent node shutdown|NodeShutdown|TaintManagerEviction|NodeLost|NodeNotReady|DeadlineExceeded",
        Code.OTHER_STOPPED_BY_OPERATOR,
        0.8,
        "the cluster took the pod away (a more important pod, a node that went down, or a deadline)",
        (
            Remedy("look at the node and at the priority classes", "nothing in vLLM failed"),
            Remedy("run a second replica on another node", "it keeps serving meanwhile"),
        ),
        Severity.WARNING,
        ("memory settings",),
    ),
)


def judge_events(log: Log, facts: PodFacts) -> list[Finding]:
    """One finding for each kind of trouble; what a line means once it means however often it is repeated."""
    said: list[tuple[str, Line]] = [(f"{event.reason}: {event.message}", event.line) for event in facts.events]
    said += facts.waiting
    said += [(f"{ending.reason}: ", ending.lines[0]) for ending in facts.endings if ending.reason and ending.lines]
    if facts.pod_lines:
        said.append((f"{facts.pod_reason}: {facts.pod_message}", facts.pod_lines[-1]))
    findings = []
    for rule in _RULES:
        found = [(text, line) for text, line in said if re.search(rule.pattern, text)]
        if not found or (rule.code is Code.OTHER_BAD_CONFIG and _scheduled_later(facts, rule)):
            continue
        text = " ".join(found[-1][0].split())
        findings.append(
            Finding(
                code=rule.code,
                severity=rule.severity,
                confidence=rule.confidence,
                title=rule.title,
                because=f"Kubernetes says so {len(found)} time(s): {text if len(text) <= 240 else text[:240] + '...'}",
                evidence=quote(log, [line for _, line in found]),
                remedy=rule.remedy,
                not_a_remedy=rule.not_a_remedy,
            )
        )
    scheduling = [one for one in findings if "FailedScheduling" in one.because]
    return [one for one in findings if one not in scheduling[1:]]


def _scheduled_later(facts: PodFacts, rule: _Rule) -> bool:
    """A pod that has run was scheduled in the end: its early waiting is no cause."""
    return rule.pattern.startswith("FailedScheduling") and bool(facts.endings)
