"""`plimsoll doctor` as a user meets it: its options, its exit codes, and one clear line for whatever it cannot read."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plimsoll.cli.doctor import DoctorOptions
from plimsoll.findings import Code
from plimsoll.launch.options import options_of
from tests.cli.doctor_runs import (
    CGROUP,
    CGROUP_DMESG,
    CPU,
    FORWARD,
    H200,
    HEALTHY,
    SPLIT,
    STORM_PAGE,
    one_line,
    said,
    said_by_process,
)
from tests.each import each

Capsys = pytest.CaptureFixture[str]


class Runs:
    """A pickle of this runs a command in whoever opens it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_help_names_every_option(capsys: Capsys) -> None:
    """What is understood is in the help, and no word more."""
    answer = said(capsys, "--help")
    assert answer.code == 0
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", answer.out))
    assert named == {info.name for info in options_of(DoctorOptions).values()}
    assert max(map(len, answer.out.splitlines())) <= 128
    assert said(capsys, "-h").out == answer.out


@each(
    ("words", "code"),
    [
        ([HEALTHY], 0),
        ([str(CPU / "terminate.log")], 0),
        ([str(CPU / "interrupt.log")], 0),
        ([FORWARD], 1),
        ([str(CPU / "port-in-use.log")], 1),
        ([str(CPU / "kill-engine-core.log")], 1),
        ([SPLIT], 1),
        ([STORM_PAGE], 1),
        ([CGROUP_DMESG], 1),
        (["--exit-code", "137"], 1),
        (["--exit-code", "143"], 0),
        (["http://127.0.0.1:1"], 3),
    ],
)
@each("more", [[], ["--json"]])
def test_the_exit_code_says_whether_something_failed(words: list[str], code: int, more: list[str], capsys: Capsys) -> None:
    """0: nothing wrong, also where it was stopped on purpose; 1: a failure; 3: a server did not answer."""
    assert said(capsys, *words, *more).code == code


@each(
    ("words", "complaint"),
    [
        ([], "nothing to read"),
        (["/nowhere/x.log"], "/nowhere/x.log: no such file"),
        (["--exit-code", "many"], "--exit-code 'many' is not a number"),
        (["--exit-code", "٣"], "is not a number"),
        (["--exit-code", "9" * 30], "is not a number"),
        (["--exit-code", "99999"], "there is no such code"),
        (["--exit-code", "300"], "there is no such code"),
        (["--exit-code=-65"], "there is no such code"),
        (["--exit-code", "65536"], "there is no such code"),
        ([HEALTHY, "--timeout", "soon"], "--timeout 'soon' is not a number of seconds"),
        ([HEALTHY, "--timeout", "0"], "--timeout '0'"),
        ([HEALTHY, "--timeout", "-3"], "--timeout"),
        ([HEALTHY, "--timeout", "nan"], "--timeout"),
        ([HEALTHY, "--timeout"], "--timeout needs a value"),
        ([HEALTHY, "--depth", "3"], "there is no option '--depth'"),
        ([HEALTHY, "--", "vllm", "serve", "m"], "not a command after"),
        ([SPLIT, "--html", "x.html"], "--html is gone: PyTorch draws a memory snapshot, with python -m torch.cuda._memory_viz"),
        ([HEALTHY, "--watch"], "--watch looks at running servers"),
        (["--watch"], "nothing to read"),
        (["--watch", "http://127.0.0.1:1", "--looks", "0"], "--looks"),
        (["--watch", "http://127.0.0.1:1", "--interval", "x"], "--interval"),
        (["http://127.0.0.1:1", "--since", "yesterday"], "--since 'yesterday' is not a time: 30m, 6h, 2d"),
        (["http://127.0.0.1:1", "--start", "noon"], "--start 'noon' is not a time in Unix seconds"),
        (["http://127.0.0.1:1", "--since", "1h", "--step", "often"], "--step"),
        (["http://127.0.0.1:1", "--since", "1h", "--match", "vllm"], "--match wants label=value"),
        (["http://"], "http://"),
        ([FORWARD, "--bundle", "case.zip"], "name the archive .tar.zst, .tar.gz or .tar"),
        ([FORWARD, "--bundle", "/nowhere/case.tar"], "/nowhere/case.tar: no such folder"),
        (["--explain", "runtime.logit"], "did you mean runtime.logits"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_2(words: list[str], complaint: str, capsys: Capsys) -> None:
    """It says what is wrong with which word, before anything is read or written."""
    answer = said(capsys, *words)
    assert answer.code == 2
    assert complaint in one_line(answer)


@pytest.mark.parametrize("words", [[HEALTHY, "--gpu", "nope"], [HEALTHY, "--since", "yesterday"], [FORWARD, "--gpu", "nope"]])
def test_a_wrong_value_is_refused_also_where_it_would_not_be_used(words: list[str], capsys: Capsys) -> None:
    """A typing mistake is told whatever the log turns out to be."""
    answer = said(capsys, *words)
    assert answer.code == 2
    one_line(answer)


def test_random_bytes_are_refused(tmp_path: Path, capsys: Capsys) -> None:
    """What is no text, alone or packed, is no log."""
    noise = bytes(range(256)) * 40
    for name, data in (("x.log", noise), ("x.log.gz", gzip.compress(noise)), ("cut.gz", b"\x1f\x8b broken")):
        path = tmp_path / name
        path.write_bytes(data)
        answer = said(capsys, str(path))
        assert answer.code == 2, name
        assert str(path) in one_line(answer)


def test_five_gigabytes_of_nothing_are_refused_at_once(tmp_path: Path, capsys: Capsys) -> None:
    """A sparse file is looked at, not read."""
    path = tmp_path / "sparse.log"
    with path.open("wb") as file:
        file.truncate(5 << 30)
    began = time.monotonic()
    answer = said(capsys, str(path))
    assert answer.code == 2
    assert "sparse.log" in one_line(answer)
    assert time.monotonic() - began < 5


def test_a_pipe_that_never_ends_is_left_after_the_timeout(tmp_path: Path) -> None:
    """A FIFO whose writer says nothing is the world's fault, in one line, when --timeout is over."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # a writer that stays and is silent
    try:
        began = time.monotonic()
        answer = said_by_process([str(path), "--timeout", "1"])
        assert answer.code == 3
        assert "fifo: nothing came in time" in one_line(answer)
        assert time.monotonic() - began < 6
    finally:
        os.close(writer)


def test_what_a_pipe_said_before_the_timeout_is_judged(tmp_path: Path) -> None:
    """A log that comes through a FIFO which is never closed is read as far as it came."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(writer, Path(FORWARD).read_bytes()[-60_000:])
        answer = said_by_process([str(path), "--timeout", "1", "--json"])
    finally:
        os.close(writer)
    assert answer.code == 1
    assert answer.body["memory_failure"] is True


def test_a_hostile_pickle_runs_nothing(tmp_path: Path, capsys: Capsys) -> None:
    """A pickle that would run a command is refused in one line, packed or not, and the command is not run."""
    mark = tmp_path / "was-run"
    data = pickle.dumps({"segments": [Runs(f"touch {mark}")], "device_traces": []})
    for name, content in (("evil.pickle", data), ("evil.pickle.gz", gzip.compress(data)), ("evil.log", data)):
        path = tmp_path / name
        path.write_bytes(content)
        answer = said(capsys, str(path))
        assert answer.code == 2
        assert "refused" in one_line(answer)
    assert not mark.exists()


def test_a_folder_is_read_and_what_is_broken_in_it_is_left_out(tmp_path: Path, capsys: Capsys) -> None:
    """One bad file does not hide the others: it is named among the notes, and the answer stands."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "server.log").write_bytes(Path(FORWARD).read_bytes())
    (tmp_path / "cut.log.gz").write_bytes(b"\x1f\x8b\x08 broken")
    (tmp_path / "evil.pickle").write_bytes(pickle.dumps(Runs("true")))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    answer = said(capsys, str(tmp_path), "--json")
    assert answer.code == 1
    assert answer.codes[0] == "runtime.forward"
    notes = " ".join(answer.body["facts"]["notes"])
    assert "cut.log.gz" in notes
    assert "evil.pickle" in notes
    assert [Path(one["source"]).name for one in answer.body["facts"]["inputs"]] == ["server.log"]


def test_notes_are_shown_to_people_too(tmp_path: Path, capsys: Capsys) -> None:
    """What was left out of a folder is said without --json as well: an answer over half of the files must say so."""
    (tmp_path / "server.log").write_bytes(Path(HEALTHY).read_bytes())
    (tmp_path / "cut.log.gz").write_bytes(b"\x1f\x8b\x08 broken")
    assert "cut.log.gz" in said(capsys, str(tmp_path)).out


def test_a_page_without_any_metric_of_vllm_proves_nothing(tmp_path: Path, capsys: Capsys) -> None:
    """Another program's page, or one that hides them, is no page on which nothing is wrong: a note says so."""
    page = tmp_path / "page.txt"
    page.write_text("# HELP http_requests_total x\n# TYPE http_requests_total counter\nhttp_requests_total 4\n")
    answer = said(capsys, str(page))
    assert answer.out.startswith("memory failure: unknown")
    assert "the page shows no metric of vLLM" in " ".join(answer.out.split())
    answer = said(capsys, str(page), "--json")
    assert answer.body["memory_failure"] is None
    assert [one["says"] for one in answer.body["facts"]["inputs"]] == ["nothing of vLLM in it"]


def test_what_others_say_beside_the_cause_is_shown(tmp_path: Path, capsys: Capsys) -> None:
    """A card's error that is another program's is no finding and is said all the same, without the secrets in its line."""
    kernel = tmp_path / "dmesg.txt"
    xid = "NVRM: Xid (PCI:0000:3b:00): {}, pid=4242, name={}, Ch 00000010 --api-key=sk-0123456789abcdefghij"
    kernel.write_text("".join(f"[ 1.0] {xid.format(*one)}\n" for one in ((31, "blender"), (999, "python"))))
    (tmp_path / "cut.log.gz").write_bytes(b"\x1f\x8b\x08 broken")
    answer = said(capsys, str(tmp_path))
    assert answer.code == 0
    assert "Remark: Xid 31 on 0000:3b:00 belongs to blender, not to vLLM" in answer.out
    assert "Remark: Xid 999 on 0000:3b:00" in answer.out
    assert "cut.log.gz" in answer.out
    assert "sk-0123" not in answer.out


def test_a_folder_without_anything_to_read_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    """An empty folder, and one with pictures alone."""
    assert "no log, metrics page or snapshot in this folder" in one_line(said(capsys, str(tmp_path)))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    answer = said(capsys, str(tmp_path))
    assert answer.code == 2
    one_line(answer)


@pytest.mark.parametrize("packed", [False, True])
def test_standard_input_is_read_like_a_file(packed: bool) -> None:
    """`-` gives what the file gives, packed or not, but for its name."""
    data = Path(FORWARD).read_bytes()
    piped = said_by_process(["-", "--json"], given=gzip.compress(data) if packed else data)
    assert piped.code == 1
    assert piped.codes[0] == "runtime.forward"
    assert {evidence["source"] for evidence in piped.body["findings"][0]["evidence"]} == {"standard input"}


def test_standard_input_is_read_beside_a_file(capsys: Capsys) -> None:
    """The kernel's lines may come through a pipe; of nothing at all it cannot be told."""
    answer = said_by_process(["-", "--json"])
    assert answer.code == 0
    assert answer.body["memory_failure"] is None
    assert answer.body["collect_next"]
    del capsys
    answer = said_by_process([CGROUP, "-", "--json"], given=Path(CGROUP_DMESG).read_bytes())
    assert answer.codes[0] == "host.out-of-memory"


def test_dmesg_settles_what_the_log_cannot(capsys: Capsys) -> None:
    """Alone the log cannot tell and says what to collect; with the kernel's lines it is host memory, in either order."""
    alone = said(capsys, CGROUP, "--json")
    assert alone.body["memory_failure"] is None
    assert any("dmesg" in ask for ask in alone.body["collect_next"])
    for words in ((CGROUP, CGROUP_DMESG), (CGROUP_DMESG, CGROUP)):
        both = said(capsys, *words, "--json")
        assert both.body["memory_failure"] is True
        assert both.codes[0] == "host.out-of-memory"
        assert both.body["collect_next"] == []


@pytest.mark.parametrize("code", ["137", "-9", "0", "134", "1", "255"])
def test_an_exit_code_alone_is_never_memory_nor_proof_of_the_contrary(code: str, capsys: Capsys) -> None:
    """It may have been the kernel for want of memory, or anybody: without a log it cannot be told."""
    assert said(capsys, "--exit-code", code, "--json").body["memory_failure"] is None


def test_an_exit_code_does_not_overrule_a_shown_cause_or_settle_an_unknown_one(capsys: Capsys) -> None:
    """A killed process does not turn "cannot be told" into "no"; a stop on purpose with 143 is no failure."""
    answer = said(capsys, CGROUP, "--exit-code", "137", "--json")
    assert answer.body["memory_failure"] is None
    assert answer.body["collect_next"]
    for code in ("0", "1", "137"):
        answer = said(capsys, FORWARD, "--exit-code", code, "--json")
        assert answer.body["memory_failure"] is True
        assert answer.codes[0] == "runtime.forward"
    stopped = said(capsys, str(CPU / "terminate.log"), "--exit-code", "143", "--json")
    assert stopped.code == 0
    assert stopped.codes[0] == "other.stopped-by-operator"


@each("code", list(Code))
def test_every_code_has_its_page(code: Code, capsys: Capsys) -> None:
    """--explain prints the page of the code, whole."""
    answer = said(capsys, "--explain", code)
    assert answer.code == 0
    assert answer.out.startswith(f"# {code}\n")
    assert "## What fixes it" in answer.out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("startup.no-cache-block", "startup.no-cache-blocks"),
        ("logits", "runtime.logits"),
        ("kv.preemption", "kv.preemption-storm"),
        ("memory", "host.out-of-memory"),
        ("oom", "plimsoll doctor --explain lists them all"),
        ("../../README", ""),
        ("x" * 5000, ""),
    ],
)
def test_a_near_miss_is_named(typed: str, meant: str, capsys: Capsys) -> None:
    """A code that is nearly right leads to the right one; anything else is refused in one short line."""
    answer = said(capsys, "--explain", typed)
    assert answer.code == 2
    assert meant in one_line(answer)
    assert len(answer.err) < 2200


def test_words_that_change_nothing_are_told(capsys: Capsys) -> None:
    """--since beside a file; a log named twice is one input; without a code the findings are listed."""
    answer = said(capsys, "--explain")
    assert answer.code == 0
    assert all(f"[{code}]" in answer.out for code in Code)
    assert "Note: --since: not used, since no Prometheus server was named" in said(capsys, HEALTHY, "--since", "6h").out
    assert len(said(capsys, FORWARD, FORWARD, "--json").body["facts"]["inputs"]) == 1


@pytest.mark.parametrize("typed", ["localhost:8000", "10.0.0.1:8000", "vllm-0.models.svc:8000/metrics"])
def test_an_address_without_its_scheme_is_told_from_a_file(typed: str, capsys: Capsys) -> None:
    """The answer is the word that was meant."""
    answer = said(capsys, typed)
    assert answer.code == 2
    assert one_line(answer).endswith(f"no such file; a server's address begins with http://: http://{typed}\n")
    assert "http" not in said(capsys, "notes:today").err


def test_two_snapshots_show_what_grew(capsys: Capsys) -> None:
    """The second is compared with the first."""
    folder = H200 / "snapshots"
    answer = said(
        capsys, str(folder / "growing-frames-early.pickle.gz"), str(folder / "growing-frames-late.pickle.gz"), "--json"
    )
    assert "gpu.growth" in answer.codes


def test_a_reader_that_goes_away_is_nobodys_fault() -> None:
    """`plimsoll doctor ... | true` ends quietly."""
    command = f"'{sys.executable}' -m plimsoll doctor '{FORWARD}' --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1")
