"""Contained failures as a server counts them itself: a saved state, and a page of metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.doctor.read.inputs import judge_gate_state
from plimsoll.doctor.rules.contained import last_words, read_survival, remedies_of
from plimsoll.doctor.rules.metrics import judge_pages
from plimsoll.findings import Code, Finding, Severity
from plimsoll.vllm.metrics_page import Page, parse_page
from tests.doctor.rules.test_gate_state import log_of
from tests.each import each

SURVIVE = {
    "armed": True, "why": "", "contained": 3, "aborted": 1, "recomputed_tokens": 190000, "stalled_s": 1.7,
    "last": {"age_s": 12.1, "site": "logits", "tokens": 8192, "requests": 48, "asked_bytes": 2093796556,
             "free_bytes": 1181116006, "kind": "prompt_logprobs"},
    "tokens_per_step": {"now": 1024, "start": 8192}, "sequences": {"now": 256, "start": 256}, "limping": False, "storm": False,
}  # fmt: skip
STATE = {"schema": "plimsoll.state/1", "ready": True, "reason": "", "engine": {"is_wedged": False}}
PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
# TYPE plimsoll_survive_contained_total counter
plimsoll_survive_contained_total COUNT
plimsoll_survive_recomputed_tokens_total 190000.0
plimsoll_survive_stalled_seconds_total 1.7
plimsoll_survive_tokens_per_step 1024.0
plimsoll_survive_tokens_per_step_start 8192.0
plimsoll_survive_limping 0.0
"""


def state(**others: object) -> str:
    """A saved answer of /plimsoll/state with this key."""
    return json.dumps({**STATE, "survive": {**SURVIVE, **others}}, indent=1)


def page(count: str, source: str = "page.txt") -> Page:
    """A page that counts so many."""
    return parse_page(PAGE.replace("COUNT", count).encode(), source, None)


def test_a_saved_state_tells_what_was_contained() -> None:
    """How many, the shape of the last one, what it cost, and the flags for it; never a wedge, never a crash."""
    (finding,) = judge_gate_state(log_of(state())).findings
    assert (finding.code, finding.severity) == (Code.RUNTIME_CONTAINED, Severity.WARNING)
    told = (
        "3 steps", "it lives", "8,192 tokens in 48 requests, at logits", "wants prompt_logprobs", "asked for 1.9 GiB",
        "190,000 tokens were computed again", "1.7 s", "1 request was aborted", "at most 1024 tokens now, 8192",
    )  # fmt: skip
    for words in told:
        assert words in finding.because
    assert finding.evidence[0].text == '"contained": 3,'
    assert "PLIMSOLL_ADMIT=certified" in finding.remedy[0].do
    assert ("--max-num-batched-tokens", "1024") in [(one.flag, one.value) for one in finding.remedy]


def test_a_storm_and_a_limp_are_said() -> None:
    """Both are the server's own word."""
    (finding,) = judge_gate_state(log_of(state(storm=True, limping=True))).findings
    assert "drained and restarted" in finding.because
    assert "it limps" in finding.because


@each(
    "survive",
    [None, [], "3", {}, {"contained": 0}, {"contained": "3"}, {"contained": True}, {"contained": -1},
     {"contained": float("nan")}, {"armed": None},
     {"armed": False, "why": "a KV connector is set", "contained": 0, "aborted": 0, "last": None}],
)  # fmt: skip
def test_a_state_that_tells_of_none_is_no_finding(survive: object) -> None:
    """Nor one of wrong types: nothing is made of what cannot be a count."""
    assert judge_gate_state(log_of(json.dumps({**STATE, "survive": survive}))).findings == ()


@pytest.mark.parametrize(
    "last", [None, [], "x", {}, {"site": 7, "kind": ["x"], "tokens": "many", "age_s": -1, "asked_bytes": True}]
)
def test_a_last_failure_of_wrong_types_says_nothing_of_itself(last: object) -> None:
    """The count stands; the shape is left out."""
    (finding,) = judge_gate_state(log_of(state(last=last, aborted=0))).findings
    assert "3 steps" in finding.because
    assert "prompt_logprobs" not in finding.because
    assert finding.remedy


def test_words_of_a_failure_hold_nobodys_text() -> None:
    """What a state says beside the known sites and kinds is not shown."""
    found = read_survival({"last": {"site": "<script>", "kind": "hello"}})
    assert found is not None
    assert last_words(found.last) == "a step"
    assert last_words(None) == ""
    assert remedies_of(None) == remedies_of(found._replace(last=None))


def page_finding(first: Page, second: Page | None = None) -> Finding | None:
    """What is said of contained failures on one page, or on two looks."""
    return next((one for one in judge_pages(first, second).findings if one.code is Code.RUNTIME_CONTAINED), None)


def test_a_page_that_counts_them_tells_it() -> None:
    """One look knows how many since the start, two how many between them; the line stands as evidence."""
    one = page_finding(page("3.0"))
    assert one is not None
    assert one.evidence[0].line == 4
    assert "at most 1024 tokens now, 8192 at the start" in one.because
    two = page_finding(page("1.0"), page("3.0"))
    assert two is not None
    assert "2 of them between the two looks" in two.because
    assert page_finding(page("0.0")) is None
    assert page_finding(page("NaN")) is None


def test_doctor_reads_both_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plimsoll doctor` on a folder with a state, and on a saved page: exit 1 and memory failure yes."""
    (tmp_path / "state.json").write_text(state(), encoding="utf-8")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "metrics.txt").write_text(PAGE.replace("COUNT", "3.0"), encoding="utf-8")
    for place in (tmp_path / "state.json", tmp_path / "page"):
        assert main(["doctor", "--json", str(place)]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [one["code"] for one in found["findings"]] == ["runtime.contained"]
        assert found["memory_failure"] is True
