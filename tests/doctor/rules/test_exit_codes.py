"""Exit codes: what each says, and that none of them ever blames memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.rules.exit_codes import judge_exit
from plimsoll.findings import Code
from tests.each import each

STOPPED, BROKEN, DEAD = Code.OTHER_STOPPED_BY_OPERATOR, Code.OTHER_INSTALLATION, Code.ENGINE_DEAD


@each(("code", "stop_seen", "expected"), [
    *((code, None, expected) for code, expected in {
        1: None, 2: Code.STARTUP_BAD_FLAG, 3: None, 124: STOPPED, 125: BROKEN, 126: BROKEN, 127: BROKEN, 129: STOPPED,
        130: STOPPED,
        132: BROKEN, 134: DEAD, 135: Code.OTHER_BAD_CONFIG, 136: DEAD, 137: Code.OTHER_KILLED, 139: DEAD, 143: STOPPED,
        255: None,
        77: None, 138: None, -9: Code.OTHER_KILLED, -15: STOPPED, -11: DEAD, 0: None,
    }.items()),
    (0, True, None), (0, False, DEAD),  # vLLM ends with 0 also when its engine died: whether a stop was asked for decides
])  # fmt: skip
def test_known_codes(code: int, stop_seen: bool | None, expected: Code | None) -> None:
    """Each code that is known says what it may say, and no more, as a shell, Python or wait() writes it."""
    for written in (code, code << 8 if 0 < code < 256 else code):
        verdict = judge_exit(written, stop_seen=stop_seen)
        assert (verdict.finding.code if verdict.finding else None) is expected
        assert str(code) in verdict.sentence
        assert verdict.does_not_prove


def test_137_is_not_proof_of_memory_and_0_wants_a_restart() -> None:
    """SIGKILL has several senders: the sentence names them; on-failure does not fire on exit code 0."""
    verdict = judge_exit(137)
    assert all(sender in verdict.sentence for sender in ("OOM killer", "kubelet"))
    assert "memory ran out" in verdict.does_not_prove
    died = judge_exit(0, stop_seen=False).finding
    assert died is not None
    assert any("always" in remedy.do for remedy in died.remedy)


@given(st.integers(), st.sampled_from([None, True, False]))
def test_no_exit_code_ever_blames_memory(code: int, stop_seen: bool | None) -> None:
    """Any number gives a sentence, and never a finding that says memory was the trouble."""
    verdict = judge_exit(code, stop_seen=stop_seen)
    assert verdict.sentence
    assert verdict.finding is None or (not verdict.finding.code.is_memory and verdict.finding.evidence)
