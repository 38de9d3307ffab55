"""The quick look: which judges are worth asking, and that none has anything to say where it was not called."""

from __future__ import annotations

from hypothesis import given

from plimsoll.doctor.rules.kernel import judge_kernel
from plimsoll.doctor.rules.log_text import LONGEST, Log, LogLine
from plimsoll.doctor.rules.nvidia_smi import judge_nvidia_smi
from plimsoll.doctor.rules.pods import judge_pods
from plimsoll.doctor.rules.timeline import kinds_in
from tests.doctor.pasted_text import printed, scrambled
from tests.each import each

KILLED = "Out of memory: Killed process 1 (python3) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


OTHERS = printed("DESCRIBE_OOM", "DOCKER_INSPECT", "SYSTEMD_OOM", "TABLE", "FULL")


@given(scrambled(KILLED, XID, *OTHERS))
def test_who_is_not_called_has_nothing_to_say(log: Log) -> None:
    """The quick look never hides a finding."""
    kinds = kinds_in(log)
    assert "kernel" in kinds or not judge_kernel(log).findings
    assert "supervisor" in kinds or not judge_pods(log).findings
    assert "nvidia-smi" in kinds or not judge_nvidia_smi(log).findings


@each("piece", ["|", "| 0 ", " ", "[", "[ 1] ", "1", "a:", "Warning  ", "NVRM: Xid (", "(", "MiB |", ", ", "x.service: "])
def test_the_longest_line_of_one_piece_is_read_quickly(piece: str) -> None:
    """Hostile lines at the reader's limit do not make a pattern run away."""
    words = ("NVRM oom-kill Killed process Restart Count:", '"OOMKilled":', ".service NVIDIA-SMI FB Memory Usage")
    milestones = " ".join(words)
    texts = [
        milestones,
        "|" + milestones,
        (piece * LONGEST)[:LONGEST],
        milestones + (piece * LONGEST)[:LONGEST],
        "|" + (piece * LONGEST)[:LONGEST] + "|",
    ]
    log = Log("hostile", [LogLine(number, "", "", None, text) for number, text in enumerate(texts * 20, 1)])
    for judge in (judge_kernel, judge_pods, judge_nvidia_smi):
        assert judge(log) is not None
