"""Says what an exit code tells about the end of a vLLM server, and what not. It never proves a shortage of memory."""

from __future__ import annotations

from typing import NamedTuple

from plimsoll.doctor.words import finding, words
from plimsoll.findings import Evidence, Finding

_ABOVE = "what went wrong: the cause stands in the log, above the last traceback"
_KILL = 9
_STOP_BEFORE = ". It had been asked to stop before: the time that it was given for that may have run out"
_PATIENCE = {
    "do": "a grace period above what its last requests need, with --shutdown-timeout below it",
    "why": "else it is killed midway",
}  # fmt: skip


class ExitVerdict(NamedTuple):
    """The meaning of an exit code: a finding where it says enough, a sentence, and what it does not prove."""

    finding: Finding | None
    sentence: str
    does_not_prove: str


def judge_exit(code: int, *, stop_seen: bool | None = None) -> ExitVerdict:
    """Read an exit code as a shell (137), Python (-9) or wait() (35072) gives it; `stop_seen`: was a stop asked for?"""
    code = code >> 8 if code > 255 and code % 256 == 0 and code >> 8 <= 255 else code
    if code == 0:  # after a clean stop, and also when its engine died while serving (vllm-project/vllm#48966)
        unproven = "success: vLLM with one API server also ends with 0 after its engine died"
        if stop_seen is None:
            return ExitVerdict(None, "Exit code 0: a clean stop, or a dead engine if nobody asked it to stop.", unproven)
        if stop_seen:
            said = "Exit code 0 after a stop that was asked for: a clean end."
            return ExitVerdict(None, said, "that every request was finished")
        said = "Exit code 0 and nobody asked it to stop: vLLM ends like this when its engine died while serving."
        because = f"{said} It does not prove {unproven}."
        return ExitVerdict(finding("exit-zero", [Evidence("exit code", "0")], because), said, unproven)
    is_signal = -64 <= code < 0 or 128 < code <= 192
    number = abs(code) if code < 0 else code - 128 if is_signal else code
    row = words("exits")["signals" if is_signal else "codes"].get(number)
    name = words("names")["signals"].get(number, f"signal {number}")
    if row is None and is_signal:
        return ExitVerdict(None, f"Exit code {code}: ended by {name}.", "why: this signal is seldom sent to a server")
    if row is None:
        return ExitVerdict(None, f"Exit code {code}: not one that vLLM or a supervisor gives a meaning.", _ABOVE)
    is_late = is_signal and number == _KILL and bool(stop_seen)
    sentence, unproven = row["sentence"] + (_STOP_BEFORE if is_late else ""), row["does_not_prove"]
    sentence = f"Exit code {code}: ended by {name}; {sentence}." if is_signal else sentence
    if "code" not in row:
        return ExitVerdict(None, sentence, unproven)
    row = {**row, "remedy": [*row.get("remedy", ()), *([_PATIENCE] if is_late else [])]}
    found = finding(row, [Evidence("exit code", str(code))], f"{sentence} It does not prove {unproven}.")
    return ExitVerdict(found, sentence, unproven)
