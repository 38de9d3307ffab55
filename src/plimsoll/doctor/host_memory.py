"""Turns kills for want of RAM into findings: a limit or the whole machine, the server or its compilers, and what cures it."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.doctor.oom_killer import Kill
from plimsoll.doctor.quoting import quote
from plimsoll.domain.finding import Code, Finding, Remedy, Severity
from plimsoll.domain.log import Log
from plimsoll.domain.units import format_gib

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


def judge_kills(log: Log, kills: Sequence[Kill]) -> tuple[list[Finding], list[str]]:
    """One finding for the server's own processes and one for its compilers; a stranger's death is only a note."""
    findings = []
    ours = [kill for kill in kills if kill.whose in ("vllm", "python", "container")]
    compilers = [kill for kill in kills if kill.whose == "compiler"]
    if ours:
        findings.append(_server(log, ours))
    if compilers:
        findings.append(_compiler(log, compilers))
    strangers = [kill for kill in kills if kill.whose == "other"]
    notes = [
        f"{kill.by} killed {kill.name}{_pid(kill)} for want of RAM; that is not a process of vLLM's" for kill in strangers[:20]
    ]
    return findings, notes


def _pid(kill: Kill) -> str:
    return "" if kill.pid is None else f" (pid {kill.pid})"


def _server(log: Log, kills: Sequence[Kill]) -> Finding:
    """The server was the victim: sure when the name says so, less when it is only some python or some container."""
    kill = min(kills, key=lambda one: ("vllm", "python", "container").index(one.whose))
    held = "" if kill.rss_bytes is None else f", which held {format_gib(kill.rss_bytes)} of RAM,"
    more = f" {len(kills)} processes were killed in all." if len(kills) > 1 else ""
    jobs = _compilers_beside(kill)
    return Finding(
        Code.HOST_OUT_OF_MEMORY,
        Severity.CRITICAL,
        {"vllm": 0.97, "python": 0.85}.get(kill.whose, 0.5),
        _title(kill),
        f"{kill.by.replace('kernel', 'The kernel')} killed {kill.name}{_pid(kill)}{held} {_why(kill)}.{jobs}{more}",
        quote(log, [line for one in kills for line in one.lines]),
        (_room(kill), *((_fewer_jobs(),) if jobs else ()), *_LESS_RAM),
        NOT_A_REMEDY,
    )


def _compiler(log: Log, kills: Sequence[Kill]) -> Finding:
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


def _compilers_beside(kill: Kill) -> str:
    if not kill.compilers:
        return ""
    size = "" if kill.compiler_bytes is None else f" with {format_gib(kill.compiler_bytes)} together"
    return f" {kill.compilers} compiler process(es){size} were running then."


def _title(kill: Kill) -> str:
    if kill.scope == "cgroup":
        size = f" of {format_gib(kill.limit_bytes)}" if kill.limit_bytes else ""
        return f"the container reached its memory limit{size} and {kill.name} was killed"
    if kill.scope == "host":
        return f"the machine ran out of RAM and {kill.name} was killed"
    return f"{kill.name} was killed for want of RAM"


def _why(kill: Kill) -> str:
    if kill.scope == "cgroup":
        limit = f"its limit of {format_gib(kill.limit_bytes)}" if kill.limit_bytes else "its memory limit"
        group = f" ({kill.cgroup[:120]})" if kill.cgroup else ""
        return f"because its control group{group} had reached {limit}; the machine itself may have had more"
    if kill.scope == "host":
        size = f" ({format_gib(kill.host_bytes)} in all)" if kill.host_bytes else ""
        return f"because the whole machine{size} had no memory left"
    return "because memory ran out; whether a limit or the whole machine is not said"


def _room(kill: Kill) -> Remedy:
    if kill.scope == "cgroup":
        size = f" above {format_gib(kill.limit_bytes)}" if kill.limit_bytes else ""
        return Remedy(
            f"raise the container's memory limit{size}, if the machine has the RAM",
            "all of it was used; /dev/shm counts against it",
        )
    return Remedy(
        "use a machine with more RAM, or move other programs off this one", "no limit was hit: the machine itself was full"
    )
