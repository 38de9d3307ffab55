"""`plimsoll doctor` as a user meets it: what it reads, its exit codes, its JSON, and one clear line for what it cannot read."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from plimsoll.findings import Code
from plimsoll.net import inputs
from plimsoll.render import doctor as report
from tests.cli.answers import (
    CAPTURES,
    CGROUP,
    CGROUP_DMESG,
    CPU,
    FORWARD,
    H200,
    HEALTHY,
    ask,
    ask_process,
    shell,
)  # fmt: skip
from tests.each import cases, each, times

BROKEN_GZIP = b"\x1f\x8b\x08 broken"
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
SCHEMA: dict[str, Any] = json.loads((Path(report.__file__).parent / "doctor.schema.json").read_text(encoding="utf-8"))
VALID = jsonschema.Draft202012Validator(SCHEMA)
EVERYTHING = sorted(
    path
    for path in CAPTURES.rglob("*")
    if path.is_file() and ("failures" in str(path) or "metrics" in path.name or path.suffix == ".log")
)


def test_what_was_not_read_to_its_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input that goes on and a packed log that unpacks to too much: a part is judged, and named as one."""
    text = Path(FORWARD).read_bytes()
    (tmp_path / "x.gz").write_bytes(gzip.compress(text))
    assert "only a part" not in ask("doctor", str(tmp_path / "x.gz"), code=1).out
    monkeypatch.setattr(inputs, "SPOOL_MAX_BYTES", 1000)
    monkeypatch.setattr(inputs, "UNPACKED_MAX_BYTES", 1000)
    assert "x.gz: only a part was read" in ask("doctor", str(tmp_path / "x.gz"), code=None).out
    assert "standard input: only a part was read" in ask("doctor -", code=None, given=text * 100).out


class Runs:
    """A pickle of this runs a command in whoever opens it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    """Bytes that are no text, alone or packed; a pickle that would run a command, which is not run; an empty folder."""
    (tmp_path / "empty").mkdir()
    mark, noise = tmp_path / "was-run", bytes(range(256)) * 40
    evil = pickle.dumps({"segments": [Runs(f"touch {mark}")], "device_traces": []})
    files = {
        "x.log": noise, "x.log.gz": gzip.compress(noise), "cut.gz": b"\x1f\x8b broken", "evil.pickle": evil,
        "evil.pickle.gz": gzip.compress(evil), "evil.log": evil,
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        line = ask("doctor", str(tmp_path / name), code=2).line
        assert str(tmp_path / name) in line
        assert "evil" not in name or "refused" in line
    assert not mark.exists()
    for name in ("", "picture.png"):
        if name:
            (tmp_path / "empty" / name).write_bytes(PICTURE)
        assert "no log, metrics page or snapshot in this folder" in ask("doctor", str(tmp_path / "empty"), code=2).line


def test_five_gigabytes_of_nothing_are_refused_at_once(tmp_path: Path) -> None:
    """A sparse file is looked at, not read."""
    with (tmp_path / "sparse.log").open("wb") as file:
        file.truncate(5 << 30)
    began = time.process_time()
    assert "sparse.log" in ask("doctor", str(tmp_path / "sparse.log"), code=2).line
    assert time.process_time() - began < 5


@each("said", [b"", Path(FORWARD).read_bytes()[-60_000:]], ids=lambda said: f"{len(said)} bytes")
def test_a_pipe_that_never_ends_is_left_after_the_timeout(said: bytes, tmp_path: Path) -> None:
    """A FIFO whose writer says nothing is the world's fault in one line; what was said before the timeout is judged."""
    path = tmp_path / f"fifo{len(said)}"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer that stays
    try:
        if said:
            os.write(writer, said)
        answer = ask_process(["doctor", str(path), "--timeout", "1", "--json"])
    finally:
        os.close(writer)
    if said:
        assert (answer.code, answer.body["memory_failure"]) == (1, True)
    else:
        assert answer.code == 3
        assert f"{path.name}: nothing came in time" in answer.line


def test_a_folder_is_read_and_what_is_broken_in_it_is_left_out(tmp_path: Path) -> None:
    """One bad file does not hide the others: it is named among the notes, on the screen too; an earlier report too."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "server.log").write_bytes(Path(FORWARD).read_bytes())
    (tmp_path / "cut.log.gz").write_bytes(BROKEN_GZIP)
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps(Runs("true")))
    (tmp_path / "picture.png").write_bytes(PICTURE)
    first = ask("doctor --json", str(tmp_path), code=1)
    (tmp_path / "doctor.json").write_text(first.out)
    again = ask("doctor --json", str(tmp_path), code=1)
    assert again.codes == first.codes == ["runtime.forward"]
    assert [Path(one["source"]).name for one in again.body["facts"]["inputs"]] == ["server.log"]
    notes = " ".join(again.body["facts"]["notes"])
    for name in ("cut.log.gz", "evil.pickle", "doctor.json (an earlier report"):
        assert name in notes
    assert "cut.log.gz" in ask("doctor", str(tmp_path), code=1).out


def test_what_others_say_beside_the_cause_is_shown(tmp_path: Path) -> None:
    """A card's error that is another program's is no finding and is said all the same, without the secrets in its line."""
    xid = "NVRM: Xid (PCI:0000:3b:00): {}, pid=4242, name={}, Ch 00000010 --api-key=sk-0123456789abcdefghij"
    lines = (f"[ 1.0] {xid.format(*one)}\n" for one in ((31, "blender"), (999, "python")))
    (tmp_path / "dmesg.txt").write_text("".join(lines))
    out = ask("doctor", str(tmp_path)).out
    assert "Remark: Xid 31 on 0000:3b:00 belongs to blender, not to vLLM" in out
    assert "Remark: Xid 999 on 0000:3b:00" in out
    assert "sk-0123" not in out


def test_standard_input_is_read_like_a_file() -> None:
    """`-` gives what the file gives, packed or not, also beside another; of nothing at all it cannot be told."""
    data = Path(FORWARD).read_bytes()
    for given in (data, gzip.compress(data)):
        piped = ask("doctor - --json", code=1, given=given)
        assert piped.codes[0] == "runtime.forward"
        assert {evidence["source"] for evidence in piped.body["findings"][0]["evidence"]} == {"standard input"}
    nothing = ask_process(["doctor", "-", "--json"])
    assert (nothing.code, nothing.body["memory_failure"], bool(nothing.body["collect_next"])) == (0, None, True)
    beside = ask("doctor --json -", CGROUP, code=1, given=Path(CGROUP_DMESG).read_bytes())
    assert beside.codes[0] == "host.out-of-memory"


@each(
    ("log", "code", "memory", "cause"),
    [
        *((None, code, None, None) for code in (137, -9, 0, 134, 1, 255)),
        (CGROUP, 137, None, None),
        *((FORWARD, code, True, "runtime.forward") for code in (0, 1, 137)),
        (str(CPU / "terminate.log"), 143, False, "other.stopped-by-operator"),
    ],
)
def test_an_exit_code_alone_is_never_memory_nor_proof_of_the_contrary(
    log: str | None, code: int, memory: bool | None, cause: str | None
) -> None:
    """It neither overrules a cause that is shown nor settles an unknown one; a stop on purpose is no failure."""
    answer = ask(f"doctor --json --exit-code={code}", *([log] if log else []), code=None)
    assert answer.body["memory_failure"] is memory
    assert cause is None or answer.codes[0] == cause
    assert memory is not False or answer.code == 0


@each("code", list(Code))
def test_every_code_has_its_page(code: Code) -> None:
    """--explain prints the page of the code, whole; without a code it lists them all."""
    out = ask("doctor --explain", code).out
    assert out.startswith(f"# {code}\n")
    assert "## What fixes it" in out
    assert f"[{code}]" in ask("doctor --explain").out


def test_words_that_change_nothing_are_told_and_snapshots_are_compared() -> None:
    """--since beside a file; a log named twice is one input; a second snapshot shows what grew; a reader may go away."""
    assert "Note: --since: not used, since no Prometheus server was named" in ask("doctor", HEALTHY, "--since", "6h").out
    assert len(ask("doctor --json", FORWARD, FORWARD, code=1).body["facts"]["inputs"]) == 1
    early, late = (str(H200 / "snapshots" / f"growing-frames-{when}.pickle.gz") for when in ("early", "late"))
    assert "gpu.growth" in ask("doctor --json", early, late, code=1).codes
    assert "http" not in ask("doctor notes:today", code=2).err
    done = shell(f"plimsoll doctor '{FORWARD}' --json | true; echo ${{PIPESTATUS[0]}}")
    assert (done.stderr, done.stdout.strip() in ("0", "1")) == ("", True)


def test_the_schema_is_the_contract() -> None:
    """--schema prints what the package ships; every code passes it, and what is not in the contract does not."""
    assert ask("doctor --schema").body == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    good = ask("doctor --json", FORWARD, code=1).body
    finding = good["findings"][0]
    for code in Code:
        VALID.validate({**good, "findings": [{**finding, "code": str(code)}]})
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


@each("path", EVERYTHING[:: times(5, 1)], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_capture_gives_a_valid_object(path: Path) -> None:
    """Logs, pages, snapshots and tables alike; no NaN, and each finding has its sentence."""
    answer = ask("doctor --json", str(path), code=None)
    assert (answer.code in (0, 1), answer.err) == (True, "")
    VALID.validate(answer.body)
    for finding in answer.body["findings"]:
        assert all(finding[name] for name in ("because", "title", "evidence")), finding["code"]
    assert [one["source"] for one in answer.body["facts"]["inputs"]] == [str(path)]
    assert (answer.code == 1) == any(finding["severity"] != "info" for finding in answer.body["findings"])


@each("words", cases("cli", "every_mix_gives_a_valid_object"))
def test_every_mix_gives_a_valid_object(words: str) -> None:
    """Several inputs at once, of one kind or of all."""
    answer = ask(f"doctor --json {words.replace('H200', str(H200)).replace('CPU', str(CPU))}", code=None)
    VALID.validate(answer.body)
    assert answer.err == ""


@each("path", EVERYTHING[:: times(9, 1)], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_text_is_for_a_terminal(path: Path) -> None:
    """No line beyond 110 columns that could have been broken, nothing but printable letters, the verdict first."""
    lines = ask("doctor", str(path), code=None).out.splitlines()
    assert lines[0].startswith("memory failure: ")
    assert all(letter.isprintable() for line in lines for letter in line)
    assert not [line for line in lines if len(line) > 130 and " " in line.strip()[:100]]
