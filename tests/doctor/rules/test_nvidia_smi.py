"""nvidia-smi in all its layouts, as facts; findings only for what the tool itself calls broken."""

from __future__ import annotations

import pytest
from hypothesis import given

from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.nvidia_smi import judge_nvidia_smi
from plimsoll.findings import Code, Severity
from tests.doctor.pasted_text import pasted, scrambled
from tests.doctor.smi_texts import BROKEN, CSV, FULL, GB10, MIG, OLD, ROCM, TABLE


def test_the_table_of_today() -> None:
    """Both cards with their figures, and the processes, blanks in their names included."""
    facts = judge_nvidia_smi(pasted(TABLE)).facts
    assert facts.last is not None
    first, second = facts.last.gpus
    assert (first.number, first.name, first.used_mib, first.total_mib) == (0, "NVIDIA H100 80GB HBM3", 79284, 81559)
    assert (first.uncorrected, second.uncorrected) == (0, 2)
    assert facts.processes == (
        (0, 2632314, "VLLM::EngineCore", 74000),
        (0, 8320, "/usr/bin/gnome shell", 5000),
        (1, 10315, "...exec/xdg-desktop-portal", 57),
    )


def test_memory_that_no_process_holds_is_a_note() -> None:
    """20 GiB on card 1 belong to nobody listed: said, and not judged."""
    verdict = judge_nvidia_smi(pasted(TABLE.replace("|                    2 |", "|                    0 |")))
    assert verdict.findings == []
    (note,) = verdict.facts.notes
    assert "GPU 1: 20,423 MiB" in note


def test_older_layouts() -> None:
    """No MIG row, no GI and CI columns, a name that is cut."""
    facts = judge_nvidia_smi(pasted(OLD)).facts
    assert facts.last is not None
    (gpu,) = facts.last.gpus
    assert (gpu.name, gpu.used_mib, gpu.total_mib) == ("Tesla V100-SXM2...", 1000, 16160)
    assert facts.processes == ((0, 12345, "python3", 990),)


def test_what_is_not_supported_is_unknown() -> None:
    """On GB10 the tool gives no memory: None, never 0; and no process is an answer."""
    facts = judge_nvidia_smi(pasted(GB10)).facts
    assert facts.last is not None
    (gpu,) = facts.last.gpus
    assert (gpu.name, gpu.used_mib, gpu.total_mib) == ("NVIDIA GB10", None, None)
    assert facts.processes == ()
    assert facts.notes == ()


def test_slices_of_a_card() -> None:
    """A MIG device has its own memory; the card's figure is not its."""
    facts = judge_nvidia_smi(pasted(MIG)).facts
    assert facts.last is not None
    assert len(facts.last.gpus) == 1
    assert facts.processes == ((0, 77777, "VLLM::EngineCore", 9000),)


def test_a_card_that_reads_err_is_broken() -> None:
    """ERR! and `GPU is lost` are the tool's own words for it."""
    verdict = judge_nvidia_smi(pasted(BROKEN))
    assert [finding.code for finding in verdict.findings] == [Code.OTHER_HARDWARE]
    assert verdict.facts.last is not None
    assert verdict.facts.last.gpus[0].used_mib is None


def test_a_card_whose_values_read_err_is_broken_without_more_words() -> None:
    """ERR! in the table alone is enough."""
    (finding,) = judge_nvidia_smi(pasted(BROKEN.replace("GPU is lost", "ERR! / ERR!"))).findings
    assert "ERR!" in finding.because


def test_counted_errors_are_a_warning() -> None:
    """Uncorrectable errors in the table's last column."""
    (finding,) = judge_nvidia_smi(pasted(TABLE)).findings
    assert (finding.code, finding.severity) == (Code.OTHER_HARDWARE, Severity.WARNING)
    assert "2 uncorrectable" in finding.because


def test_the_full_printout() -> None:
    """Memory from its own section, processes, errors since the driver was loaded and the waiting row."""
    verdict = judge_nvidia_smi(pasted(FULL))
    reading = verdict.facts.last
    assert reading is not None
    (gpu,) = reading.gpus
    assert (gpu.name, gpu.used_mib, gpu.total_mib) == ("NVIDIA A100-SXM4-80GB", 79000, 81920)
    assert verdict.facts.processes == ((0, 4242, "VLLM::EngineCore", 78456),)
    (card,) = verdict.facts.health
    assert (card.uncorrected, card.faults) == (3, frozenset({"Pending"}))
    (finding,) = verdict.findings
    assert "3 uncorrectable" in finding.because


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("Remapping Failure Occurred        : No", "Remapping Failure Occurred        : Yes", "no way left"),
        ("DRAM Uncorrectable            : 3", "DRAM Uncorrectable            : 0", "waits for its replacement"),
    ],
)
def test_repairs_that_failed_or_wait(old: str, new: str, word: str) -> None:
    """A failed replacement is grave; a waiting one is a warning."""
    (finding,) = judge_nvidia_smi(pasted(FULL.replace(old, new))).findings
    assert word in finding.title


def test_csv_with_its_header() -> None:
    """Both queries; [N/A] is unknown."""
    facts = judge_nvidia_smi(pasted(CSV)).facts
    assert facts.last is not None
    assert [(gpu.number, gpu.used_mib) for gpu in facts.last.gpus] == [(0, 40000), (1, None)]
    assert facts.processes == ((None, 4242, "VLLM::EngineCore", 39500), (None, 911, "/usr/bin/python3", None))


def test_rocm() -> None:
    """AMD's memory query gives sizes."""
    facts = judge_nvidia_smi(pasted(ROCM)).facts
    assert facts.last is not None
    (first,) = facts.last.gpus
    assert (first.total_mib, first.used_mib) == (196592, 178909)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Unable to determine the device handle for GPU3: 0000:5F:00.0: Unknown Error", Code.OTHER_HARDWARE),
        ("Failed to initialize NVML: Driver/library version mismatch", Code.OTHER_INSTALLATION),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", Code.OTHER_INSTALLATION),
        ("Failed to initialize NVML: Unknown Error", Code.OTHER_INSTALLATION),
        ("No devices were found", Code.OTHER_HARDWARE),
    ],
)
def test_what_it_says_instead_of_a_table(line: str, expected: Code) -> None:
    """One line is enough, and it is never memory."""
    assert [finding.code for finding in judge_nvidia_smi(pasted(line)).findings] == [expected]


def test_several_readings_keep_their_order() -> None:
    """`watch nvidia-smi`: the last one counts."""
    later = TABLE.replace("79284MiB", "80001MiB")
    facts = judge_nvidia_smi(pasted(TABLE + later)).facts
    assert len(facts.readings) == 2
    assert facts.last is not None
    assert facts.last.gpus[0].used_mib == 80001


def test_a_healthy_log_gives_nothing() -> None:
    """Other tables and csv lines are not nvidia-smi's."""
    verdict = judge_nvidia_smi(pasted("a, b, c\n| x | y | z |\nGPU 0 is fine\nGPU KV cache size: 1,000 tokens"))
    assert verdict.findings == []
    assert verdict.facts.readings == ()


@given(scrambled(TABLE, OLD, GB10, MIG, BROKEN, FULL, CSV, ROCM))
def test_no_text_breaks_it(log: Log) -> None:
    """Cut, mixed and random lines give a verdict, and no finding of it is about memory running out."""
    for finding in judge_nvidia_smi(log).findings:
        assert finding.evidence
        assert not finding.code.is_memory
