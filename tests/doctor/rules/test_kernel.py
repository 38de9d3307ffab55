"""Kernel lines: who was killed and by which limit, what an Xid means, and what is only noise."""

from __future__ import annotations

from hypothesis import given

from plimsoll.doctor.rules.host_memory import read_kills
from plimsoll.doctor.rules.kernel import judge_kernel
from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.findings import Code
from tests.doctor.pasted_text import pasted, printed, scrambled
from tests.each import each

CGROUP, COMPILERS, XIDS, OTHERS, OLD_KERNEL = printed("CGROUP", "COMPILERS", "XIDS", "OTHERS", "OLD_KERNEL")
POSTGRES = CGROUP.replace("VLLM::EngineCor", "postgres")
MMU = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4242, name=VLLM::EngineCor, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS"
DBE = "NVRM: Xid (PCI:0000:3b:00): 48, pid=4242, name=VLLM::EngineCor, An uncorrectable double bit error (DBE)"
XORG = "NVRM: Xid (PCI:0000:01:00): 13, pid=911, name=Xorg, Graphics Exception: ESR 0x404490=0x80000001"
REMAPPED = "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate."
RAM = Code.HOST_OUT_OF_MEMORY


@each(("promise", "text", "codes", "words", "do"), [
    ("a container at its limit", CGROUP, [RAM],
     ["limit of 64.0 GiB", "held 56.0 GiB", "kubepods-pod1a2b"], "above 64.0 GiB"),
    ("a killed compiler wants fewer jobs", COMPILERS, [RAM],
     ["2 compiler process(es) with 14.3 GiB", "120.0 GiB in all"], "MAX_JOBS=1"),
    ("an old kernel says it in two lines", OLD_KERNEL, [RAM], ["held 50.0 GiB"], "more RAM"),
    ("a victim's line alone is enough", CGROUP.strip().split("\n")[10], [RAM], [], "memory limit"),
    ("so is a summary alone", CGROUP.strip().split("\n")[9], [RAM], [], "memory limit"),
    ("a lost card rules over its echoes", XIDS, [Code.OTHER_HARDWARE], ["2 other Xid line(s)"], "Node Reboot Required"),
    ("a program's fault is not the card's", MMU, [Code.OTHER_ILLEGAL_ACCESS], ["Xid 31"], "start the server again"),
    ("unless the card's stands beside it", f"{MMU}\n{DBE}", [Code.OTHER_HARDWARE], ["Xid 48"], ""),
    ("a repaired row ends no server", REMAPPED, [Code.OTHER_HARDWARE], ["Alone it ends no server"], ""),
    ("a full disk", "cp: error writing '/data/model': No space left on device", [Code.OTHER_DISK], [], "free space"),
    ("full shared memory", "OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", [RAM], [], "--shm-size"),
    ("a stranger's death is only a note", POSTGRES, [], [], ""), ("so is a stranger's Xid", XORG, [], [], ""),
    ("an echo is no cause", "NVRM: Xid (PCI:0000:3b:00): 45, pid=4242, name=python3, Ch 00000008", [], [], ""),
    ("an unknown number is not guessed", "NVRM: Xid (PCI:0000:3b:00): 999, something new", [], [], ""),
])  # fmt: skip
def test_kernel_lines_and_what_they_mean(promise: str, text: str, codes: list[Code], words: list[str], do: str) -> None:
    """One finding for the lines that tell of one thing, with its figures and its first remedy; or a note."""
    verdict = judge_kernel(pasted(text))
    assert [one.code for one in verdict.findings] == codes, promise
    for finding in verdict.findings:
        assert all(word in finding.because for word in words), finding.because
        assert do in finding.remedy[0].do
    assert codes or len(verdict.facts) == 1


@each(("text", "expected"), [
    (CGROUP, [("kernel", 4242, "VLLM::EngineCor", "cgroup", 64 << 30)]), (COMPILERS, [("kernel", 18002, "cicc", "host", None)]),
    (OLD_KERNEL, [("kernel", 812, "python3", "host", None)]),
    (OTHERS, [("systemd-oomd", None, "/system.slice/vllm.service", "host", None),
      ("earlyoom", 4242, "VLLM::EngineCor", "host", None)]),
])  # fmt: skip
def test_kills_are_read_once_each(text: str, expected: list[tuple[str, int | None, str, str, int | None]]) -> None:
    """By whom, whose, and for which limit."""
    assert [(kill.by, kill.pid, kill.name, kill.scope, kill.limit_bytes) for kill in read_kills(pasted(text))] == expected


def test_pages_of_64_kib_are_seen_from_the_victims_own_figures() -> None:
    """ARM servers count in larger pages; the sizes still come out right."""
    text = CGROUP.replace("14680064", "917504").replace("524288", "32768").replace(" vllm\n", " ninja\n")
    (kill,) = read_kills(pasted(text))
    assert (kill.compilers, kill.compiler_bytes) == (1, 32768 * 65536)


def test_other_ends_from_below() -> None:
    """Each kind of trouble is found once, none of it is called memory except the two kills."""
    verdict = judge_kernel(pasted(OTHERS))
    assert {finding.code for finding in verdict.findings} == {
        RAM, Code.ENGINE_DEAD, Code.ENGINE_WEDGED, Code.OTHER_DISK, Code.OTHER_HARDWARE, Code.OTHER_INSTALLATION,
        Code.OTHER_ILLEGAL_ACCESS,
    }  # fmt: skip
    assert any("libtorch_cuda.so" in finding.title for finding in verdict.findings)
    assert any("refused memory" in note for note in verdict.facts)


def test_what_others_say_is_left_to_them() -> None:
    """A line that a vLLM process printed is not the kernel's; ordinary words about memory are no evidence."""
    said = LogLine(1, "EngineCore pid=1", "INFO", None, "prompt: 'Out of memory: Killed process 1 (python3)'")
    for log in (Log("x", [said]), pasted("Available KV cache memory: 12.3 GiB\nkilled time\nout of memory is a thing\nXid")):
        assert judge_kernel(log) == ([], ())


@given(scrambled(CGROUP, COMPILERS, XIDS, OTHERS))
def test_no_text_breaks_it(log: Log) -> None:
    """Cut, mixed and random lines give a verdict, and every finding quotes a line of the text."""
    assert all(finding.evidence and finding.because for finding in judge_kernel(log).findings)
