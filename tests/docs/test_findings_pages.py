"""The pages under docs/findings: one for each code, all of one shape, with flags, metrics and commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lab.catalogue.log_lines import LOG_LINES
from plimsoll.cli.main import main
from plimsoll.doctor.rules.out_of_memory import NEIGHBOUR_MATTERS_BYTES, NEIGHBOUR_MATTERS_SHARE
from plimsoll.doctor.rules.trend_growth import FULL, ROOM, SEVERE_STORM, STORM
from plimsoll.doctor.rules.trends import GPU_LEAST, HOST_LEAST, STUCK_RANGE_S
from plimsoll.findings import Code
from plimsoll.units import GIB, MIB
from plimsoll.vllm import versions
from plimsoll.vllm.failure_texts import STEP_FRAMES, TEXTS
from plimsoll.vllm.flags import flags_of, history_of
from tests.each import each

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "findings"
INDEX = FOLDER / "README.md"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page != INDEX)
HEADINGS = [
    "What you see", "Evidence", "Why it happens", "What fixes it", "What does not help", "How to prevent it", "Versions",
    "How sure can one be", "Sources",
]  # fmt: skip
SECTION_LINES_MAX = 22
LINES_MIN, LINES_MAX = 35, 90  # a page is read at three in the morning
COLUMNS_MAX = 110  # a terminal of that width prints a page without wrapping
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
NEWEST = "0.32.0"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
RELEASE = re.compile(r"\b0\.\d{1,2}(?:\.\d{1,2}){0,2}\b")
TYPED = "plan|simulate|flags"  # commands of plimsoll that take a command of vLLM after `--`
# Values in the command lines of other programs that only look like flags of vLLM.
OTHERS_FLAGS = frozenset({"--previous", "--gpu-reset"})


def sections(page: Path) -> dict[str, str]:
    """The text under each second-level heading, in the order of the page."""
    _, *parts = re.split(r"^## ", body(page), flags=re.MULTILINE)
    return {heading: body.strip() for heading, _, body in (part.partition("\n") for part in parts)}


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
    return [piece for piece in quoted(body(page)) if re.match(rf"plimsoll ({TYPED}) \S", piece)]


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


def test_each_code_has_a_page_and_each_page_a_code() -> None:
    """A code without a page leaves a person alone at night, one without a code is never shown; the index is in order."""
    assert [text for text, _ in LINK.findall(body(INDEX))] == list(Code)
    assert {page.name.removesuffix(".md") for page in PAGES} == set(Code)


@each("page", PAGES, ids=lambda page: page.name)
def test_page_says_first_what_happened_and_has_the_shape_of_all(page: Path) -> None:
    """Its code and one sentence; the same headings, filled and short; fixes by their cost; a page it is confused with."""
    text = body(page)
    title, sentence, *_ = text.split("\n\n")
    assert title == f"# {page.name.removesuffix('.md')}"
    assert sentence.endswith(".")
    assert ". " not in sentence.replace("\n", " "), "one sentence"
    assert LINES_MIN <= len(text.splitlines()) <= LINES_MAX
    assert re.findall(r"^(#+) (.+)$", text, flags=re.MULTILINE)[1:] == [("##", heading) for heading in HEADINGS]
    found = sections(page)
    assert [heading for heading, body in found.items() if len(body) < 40] == []
    assert {heading: n for heading, body in found.items() if (n := len(body.splitlines())) > SECTION_LINES_MAX} == {}
    assert LINK.search(found["How sure can one be"])
    numbers = re.findall(r"^(\d+)\. ", found["What fixes it"], flags=re.MULTILINE)
    assert numbers == [str(1 + index) for index in range(len(numbers))] != []


@each("page", [*PAGES, INDEX], ids=lambda page: page.name)
def test_lines_fit_a_terminal_and_links_lead_to_the_code_they_name(page: Path) -> None:
    """Pages are printed as they are; no link leads nowhere or to the page it stands on."""
    text = body(page)
    assert [line for line in text.splitlines() if len(line) > COLUMNS_MAX or line != line.rstrip()] == []
    assert "\t" not in text
    for name, target in LINK.findall(body(page)):
        assert (FOLDER / target).is_file(), f"{page.name}: {target} does not exist"
        assert target == f"{Code(name)}.md", f"{page.name}: the link says {name} and leads to {target}"
        assert target != page.name, f"{page.name}: links to itself"


@each("page", PAGES, ids=lambda page: page.stem)
def test_advised_flags_exist_or_name_their_release_and_all_are_spelt_as_some_release_did(page: Path) -> None:
    """Nobody is sent to a flag that vLLM refuses: it is in the newest release, or the point says when it existed, or never."""
    for item in items("\n\n".join(sections(page)[heading] for heading in ("What fixes it", "How to prevent it"))):
        for flag in vllm_flags(item):
            known_once = bool(history_of(flag)) and RELEASE.search(item)
            # An example of a refused command is allowed where the refusal is the point.
            is_example = any(flag in command and command.startswith("plimsoll flags ") for command in quoted(item))
            assert takes(flag) or known_once or is_example, f"{flag} in: {item}"
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
def test_commands_can_be_typed(page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plimsoll command of a page runs, without a network, and answers; recordings that it names are there."""
    for named in re.findall(r"`(tests/captures/[^`]+)`", body(page)):
        assert (ROOT / named).is_file(), named
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        try:
            status: object = main(shlex.split(command)[1:])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        assert status in (0, 1, None), f"{command}: {said.err}"


def test_plan_says_the_code_that_a_page_says_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of start failures show a command that foresees them; where it does not fit, its output names the page's code."""
    for page in PAGES:
        if page.stem.startswith("startup."):
            assert re.search("plimsoll (plan|flags)", sections(page)["How to prevent it"]), page.stem
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = ("startup.weights-do-not-fit", "startup.no-cache-blocks", "startup.context-too-long", "startup.sampler-warmup",
            "startup.free-memory-check", "startup.kv-allocation", "runtime.logits")  # fmt: skip
    for code in told:
        first = next(c for c in commands(FOLDER / f"{code}.md") if c.startswith("plimsoll plan"))
        main(shlex.split(first)[1:])
        assert f"{code}:" in capsys.readouterr().out, first


def test_evidence_quotes_texts_and_names_steps_that_doctor_knows() -> None:
    """One of vLLM's texts that decide for a code stands on its page; two functions of a traceback that tells of the failure."""
    shown = {page.stem: " ".join(sections(page)["Evidence"].split()) + sections(page)["What you see"] for page in PAGES}
    for code in Code:
        mine = [text for text in TEXTS if text.code is code]
        if mine:
            assert any(text.needle.strip() in shown[code] for text in mine), f"{code}: none of {[t.needle for t in mine]}"
    pages = {
        "wake-up": "runtime.wake-up", "graph-capture": "startup.graph-capture", "profile": "startup.profile-run",
        "kv-allocation": "startup.kv-allocation", "lora": "runtime.lora", "weights": "startup.weights-do-not-fit",
        "multimodal": "runtime.multimodal", "logits": "runtime.logits",
    }  # fmt: skip
    functions = dict(STEP_FRAMES)
    for step, stem in pages.items():
        evidence = quoted(sections(FOLDER / f"{stem}.md")["Evidence"])
        assert len(set(functions[step]) & set(evidence)) >= 2, stem


def test_thresholds_on_the_pages_are_those_of_doctor() -> None:
    """What a page says about when doctor speaks is what doctor does."""
    evidence = {page.stem: " ".join(sections(page)["Evidence"].split()) for page in PAGES}
    assert f"at {FULL:.2f} or more" in evidence["kv.saturated"]
    assert f"below {ROOM:.2f}" in evidence["engine.saturated"]
    assert all(f"{100 * share:.0f} %" in evidence["kv.preemption-storm"] for share in (STORM, SEVERE_STORM))
    assert f"by {GPU_LEAST / MIB:.0f} MiB or more" in evidence["gpu.growth"]
    assert f"by {HOST_LEAST / MIB:.0f} MiB or more" in evidence["host.growth"]
    matters = f"{NEIGHBOUR_MATTERS_BYTES / GIB:.1f} GiB or {100 * NEIGHBOUR_MATTERS_SHARE:.0f} %"
    assert matters in evidence["runtime.neighbour"]
    assert f"{STUCK_RANGE_S:.0f} s or more" in evidence["engine.wedged"]
