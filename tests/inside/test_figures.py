"""The files through which workers tell API servers their figures."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.figures import FILE_MAX_BYTES, GROUPS, empty_figures, read_figures, write_whole
from plimsoll.inside.places import start_ticks, sweep
from tests.each import cases

KEY = 4242


def figures_of(pid: int = 0, **more: Any) -> dict[str, Any]:
    pid = pid or os.getpid()
    found = empty_figures()
    found |= {"pid": pid, "started": start_ticks(pid), "ancestors": [pid, 17, KEY], "beat": 100.0, "engine": 0, "rank": 0}
    return found | more


def write_figures(folder: str, figures: dict[str, Any]) -> None:
    write_whole(folder, f"worker-{figures['pid']}-{figures['started']}", figures)


def put(folder: Path, text: str | bytes) -> Path:
    pid = os.getpid()
    path = folder / f"worker-{pid}-{start_ticks(pid)}.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def ended_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_what_is_written_is_read_with_its_age_and_life(tmp_path: Path) -> None:
    """All values come back, with how old they are and that their process lives; the file is its user's alone."""
    allocator = dict.fromkeys(GROUPS["allocator"], 1) | {"expandable": True}
    written = figures_of(allocator=allocator, reasons={"budget": "none"}, last_compact={"returned": 5})
    write_figures(str(tmp_path), written)
    (read,) = read_figures(str(tmp_path), KEY, now=103.5)
    assert read.pop("age_s") == 3.5
    assert read.pop("alive") is True
    assert read == written
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_workers_of_this_server_come_in_the_order_of_engine_and_rank(tmp_path: Path) -> None:
    """Two engines of two ranks, written in no order; those of another server are left out."""
    places = [(1, 0), (0, 1), (1, 1), (0, 0)]
    for pid, (engine, rank) in enumerate(places, start=900_001):
        write_figures(str(tmp_path), figures_of(pid, engine=engine, rank=rank))
    read = read_figures(str(tmp_path), KEY, now=0.0)
    assert [(each["engine"], each["rank"]) for each in read] == sorted(places)
    assert all(each["age_s"] == 0.0 for each in read), "a clock that runs behind makes no negative age"
    write_figures(str(tmp_path), figures_of())
    assert read_figures(str(tmp_path), KEY + 1, now=0.0) == []


def test_a_dead_worker_is_told_as_dead_and_at_the_next_start_its_files_go(tmp_path: Path) -> None:
    """A number that is used again is not taken for it; files of the living stay, half-written ones too."""
    gone = ended_process()
    for figures in (figures_of(gone, started=1), figures_of(started=1)):
        write_figures(str(tmp_path), figures)
    assert [each["alive"] for each in read_figures(str(tmp_path), KEY, now=0.0)] == [False, False]
    sweep(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    own = f"worker-{os.getpid()}-{start_ticks(os.getpid())}.json"
    kept = {own, "worker-abc.json", "drain.json", f".{own}.tmp"}
    for name in (*kept, f"core-{gone}-1.json", f".knobs-{gone}-1.json.tmp"):
        (tmp_path / name).write_text("{}")
    sweep(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == kept


HUGE = {"reasons": {"x": "y" * FILE_MAX_BYTES}}


@pytest.mark.parametrize("told", [*cases("inside", "what_is_no_figures"), HUGE, "[" * 100_000, b"\xff\xfe\x00"])
def test_what_is_no_figures_is_skipped(tmp_path: Path, told: str | bytes | dict[str, Any]) -> None:
    """A torn, foreign, huge or newer file hides no other worker."""
    put(tmp_path, json.dumps(figures_of() | told) if isinstance(told, dict) else told)
    write_figures(str(tmp_path), figures_of(900_001))
    assert [each["pid"] for each in read_figures(str(tmp_path), KEY, now=0.0)] == [900_001]


def test_links_pipes_and_folders_are_not_followed(tmp_path: Path) -> None:
    """None of them is read, and none of them makes the reader wait."""
    real = put(tmp_path, json.dumps(figures_of()))
    real.rename(tmp_path / "elsewhere.json")
    real.symlink_to(tmp_path / "elsewhere.json")
    os.mkfifo(tmp_path / "worker-3-1.json")
    (tmp_path / "worker-4-1.json").mkdir()
    assert read_figures(str(tmp_path), KEY, now=0.0) == []
    assert read_figures(str(tmp_path / "missing"), KEY, now=0.0) == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(changes=st.dictionaries(st.sampled_from(sorted(empty_figures())), _JSON, max_size=6))
def test_wild_values_never_reach_a_reader(changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a file says, every key is there, groups are tables of plain values or None, and nothing is raised."""
    folder = tmp_path_factory.mktemp("wild")
    put(folder, json.dumps(figures_of() | changes))
    for read in read_figures(str(folder), KEY, now=0.0):
        assert set(empty_figures()) <= set(read)
        for group, keys in GROUPS.items():
            for key in keys:
                value = (read[group] or {}).get(key)
                assert value is None or isinstance(value, bool | int | float | str)


def test_a_failed_write_leaves_the_last_file_as_it_was(tmp_path: Path) -> None:
    """What cannot be said in JSON is refused before anything is touched, and no scrap is left."""
    write_figures(str(tmp_path), figures_of())
    with pytest.raises(ValueError, match="JSON"):
        write_figures(str(tmp_path), figures_of(samples=float("inf")))
    assert len(list(tmp_path.iterdir())) == 1
    assert len(read_figures(str(tmp_path), KEY, now=0.0)) == 1
