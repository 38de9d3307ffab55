"""The words by which failures are known, against the sources of vLLM's releases and lines that were really printed."""

from __future__ import annotations

import re
import time

from plimsoll.findings import Code
from plimsoll.vllm import versions
from plimsoll.vllm.failure_texts import (
    CONSEQUENCE_WORDS,
    CONSEQUENCES,
    LIFE,
    MEMORY,
    OTHER,
    STEP_FRAMES,
    TEXTS,
    FailureText,
    Role,
)
from tests.each import each, rows
from tests.vllm.test_flags import CASES

BY_NAME = {text.name: text for text in TEXTS}
CALLED_OFF = (Role.DEATH, Role.NOISE, Role.OUT_OF_MEMORY)  # these name no cause of their own


@each("text", TEXTS, ids=lambda text: text.name)
def test_every_text_of_vllms_was_seen_in_a_wheel_and_what_names_a_cause_has_a_code(text: FailureText) -> None:
    """No text rests on one log; death is never the reason, and an allocation that failed gets its code from the step."""
    assert bool(versions.spans_of("failure_texts", text.name)) == (text.speaker == "vllm")
    assert text.fragment is None or text.speaker == "vllm"
    assert (text.code is None) == (text.role in CALLED_OFF)
    if text in OTHER:
        assert text.code is not None
        assert not text.code.is_memory


def test_every_row_of_the_table_is_a_text_of_today_and_consequences_are_class_names_and_words() -> None:
    """A name means one text, in one list; what passes a failure on is known by class or message; every code may be given."""
    assert set(versions.rows("failure_texts")) == {text.name for text in TEXTS if text.speaker == "vllm"}
    assert len(BY_NAME) == len(TEXTS)
    assert (*MEMORY, *OTHER, *LIFE) == TEXTS
    assert all(name.isidentifier() for name in CONSEQUENCES)
    assert all(len(words) > 6 for words in CONSEQUENCE_WORDS)
    assert {text.code for text in TEXTS} >= {Code.OTHER_GATED_MODEL, Code.STARTUP_BAD_FLAG, Code.ENGINE_WEDGED}


@each("text", [text for text in TEXTS if text.pattern], ids=lambda text: text.name)
def test_patterns_stay_quick_on_hostile_lines(text: FailureText) -> None:
    """A line of repeated words takes no pattern longer than a blink."""
    started = time.perf_counter()
    for word in ("compute capability ", "nccl ", "at least ", "rank ", f"{text.needle} ", "A.", ": line 1: "):
        re.search(text.pattern or "", (word * 16_000)[:16_000])
    assert time.perf_counter() - started < 5


@each(("section", "name", "line"), [(section, *row) for section in ("known", "not it") for row in rows(CASES, section)])
def test_real_lines_are_known_and_those_that_only_look_like_it_are_not(section: str, name: str, line: str) -> None:
    """A line as it was printed is known by its text; the same words in a harmless line do not count."""
    text = BY_NAME[name]
    is_it = text.needle in line and (text.pattern is None or re.search(text.pattern, line) is not None)
    assert is_it is (section == "known")


FUNCTIONS = sorted({function for _, functions in STEP_FRAMES for function in functions})


def test_every_step_is_known_in_the_newest_release() -> None:
    """No function means two steps, none is one that vLLM never had, and no row belongs to one that is gone."""
    assert [function for function in FUNCTIONS if not versions.spans_of("frames", function)] == []
    assert set(versions.rows("frames")) == set(FUNCTIONS)
    assert versions.spans_of("frames", "no_such_function") == ()
    newest = list(versions.wheels())[-1]
    for name, functions in STEP_FRAMES:
        assert any(versions.spans_of("frames", function)[-1].last == newest for function in functions), name
    assert len(FUNCTIONS) == sum(len(functions) for _, functions in STEP_FRAMES)
