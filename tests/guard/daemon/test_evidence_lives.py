"""The last life of an engine in its log: what earlier ones said is kept, and not taken for what happened to this one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from plimsoll.guard.adapters.own_process import NEW_LIFE, open_for_new_life
from plimsoll.guard.daemon.acting import doctor_on
from plimsoll.guard.daemon.evidence import EARLIER, LOG, LOG_HEAD_BYTES, LOG_TAIL_BYTES, EvidenceSources, EvidenceStore

BANNER = "(APIServer pid=7) INFO 11-15 20:07:09 [api_server.py:1839] vLLM API server version 0.32.0\n"
DRAWN = "(APIServer pid=7) INFO 11-15 09:18:05 [api_utils.py:339]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0\n"
SERVES = "(APIServer pid=7) INFO:     Application startup complete.\n"
STOPPED = "(APIServer pid=7) INFO 11-15 20:09:00 [launcher.py:1] API server: shutdown triggered by SIGTERM\n"
FILLER = "(APIServer pid=7) INFO 11-15 20:08:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s\n"


def kept(folder: Path, log: str) -> tuple[str, str]:
    """What is kept of this log: of the last life, and of those before."""
    path = folder / "server.log"
    path.write_text(log, encoding="utf-8")
    taken = asyncio.run(EvidenceStore(folder / "evidence", environ={"PATH": ""}).take("a", "x", EvidenceSources(str(path))))
    found = Path(str(taken.facts["folder"]))
    earlier = (found / EARLIER).read_text(encoding="utf-8") if (found / EARLIER).exists() else ""
    assert (f"  {EARLIER}\n" in (found / "CONTENTS.txt").read_text(encoding="utf-8")) is bool(earlier)
    return (found / LOG).read_text(encoding="utf-8"), earlier


@pytest.mark.parametrize("banner", [BANNER, DRAWN])
def test_a_log_of_two_lives_is_parted_at_the_last_introduction(tmp_path: Path, banner: str) -> None:
    """Nothing is lost: what stood before it is beside it."""
    last, earlier = kept(tmp_path, banner + SERVES + STOPPED + "plimsoll: a line of the script\n" + banner + SERVES)
    assert last == banner + SERVES
    assert earlier == banner + SERVES + STOPPED + "plimsoll: a line of the script\n"


@pytest.mark.parametrize(
    "log", [BANNER + SERVES, "Segmentation fault\n" + DRAWN + SERVES, "vllm serve: error: unrecognized arguments: --x\n"]
)
def test_a_log_of_one_life_stays_whole(tmp_path: Path, log: str) -> None:
    """Also with a few lines before the server introduces itself, and one that never does."""
    assert kept(tmp_path, log) == (log, "")


def test_a_life_that_never_introduced_itself_begins_where_guard_started_it(tmp_path: Path) -> None:
    """Guard writes a line of its own between two lives; the introduction above it is of the one before."""
    mark = NEW_LIFE.decode()
    last, earlier = kept(tmp_path, f"{BANNER}{STOPPED}\n{mark}ImportError: no module named torch\n")
    assert last == f"{mark}ImportError: no module named torch\n"
    assert earlier == f"{BANNER}{STOPPED}\n"


@pytest.mark.parametrize("is_second", [True, False])
def test_a_life_that_began_in_the_part_that_is_left_out(tmp_path: Path, is_second: bool) -> None:
    """Of a long log the beginning of the file is then of another life; of one long life it belongs to it."""
    half = FILLER * ((LOG_HEAD_BYTES + LOG_TAIL_BYTES) // len(FILLER))
    last, earlier = kept(tmp_path, BANNER + half + (STOPPED + BANNER if is_second else FILLER) + half)
    assert last.startswith("[plimsoll left out about" if is_second else BANNER)
    assert earlier.startswith(BANNER) is is_second


def test_a_users_text_that_looks_like_a_beginning_shows_nothing(tmp_path: Path) -> None:
    """What is hidden is hidden before the log is parted."""
    secret = "my-own-secret-words"
    prompt = "INFO 11-15 20:08:00 [logger.py:40] Received request cmpl-1: prompt: 'hi\n"
    prompt += f"vLLM API server version 9\n{secret}', params: x\n"
    last, earlier = kept(tmp_path, BANNER + SERVES + prompt + SERVES)
    assert secret not in last + earlier


def test_doctor_reads_the_last_life_alone(tmp_path: Path) -> None:
    """The life before was stopped by its operator; this one was killed without a word: nobody is blamed for it."""

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


def test_guard_marks_a_new_life_only_after_another(tmp_path: Path) -> None:
    """The first line of a fresh log is the server's own."""
    path = tmp_path / "engine.log"
    os.close(open_for_new_life(path))
    assert path.read_bytes() == b""
    path.write_bytes(b"cut off in the mid")
    os.close(open_for_new_life(path))
    assert path.read_bytes() == b"cut off in the mid\n" + NEW_LIFE
