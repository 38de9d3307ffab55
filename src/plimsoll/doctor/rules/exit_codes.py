"""Says what an exit code tells about the end of a vLLM server, and what not. It never proves a shortage of memory."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.findings import Code, Evidence, Finding, Remedy, Severity

_SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
    10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ",
    31: "SIGSYS",
}  # fmt: skip
_ABOVE = "what went wrong: the cause stands in the log, above the last traceback"
_KERNEL_LOG = Remedy("read the kernel log (dmesg -T) and the orchestrator's events at that minute", "they say who did it")
_KILL = 9
_STOP_BEFORE = ". It had been asked to stop before: the time that it was given for that may have run out"
_PATIENCE = Remedy(
    "a grace period above what its last requests need, with --shutdown-timeout below it", "else it is killed midway"
)
_UNIT = "with Restart=always (systemd) or restart: always (docker)"


class ExitVerdict(NamedTuple):
    """The meaning of an exit code: a finding where it says enough, a sentence, and what it does not prove."""

    finding: Finding | None
    sentence: str
    does_not_prove: str


class _Meaning(NamedTuple):
    sentence: str
    does_not_prove: str
    code: Code | None = None
    confidence: float = 0.0
    title: str = ""
    severity: Severity = Severity.CRITICAL
    remedy: tuple[Remedy, ...] = ()
    not_a_remedy: tuple[str, ...] = ()


_NATIVE = (
    Remedy(
        "bring vLLM, torch, the CUDA libraries and the driver to releases that belong together", "mixed ones crash like this"
    ),
    Remedy("read the last lines before the end and the kernel log", "the library that crashed is named there"),
)
_OPERATOR = (
    Remedy("look at who stopped it: the orchestrator's events, the journal, the shell", "nothing is broken in vLLM"),
    Remedy("let running requests finish at the next stop", "the default aborts them", "--shutdown-timeout", "120"),
)

_PLAIN: dict[int, _Meaning] = {
    1: _Meaning("Exit code 1: the start failed, or an error ended the server.", _ABOVE),
    2: _Meaning(
        "Exit code 2: the command line was refused; vLLM's parser ends like this before anything is loaded.",
        "which option it was: the line `error: ...` above names it; other programs use 2 as well", Code.STARTUP_BAD_FLAG, 0.5,
        "the command line was refused",
        remedy=(Remedy("run `plimsoll flags -- <the command>`", "it names the option and what replaces it"),),
        not_a_remedy=("memory settings: nothing was loaded",),
    ),
    3: _Meaning("Exit code 3: uvicorn ends like this when the application could not start.", _ABOVE),
    124: _Meaning(
        "Exit code 124: the command `timeout` ended it after its time was over.",
        "that anything failed: the limit may simply have been too short", Code.OTHER_STOPPED_BY_OPERATOR, 0.6,
        "a time limit ended the server", Severity.WARNING, _OPERATOR,
    ),
    125: _Meaning(
        "Exit code 125: docker itself failed before the container ran (options, runtime, image).",
        "anything about vLLM, which never ran", Code.OTHER_INSTALLATION, 0.6, "the container could not be created",
        remedy=(Remedy("read docker's own message", "a missing NVIDIA container runtime is the usual one"),),
    ),
    126: _Meaning(
        "Exit code 126: the command was found and could not be executed.", "anything about vLLM, which never ran",
        Code.OTHER_INSTALLATION, 0.8, "the command could not be executed",
        remedy=(Remedy("check the file's rights and whether it is made for this machine (x86 or ARM)", "it never ran"),),
    ),
    127: _Meaning(
        "Exit code 127: the command was not found.", "anything about vLLM, which never ran", Code.OTHER_INSTALLATION, 0.8,
        "the command was not found",
        remedy=(Remedy("check the image, the PATH and the virtual environment", "`vllm` is not where it was looked for"),),
    ),
    128: _Meaning("Exit code 128: the container could not be started, or a script ended with a wrong number.", _ABOVE),
    255: _Meaning(
        "Exit code 255: an exit value out of range (-1), or a wrapper (ssh, a shell, a runtime) that failed itself.",
        "anything about the cause; many programs use it for every error",
    ),
}  # fmt: skip

_BY_SIGNAL: dict[int, _Meaning] = {
    1: _Meaning(
        "the terminal or session that started it was closed", "that anything failed", Code.OTHER_STOPPED_BY_OPERATOR, 0.6,
        "the server ended with its terminal (SIGHUP)", Severity.WARNING,
        (Remedy("start it from systemd, docker or with nohup", "it then outlives the session"), *_OPERATOR),
    ),
    2: _Meaning(
        "somebody or a script sent an interrupt (Ctrl-C)",
        "that it was wanted, or why: a script may interrupt a server that is slow", Code.OTHER_STOPPED_BY_OPERATOR, 0.8,
        "the server was interrupted (SIGINT)", Severity.INFO, _OPERATOR,
    ),
    4: _Meaning(
        "a library used an instruction that this CPU does not have", "which library; the kernel log names it",
        Code.OTHER_INSTALLATION, 0.6, "a library is not made for this CPU (SIGILL)",
        remedy=(Remedy("install builds made for this CPU", "AVX-512 builds do not run on older ones"),),
    ),
    6: _Meaning(
        "native code gave up by itself: an uncaught C++ exception, a failed check, or NCCL's watchdog",
        "the cause, which stands in the last lines before it; a CUDA error of any kind can end like this", Code.ENGINE_DEAD,
        0.6, "the server aborted in native code (SIGABRT)", remedy=_NATIVE,
    ),
    7: _Meaning(
        "memory that was mapped could not be delivered; most often /dev/shm was too small (64 MiB is docker's default)",
        "that /dev/shm was full: a model file that shrank, or a broken disk, gives the same signal", Code.OTHER_BAD_CONFIG, 0.5,
        "a bus error (SIGBUS), most often a too small /dev/shm",
        remedy=(
            Remedy("docker: --ipc=host or --shm-size 16g", "vLLM's processes pass data through /dev/shm"),
            Remedy("Kubernetes: an emptyDir volume with medium: Memory on /dev/shm", "the default is 64 MiB"),
        ),
        not_a_remedy=("GPU memory settings",),
    ),
    8: _Meaning("native code divided by zero", "where", Code.ENGINE_DEAD, 0.5, "a crash (SIGFPE)", remedy=_NATIVE),
    _KILL: _Meaning(
        "somebody sent SIGKILL: the kernel's OOM killer, the kubelet after a failed probe or a slow stop, or a person",
        "that memory ran out: only the kernel's line, or the reason OOMKilled, shows that", Code.OTHER_KILLED, 0.5,
        "the server was killed (SIGKILL); by whom is not known yet",
        remedy=(_KERNEL_LOG, Remedy("kubectl describe pod, or docker inspect (OOMKilled)", "they name the reason")),
        not_a_remedy=("changing memory settings before it is known who killed it",),
    ),
    11: _Meaning(
        "native code touched memory of the host it must not touch", "that memory ran out: it is a bug or a mix of libraries",
        Code.ENGINE_DEAD, 0.6, "the server crashed in native code (SIGSEGV)", remedy=_NATIVE,
        not_a_remedy=("GPU memory settings",),
    ),
    13: _Meaning("it wrote to a pipe that nobody read any more", "that vLLM failed: the reader of its output went first"),
    15: _Meaning(
        "somebody asked it to stop (SIGTERM): a deployment, a drain, a probe, systemctl, a person",
        "who asked, or why; a failed liveness probe sends it too", Code.OTHER_STOPPED_BY_OPERATOR, 0.75,
        "the server was asked to stop (SIGTERM)", Severity.INFO, _OPERATOR,
    ),
}  # fmt: skip


def judge_exit(code: int, *, stop_seen: bool | None = None) -> ExitVerdict:
    """Read an exit code as a shell (137), Python (-9) or wait() (35072) gives it; `stop_seen`: was a stop asked for?"""
    code = code >> 8 if code > 255 and code % 256 == 0 and code >> 8 <= 255 else code
    if code == 0:
        return _zero(stop_seen=stop_seen)
    if -64 <= code < 0 or 128 < code <= 192:
        return _signal(code, -code if code < 0 else code - 128, stop_seen=stop_seen is True)
    meaning = _PLAIN.get(code)
    if meaning is None:
        return ExitVerdict(None, f"Exit code {code}: not one that vLLM or a supervisor gives a meaning.", _ABOVE)
    return ExitVerdict(_finding(code, meaning, meaning.sentence), meaning.sentence, meaning.does_not_prove)


def _signal(code: int, number: int, *, stop_seen: bool) -> ExitVerdict:
    name = _SIGNALS.get(number, f"signal {number}")
    meaning = _BY_SIGNAL.get(number)
    if number == _KILL and meaning is not None and stop_seen:
        meaning = meaning._replace(sentence=meaning.sentence + _STOP_BEFORE, remedy=(*meaning.remedy, _PATIENCE))
    if meaning is None:
        return ExitVerdict(None, f"Exit code {code}: ended by {name}.", "why: this signal is seldom sent to a server")
    sentence = f"Exit code {code}: ended by {name}; {meaning.sentence}."
    return ExitVerdict(_finding(code, meaning, sentence), sentence, meaning.does_not_prove)


def _finding(code: int, meaning: _Meaning, sentence: str) -> Finding | None:
    if meaning.code is None:
        return None
    return Finding(
        code=meaning.code, severity=meaning.severity, confidence=meaning.confidence, title=meaning.title,
        because=f"{sentence} It does not prove {meaning.does_not_prove}.", evidence=(Evidence("exit code", str(code)),),
        remedy=meaning.remedy, not_a_remedy=meaning.not_a_remedy,
    )  # fmt: skip


def _zero(*, stop_seen: bool | None) -> ExitVerdict:
    """vLLM ends with 0 after a clean stop, and also when its engine died while serving (vllm-project/vllm#48966)."""
    unproven = "success: vLLM with one API server also ends with 0 after its engine died"
    if stop_seen:
        return ExitVerdict(None, "Exit code 0 after a stop that was asked for: a clean end.", "that every request was finished")
    if stop_seen is None:
        return ExitVerdict(None, "Exit code 0: a clean stop, or a dead engine if nobody asked it to stop.", unproven)
    meaning = _Meaning(
        "", unproven, Code.ENGINE_DEAD, 0.6, "the server ended by itself with exit code 0: its engine died",
        remedy=(
            Remedy(f"start it again, {_UNIT}", "on-failure does not fire on exit code 0"),
            Remedy("read the log upward from its end to the first error of any process", "the cause stands there"),
        ),
        not_a_remedy=("Restart=on-failure: 0 counts as success",),
    )  # fmt: skip
    sentence = "Exit code 0 and nobody asked it to stop: vLLM ends like this when its engine died while serving."
    return ExitVerdict(_finding(0, meaning, sentence), sentence, unproven)
