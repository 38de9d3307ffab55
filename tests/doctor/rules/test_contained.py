"""Contained failures, in a log, in a gate's state and on a page of metrics: told as what they are, and never as an end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cli.main import main
from plimsoll.doctor.read.inputs import judge_gate_state, read_inputs
from plimsoll.doctor.rules.contained import (
    KINDS,
    LONGEST_WHY,
    SITES,
    ContainedLines,
    LastFailure,
    Survival,
    last_words,
    read_contained,
    read_survival,
    remedies_of,
)
from plimsoll.doctor.rules.diagnose import Diagnosis, diagnose
from plimsoll.doctor.rules.log_text import Log, LogLine
from plimsoll.doctor.rules.metrics import judge_pages
from plimsoll.doctor.rules.timeline import read_timeline
from plimsoll.findings import Code, Finding, Severity
from plimsoll.vllm.metrics_page import Page, parse_page
from tests.doctor.contained_logs import (
    ABORTED,
    ARMED,
    CANNOT,
    GAVE_UP,
    GREW,
    ONE_PROCESS,
    STORM,
    TWO_PROCESSES,
    Recorded,
    contained,
    core,
    prompt,
    survived,
)
from tests.doctor.log_maker import ENGINE_DEAD, ILLEGAL, OOM, REQUEST, STARTED, STEP, STOP, log, traceback
from tests.doctor.pasted_text import printed
from tests.each import each

Lines = str | list[str]
LINE = f"plimsoll: survive: {contained(1)}"
LOGGER = "(APIServer pid=1) INFO 11-15 09:18:15 [logger.py:40] "


def read(*lines: str) -> ContainedLines:
    """What containment says in these lines, with users' text hidden as doctor does."""
    return read_contained(read_timeline(log([*lines])).log.lines)


def said(*parts: Lines) -> Diagnosis:
    """What doctor says of these lines."""
    return diagnose([log(*parts)])


def codes(found: Diagnosis) -> list[Code]:
    return [one.code for one in found.findings]


def test_every_line_of_containment_is_known() -> None:
    """Armed, not armed, contained, aborted, grown, a storm, and both ways to give up; a site that nobody knows is unknown."""
    words = (ARMED, "not armed: a KV connector is set", contained(1), ABORTED, GREW, STORM, GAVE_UP, CANNOT)
    found = read(*map(core, words))
    assert [len(part) for part in found] == [1, 1, 1, 1, 1, 1, 2]
    assert found.not_armed[0].text == "a KV connector is set"
    (failure,) = found.contained
    assert (failure.site, failure.tokens, failure.requests, failure.recomputed) == ("forward", 8192, 48, 190_000)
    assert (found.aborted[0].site, found.aborted[0].tokens, found.grown[0].limit_tokens) == ("encoder", 512, 6144)
    assert [is_survived for _, is_survived in found.ends] == [True, True, False, False]
    assert read(core(contained(1, site="elsewhere"))).contained[0].site == "unknown"
    assert len(read(LINE, f"plimsoll: survive: {STORM}").contained) == 1, "a log that lost its prefixes"


@each("lines", [
    [prompt(LINE)], [LOGGER + LINE], [f"(EngineCore pid=2) INFO 11-15 09:18:15 [x.py:1] he said: {LINE}"], [LINE],
    [f"(EngineCore pid=2) INFO 11-15 09:18:15 [x.py:1]   {LINE}"],
    [LOGGER + "Received request cmpl-1: prompt: 'first", LOGGER + LINE, LOGGER + "last'"],
    *([core(text)] for text in ("contained failure x: nothing", "contained failure 1", "aborted request", "", "a" * 20_000)),
])  # fmt: skip
def test_what_only_quotes_such_a_line_or_half_of_one_is_none(lines: list[str]) -> None:
    """A request's text may hold anything: only the engine core's own message counts, whole and from its first letter."""
    assert not read(*STARTED, *lines).failures
    assert not read(LOGGER + LINE).failures, "of the API server, where no engine core is named"


def test_failures_between_two_kept_lines_are_counted() -> None:
    """Of a huge log the middle is thinned: the number in the line tells how many there were, each engine core for itself."""
    other = "(EngineCore_DP1 pid=3) "
    assert read(core(contained(1)), core(contained(40))).total == 40
    assert read(core(contained(7)), core(contained(2), other), core(contained(8)), core(contained(3), other)).total == 4
    assert read(core(contained(9)), core(contained(1))).total == 2, "a new start counts from one"


@each(("path", "last"), [(path, last) for path in (ONE_PROCESS, TWO_PROCESSES) for last in (GAVE_UP, CANNOT)])
def test_what_it_could_not_contain_is_the_cause_as_without_it(path: Path, last: str) -> None:
    """runtime.forward comes first, with a word on containment; what was contained before stands beside it."""
    one = Recorded(path)
    before = [*one.step, one.says(contained(1)), *[REQUEST] * 3]
    # In one process the last traceback stands below containment's word, with a worker above it.
    found = said([*one.start, one.says(ARMED), *before, *(one.step if path is TWO_PROCESSES else []), one.says(last), *one.end])
    assert codes(found)[:2] == [Code.RUNTIME_FORWARD, Code.RUNTIME_CONTAINED]
    assert (found.findings[0].severity, found.memory_failure) == (Severity.CRITICAL, True)
    assert last.partition("; ")[0] in found.findings[0].because
    assert any(last[:20] in evidence.text for evidence in found.findings[0].evidence)
    assert "lives" not in found.findings[1].because


EARLY = [line.replace("pid=2) ", "pid=2) ERROR 11-15 08:00:00 [core.py:1] ") for line in traceback(STEP)]
LATE = traceback(STEP, who="(Worker pid=7) ")
SURVIVED, CRASH = Code.RUNTIME_CONTAINED, Code.RUNTIME_FORWARD


@each(("promise", "lines", "expected", "memory"), [
    ("another cause of death comes first", [traceback(STEP), core(contained(1)), [REQUEST] * 3, traceback(STEP, error=ILLEGAL),
                                            ENGINE_DEAD], [Code.OTHER_ILLEGAL_ACCESS, SURVIVED], False),
    ("a death without a word stays one", [traceback(STEP), core(contained(1)), [REQUEST] * 30, ENGINE_DEAD],
     [Code.ENGINE_DEAD, SURVIVED], None),
    ("a stop afterwards hides nothing", [traceback(STEP), core(contained(1)), [REQUEST] * 3, STOP],
     [SURVIVED, Code.OTHER_STOPPED_BY_OPERATOR], True),
    ("of two engine cores each tells its own", [traceback(STEP, who="(EngineCore_DP1 pid=9) "), core(contained(1)),
      ENGINE_DEAD],
     [CRASH, SURVIVED], True),
    ("what fails in the API server is nobody's step", [traceback(STEP, who="(APIServer pid=1) "), core(contained(1)),
      ENGINE_DEAD],
     [CRASH, SURVIVED], True),
    ("minutes apart, two are two", [EARLY, core(contained(1)), ENGINE_DEAD], [CRASH, SURVIVED], True),
    ("a worker that writes late is cleared", [core(contained(1)), LATE, [REQUEST] * 4], [SURVIVED], True),
    ("not where the server dies soon after", [core(contained(1)), LATE, ENGINE_DEAD], [CRASH, SURVIVED], True),
    ("a quoted line makes no death harmless", [traceback(STEP), prompt(LINE), LINE, ENGINE_DEAD], [CRASH], True),
])  # fmt: skip
def test_what_is_cleared_and_what_is_not(promise: str, lines: list[Lines], expected: list[Code], memory: bool | None) -> None:
    """Only the failure that the next line of containment speaks of, in the process that failed."""
    found = said(STARTED, core(ARMED), *lines)
    assert (codes(found), found.memory_failure) == (expected, memory), promise


TOKENS, SHARE = "--max-num-batched-tokens", "--gpu-memory-utilization"


@each(("site", "flags"), [
    ("forward", [TOKENS, SHARE]), ("unknown", [TOKENS, SHARE]), ("logits", ["--max-logprobs", TOKENS, SHARE]),
    ("sampler", ["--max-num-seqs", TOKENS, SHARE]), ("encoder", ["--mm-processor-kwargs", "--limit-mm-per-prompt", SHARE]),
    ("adapter", ["--max-loras", "--max-lora-rank", SHARE]),
])  # fmt: skip
def test_each_site_has_the_flag_that_closes_it(site: str, flags: list[str]) -> None:
    """By the site, with the size of a step that worked and the share that leaves room for what was missing."""
    (finding,) = said(STARTED, traceback(STEP), core(contained(1, site=site)), [REQUEST] * 3).findings
    assert [one.flag for one in finding.remedy if one.flag] == flags
    assert [one.value for one in finding.remedy if one.flag == TOKENS] == ["4096"] * (TOKENS in flags)
    assert finding.remedy[-1].value == "0.90", "of 79.1 GiB 0.85 were missing"
    assert ("PLIMSOLL_ADMIT=certified" in " ".join(one.do for one in finding.remedy)) is (site in ("logits", "encoder"))


def test_neighbours_aborts_storms_and_several_sites_are_told() -> None:
    """A neighbour is sent away first; what cost a request comes before other sites; each site is counted apart."""
    error = OOM.replace("Including", "Process 77 has 20.00 GiB memory in use. Including").replace("77.85", "57.85")
    (finding,) = said(STARTED, traceback(STEP, error=error), core(contained(1)), [REQUEST] * 3).findings
    assert finding.remedy[0].do.startswith("move the other process")
    (finding,) = said(STARTED, core(contained(1)), core(ABORTED), core(STORM)).findings
    words = ("1 request was aborted", "drained and restarted", "1 step ran out of device memory at forward")
    assert all(word in finding.because for word in words)
    flags = [one.flag for one in finding.remedy if one.flag]
    assert (flags[0], TOKENS in flags, len(set(flags))) == ("--mm-processor-kwargs", True, len(flags))
    assert [line.text.partition("survive: ")[2][:8] for line in finding.evidence] == ["containe", "aborted ", "storm: 3"]
    (finding,) = said(
        STARTED, [core(contained(n, site=site)) for n, site in ((1, "forward"), (2, "logits"), (3, "forward"))]
    ).findings
    assert "3 steps ran out of device memory (2 at forward, 1 at logits), and" in finding.because
    assert "--max-logprobs" in [one.flag for one in finding.remedy]


REFUSED = core("not armed: a KV connector is set", level="INFO")


@each(("lines", "is_told"), [
    ([REFUSED, traceback(STEP)], True), ([traceback(STEP)], False), ([core(ARMED), traceback(STEP)], False),
    ([REFUSED, traceback(STEP, error=ILLEGAL)], False),
])  # fmt: skip
def test_asked_for_and_not_armed_is_told_to_whoever_died_of_memory(lines: list[Lines], is_told: bool) -> None:
    """With the reason; not where it was armed, and not beside another cause."""
    offer = said(STARTED, *lines, ENGINE_DEAD).findings[0].remedy[-1].do
    assert offer.endswith("it was not armed: a KV connector is set") is is_told


STATE: dict[str, Any] = {
    "schema": "plimsoll.state/1", "ready": False, "reason": "wedged",
    "engine": {"is_dead": False, "is_wedged": True, "last_step_age_s": 12.8, "longest_step_s": 0.04},
}  # fmt: skip
SURVIVE: dict[str, Any] = {
    "armed": True, "why": "", "contained": 3, "aborted": 1, "recomputed_tokens": 190000, "stalled_s": 1.7,
    "last": {"age_s": 12.1, "site": "logits", "tokens": 8192, "requests": 48, "asked_bytes": 2093796556,
             "free_bytes": 1181116006, "kind": "prompt_logprobs"},
    "tokens_per_step": {"now": 1024, "start": 8192}, "sequences": {"now": 256, "start": 256}, "limping": False, "storm": False,
}  # fmt: skip
PAGE = printed("SURVIVE_PAGE")[0].lstrip("\n")


def gate(engine: object = None, **survive: object) -> str:
    """A saved answer of /plimsoll/state."""
    kept = (
        {**STATE, "engine": engine, "survive": {**SURVIVE, **survive}}
        if survive or engine is None
        else {**STATE, "engine": engine}
    )
    return json.dumps(kept, indent=2)


def of_gate(text: str) -> list[Finding]:
    lines = [LogLine(n, "", "", None, line) for n, line in enumerate((text or " ").splitlines(), 1)]
    return list(judge_gate_state(Log("state.json", lines)).findings)


def test_a_wedge_that_the_gate_proved_is_a_finding() -> None:
    """With the line that says so, and figures that are missing left out."""
    (finding,) = of_gate(gate(STATE["engine"]))
    assert (finding.code, finding.evidence[0].text) == (Code.ENGINE_WEDGED, '"is_wedged": true,')
    assert "no step for 13 s" in finding.because
    (finding,) = of_gate(gate({"is_wedged": True}))
    assert finding.because.startswith("no step with requests there;")


WEDGES: list[object] = [{"is_wedged": False}, {"is_wedged": "yes"}, {"is_wedged": None}, {}, [], "wedged"]
NONE: list[object] = [
    None, [], "3", {}, {"contained": 0}, {"contained": "3"}, {"contained": True}, {"contained": -1}, {"contained": math.nan},
    {"armed": None}, {"armed": False, "why": "a KV connector is set", "contained": 0, "aborted": 0, "last": None},
]  # fmt: skip


@each("text", [
    *(gate(engine or {}) for engine in WEDGES),
    *(json.dumps({**STATE, "engine": {}, "survive": survive}) for survive in NONE),
    '{"schema": "plimsoll.state/1", "engine": {"is_wed', "", "[" * 100_000,
])  # fmt: skip
def test_what_the_gate_did_not_prove_is_no_finding(text: str) -> None:
    """Only its own true and a count count; a text that is cut off says nothing, and breaks nothing."""
    assert of_gate(text) == []


def test_a_saved_state_tells_what_was_contained() -> None:
    """How many, the shape of the last one, what it cost, the flags for it, a storm and a limp."""
    (finding,) = of_gate(gate(storm=True, limping=True))
    assert (finding.code, finding.severity, finding.evidence[0].text) == (
        Code.RUNTIME_CONTAINED,
        Severity.WARNING,
        '"contained": 3,',
    )
    told = (
        "3 steps", "the server lives", "8,192 tokens in 48 requests, at logits", "wants prompt_logprobs", "asked for 1.9 GiB",
        "190,000 tokens were computed again", "1.7 s", "1 request was aborted", "at most 1024 tokens now, 8192",
        "drained and restarted", "it limps",
    )  # fmt: skip
    assert all(words in finding.because for words in told)
    assert "PLIMSOLL_ADMIT=certified" in finding.remedy[0].do
    assert (TOKENS, "1024") in [(one.flag, one.value) for one in finding.remedy]


@each("last", [None, [], "x", {}, {"site": 7, "kind": ["x"], "tokens": "many", "age_s": -1, "asked_bytes": True}])
def test_a_last_failure_of_wrong_types_says_nothing_of_itself(last: object) -> None:
    """The count stands; the shape is left out."""
    (finding,) = of_gate(gate(last=last, aborted=0))
    assert ("3 steps" in finding.because, "prompt_logprobs" in finding.because, bool(finding.remedy)) == (True, False, True)


@each(("text", "is_one"), [
    (json.dumps(STATE), True), (json.dumps(STATE, indent=2), True), ('INFO got {"schema": "plimsoll.state/1"}', False),
    ('{"schema": "plimsoll.memory/1"}', False),
])  # fmt: skip
def test_other_texts_are_not_taken_for_one(text: str, is_one: bool, tmp_path: Path) -> None:
    """A log that quotes one stays a log."""
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    inputs = read_inputs([str(tmp_path / "a.txt")], timeout_s=5, time_range={}, range_flags=frozenset())
    assert (len(inputs.gate_states), len(inputs.logs)) == (is_one, not is_one)


def page(count: str) -> Page:
    """A page that counts so many."""
    return parse_page(PAGE.replace("COUNT", count).encode(), "page.txt", None)


@each(("first", "second", "words"), [
    ("3.0", None, "at most 1024 tokens now, 8192 at the start"), ("1.0", "3.0", "2 of them between the two looks"),
    ("0.0", None, ""), ("NaN", None, ""),
])  # fmt: skip
def test_a_page_that_counts_them_tells_it(first: str, second: str | None, words: str) -> None:
    """One look knows how many since the start, two how many between them; the line stands as evidence."""
    judged = judge_pages(page(first), page(second) if second is not None else None).findings
    found = [one for one in judged if one.code is Code.RUNTIME_CONTAINED]
    assert bool(found) is bool(words)
    assert all(words in one.because and one.evidence[0].line == 4 for one in found)


@each(("name", "text", "code", "memory"), [
    ("server.log", "\n".join(survived(ONE_PROCESS)), "runtime.contained", True),
    ("state.json", gate(), "runtime.contained", True),
    ("metrics.txt", PAGE.replace("COUNT", "3.0"), "runtime.contained", True),
    ("wedge.json", gate(STATE["engine"]), "engine.wedged", None),
])  # fmt: skip
def test_doctor_reads_them_from_files(
    name: str, text: str, code: str, memory: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plimsoll doctor FOLDER`: exit 1, the one code, and whether memory is to blame."""
    (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
    assert main(["doctor", "--json", str(tmp_path / name)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert ([one["code"] for one in found["findings"]], found["memory_failure"]) == ([code], memory)


def test_the_key_survive_as_it_is_answered() -> None:
    """Every field; None where there is no table, and nobody's text in words."""
    assert read_survival({**SURVIVE, "storm": True}) == Survival(
        True, "", 3, 1, 190_000, 1.7, LastFailure(12.1, "logits", 8192, 48, 2_093_796_556, 1_181_116_006, "prompt_logprobs"),
        1024, 8192, 256, 256, limping=False, storm=True,
    )  # fmt: skip
    nothing: list[object] = [None, [], "armed", 1, True]
    assert [read_survival(one) for one in nothing] == [None] * 5
    found = read_survival({"last": {"site": "<script>", "kind": "hello"}})
    assert found is not None
    assert (last_words(found.last), last_words(None)) == ("a step", "")
    assert remedies_of(None) == remedies_of(found._replace(last=None))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*SURVIVE, *SURVIVE["last"], "now"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(found=st.dictionaries(st.sampled_from(list(SURVIVE)), ANYTHING))
def test_wrong_types_are_unknown(found: dict[str, object]) -> None:
    """Whatever is answered: numbers that a count can be, words from the known ones, yes and no, or nothing."""
    survival = read_survival(found)
    assert survival is not None
    numbers = [value for name, value in survival._asdict().items() if name not in ("armed", "why", "last", "limping", "storm")]
    numbers += [] if survival.last is None else [value for value in survival.last if not isinstance(value, str)]
    assert all(value is None or (isinstance(value, float) and 0 <= value < math.inf) for value in numbers)
    assert all(value is None or isinstance(value, bool) for value in (survival.armed, survival.limping, survival.storm))
    assert len(survival.why) <= LONGEST_WHY
    assert survival.last is None or (survival.last.site in SITES and survival.last.kind in ("", *KINDS))


@each(("sizes", "is_shrunk"), [
    ((1024, 8192, 256, 256), True), ((8192, 8192, 128, 256), True), ((8192, 8192, 256, 256), False),
    ((None, 8192, 1, None), False),
])  # fmt: skip
def test_steps_are_shrunk_only_where_both_sizes_say_so(sizes: tuple[Any, Any, Any, Any], is_shrunk: bool) -> None:
    """Tokens or sequences below their start; what is not known is not smaller."""
    names = ("tokens_now", "tokens_start", "sequences_now", "sequences_start")
    assert Survival(**dict(zip(names, sizes, strict=True))).is_shrunk is is_shrunk
