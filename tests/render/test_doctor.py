"""What a tired person reads, and what a program reads, of one diagnosis."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll.doctor.rules.diagnose import Diagnosis
from plimsoll.findings import Code, Evidence, Finding, Remedy, Severity
from plimsoll.redaction import clean, plain
from plimsoll.render.doctor import MOST_TEXT_FINDINGS, as_json, as_text, body

GIB = 1 << 30
FACTS = {"vllm": "0.25.1", "model": "m", "gpu": {"name": "H100", "total_bytes": 80 * GIB}, "flags": {"max_model_len": "8192"}}


def finding(number: int = 0, **changes: object) -> Finding:
    """A finding with all its parts."""
    parts: dict[str, object] = {
        "code": Code.RUNTIME_FORWARD,
        "severity": Severity.CRITICAL,
        "confidence": 0.9,
        "title": f"title {number}",
        "because": f"because {number}",
        "evidence": tuple(Evidence("folder/server.log", f"line {n} of {number}", n) for n in range(1, 8)),
        "remedy": (
            Remedy("lower it", "it helps", "--max-num-seqs", "64"),
            Remedy("--enforce-eager", "no graphs", "--enforce-eager"),
        ),
        "not_a_remedy": ("prayer",),
    }
    return Finding(**(parts | changes))  # type: ignore[arg-type]


def diagnosis(*findings: Finding, failure: bool | None = True, **facts: object) -> Diagnosis:
    return Diagnosis(failure, findings, {**FACTS, **facts}, ())


def test_the_first_line_is_the_verdict_and_what_is_not_known_takes_no_line() -> None:
    """Yes, no or unknown, with the version, the model and the card; "nothing wrong" only where it is so; what to collect."""
    for memory, head, nothing in (
        (True, "memory failure: yes", "No failure was recognised."),
        (False, "memory failure: no", "Nothing wrong was found."),
        (None, "memory failure: unknown", "No failure was recognised."),
    ):
        text = str(as_text(diagnosis(failure=memory)))
        assert text.splitlines()[0] == f"{head}   (vLLM 0.25.1, m, H100 80.0 GiB)"
        assert nothing in text
    assert "--explain" not in str(as_text(diagnosis(finding(severity=Severity.INFO), failure=False)))
    text = str(as_text(Diagnosis(None, (), {}, ("dmesg -T", "the exit code"))))
    assert text.splitlines()[0] == "memory failure: unknown"
    assert text.endswith("To settle it, collect:\n  - dmesg -T\n  - the exit code")


def test_a_finding_is_told_in_order() -> None:
    """Its code and how sure, why, what to do with its flag, the proof by file and line, what is no use, where to read on."""
    lines = str(as_text(diagnosis(finding()))).splitlines()
    told = [line[:13].strip() for line in lines if line.startswith("   ") and line[3:4] not in ("", " ")]
    assert told[0] == "why"
    assert told[-1] == "read on"
    assert set(told) == {"why", "do", "no use", "evidence", "read on"}
    text = "\n".join(lines)
    assert "1. runtime.forward (critical, 90% sure): title 0" in text
    assert "server.log, line 1\n" in text
    assert "folder/" not in text
    assert "lower it (--max-num-seqs 64): it helps" in text
    assert "--enforce-eager: no graphs" in text
    assert "plimsoll doctor --explain runtime.forward" in text
    lines = str(as_text(diagnosis(finding(because="word " * 80)))).splitlines()
    assert max(map(len, lines)) <= 110
    why = next(at for at, line in enumerate(lines) if line.startswith("   why"))
    assert lines[why + 1].startswith(" " * 13 + "word"), "a long sentence goes on below its own beginning"


def test_the_first_finding_is_told_in_full_and_the_others_shortly() -> None:
    """Four lines of proof for the cause, one for each other; beyond five findings the rest is counted."""
    text = str(as_text(diagnosis(*(finding(n) for n in range(8)))))
    assert [n for n in range(1, 8) if f"line {n} of 0" in text] == [1, 2, 3, 4]
    assert [n for n in range(1, 8) if f"line {n} of 1" in text] == [1]
    assert text.count("no use") == 1
    assert f"and {8 - MOST_TEXT_FINDINGS} more: --json has them all" in text


def test_figures_plan_flags_and_noise_close_the_answer() -> None:
    """What the start measured, what plan computes, how it was started, what only looks bad; a flag like a page is cut."""
    facts: dict[str, Any] = {
        "memory": {"weights_bytes": 15 * GIB, "kv_bytes": 40 * GIB},
        "plan": {"weights_bytes": 14 * GIB, "kv_bytes": None, "slack_bytes": GIB},
        "harmless": ["CUDA warning: out of memory (function destroyEvent)"],
    }
    text = str(as_text(diagnosis(finding(), **facts)))
    assert "The start's own figures: weights 15.0 GiB, KV cache 40.0 GiB" in text
    assert "plan computes for this command: weights 14.0 GiB, slack 1.0 GiB" in text
    assert "Started with: max_model_len=8192" in text
    assert "Harmless, whatever it says: CUDA warning" in text
    long = "{'mode': None, " + "'custom_ops': ['+rms_norm'], " * 40
    found = diagnosis(finding(), flags={"compilation_config": long, "port": "8000"})
    text = " ".join(str(as_text(found)).split())
    assert f"compilation_config={long[:60]}" in text
    assert len(text) < len(long)
    assert "..., port=8000" in text
    assert json.loads(as_json(found))["facts"]["flags"]["compilation_config"] == long.strip()


def test_json_has_every_finding_whole_and_knows_no_infinity() -> None:
    """In the contract's names; what JSON cannot hold is unknown, tuples are lists."""
    read = json.loads(as_json(diagnosis(*(finding(n) for n in range(8)))))
    assert len(read["findings"]) == 8
    first = read["findings"][0]
    assert set(first) == {"code", "severity", "confidence", "title", "because", "evidence", "remedy", "not_a_remedy"}
    assert len(first["evidence"]) == 7
    assert first["evidence"][0] == {"source": "folder/server.log", "line": 1, "text": "line 1 of 0"}
    assert first["remedy"][0] == {"do": "lower it", "why": "it helps", "flag": "--max-num-seqs", "value": "64"}
    assert read["schema"] == "plimsoll.doctor/1"
    assert plain({"a": float("nan"), "b": float("-inf"), "c": (1, True, None)}) == {"a": None, "b": None, "c": [1, True, None]}
    assert json.loads(as_json(diagnosis(figure=float("inf"))), parse_constant=pytest.fail)["facts"]["figure"] is None


def test_secrets_prompts_and_control_characters_are_cleaned_everywhere() -> None:
    """Whatever field they are in: not in the text, not in the JSON, not as a key."""
    secret = "hf_" + "aB3dE5gH7jK9" * 3
    dirty = f"token {secret} prompt: 'qwertzuiop asdfgh', params: SamplingParams(n=1) \x1b[2J\x07\u202e"
    parts: dict[str, Any] = {
        "evidence": (Evidence(f"/tmp/{secret}", dirty, 1),),
        "remedy": (Remedy(dirty, dirty, "--x", dirty),),
    }
    given = finding(title=dirty, because=dirty, not_a_remedy=(dirty,), **parts)
    facts = {**FACTS, "model": dirty, "flags": {"api_key": dirty, secret: "1"}, "harmless": [dirty]}
    whole = Diagnosis(True, (given,), facts, (dirty,))
    for shown in (str(as_text(whole)), as_json(whole), json.dumps(body(whole), ensure_ascii=False)):
        assert [part for part in (secret[:12], "qwertz", "\x1b", "\u202e") if part in shown] == []
    assert clean(dirty).isprintable()
