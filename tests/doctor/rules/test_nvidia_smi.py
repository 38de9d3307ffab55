"""nvidia-smi in all its layouts, as facts; findings only for what the tool itself calls broken."""

from __future__ import annotations

from hypothesis import given

from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.nvidia_smi import judge_nvidia_smi
from plimsoll.findings import Code, Severity
from tests.doctor.pasted_text import pasted, printed, scrambled
from tests.each import each

TABLE, OLD, GB10, MIG, BROKEN, FULL = printed("TABLE", "OLD", "GB10", "MIG", "BROKEN", "FULL")
H100 = "NVIDIA H100 80GB HBM3"
PROCESSES = (
    (0, 2632314, "VLLM::EngineCore", 74000), (0, 8320, "/usr/bin/gnome shell", 5000),
    (1, 10315, "...exec/xdg-desktop-portal", 57),
)  # fmt: skip


@each(("text", "cards", "processes"), [
    (TABLE, [(0, H100, 79284, 81559), (1, H100, 20480, 81559)], PROCESSES),
    (TABLE + TABLE.replace("79284MiB", "80001MiB"), [(0, H100, 80001, 81559), (1, H100, 20480, 81559)], PROCESSES),  # the last
    (OLD, [(0, "Tesla V100-SXM2...", 1000, 16160)], ((0, 12345, "python3", 990),)),
    (GB10, [(0, "NVIDIA GB10", None, None)], ()),  # it gives no memory: unknown, never 0; and no process is an answer
    (MIG, None, ((0, 77777, "VLLM::EngineCore", 9000),)),  # a slice has its own memory; the card's is not its
    ("a, b, c\n| x | y | z |\nGPU 0 is fine\nGPU KV cache size: 1,000 tokens", [], None),  # tables and csv of others
])  # fmt: skip
def test_every_layout_is_read(
    text: str, cards: list[tuple[int, str | None, int | None, int | None]] | None, processes: tuple[object, ...] | None
) -> None:
    """Cards with their memory, and who holds it, blanks in names included; what is not said is unknown."""
    facts = judge_nvidia_smi(pasted(text)).facts
    gpus = facts.last.gpus if facts.last is not None else ()
    for gpu, card in zip(gpus, cards or [], strict=cards is not None):
        number, name, used, total = card
        assert (gpu.number, gpu.used_mib) == (number, used)
        assert name is None or (gpu.name, gpu.total_mib) == (name, total)
    assert len(gpus) == (len(cards) if cards is not None else 1)
    assert facts.processes == processes


UNHELD = TABLE.replace("|                    2 |", "|                    0 |")


@each(("text", "found"), [
    (UNHELD, []), (GB10, []),
    (TABLE, [(Code.OTHER_HARDWARE, Severity.WARNING, "2 uncorrectable")]),
    (BROKEN, [(Code.OTHER_HARDWARE, Severity.CRITICAL, "GPU is lost")]),
    (BROKEN.replace("GPU is lost", "ERR! / ERR!"), [(Code.OTHER_HARDWARE, Severity.CRITICAL, "ERR!")]),
    (FULL, [(Code.OTHER_HARDWARE, Severity.WARNING, "3 uncorrectable")]),
    (FULL.replace("Remapping Failure Occurred        : No", "Remapping Failure Occurred        : Yes"),
     [(Code.OTHER_HARDWARE, Severity.CRITICAL, "no way left")]),
    (FULL.replace("DRAM Uncorrectable            : 3", "DRAM Uncorrectable            : 0"),
     [(Code.OTHER_HARDWARE, Severity.WARNING, "waits for its replacement")]),
    *((line, [(code, Severity.CRITICAL, line[:40])]) for line, code in [
        ("Unable to determine the device handle for GPU3: 0000:5F:00.0: Unknown Error", Code.OTHER_HARDWARE),
        ("Failed to initialize NVML: Driver/library version mismatch", Code.OTHER_INSTALLATION),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", Code.OTHER_INSTALLATION),
        ("Failed to initialize NVML: Unknown Error", Code.OTHER_INSTALLATION), ("No devices were found", Code.OTHER_HARDWARE),
    ]),
])  # fmt: skip
def test_only_what_the_tool_calls_broken_is_a_finding(text: str, found: list[tuple[Code, Severity, str]]) -> None:
    """Counted errors and a waiting row are warnings; ERR!, a lost card and a failed repair are grave."""
    findings = judge_nvidia_smi(pasted(text)).findings
    assert [(one.code, one.severity) for one in findings] == [(code, severity) for code, severity, _ in found]
    assert all(words in one.because for one, (_, _, words) in zip(findings, found, strict=True))


def test_health_and_memory_that_no_process_holds_are_told() -> None:
    """20 GiB on card 1 belong to nobody listed: said, and not judged; errors and the waiting row are facts."""
    assert [note[:17] for note in judge_nvidia_smi(pasted(UNHELD)).facts.notes] == ["GPU 1: 20,423 MiB"]
    assert judge_nvidia_smi(pasted(GB10)).facts.notes == ()
    (card,) = judge_nvidia_smi(pasted(FULL)).facts.health
    assert (card.uncorrected, card.faults) == (3, frozenset({"Pending"}))


@given(scrambled(TABLE, OLD, GB10, MIG, BROKEN, FULL))
def test_no_text_breaks_it(log: Log) -> None:
    """Cut, mixed and random lines give a verdict, and no finding of it is about memory running out."""
    assert all(finding.evidence and not finding.code.is_memory for finding in judge_nvidia_smi(log).findings)
