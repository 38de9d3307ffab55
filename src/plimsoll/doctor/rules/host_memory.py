"""Reads kills for want of RAM (by the kernel, systemd-oomd or earlyoom) and turns them into findings.

A finding says whether a limit or the whole machine was full, and whether the server or its compilers were killed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import Log, LogLine, kernel_message, process_owner, quote
from plimsoll.doctor.words import finding
from plimsoll.findings import Finding, Remedy
from plimsoll.units import KIB, MIB, format_gib

MOST_KILLS = 1000
MOST_TASKS = 5000
_GATE = ("oom", "Kill", "memory: usage", "pages RAM", "total-vm", "killed as a result of limit", "SIG", "] ")
_KILLED = (
    r"(?P<memcg>Memory cgroup out of memory: )?(?:Out of memory[^:]{0,40}: )?Kill(?:ed)? process (?P<pid>\d{1,10}),? "
    r"(?:\((?P<name>[^)]{0,64})\)|UID \d{1,10} \((?P<old>[^)]{0,64})\))"
)
_OOM_KILL = r"oom-kill:constraint=CONSTRAINT_(?P<constraint>\w{1,20})"
_TASK = r"\[\s{0,9}(?P<pid>\d{1,10})\]\s{1,9}\d{1,10}\s{1,9}\d{1,10}\s{1,9}\d{1,15}\s{1,9}(?P<rss>\d{1,15})\s(?P<rest>.{1,160})"
_OOMD = (
    r"(?:Killed|Marked) (?P<what>\S{1,300}) (?:for killing )?due to memory "
    r"(?:used \(\d{1,18}\) / total \((?P<total>\d{1,18})\)|pressure)"
)
_EARLYOOM = (
    r"sending SIG(?:TERM|KILL) to process (?P<pid>\d{1,10})[^\"]{0,80}\"(?P<name>[^\"]{1,64})\""
    r"(?:.{0,80}?VmRSS (?P<rss>\d{1,10}) MiB)?"
)
_CONTAINER_UNITS = ("docker-", "kubepods", "libpod", "cri-", "crio-", "containerd")


class OomKill(NamedTuple):
    """One process that was killed because memory ran out, and the known circumstances."""

    pid: int | None = None
    name: str = ""
    owner: str = "other"  # "vllm", "python", "compiler", "container" (a unit whose content is not named) or "other"
    scope: str = "unknown"  # "cgroup": a limit was reached; "host": the whole machine was full; "unknown"
    by: str = "kernel"  # "kernel", "systemd-oomd" or "earlyoom"
    rss_bytes: int | None = None
    cgroup: str | None = None
    limit_bytes: int | None = None
    host_bytes: int | None = None
    compilers: int = 0  # compiler processes that were running then
    compiler_bytes: int | None = None
    lines: tuple[LogLine, ...] = ()


class _Shortage:
    """The kernel's lines about one shortage, gathered until it names its victim."""

    def __init__(self) -> None:
        self.scope = "unknown"
        self.cgroup: str | None = None
        self.limit: int | None = None
        self.pages: int | None = None
        self.tasks: dict[int, tuple[str, int]] = {}
        self.lines: list[LogLine] = []

    def kill(self, pid: int, name: str, rss: int | None) -> OomKill:
        """The kill of this victim."""
        pages = self.tasks.get(pid, ("", 0))[1]
        # The page size follows from the victim's two figures: 64 KiB on some ARM servers, so it is never assumed.
        sizes = (4 * KIB, 16 * KIB, 64 * KIB)
        page = min(sizes, key=lambda size: abs(size - rss / pages)) if rss and pages else None
        compilers = [held for task, held in self.tasks.values() if process_owner(task) == "compiler"]
        return OomKill(
            pid, name, process_owner(name), self.scope, "kernel", rss, self.cgroup,
            self.limit if self.scope == "cgroup" else None, self.pages * page if self.pages and page else None,
            len(compilers), sum(compilers) * page if compilers and page else None, tuple(self.lines),
        )  # fmt: skip


def read_kills(log: Log) -> list[OomKill]:
    """Every kill in the text, in order; a victim that two lines name counts once."""
    kills: list[OomKill] = []
    shortage = _Shortage()
    for line in log.lines:
        text = kernel_message(line) if any(word in line.text for word in _GATE) else None
        if text is None:
            continue
        kill = None
        if "due to memory" in text and (found := re.search(_OOMD, text)):
            unit, total = found["what"], int(found["total"]) if found["total"] else None
            is_container = any(word in unit.lower() for word in _CONTAINER_UNITS)
            owner = "vllm" if "vllm" in unit.lower() else "container" if is_container else "other"
            kill = OomKill(None, unit, owner, "host", "systemd-oomd", cgroup=unit, host_bytes=total, lines=(line,))
        elif "sending SIG" in text and (found := re.search(_EARLYOOM, text)):
            rss, name = int(found["rss"]) * MIB if found["rss"] else None, found["name"]
            kill = OomKill(int(found["pid"]), name, process_owner(name), "host", "earlyoom", rss, lines=(line,))
        else:
            shortage, kill = _read_kernel(text, line, shortage)
        if kill is None or len(kills) >= MOST_KILLS:
            continue
        last = kills[-1] if kills else None
        if last is None or (last.by, last.pid) != (kill.by, kill.pid) or (kill.by == "systemd-oomd" and last.name != kill.name):
            kills.append(kill)
        else:  # the line before named the same victim
            known = {field: value for field, value in kill._asdict().items() if value not in (None, "unknown", 0, "", ())}
            lines = (*last.lines, *(one for one in kill.lines if one not in last.lines))
            kills[-1] = last._replace(**known)._replace(lines=lines)
    return kills


def _read_kernel(text: str, line: LogLine, shortage: _Shortage) -> tuple[_Shortage, OomKill | None]:
    """The shortage as it stands after this kernel line, and the kill if the line names a victim."""
    if "invoked oom-killer" in text:
        shortage = _Shortage()
        shortage.lines.append(line)
    elif text.startswith("memory: usage "):
        limit = re.match(r"memory: usage \d{1,18}kB, limit (\d{1,18})kB", text)
        if limit and int(limit[1]) * KIB < 1 << 60:  # the kernel writes "no limit" as a number near 2**63
            shortage.limit, shortage.scope = int(limit[1]) * KIB, "cgroup"
            shortage.lines.append(line)
    elif "killed as a result of limit of " in text:
        shortage.scope, shortage.cgroup = "cgroup", text.partition("as a result of limit of ")[2].strip()[:300]
    elif text.rstrip().endswith("pages RAM"):
        pages = re.match(r"(\d{1,15}) pages RAM", text)
        shortage.pages = int(pages[1]) if pages else None
    elif text.startswith("oom-kill:"):  # the kernel's summary: the limit, its group and the task it chose
        found = re.match(_OOM_KILL, text)
        if found is not None:
            shortage.scope = {"MEMCG": "cgroup", "NONE": "host"}.get(found["constraint"], "unknown")
            group = re.search(r",oom_memcg=([^,]{1,300})", text)
            task = re.search(r",task=(.{1,64}?),pid=(\d{1,10})", text)
            shortage.cgroup = group[1] if group else shortage.cgroup
            shortage.lines.append(line)
            return shortage, shortage.kill(int(task[2]), task[1], None) if task else None
    elif "Kill" in text and " process " in text:
        found = re.search(_KILLED, text)
        if found is not None:
            if found["memcg"]:
                shortage.scope = "cgroup"
            elif shortage.scope == "unknown" and "Out of memory" in text:
                shortage.scope = "host"
            held = [int(size) for size in re.findall(r"(?:anon|file|shmem)-rss:(\d{1,15})kB", text)]
            shortage.lines.append(line)
            name = found["name"] or found["old"] or ""
            return _Shortage(), shortage.kill(int(found["pid"]), name, sum(held) * KIB if held else None)
    elif text.startswith("[") and len(shortage.tasks) < MOST_TASKS and (task := re.match(_TASK, text)):
        shortage.tasks[int(task["pid"])] = ((task["rest"].split() or [""])[-1], int(task["rss"]))
    return shortage, None


_FEWER_JOBS = Remedy(
    "set MAX_JOBS=1 in the environment", "one compiler at a time instead of one for each CPU; the first start is slower"
)
_KERNEL_CACHE = Remedy(
    "keep the cache of compiled kernels (the home folder's .cache) on a volume", "later starts compile nothing"
)


def judge_kills(log: Log, kills: Sequence[OomKill]) -> tuple[list[Finding], list[str]]:
    """One finding for the server's own processes and one for its compilers; another program's death is only a note."""
    findings = []
    ours = [kill for kill in kills if kill.owner in ("vllm", "python", "container")]
    compilers = [kill for kill in kills if kill.owner == "compiler"]
    if ours:
        kill = min(ours, key=lambda one: ("vllm", "python", "container").index(one.owner))
        if kill.scope == "cgroup":
            size = f" of {format_gib(kill.limit_bytes)}" if kill.limit_bytes else ""
            title = f"the container reached its memory limit{size} and {kill.name} was killed"
        elif kill.scope == "host":
            title = f"the machine ran out of RAM and {kill.name} was killed"
        else:
            title = f"{kill.name} was killed for want of RAM"
        findings.append(finding(
            "server-out-of-ram", quote(log, [line for one in ours for line in one.lines]), title=title,
            confidence={"vllm": 0.97, "python": 0.85}.get(kill.owner), by=kill.by.replace("kernel", "The kernel"),
            whom=_describe(kill), more=f" {len(ours)} processes were killed in all." if len(ours) > 1 else "",
            first=[_room(kill), *([_FEWER_JOBS] if kill.compilers else [])],
        ))  # fmt: skip
    if compilers:
        kill = compilers[0]
        findings.append(finding(
            "compiler-out-of-ram", quote(log, [line for one in compilers for line in one.lines]), name=kill.name,
            whom=_describe(kill), count=len(compilers), first=[_FEWER_JOBS, _KERNEL_CACHE, _room(kill)],
        ))  # fmt: skip
    others = [kill for kill in kills if kill.owner == "other"][:20]
    return findings, [f"{kill.by} killed {kill.name}{_pid(kill)} for want of RAM; it is no process of vLLM" for kill in others]


def _pid(kill: OomKill) -> str:
    return "" if kill.pid is None else f" (pid {kill.pid})"


def _describe(kill: OomKill) -> str:
    """The victim, what it held, why it was killed, and the compilers beside it."""
    held = "" if kill.rss_bytes is None else f", which held {format_gib(kill.rss_bytes)} of RAM,"
    if kill.scope == "cgroup":
        limit = f"its limit of {format_gib(kill.limit_bytes)}" if kill.limit_bytes else "its memory limit"
        group = f" ({kill.cgroup[:120]})" if kill.cgroup else ""
        why = f"because its control group{group} had reached {limit}; the machine itself may have had more"
    elif kill.scope == "host":
        size = f" ({format_gib(kill.host_bytes)} in all)" if kill.host_bytes else ""
        why = f"because the whole machine{size} had no memory left"
    else:
        why = "because memory ran out; whether a limit or the whole machine is not known"
    size = "" if kill.compiler_bytes is None else f" with {format_gib(kill.compiler_bytes)} together"
    beside = f" {kill.compilers} compiler process(es){size} were running then." if kill.compilers else ""
    return f"{kill.name}{_pid(kill)}{held} {why}.{beside}"


def _room(kill: OomKill) -> Remedy:
    if kill.scope == "cgroup":
        size = f" above {format_gib(kill.limit_bytes)}" if kill.limit_bytes else ""
        do = f"raise the container's memory limit{size}, if the machine has the RAM"
        return Remedy(do, "all of it was used; /dev/shm counts against it")
    why = "no limit was hit: the machine itself was full"
    return Remedy("use a machine with more RAM, or move other programs off this one", why)
