"""Whether the sources of a vLLM have what plimsoll.inside relies on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.write_inside_docs import stretches
from plimsoll.vllm import versions
from plimsoll.vllm.extension_points import (
    ANY,
    NEEDS,
    TESTED,
    FileShape,
    InsidePart,
    Need,
    NeedAnswer,
    NeedState,
    Symbols,
    Way,
    Weight,
    answers_in,
    judge,
    shape_of,
    verdicts,
)
from plimsoll.vllm.versions import Behaviour
from tests.each import cases, each, sure
from tests.vllm.vllm_like import files_that_meet_all, sources

FILE = "v1/engine/async_llm.py"


def _need(*ways: Way, **more: object) -> Need:
    return Need("calls", "for calls", "no calls", {InsidePart.GATE: Weight.HELPS}, ways, **more)  # type: ignore[arg-type]


def _ask(need: Need, text: str | None = None) -> NeedAnswer:
    (answer,) = judge(sources({} if text is None else {FILE: text}), [need])
    return answer


CALL = _need(Way((Symbols((FILE,), "AsyncLLM", methods={"collective_rpc": ("method", "args")}),), "as it is"))


@pytest.mark.parametrize(("text", "state", "note"), cases("vllm", "what_does_not_fit_says_how"))
def test_what_does_not_fit_says_how(text: str, state: NeedState, note: str) -> None:
    """Another signature, another class and an unreadable file are told apart."""
    answer = _ask(CALL, text)
    assert answer.state == state
    assert note in answer.note


def test_the_first_way_that_fits_is_taken() -> None:
    """More arguments than we give do no harm; a missing file is absent; a method that is stood in for must begin alike."""
    fits = _ask(CALL, "class AsyncLLM:\n    async def collective_rpc(self, method, timeout=None, args=()): ...\n")
    assert (fits.state, fits.where, fits.note) == (NeedState.FOUND, FILE, "as it is")
    assert _ask(CALL, "class AsyncLLM:\n    def collective_rpc(self, method, **kw): ...\n").state is NeedState.FOUND
    assert _ask(CALL) == NeedAnswer("calls", NeedState.ABSENT, FILE, "there is no such file")
    need = _need(*(Way((Symbols((FILE,), attributes=(name,)),), name) for name in ("new", "old")))
    assert _ask(need, "self.old = 1\n").note == "old"
    assert _ask(need, "self.old = self.new = 1\n").note == "new"
    need = _need(Way((Symbols((FILE,), "A", begins={"add": ("self", "request", "prompt")}),)))
    assert _ask(need, "class A:\n    def add(self, request, prompt, more): ...\n").state is NeedState.FOUND
    assert _ask(need, "class A:\n    def add(self, prompt, request): ...\n").state is NeedState.DIFFERENT


def test_what_a_release_has_no_use_for_is_not_needed() -> None:
    """A release without background responses loses nothing by not listing them."""
    need = _need(
        Way((Symbols((FILE,), attributes=("background_tasks",)),)),
        unneeded_without=Symbols((FILE,), words=("background",)),
        unneeded_because="it has none",
    )
    assert _ask(need, "x = 1\n").state is NeedState.NOT_NEEDED
    assert _ask(need, "x = background\n").state is NeedState.ABSENT


@pytest.mark.parametrize("taken", ["def plimsoll_compact(self): ...", "plimsoll_figures = 1", "def plimsoll_x(cls): ..."])
def test_a_name_that_a_worker_has_already_is_found_out(taken: str) -> None:
    """vLLM would refuse to start; the class and the name are said. Being spoken of is not being defined."""
    need = next(need for need in NEEDS if need.name == "free names")
    (answer,) = judge(sources({"v1/worker/deep/new_worker.py": f"class NewWorker:\n    {taken}\n"}), [need])
    assert answer.state is NeedState.DIFFERENT
    assert answer.note.startswith("NewWorker defines plimsoll_")
    (answer,) = judge(sources({"v1/worker/a.py": "class W:\n    '''plimsoll_ is theirs'''\n"}), [need])
    assert answer.state is NeedState.FOUND


def test_everything_there_is_yes_to_all_and_nothing_there_no() -> None:
    """A tree with all needs meets all, as 0.32.0 does; an empty one promises nothing; before 0.11.1 the gate records."""
    assert all(answer.state is NeedState.FOUND for answer in answers_in("0.32.0"))
    answers = judge(sources(files_that_meet_all()), NEEDS)
    assert [answer for answer in answers if not answer.state.is_met] == []
    assert {verdict.works for verdict in verdicts(answers, NEEDS)} == {"yes"}
    assert {verdict.works for verdict in verdicts(judge(sources({}), NEEDS), NEEDS)} == {"no"}
    for release, way in (("0.11.0", "by the gate"), ("0.11.1", "entry point")):
        assert way in next(answer.note for answer in answers_in(release) if answer.name == "stat loggers")


@each("need", [need for need in NEEDS if need.ways], ids=lambda need: need.name)
def test_each_need_can_be_missed(need: Need) -> None:
    """Without its files each need is unmet, and each part that it weighs on says what is lost."""
    gone = {look.files[0] for way in need.ways for look in way.looks}
    answers = judge(sources({path: text for path, text in files_that_meet_all().items() if path not in gone}), NEEDS)
    answer = next(answer for answer in answers if answer.name == need.name)
    if need.unneeded_without is None:
        assert not answer.state.is_met
        for verdict in verdicts(answers, NEEDS):
            assert (need.lost in (*verdict.because, *verdict.details)) == (verdict.part in need.weights)


def test_a_part_is_as_good_as_what_it_misses() -> None:
    """A must makes it no, a help partly, a detail nothing but a remark."""
    needs = [Need(weight.value, "for shedding", weight.value, {InsidePart.SHED: weight}) for weight in Weight]
    for weight, works in zip(Weight, ("no", "partly", "yes"), strict=True):
        answers = [NeedAnswer(w.value, NeedState.ABSENT if w is weight else NeedState.FOUND) for w in Weight]
        shed = next(v for v in verdicts(answers, needs) if v.part is InsidePart.SHED)
        assert shed.works == works
        assert (*shed.because, *shed.details) == (weight.value,)


@given(st.dictionaries(st.sampled_from(sorted(files_that_meet_all())), st.text(max_size=60), max_size=6))
def test_whatever_the_files_hold_there_is_an_answer(files: dict[str, str]) -> None:
    """Torn, foreign or empty files never make the judge fail."""
    answers = judge(sources(files), NEEDS)
    assert [answer.name for answer in answers] == [need.name for need in NEEDS]


def test_every_need_says_what_it_is_for_and_what_is_lost() -> None:
    """No entry is half written, and no part would be promised without any need; what is called tested is a release."""
    assert len({need.name for need in NEEDS}) == len(NEEDS)
    for need in NEEDS:
        assert need.purpose
        assert need.lost
        assert not need.lost.endswith(".")
        assert bool(need.ways) != bool(need.forbidden)
        assert need.weights
        assert bool(need.unneeded_without) == bool(need.unneeded_because)
    for part in InsidePart:
        assert any(need.weights.get(part) is Weight.MUST for need in NEEDS)
    assert set(TESTED) <= set(versions.wheels())


@each("release", versions.wheels())
def test_every_release_has_an_answer_for_every_need(release: str) -> None:
    """The table is whole: a need that was added since must be read from the wheels again."""
    assert [answer.name for answer in answers_in(release)] == [need.name for need in NEEDS]


@pytest.mark.parametrize(("release", "part", "works"), cases("vllm", "verdicts_that_were_seen_by_hand"))
def test_verdicts_that_were_seen_by_hand(release: str, part: InsidePart, works: str) -> None:
    """Turning points that a person found in the sources are found by the rules too."""
    assert next(v for v in verdicts(answers_in(release), NEEDS) if v.part == part).works == works


def test_stretches_cover_every_release_once() -> None:
    """From the oldest that is spoken of to the newest, without a gap, and neighbours differ."""
    found = stretches()
    releases = [release for release in versions.wheels() if Behaviour.WORKER_EXTENSIONS.is_in(release)]
    assert found[0].first == releases[0]
    assert found[-1].last == releases[-1]
    for before, after in itertools.pairwise(found):
        assert releases.index(after.first) == releases.index(before.last) + 1
        assert (before.verdicts, before.evidence) != (after.verdicts, after.evidence)


(TEXT,) = cases("vllm", "a_source_file")


def _shape() -> FileShape:
    return sure(shape_of(TEXT))


def test_a_source_is_read_for_what_its_code_has() -> None:
    """Methods with all kinds of arguments, fields and what is set on self; no word of a comment or a text."""
    assert _shape().classes["Worker"].methods == {"__init__": ("self", "config", "local", ANY), "errored": ("self",)}
    assert _shape().functions == {"helper": ("a", "b", "c")}
    assert _shape().classes["Worker"].attributes == {"rank", "KIND", "device", "other", "model"}
    assert "seen" in _shape().assigned
    words = _shape().words
    assert {"vllm.general_plugins", "load_general_plugins", "GROUP"} <= words
    assert not words & {"gone_word", "lost_word"}


@given(st.text(max_size=200) | st.sampled_from(["(" * 3000, "\0", "class A:\n", "x = " + "-" * 5000 + "1", "\ud800"]))
def test_any_text_gives_a_shape_or_nothing(text: str) -> None:
    """Whatever lies in a folder that is called vllm, reading it does not fail."""
    assert shape_of(text) is None or isinstance(shape_of(text), FileShape)
