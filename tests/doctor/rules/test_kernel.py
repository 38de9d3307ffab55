"""Kernel lines: who was killed and by which limit, what an Xid means, and what is only noise."""

from __future__ import annotations

from hypothesis import given

from plimsoll.doctor.rules.host_memory import read_kills
from plimsoll.doctor.rules.kernel import judge_kernel
from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.findings import Code
from tests.doctor.pasted_text import pasted, scrambled
from tests.each import each

CGROUP = """
[81234.100001] VLLM::EngineCor invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=-997
[81234.100002] CPU: 12 PID: 4242 Comm: VLLM::EngineCor Tainted: P           OE      6.8.0-45-generic #45-Ubuntu
[81234.100003] memory: usage 67108864kB, limit 67108864kB, failcnt 9182
[81234.100004] swap: usage 0kB, limit 0kB, failcnt 0
[81234.100005] Memory cgroup stats for /kubepods.slice/kubepods-pod1a2b.slice/cri-containerd-99.scope:
[81234.100006] Tasks state (memory values in pages):
[81234.100007] [  pid  ]   uid  tgid total_vm      rss rss_anon rss_file rss_shmem pgtables_bytes swapents oom_score_adj name
[81234.100008] [   4001]     0  4001  5242880   524288   500000    24288        0  8192000        0          -997 vllm
[81234.100009] [   4242]     0  4242 41943040 14680064 14000000   600000    80064 99192000        0          -997 VLLM::EngineCor
[81234.100010] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=cri-containerd-99.scope,mems_allowed=0-1,oom_memcg=/kubepods.slice/kubepods-pod1a2b.slice,task_memcg=/kubepods.slice/kubepods-pod1a2b.slice/cri-containerd-99.scope,task=VLLM::EngineCor,pid=4242,uid=0
[81234.100011] Memory cgroup out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:167772160kB, anon-rss:56000000kB, file-rss:2400000kB, shmem-rss:320256kB, UID:0 pgtables:96868kB oom_score_adj:-997
[81234.200000] oom_reaper: reaped process 4242 (VLLM::EngineCor), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
"""  # noqa: E501
COMPILERS = """
[Sat Nov 14 17:52:01 2026] cicc invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE|__GFP_ZERO), order=0, oom_score_adj=0
[Sat Nov 14 17:52:01 2026] 31457280 pages RAM
[Sat Nov 14 17:52:01 2026] [  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name
[Sat Nov 14 17:52:01 2026] [  17574]  1000 17574 90000000  1200000 99192000        0             0 VLLM::EngineCor
[Sat Nov 14 17:52:01 2026] [  18001]  1000 18001  2000000  1850000 9192000        0             0 cicc
[Sat Nov 14 17:52:01 2026] [  18002]  1000 18002  2000000  1900000 9192000        0             0 cicc
[Sat Nov 14 17:52:01 2026] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/user.slice,task=cicc,pid=18002,uid=1000
[Sat Nov 14 17:52:01 2026] Out of memory: Killed process 18002 (cicc) total-vm:8000000kB, anon-rss:7599000kB, file-rss:1000kB, shmem-rss:0kB, UID:1000 pgtables:15000kB oom_score_adj:0
"""  # noqa: E501
XIDS = """
[12345.678] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[12345.679] NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.
[12345.700] NVRM: Xid (PCI:0000:3b:00): 45, pid=4242, name=VLLM::EngineCor, Ch 00000008
[12345.800] NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
"""
OTHERS = """
kernel: python3[4242]: segfault at 10 ip 00007f3c2a1b2c3d sp 00007ffd1e2f3a40 error 4 in libtorch_cuda.so[7f3c00000000+5a000000]
kernel: INFO: task VLLM::Worker_TP:4243 blocked for more than 120 seconds.
kernel: blk_update_request: I/O error, dev nvme0n1, sector 123456 op 0x0:(READ) flags 0x80700
kernel: pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0
kernel: NVRM: RmInitAdapter failed! (0x62:0x55:2477)
kernel: NVRM: API mismatch: the client has the version 570.86.10, but this kernel module has the version 550.54.15.
kernel: nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 32 egress nonposted PRIV error
kernel: amdgpu 0000:c1:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:8 pasid:32770)
kernel: amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!
kernel: Memory failure: 0x3f4a21: Killing python3:4242 due to hardware memory corruption
kernel: NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from _memdescAllocInternal
systemd-oomd[709]: Killed /system.slice/vllm.service due to memory used (66571993088) / total (67502944256) and swap used (0) / total (0) being more than 90.00%
earlyoom[812]: sending SIGTERM to process 4242 uid 0 "VLLM::EngineCor": oom_score 901, VmRSS 61234 MiB, cmdline "VLLM::EngineCore"
"""  # noqa: E501


POSTGRES = CGROUP.replace("VLLM::EngineCor", "postgres")
OLD_KERNEL = """
kernel: Out of memory: Kill process 812 (python3) score 912 or sacrifice child
kernel: Killed process 812 (python3) total-vm:99999999kB, anon-rss:52428800kB, file-rss:0kB, shmem-rss:0kB
"""
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
