"""What the pages of the findings promise: nine sections each, flags and metrics that exist, commands that can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lab.catalogue.log_lines import LOG_LINES
from plimsoll.cli.main import main
from plimsoll.doctor.rules.root_cause import NEIGHBOUR_MATTERS_BYTES, NEIGHBOUR_MATTERS_SHARE
from plimsoll.doctor.rules.trend_growth import FULL, ROOM, SEVERE_STORM, STORM
from plimsoll.doctor.rules.trends import GPU_LEAST, HOST_LEAST, STUCK_RANGE_S
from plimsoll.findings import Code
from plimsoll.units import GIB, MIB
from plimsoll.vllm import versions
from plimsoll.vllm.failure_texts import STEP_FRAMES, TEXTS
from plimsoll.vllm.flags import flags_of, history_of
from tests.docs.test_findings import FOLDER, PAGES, sections
from tests.each import each

ROOT = Path(__file__).parents[2]
NEWEST = "0.32.0"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
RELEASE = re.compile(r"\b0\.\d{1,2}(?:\.\d{1,2}){0,2}\b")
TYPED = ("plan", "simulate", "flags")  # commands of plimsoll that take a command of vLLM after `--`
# Values in the command lines of other programs that only look like flags of vLLM.
OTHERS_FLAGS = frozenset({"--previous", "--gpu-reset"})


def body(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def items(text: str) -> list[str]:
    """The bullets, numbered points and paragraphs of a section, each on one line."""
    pieces = re.split(r"\n(?=- |\d+\. )|\n\n", text)
    return [" ".join(piece.split()) for piece in pieces if piece.strip()]


def quoted(text: str) -> list[str]:
    """What stands in single backticks, with line breaks undone."""
    return [" ".join(piece.split()) for piece in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def commands(page: Path) -> list[str]:
    """The complete plimsoll commands that a page gives: those with something behind their name."""
    found = []
    for piece in quoted(body(page)):
        words = piece.split()
        if words[0] == "plimsoll" and len(words) > 2 and words[1] in TYPED:
            found.append(piece)
    return found


def vllm_flags(item: str) -> list[str]:
    """The flags of vLLM in a piece of text; those of plimsoll in its own commands are left out."""
    for piece in quoted(item):
        if piece.startswith("plimsoll "):
            item = item.replace(piece, piece.partition(" -- ")[2])
    return [flag for flag in FLAG.findall(item) if flag not in OTHERS_FLAGS]


def takes(flag: str) -> bool:
    """Whether the newest release knows a flag, in its plain form or as `--no-...`."""
    known = flags_of(NEWEST)
    return flag in known or "--" + flag.removeprefix("--no-") in known


@each("page", PAGES, ids=lambda page: page.stem)
@each("heading", ["What fixes it", "How to prevent it"])
def test_advised_flags_exist_or_name_their_release(page: Path, heading: str) -> None:
    """Nobody is sent to a flag that vLLM refuses: it is in the newest release, or the point says when it existed."""
    for item in items(sections(page)[heading]):
        for flag in vllm_flags(item):
            known_once = bool(history_of(flag)) and RELEASE.search(item)
            # An example of a refused command is allowed where the refusal is the point.
            is_example = any(flag in command and command.startswith("plimsoll flags ") for command in quoted(item))
            assert takes(flag) or known_once or is_example, f"{flag} in: {item}"


@each("page", PAGES, ids=lambda page: page.stem)
def test_every_flag_named_anywhere_was_once_a_flag(page: Path) -> None:
    """A flag on a page is spelt as some release spelt it, unless the page says that it never existed."""
    for item in items("\n\n".join(sections(page).values())):
        for line in item.split("|"):  # rows of a table
            for flag in vllm_flags(line):
                if "never existed" in item or flag in ("--help",):
                    continue
                assert history_of(flag) or history_of("--" + flag.removeprefix("--no-")), f"{flag} in: {item}"


@each("page", PAGES, ids=lambda page: page.stem)
def test_releases_fit_the_catalogues(page: Path) -> None:
    """`--flag`, `vllm:metric` or `a text`: 0.29.0 and later" is what the catalogues say; every metric exists."""
    text = " ".join(sections(page)["Versions"].split())
    for names, release in re.findall(r"((?:`--[a-z0-9-]+`(?:,| and)? ?)+): (0\.\d+\.\d+) and later", text):
        for flag in FLAG.findall(names):
            assert history_of(flag)[0].first == release, f"{flag} began in {history_of(flag)[0].first}, not in {release}"
            assert history_of(flag)[-1].last == NEWEST, f"{flag} ended with {history_of(flag)[-1].last}"
    spans: dict[str, list[dict[str, Any]]] = {}
    for key, rows in versions.rows("metrics").items():
        spans.setdefault(key.rsplit(" ", 1)[0], []).extend(rows)
    for name, release in re.findall(r"`(vllm:[a-z0-9_]+)`: (0\.\d+\.\d+) and later", text):
        assert release in {span["from"] for span in spans[name]}, f"{name} did not begin in {release}"
        assert NEWEST in {span["to"] for span in spans[name]}
    for name in set(re.findall(r"vllm:[a-z][a-z0-9_]+", body(page))):
        forms = (name, f"{name}_total", *(name.removesuffix(end) for end in ("_count", "_sum", "_bucket")))
        assert any(form in spans for form in forms), f"no release exports {name}: an alert on it is silent for ever"
    for said, release in re.findall(r"`([A-Z#][^`]+)`: (0\.\d+\.\d+) (?:and later|to 0\.32\.0)", text):
        for line in LOG_LINES:
            if line.fragment and line.fragment in said:
                assert str(line.seen_in()[0].first) == release, f"{said} began in {line.seen_in()[0].first}"


@each("page", PAGES, ids=lambda page: page.stem)
def test_captures_named_as_sources_are_there(page: Path) -> None:
    """What a page calls provoked or recorded can be looked at."""
    for named in re.findall(r"`(tests/captures/[^`]+)`", body(page)):
        assert (ROOT / named).is_file(), named


@each("page", PAGES, ids=lambda page: page.stem)
def test_commands_can_be_typed(page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plimsoll command of a page runs, without a network, and answers the question rather than refusing it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        try:
            status: object = main(shlex.split(command)[1:])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        assert status in (0, 1, None), f"{command}: {said.err}"


def test_prevention_shows_commands_on_most_start_pages() -> None:
    """Failures of memory at the start can be foreseen, so their pages show the command that foresees them."""
    at_start = [page for page in PAGES if page.stem.startswith("startup.")]
    assert [
        page.stem
        for page in at_start
        if not any(c in sections(page)["How to prevent it"] for c in ("plimsoll plan", "plimsoll flags"))
    ] == []


def test_plan_says_the_code_that_a_page_says_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a page of a start failure gives a command for prevention that does not fit, its output names the page's code."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = ("startup.weights-do-not-fit", "startup.no-cache-blocks", "startup.context-too-long", "startup.sampler-warmup",
            "startup.free-memory-check", "startup.kv-allocation", "runtime.logits")  # fmt: skip
    for code in told:
        first = next(c for c in commands(FOLDER / f"{code}.md") if c.startswith("plimsoll plan"))
        main(shlex.split(first)[1:])
        assert f"{code}:" in capsys.readouterr().out, first


def test_evidence_quotes_texts_that_doctor_knows() -> None:
    """Each text of vLLM's that decides for a code stands on the page of that code, or the page shows another of its texts."""
    shown = {page.stem: " ".join(sections(page)["Evidence"].split()) + sections(page)["What you see"] for page in PAGES}
    for code in Code:
        mine = [text for text in TEXTS if text.code is code]
        if mine:
            assert any(text.needle.strip() in shown[code] for text in mine), f"{code}: none of {[t.needle for t in mine]}"


def test_thresholds_on_the_pages_are_those_of_doctor() -> None:
    """What a page says about when doctor speaks is what doctor does."""
    evidence = {page.stem: " ".join(sections(page)["Evidence"].split()) for page in PAGES}
    assert f"at {FULL:.2f} or more" in evidence["kv.saturated"]
    assert f"below {ROOM:.2f}" in evidence["engine.saturated"]
    assert f"{STORM:.0%}".replace("%", " %") in evidence["kv.preemption-storm"]
    assert f"{SEVERE_STORM:.0%}".replace("%", " %") in evidence["kv.preemption-storm"]
    assert f"by {GPU_LEAST / MIB:.0f} MiB or more" in evidence["gpu.growth"]
    assert f"by {HOST_LEAST / MIB:.0f} MiB or more" in evidence["host.growth"]
    assert (
        f"{NEIGHBOUR_MATTERS_BYTES / GIB:.1f} GiB or {NEIGHBOUR_MATTERS_SHARE:.0%}".replace("%", " %")
        in evidence["runtime.neighbour"]
    )
    assert f"{STUCK_RANGE_S:.0f} s or more" in evidence["engine.wedged"]


def test_steps_of_tracebacks_are_named_on_their_pages() -> None:
    """A page whose failure is told by functions of a traceback names at least two of them."""
    pages = {
        "wake-up": "runtime.wake-up", "graph-capture": "startup.graph-capture", "profile": "startup.profile-run",
        "kv-allocation": "startup.kv-allocation", "lora": "runtime.lora", "weights": "startup.weights-do-not-fit",
        "multimodal": "runtime.multimodal", "logits": "runtime.logits",
    }  # fmt: skip
    functions = dict(STEP_FRAMES)
    for step, stem in pages.items():
        evidence = quoted(sections(FOLDER / f"{stem}.md")["Evidence"])
        assert len(set(functions[step]) & set(evidence)) >= 2, stem
