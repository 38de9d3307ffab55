"""Evidence of an engine before it is stopped: what is kept, what is hidden, what is missing; no user's text reaches it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.doctor.read.redact_text import shown_text
from plimsoll.guard.adapters.own_process import NEW_LIFE
from plimsoll.guard.daemon import evidence as keeping
from plimsoll.guard.daemon.acting import doctor_on
from plimsoll.guard.daemon.evidence import EARLIER, LOG, LOG_HEAD_BYTES, EvidenceSources, EvidenceStore, death_in_log
from plimsoll.guard.daemon.safe_log import safe_lines
from tests.each import cases, each, sure

SECRET = "hf_0123456789abcdefghijklmnopqrstuvwxyz0"
CAPTURES = Path(__file__).parents[2] / "captures"
PY_SPY = shutil.which("py-spy") or shutil.which(Path(sys.executable).with_name("py-spy"))


def keeper(folder: Path, path: str = "", **more: Any) -> EvidenceStore:
    """One that finds programs in `path` alone."""
    return EvidenceStore(folder / "evidence", environ={"PATH": path}, **{"limit_s": 120.0, **more})


def take(one: EvidenceStore, wanted: EvidenceSources, action: str = "a-1") -> Path:
    outcome = asyncio.run(one.take("llama/8b", action, wanted))
    assert outcome.is_done, outcome
    return Path(str(outcome.facts["folder"]))


@each(("log", "failure", "requests"), cases("guard", "logs of dead engines"))
def test_the_log_of_a_dead_engine_tells_which_requests_it_had_begun(log: str, failure: str, requests: str) -> None:
    """By vLLM's dump of its last step: lengths and kinds, nothing else of the line."""
    assert death_in_log(str(CAPTURES / log)) == ("EngineCore encountered a fatal error", failure, requests)


def program(folder: Path, name: str, text: str) -> str:
    """A program of that name, and the folder it lies in."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(folder)


def test_everything_that_there_is(tmp_path: Path) -> None:
    """The log, the pages, the processes and the cards, each a file of this user alone, and a list of them."""
    (tmp_path / "engine.log").write_text("INFO it began\n")
    path = program(tmp_path / "bin", "nvidia-smi", 'echo "Driver Version: 1"')
    program(tmp_path / "bin", "py-spy", 'echo "$@"; echo "Thread 1 (idle): MainThread"')

    async def state() -> bytes:
        return b'{"phase": "serving", "api_key": "abc-secret-def"}'

    wanted = EvidenceSources(str(tmp_path / "engine.log"), (os.getpid(),), {"metrics.txt": b"vllm:x 1\n", "state.json": state})
    folder = take(keeper(tmp_path, path), wanted)
    names = {"CONTENTS.txt", "engine.log", "metrics.txt", "nvidia-smi.txt", "processes.txt", "stacks.txt", "state.json"}
    assert {one.name for one in folder.iterdir()} == names
    assert folder.name.endswith("Z-llama_8b-a-1")
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {0o600}
    assert {stat.S_IMODE(one.stat().st_mode) for one in (folder, folder.parent)} == {0o700}
    assert f"dump --nonblocking --pid {os.getpid()}" in (folder / "stacks.txt").read_text()
    assert "abc-secret-def" not in (folder / "state.json").read_text()
    assert "could not be had" not in (folder / "CONTENTS.txt").read_text()
    text = keeping.describe_processes([os.getpid(), 999_999_999]).decode()
    assert text.startswith(f"=== pid {os.getpid()}\ncommand: ")
    told = ("--- status", "threads: number, name, state, where it waits", "cannot be read (No such file or directory)")
    assert [words for words in told if words not in text] == []


def test_secrets_users_words_and_odd_names_are_hidden_and_of_a_long_log_the_middle_is_left_out(tmp_path: Path) -> None:
    """In log, page and command line; neither engine, action nor page leads out of the folder; a long log takes its time."""
    log = f"INFO api_key='{SECRET}'\nINFO Received request cmpl-1: prompt: 'my dear diary', params: SamplingParams(n=1)\n"
    (tmp_path / "engine.log").write_text(log)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--api-key", SECRET]) as process:
        wanted = EvidenceSources(str(tmp_path / "engine.log"), (process.pid,), {"page.txt": f"HF_TOKEN={SECRET}".encode()})
        folder = take(keeper(tmp_path), wanted)
        process.kill()
    kept = "".join(one.read_text() for one in folder.iterdir())
    assert SECRET not in kept
    assert "dear diary" not in kept
    assert "[redacted]" in (folder / "processes.txt").read_text()
    odd = EvidenceSources(pages={"../../out.txt": b"x", "": b"y"})
    folder = Path(str(asyncio.run(keeper(tmp_path).take("../../e", "/etc/x\0y", odd)).facts["folder"]))
    assert folder.parent == tmp_path / "evidence"
    assert {one.name for one in folder.iterdir()} == {"CONTENTS.txt", "_.._out.txt", "unnamed"}
    line = "INFO 01-01 00:00:00 [loggers.py:1] Engine 000: Avg generation throughput: 12.3 tokens/s, Running: 4 reqs\n"
    (tmp_path / "engine.log").write_text(
        "INFO 01-01 00:00:00 [core.py:1] EngineCore failed to start.\n"
        + line * 200_000
        + "INFO 01-01 00:00:00 [core.py:1] WorkerProc failed.\n"
    )
    begun = time.process_time()
    folder = take(keeper(tmp_path), EvidenceSources(str(tmp_path / "engine.log")), "a-2")
    assert time.process_time() - begun < 15
    text = (folder / "engine.log").read_text()
    assert text.startswith("INFO 01-01 00:00:00 [core.py:1] EngineCore failed to start.")
    assert text.endswith("] WorkerProc failed.\n")
    assert "left out about" in text
    assert len(text) < 5 << 20


def test_what_cannot_be_had_is_named_and_what_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """No log, page, process or program, or one that never ends: a list of what is missing, in time, and no exception."""

    async def broken() -> bytes:
        raise ConnectionRefusedError(111, f"Connection refused Authorization: Bearer {SECRET}")

    path = program(tmp_path / "bin", "py-spy", "echo 'Permission Denied: try running with sudo' >&2; exit 1")
    program(tmp_path / "bin", "nvidia-smi", "exit 9")
    wanted = EvidenceSources(str(tmp_path / "none.log"), (999_999_999,), {"metrics.txt": broken, "state.json": b""})
    outcome = asyncio.run(keeper(tmp_path, path).take("e", "a-1", wanted))
    assert (outcome.is_done, outcome.facts["parts"], outcome.facts["missing"]) == (True, 1, 5)
    text = (Path(str(outcome.facts["folder"])) / "CONTENTS.txt").read_text()
    assert SECRET not in text
    told = ("engine.log: could not be opened", "metrics.txt: Connection refused", "state.json: no answer",
            "nvidia-smi.txt: no output", "pid 999999999: Permission Denied")  # fmt: skip
    assert [words for words in told if words not in text] == []
    nothing = (take(keeper(tmp_path), EvidenceSources(), "a-2") / "CONTENTS.txt").read_text()
    assert [words for words in ("log path unknown", "processes unknown") if words not in nothing] == []
    path = program(tmp_path / "bin", "py-spy", "sleep 60")
    (tmp_path / "engine.log").write_text("INFO 01-01 00:00:00 [core.py:1] WorkerProc failed.\n")

    async def never() -> bytes:
        await asyncio.sleep(60)
        return b""

    begun = time.monotonic()
    wanted = EvidenceSources(str(tmp_path / "engine.log"), (os.getpid(),), {"metrics.txt": never})
    folder = take(keeper(tmp_path, path, limit_s=1.5), wanted)
    assert time.monotonic() - begun < 40
    assert (folder / "engine.log").read_text() == "INFO 01-01 00:00:00 [core.py:1] WorkerProc failed.\n"
    assert "time limit of 1.5 s reached" in (folder / "CONTENTS.txt").read_text()


def test_the_same_action_is_kept_once_and_only_so_many_and_so_much(tmp_path: Path) -> None:
    """Found again by whoever asks again, taken anew where one was killed amid it; the oldest go, what is not ours stays."""
    one = keeper(tmp_path)
    first = take(one, EvidenceSources(pages={"metrics.txt": b"before 1\n"}))
    assert take(one, EvidenceSources(pages={"metrics.txt": b"after 1\n"})) == first
    assert (first / "metrics.txt").read_text() == "before 1\n"
    (first / "CONTENTS.txt").unlink()
    assert take(one, EvidenceSources(pages={"metrics.txt": b"after 1\n"})) == first
    assert (first / "metrics.txt").read_text() == "after 1\n"
    now = 1_800_000_000.0
    shutil.rmtree(tmp_path / "evidence")
    one = keeper(tmp_path, most_folders=3, most_bytes=100_000, now=lambda: now)
    (tmp_path / "evidence").mkdir(mode=0o700)
    (tmp_path / "evidence" / "mine").mkdir()
    for number in range(6):
        now += 10
        take(one, EvidenceSources(pages={"page.txt": b"x " * 500}), f"a-{number}")
    assert [path.name[-3:] for path in sorted((tmp_path / "evidence").iterdir())] == ["a-3", "a-4", "a-5", "ine"]
    now += 10
    take(one, EvidenceSources(pages={"page.txt": b"x " * 60_000}), "big")
    assert [path.name[-3:] for path in sorted((tmp_path / "evidence").iterdir())] == ["big", "ine"], "the newest is always kept"


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_a_place_that_is_not_ours_alone(tmp_path: Path, kind: str) -> None:
    """A link, a file, a folder that others may write to: nothing is written there, and that is said."""
    root = tmp_path / "evidence"
    (tmp_path / "elsewhere").mkdir()
    if kind == "link":
        root.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        root.write_text("")
    else:
        root.mkdir()
        root.chmod(0o777)
    outcome = asyncio.run(keeper(tmp_path).take("e", "a", EvidenceSources()))
    assert outcome.is_done is False
    assert outcome.message.startswith("no evidence saved: ")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(PY_SPY is None, reason="needs py-spy: pip install 'plimsoll-line[evidence]'")
def test_real_stacks_of_a_real_process(tmp_path: Path) -> None:
    """py-spy from outside, without stopping it: the function where a stuck process stands is named."""
    code = "import time\ndef stuck_here(): time.sleep(60)\nprint(1, flush=True)\nstuck_here()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        sure(process.stdout).readline()
        time.sleep(0.3)
        folder = take(keeper(tmp_path, str(Path(sure(PY_SPY)).parent)), EvidenceSources(pids=(process.pid,)))
        assert process.poll() is None
        process.kill()
    contents = (folder / "CONTENTS.txt").read_text()
    if "ermission" in contents:
        pytest.skip("this user may not look into another process")
    assert "stuck_here" in (folder / "stacks.txt").read_text()


BANNER = "(APIServer pid=7) INFO 11-15 20:07:09 [api_server.py:1839] vLLM API server version 0.32.0\n"
DRAWN = "(APIServer pid=7) INFO 11-15 09:18:05 [api_utils.py:339]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0\n"
SERVES = "(APIServer pid=7) INFO:     Application startup complete.\n"
STOPPED = "(APIServer pid=7) INFO 11-15 20:09:00 [launcher.py:1] [shutdown] API server: shutdown triggered\n"
FILLER = "(APIServer pid=7) INFO 11-15 20:08:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s\n"


def kept(folder: Path, log: str) -> tuple[str, str]:
    """What is kept of this log: of the last life, and of those before."""
    path = folder / "server.log"
    path.write_text(log, encoding="utf-8")
    found = Path(str(asyncio.run(keeper(folder).take("a", "x", EvidenceSources(str(path)))).facts["folder"]))
    earlier = (found / EARLIER).read_text(encoding="utf-8") if (found / EARLIER).exists() else ""
    assert (f"  {EARLIER}\n" in (found / "CONTENTS.txt").read_text(encoding="utf-8")) is bool(earlier)
    return (found / LOG).read_text(encoding="utf-8"), earlier


SCRIPT, MARK = "usage: vllm serve [model_tag] [options]\n", NEW_LIFE.decode() + "ImportError: no module named torch\n"


@each(
    ("earlier", "last"),
    [
        *((banner + SERVES + STOPPED + SCRIPT, banner + SERVES) for banner in (BANNER, DRAWN)),
        *(("", log) for log in (BANNER + SERVES, "Segmentation fault\n" + DRAWN + SERVES, "vllm: error: argument --x\n")),
        (f"{BANNER}{STOPPED}\n", MARK),
    ],
)
def test_a_log_of_several_lives_is_parted_where_the_last_begins(earlier: str, last: str, tmp_path: Path) -> None:
    """At its introduction, or where guard started it; nothing is lost, and one life stays whole, also with lines before it."""
    folder = tmp_path / str(len(earlier) * 10_000 + len(last))
    folder.mkdir()
    assert kept(folder, earlier + last) == (last, earlier)


@pytest.mark.parametrize("is_second", [True, False])
def test_a_life_that_began_in_the_part_that_is_left_out(tmp_path: Path, is_second: bool) -> None:
    """Of a long log the beginning of the file is then of another life; of one long life it belongs to it."""
    half = FILLER * ((LOG_HEAD_BYTES + keeping.LOG_TAIL_BYTES) // len(FILLER))
    last, earlier = kept(tmp_path, BANNER + half + (STOPPED + BANNER if is_second else FILLER) + half)
    assert last.startswith("[plimsoll left out about" if is_second else BANNER)
    assert earlier.startswith(BANNER) is is_second


def test_a_users_text_that_looks_like_a_beginning_shows_nothing_and_doctor_reads_the_last_life_alone(tmp_path: Path) -> None:
    """It is hidden before the log is parted; a life before was stopped by its operator, and nobody is blamed for the next."""
    secret = "my-own-secret-words"
    prompt = "INFO 11-15 20:08:00 [logger.py:40] Received request cmpl-1: prompt: 'hi\n"
    prompt += f"vLLM API server version 9\n{secret}', params: x\n"
    last, earlier = kept(tmp_path, BANNER + SERVES + prompt + SERVES)
    assert secret not in last + earlier

    def codes(log: str) -> str:
        folder = tmp_path / str(len(log))
        folder.mkdir()
        kept(folder, log)
        (found,) = (folder / "evidence").iterdir()
        said = asyncio.run(doctor_on(found))
        assert json.loads((found / "doctor.json").read_bytes())["schema"] == "plimsoll.doctor/1"
        return said

    assert "other.stopped-by-operator" in codes(BANNER + SERVES + STOPPED)
    assert "other.stopped-by-operator" not in codes(BANNER + SERVES + STOPPED + BANNER + SERVES)


LOGGED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("log_shapes.yaml").read_text(encoding="utf-8"))
SAID = "Frau Zwiebel trinkt heimlich Absinth"
WORDS = ("Zwiebel", "heimlich", "Absinth", "dritte Zeile", "玉ねぎ", "Лукова", "بصلة")


@each("name", LOGGED["with users' text"])
def test_no_users_text_reaches_the_evidence(tmp_path: Path, name: str) -> None:
    """Nor the journal: whatever wrote it into the log, and in whatever language; the records around it stay."""
    log = tmp_path / "vllm.log"
    around = ("(APIServer pid=7) INFO 11-15 09:00:00 [launcher.py:40] Available routes are:",
              "(EngineCore pid=9) ERROR 11-15 09:00:00 [core.py:1512] WorkerProc failed.")  # fmt: skip
    log.write_text("\n".join((around[0], LOGGED["with users' text"][name], around[1], "")))
    outcome = asyncio.run(EvidenceStore(tmp_path / "kept", environ={"PATH": ""}).take("e", "a-1", EvidenceSources(str(log))))
    shown = (Path(str(outcome.facts["folder"])) / LOG).read_text()
    told = str(death_in_log(str(log)))  # all that the journal and notices have of a log
    assert not [word for word in WORDS if word in shown + told], shown + told
    assert all(line in shown for line in around), shown


@each("line", LOGGED["why it died"])
def test_what_says_why_it_died_is_shown(line: str) -> None:
    """Records of files that log no request, known exceptions, and the lines of the system and its drivers stay as they are."""
    assert "".join(safe_lines([line])) == line.replace("\x1b[0;0m", "") + "\n"


def test_what_was_logged_before_it_served_is_shown_and_never_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not finished its start has had no request; guard may be ended before users' text is hidden."""
    banner = "(APIServer pid=7) INFO 11-15 09:00:00 [api_utils.py:1]        █▄█▀ █  version 0.32.0"
    up = "(APIServer pid=7) INFO:     Application startup complete."
    error = "OSError: Zwiebel/model is not a folder"
    shown = "".join(safe_lines([banner, error, up, error]))
    assert shown.count("Zwiebel") == 1
    assert shown.endswith("OSError: [hidden]\n")
    assert "".join(shown_text(["/run/gate.token: no such file\n", "gate.token: Permission denied\n"])).count("redacted") == 0

    def end(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plimsoll.guard.daemon.evidence.safe_lines", end)
    (tmp_path / "vllm.log").write_text(f"{SAID}\n")
    sources = EvidenceSources(str(tmp_path / "vllm.log"))
    outcome = asyncio.run(EvidenceStore(tmp_path / "kept", environ={"PATH": ""}).take("e", "a-1", sources))
    kept = [path.read_text() for path in Path(str(outcome.facts["folder"])).iterdir()]
    assert len(kept) == 1, "the list of contents"
    assert "No space left" in kept[0]
    assert SAID not in kept[0]


@each("line", [" " * 100_000 + "x", "a | 0%|| 1[1]" * 700])
def test_an_odd_line_holds_nobody_up(line: str) -> None:
    """Guard's other work waits while a pattern is tried: long blanks, and a thousand bars each behind another's head."""
    begun = time.process_time()
    assert "hidden" in "".join(safe_lines([line]))
    assert time.process_time() - begun < 5
