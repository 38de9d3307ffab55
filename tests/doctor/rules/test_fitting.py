"""Cures that suit the server at hand, on logs of servers that failed."""

from __future__ import annotations

from pathlib import Path

from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.doctor.rules.facts import fitting
from plimsoll.findings import Code, Finding, Remedy, Severity
from tests.doctor.case_maker import facts_with
from tests.each import each

CAPTURES = Path(__file__).parents[2] / "captures" / "vllm-0.25.1-h200-failures"


def _cures(name: str) -> list[str]:
    return [one.do for one in diagnose([read_log(str(CAPTURES / name))]).findings[0].remedy]


def test_an_adapter_that_has_the_only_slot() -> None:
    """Fewer slots are not offered to a server that has one, as vLLM has unless told: it prints only what differs."""
    cures = _cures("lora.log")
    assert not any(cure.startswith("--max-loras") for cure in cures)
    assert any(cure.startswith("--max-lora-rank") for cure in cures)


def test_pictures_that_nobody_measured() -> None:
    """What kept vLLM from leaving room comes first, and one picture a request is not offered where there is one."""
    cures = _cures("multimodal.log")
    assert cures[0] == "leave out --skip-mm-profiling and --kv-cache-memory-bytes"
    assert not any(cure.startswith("--limit-mm-per-prompt") for cure in cures)


@each(
    ("flag", "value", "flags", "is_offered"),
    [
        ("--max-loras", "1", {"max_loras": "4"}, True),
        ("--max-loras", "1", {"max_loras": "1"}, False),
        ("--max-loras", "1", {"enable_lora": "True"}, False),
        ("--max-loras", "1", {}, True),
        ("--max-loras", "1", {"max_model_len": "2048"}, True),
        ("--limit-mm-per-prompt", None, {}, True),
        ("--limit-mm-per-prompt", None, {"limit_mm_per_prompt": "{'image': 4}"}, True),
        ("--limit-mm-per-prompt", None, {"limit_mm_per_prompt": "{'image': 1, 'video': 0}"}, False),
        ("--limit-mm-per-prompt", None, {"limit_mm_per_prompt": "{'image': {'count': 1, 'width': 512}}"}, True),
        ("--limit-mm-per-prompt", None, {"limit_mm_per_prompt": "{'video': 1}"}, True),
        ("--limit-mm-per-prompt", None, {"limit_mm_per_prompt": '{"image":0,"audio":0}'}, False),
        ("--limit-mm-per-prompt", None, {"limit_mm_per_prompt": "{}"}, True),
        ("--max-num-seqs", "32", {"max_num_seqs": "16"}, False),
        ("--max-num-seqs", "32", {"max_num_seqs": "64"}, True),
    ],
)
def test_what_it_has_already_is_not_offered(flag: str, value: str | None, flags: dict[str, str], is_offered: bool) -> None:
    """A cure stays unless the server was started that way; where its flags are not known, it stays."""
    remedy = Remedy("do", "why", flag, value)
    found = Finding(Code.RUNTIME_LORA, Severity.CRITICAL, 0.9, "title", "because", (), (remedy,), ())
    assert (fitting(found, facts_with(flags=flags)).remedy == (remedy,)) is is_offered
