"""Says what an exit code tells about the end of a vLLM server, and what not. It never proves a shortage of memory."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.doctor.words import fields, words
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


def _meaning(kind: str, number: int) -> _Meaning | None:
    row = words("exits")[kind].get(number)
    return None if row is None else _Meaning(**fields(row))


def judge_exit(code: int, *, stop_seen: bool | None = None) -> ExitVerdict:
    """Read an exit code as a shell (137), Python (-9) or wait() (35072) gives it; `stop_seen`: was a stop asked for?"""
    code = code >> 8 if code > 255 and code % 256 == 0 and code >> 8 <= 255 else code
    if code == 0:
        return _zero(stop_seen=stop_seen)
    if -64 <= code < 0 or 128 < code <= 192:
        return _signal(code, -code if code < 0 else code - 128, stop_seen=stop_seen is True)
    meaning = _meaning("codes", code)
    if meaning is None:
        return ExitVerdict(None, f"Exit code {code}: not one that vLLM or a supervisor gives a meaning.", _ABOVE)
    return ExitVerdict(_finding(code, meaning, meaning.sentence), meaning.sentence, meaning.does_not_prove)


def _signal(code: int, number: int, *, stop_seen: bool) -> ExitVerdict:
    name = _SIGNALS.get(number, f"signal {number}")
    meaning = _meaning("signals", number)
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
