"""Turns kills for want of RAM into findings: a limit or the whole machine, the server or its compilers, and what cures it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.doctor.rules.log_text import OOM_KILLER, Log, LogLine, holds, kernel_text, process_owner, quote
from plimsoll.findings import Code, Finding, Remedy, Severity
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


class OomKill(NamedTuple):
    """One process that was ended because memory ran out, and what is known about why."""

    pid: int | None
    name: str
    process_owner: str  # "vllm", "python", "compiler", "container" (a unit whose content is not named) or "other"
    scope: str  # "cgroup": a limit was reached; "host": the whole machine was full; "unknown"
    by: str  # "kernel", "systemd-oomd" or "earlyoom"
    rss_bytes: int | None
    cgroup: str | None
    limit_bytes: int | None
    host_bytes: int | None
    compilers: int  # compiler processes that were running then
    compiler_bytes: int | None
    lines: tuple[LogLine, ...]


_BLANK = OomKill(None, "", "other", "unknown", "kernel", None, None, None, None, 0, None, ())


class _Event:
    """What the kernel prints about one shortage, gathered until it names its victim."""

    def __init__(self) -> None:
        self.scope = "unknown"
        self.cgroup: str | None = None
        self.limit: int | None = None
        self.pages: int | None = None
        self.tasks: dict[int, tuple[str, int]] = {}
        self.lines: list[LogLine] = []


def read_kills(log: Log) -> list[OomKill]:
    """Every kill that the text tells of, in order; a victim that two lines name counts once."""
    if not holds(log.lines, OOM_KILLER):
        return []
    kills: list[OomKill] = []
    event = _Event()
    for line in log.lines:
        if line.process or not any(word in line.text for word in _GATE):
            continue
        text = kernel_text(line.text)
        kill = _by_daemon(text, line)
        if kill is None:
            event, kill = _by_kernel(text, line, event)
        if kill is not None and len(kills) < MOST_KILLS:
            _add(kills, kill)
    return kills


def _add(kills: list[OomKill], kill: OomKill) -> None:
    """Put a kill on the list, or join it to the line before it that named the same victim."""
    last = kills[-1] if kills else None
    if last is None or last.by != kill.by or last.pid != kill.pid or (kill.by == "systemd-oomd" and last.name != kill.name):
        kills.append(kill)
        return
    known = {field: value for field, value in kill._asdict().items() if value not in (None, "unknown", 0, "", ())}
    kills[-1] = last._replace(**known)._replace(lines=(*last.lines, *(x for x in kill.lines if x not in last.lines)))


def _by_daemon(text: str, line: LogLine) -> OomKill | None:
    if "due to memory" in text:
        found = re.search(_OOMD, text)
        if found:
            what = found["what"]
            total = int(found["total"]) if found["total"] else None
            return _BLANK._replace(
                name=what, process_owner=_whose_unit(what), scope="host", by="systemd-oomd", cgroup=what, host_bytes=total,
                lines=(line,),
            )  # fmt: skip
    if "sending SIG" in text:
        found = re.search(_EARLYOOM, text)
        if found:
            rss = int(found["rss"]) * MIB if found["rss"] else None
            pid, name = int(found["pid"]), found["name"]
            return _BLANK._replace(
                pid=pid, name=name, process_owner=process_owner(name), scope="host", by="earlyoom", rss_bytes=rss, lines=(line,)
            )
    return None


def _whose_unit(path: str) -> str:
    lowered = path.lower()
    if "vllm" in lowered:
        return "vllm"
    return (
        "container" if any(w in lowered for w in ("docker-", "kubepods", "libpod", "cri-", "crio-", "containerd")) else "other"
    )


def _by_kernel(text: str, line: LogLine, event: _Event) -> tuple[_Event, OomKill | None]:
    """Take one kernel line in: the event as it stands after it, and the kill if this line names a victim."""
    if "invoked oom-killer" in text:
        event = _Event()
        event.lines.append(line)
    elif text.startswith("memory: usage "):
        limit = re.match(r"memory: usage \d{1,18}kB, limit (\d{1,18})kB", text)
        if limit and int(limit[1]) * KIB < 1 << 60:  # the kernel writes "no limit" as a number near 2**63
            event.limit, event.scope = int(limit[1]) * KIB, "cgroup"
            event.lines.append(line)
    elif "killed as a result of limit of " in text:
        event.scope, event.cgroup = "cgroup", text.partition("as a result of limit of ")[2].strip()[:300]
    elif text.rstrip().endswith("pages RAM"):
        pages = re.match(r"(\d{1,15}) pages RAM", text)
        event.pages = int(pages[1]) if pages else None
    elif text.startswith("oom-kill:"):
        return event, _constraint(text, line, event)
    elif "Kill" in text and " process " in text:
        found = re.search(_KILLED, text)
        return (_Event(), _victim(found, text, line, event)) if found else (event, None)
    elif text.startswith("[") and len(event.tasks) < MOST_TASKS:
        task = re.match(_TASK, text)
        if task:
            name = task["rest"].split()[-1] if task["rest"].split() else ""
            event.tasks[int(task["pid"])] = (name, int(task["rss"]))
    return event, None


def _constraint(text: str, line: LogLine, event: _Event) -> OomKill | None:
    """The kernel's own summary: which limit was hit, in which group, and which task was chosen."""
    found = re.match(_OOM_KILL, text)
    if found is None:
        return None
    event.scope = {"MEMCG": "cgroup", "NONE": "host"}.get(found["constraint"], "unknown")
    group = re.search(r",oom_memcg=([^,]{1,300})", text)
    task = re.search(r",task=(.{1,64}?),pid=(\d{1,10})", text)
    event.cgroup = group[1] if group else event.cgroup
    event.lines.append(line)
    return _kill(int(task[2]), task[1], None, event) if task else None


def _victim(found: re.Match[str], text: str, line: LogLine, event: _Event) -> OomKill:
    if found["memcg"]:
        event.scope = "cgroup"
    elif event.scope == "unknown" and "Out of memory" in text:
        event.scope = "host"
    held = [int(size) for size in re.findall(r"(?:anon|file|shmem)-rss:(\d{1,15})kB", text)]
    event.lines.append(line)
    return _kill(int(found["pid"]), found["name"] or found["old"] or "", sum(held) * KIB if held else None, event)


def _kill(pid: int, name: str, rss: int | None, event: _Event) -> OomKill:
    page = _page_bytes(event, pid, rss)
    compilers = [pages for task, pages in event.tasks.values() if process_owner(task) == "compiler"]
    return OomKill(
        pid=pid, name=name, process_owner=process_owner(name), scope=event.scope, by="kernel", rss_bytes=rss,
        cgroup=event.cgroup, limit_bytes=event.limit if event.scope == "cgroup" else None,
        host_bytes=event.pages * page if event.pages and page else None, compilers=len(compilers),
        compiler_bytes=sum(compilers) * page if compilers and page else None, lines=tuple(event.lines),
    )  # fmt: skip


def _page_bytes(event: _Event, pid: int, rss: int | None) -> int | None:
    """The machine's page size, worked out from the victim's two figures: 64 KiB on some ARM servers, so it is never assumed."""
    pages = event.tasks.get(pid, ("", 0))[1]
    if not rss or not pages:
        return None
    return min((4 * KIB, 16 * KIB, 64 * KIB), key=lambda size: abs(size - rss / pages))


NOT_A_REMEDY = (
    "GPU settings on a normal card (utilisation, KV data type, graphs): this is RAM, not GPU memory",
    "swap on disk: pinned memory cannot be swapped",
    "--swap-space: removed in 0.18.0, and it used RAM",
)
_LESS_RAM = (
    Remedy(
        "hold fewer prepared images",
        "the cache takes 4 GiB for each API server and data-parallel rank",
        "--mm-processor-cache-gb",
        "0",
    ),
    Remedy("lower or remove --kv-offloading-size and --cpu-offload-gb", "both are RAM, pinned"),
)


def judge_kills(log: Log, kills: Sequence[OomKill]) -> tuple[list[Finding], list[str]]:
    """One finding for the server's own processes and one for its compilers; a stranger's death is only a note."""
    findings = []
    ours = [kill for kill in kills if kill.process_owner in ("vllm", "python", "container")]
    compilers = [kill for kill in kills if kill.process_owner == "compiler"]
    if ours:
        findings.append(_server(log, ours))
    if compilers:
        findings.append(_compiler(log, compilers))
    strangers = [kill for kill in kills if kill.process_owner == "other"]
    notes = [
        f"{kill.by} killed {kill.name}{_pid(kill)} for want of RAM; that is not a process of vLLM's" for kill in strangers[:20]
    ]
    return findings, notes


def _pid(kill: OomKill) -> str:
    return "" if kill.pid is None else f" (pid {kill.pid})"


def _server(log: Log, kills: Sequence[OomKill]) -> Finding:
    """The server was the victim: sure when the name says so, less when it is only some python or some container."""
    kill = min(kills, key=lambda one: ("vllm", "python", "container").index(one.process_owner))
    held = "" if kill.rss_bytes is None else f", which held {format_gib(kill.rss_bytes)} of RAM,"
    more = f" {len(kills)} processes were killed in all." if len(kills) > 1 else ""
    jobs = _compilers_beside(kill)
    return Finding(
        Code.HOST_OUT_OF_MEMORY, Severity.CRITICAL, {"vllm": 0.97, "python": 0.85}.get(kill.process_owner, 0.5), _title(kill),
        f"{kill.by.replace('kernel', 'The kernel')} killed {kill.name}{_pid(kill)}{held} {_why(kill)}.{jobs}{more}",
        quote(log, [line for one in kills for line in one.lines]),
        (_room(kill), *((_fewer_jobs(),) if jobs else ()), *_LESS_RAM), NOT_A_REMEDY,
    )  # fmt: skip


def _compiler(log: Log, kills: Sequence[OomKill]) -> Finding:
    """A compiler that vLLM's libraries started was the victim: the RAM went into building kernels."""
    kill = kills[0]
    held = "" if kill.rss_bytes is None else f", which held {format_gib(kill.rss_bytes)} of RAM,"
    return Finding(
        Code.HOST_OUT_OF_MEMORY,
        Severity.CRITICAL,
        0.85,
        f"the host ran out of RAM while GPU kernels were being compiled ({kill.name})",
        f"The kernel killed the compiler {kill.name}{_pid(kill)}{held} {_why(kill)}.{_compilers_beside(kill)}"
        f" {len(kills)} compiler process(es) were killed.",
        quote(log, [line for one in kills for line in one.lines]),
        (
            _fewer_jobs(),
            Remedy("keep the cache of compiled kernels (the home folder's .cache) on a volume", "later starts compile nothing"),
            _room(kill),
            Remedy(
                "where CPU and GPU share memory (GB10), ask for less of it", "it is the host's own", "--gpu-memory-utilization"
            ),
        ),
        NOT_A_REMEDY[1:],
    )


def _fewer_jobs() -> Remedy:
    return Remedy(
        "set MAX_JOBS=1 in the environment", "one compiler at a time instead of one for each CPU; the first start is slower"
    )


def _compilers_beside(kill: OomKill) -> str:
    if not kill.compilers:
        return ""
    size = "" if kill.compiler_bytes is None else f" with {format_gib(kill.compiler_bytes)} together"
    return f" {kill.compilers} compiler process(es){size} were running then."


def _title(kill: OomKill) -> str:
    if kill.scope == "cgroup":
        size = f" of {format_gib(kill.limit_bytes)}" if kill.limit_bytes else ""
        return f"the container reached its memory limit{size} and {kill.name} was killed"
    if kill.scope == "host":
        return f"the machine ran out of RAM and {kill.name} was killed"
    return f"{kill.name} was killed for want of RAM"


def _why(kill: OomKill) -> str:
    if kill.scope == "cgroup":
        limit = f"its limit of {format_gib(kill.limit_bytes)}" if kill.limit_bytes else "its memory limit"
        group = f" ({kill.cgroup[:120]})" if kill.cgroup else ""
        return f"because its control group{group} had reached {limit}; the machine itself may have had more"
    if kill.scope == "host":
        size = f" ({format_gib(kill.host_bytes)} in all)" if kill.host_bytes else ""
        return f"because the whole machine{size} had no memory left"
    return "because memory ran out; whether a limit or the whole machine is not said"


def _room(kill: OomKill) -> Remedy:
    if kill.scope == "cgroup":
        size = f" above {format_gib(kill.limit_bytes)}" if kill.limit_bytes else ""
        return Remedy(
            f"raise the container's memory limit{size}, if the machine has the RAM",
            "all of it was used; /dev/shm counts against it",
        )
    return Remedy(
        "use a machine with more RAM, or move other programs off this one", "no limit was hit: the machine itself was full"
    )
