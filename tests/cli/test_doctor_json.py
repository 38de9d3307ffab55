"""`plimsoll doctor --json`: one object of the shipped schema, whatever was read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from plimsoll.findings import Code
from plimsoll.render import doctor as report
from tests.cli.doctor_runs import CAPTURES, CGROUP, CGROUP_DMESG, CPU, FORWARD, H200, HEALTHY, SPLIT, STORM_PAGE, said
from tests.each import each, times

Capsys = pytest.CaptureFixture[str]
SCHEMA: dict[str, Any] = json.loads((Path(report.__file__).parent / "doctor.schema.json").read_text(encoding="utf-8"))
VALID = jsonschema.Draft202012Validator(SCHEMA)
EVERYTHING = sorted(
    path
    for path in CAPTURES.rglob("*")
    if path.is_file() and ("failures" in str(path) or "metrics" in path.name or path.suffix == ".log")
)
MIXES = {
    "log and dmesg": [CGROUP, CGROUP_DMESG],
    "log and page": [FORWARD, STORM_PAGE],
    "log and nvidia-smi": [str(H200 / "neighbour.log"), str(H200 / "neighbour.smi-at-failure.txt")],
    "log and snapshot": [str(H200 / "snapshot.log"), str(H200 / "snapshots" / "snapshot-ready.pickle.gz")],
    "log, summary and error": [FORWARD, *(str(H200 / "snapshots" / f"split.{end}.txt") for end in ("summary", "error"))],
    "two servers": [FORWARD, str(H200 / "logits.log")],
    "two snapshots": [SPLIT, str(H200 / "snapshots" / "pinned.pickle.gz")],
    "a folder": [str(CPU)],
    "another folder": [str(H200)],
    "exit code alone": ["--exit-code", "137"],
    "exit code of a stop": [HEALTHY, "--exit-code", "143"],
    "everything": [CGROUP, CGROUP_DMESG, STORM_PAGE, SPLIT, "--exit-code", "137", "--gpu", "H100"],
}


def test_the_schema_is_a_schema(capsys: Capsys) -> None:
    """--schema prints what the package ships, and every code passes it."""
    answer = said(capsys, "--schema")
    assert answer.code == 0
    assert json.loads(answer.out) == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    good = said(capsys, FORWARD, "--json").body
    for code in Code:
        VALID.validate({**good, "findings": [{**good["findings"][0], "code": str(code)}]})


def test_the_schema_refuses_what_is_not_in_the_contract(capsys: Capsys) -> None:
    """A finding without its evidence, with a code nobody knows, or another name at the top does not pass."""
    good = said(capsys, FORWARD, "--json").body
    VALID.validate(good)
    finding = good["findings"][0]
    for bad in (
        {**good, "more": 1},
        {**good, "memory_failure": "yes"},
        {**good, "schema": "plimsoll.doctor/2"},
        {key: value for key, value in good.items() if key != "collect_next"},
        {**good, "findings": [{**finding, "code": "Out of memory"}]},
        {**good, "findings": [{**finding, "confidence": 1.2}]},
        {**good, "findings": [{key: value for key, value in finding.items() if key != "evidence"}]},
    ):
        assert not VALID.is_valid(bad)


def _strict(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


@each("path", EVERYTHING, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_capture_gives_a_valid_object(path: Path, capsys: Capsys) -> None:
    """Logs, pages, snapshots and tables alike; no NaN, and each finding has its sentence."""
    answer = said(capsys, str(path), "--json")
    assert answer.code in (0, 1)
    assert answer.err == ""
    body = json.loads(answer.out, parse_constant=_strict)
    VALID.validate(body)
    for finding in body["findings"]:
        assert finding["because"]
        assert finding["title"]
        assert finding["evidence"], finding["code"]
    assert [one["source"] for one in body["facts"]["inputs"]] == [str(path)]
    assert (answer.code == 1) == any(finding["severity"] != "info" for finding in body["findings"])


@each("words", MIXES.values())
def test_every_mix_gives_a_valid_object(words: list[str], capsys: Capsys) -> None:
    """Several inputs at once, of one kind or of all."""
    answer = said(capsys, *words, "--json")
    VALID.validate(answer.body)
    assert answer.err == ""


@each("path", EVERYTHING[:: times(4, 1)], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_text_is_for_a_terminal(path: Path, capsys: Capsys) -> None:
    """No line beyond 110 columns that could have been broken, nothing but printable letters, the verdict first."""
    answer = said(capsys, str(path))
    lines = answer.out.splitlines()
    assert lines[0].startswith("memory failure: ")
    assert all(letter.isprintable() for line in lines for letter in line)
    assert not [line for line in lines if len(line) > 130 and " " in line.strip()[:100]]
