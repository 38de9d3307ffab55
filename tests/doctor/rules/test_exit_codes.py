"""Exit codes: what each says, and that none of them ever blames memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.exit_codes import judge_exit
from plimsoll.findings import Code
from tests.each import each


@each(
    ("code", "expected"),
    [
        (1, None),
        (2, Code.STARTUP_BAD_FLAG),
        (3, None),
        (124, Code.OTHER_STOPPED_BY_OPERATOR),
        (125, Code.OTHER_INSTALLATION),
        (126, Code.OTHER_INSTALLATION),
        (127, Code.OTHER_INSTALLATION),
        (129, Code.OTHER_STOPPED_BY_OPERATOR),
        (130, Code.OTHER_STOPPED_BY_OPERATOR),
        (132, Code.OTHER_INSTALLATION),
        (134, Code.ENGINE_DEAD),
        (135, Code.OTHER_BAD_CONFIG),
        (136, Code.ENGINE_DEAD),
        (137, Code.OTHER_KILLED),
        (139, Code.ENGINE_DEAD),
        (143, Code.OTHER_STOPPED_BY_OPERATOR),
        (255, None),
        (77, None),
        (138, None),
    ],
)
def test_known_codes(code: int, expected: Code | None) -> None:
    """Each code that is known says what it may say, and no more."""
    verdict = judge_exit(code)
    assert (verdict.finding.code if verdict.finding else None) is expected
    assert str(code) in verdict.sentence
    assert verdict.does_not_prove


@pytest.mark.parametrize(("shell", "python", "wait"), [(137, -9, 137 << 8), (143, -15, 143 << 8), (139, -11, 139 << 8)])
def test_three_ways_to_write_one_end(shell: int, python: int, wait: int) -> None:
    """A shell, Python and wait() write a signal differently; the verdict is the same."""
    codes = [finding.code for code in (shell, python, wait) if (finding := judge_exit(code).finding)]
    assert len(codes) == 3
    assert len(set(codes)) == 1


def test_137_is_not_proof_of_memory() -> None:
    """SIGKILL has several senders; the sentence names them and says what would show memory."""
    verdict = judge_exit(137)
    assert "OOM killer" in verdict.sentence
    assert "kubelet" in verdict.sentence
    assert "memory ran out" in verdict.does_not_prove


def test_zero_is_a_crash_only_when_nobody_asked() -> None:
    """vLLM ends with 0 also when its engine died; whether a stop was asked for decides."""
    assert judge_exit(0).finding is None
    assert judge_exit(0, stop_seen=True).finding is None
    died = judge_exit(0, stop_seen=False).finding
    assert died is not None
    assert died.code is Code.ENGINE_DEAD
    assert any("always" in remedy.do for remedy in died.remedy)


@given(st.integers(), st.sampled_from([None, True, False]))
def test_no_exit_code_ever_blames_memory(code: int, stop_seen: bool | None) -> None:
    """Any number gives a sentence, and never a finding that says memory was the trouble."""
    verdict = judge_exit(code, stop_seen=stop_seen)
    assert verdict.sentence
    assert verdict.finding is None or (not verdict.finding.code.is_memory and verdict.finding.evidence)
