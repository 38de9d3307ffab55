"""The corrections file: written whole and alone, never over something that is not understood; nothing odd gets through."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TimedOut, WorldFailed
from plimsoll.plan.learned import FILE_MAX_BYTES, STARTS_MAX, Correction, Learned, Start, decoded, encoded
from plimsoll.plan.read import read_corrections
from plimsoll.plan.store import forget, store
from tests.each import cases, each

KEY = "vllm=0.25.1;gpu=h200-sxm-141gb;model=0123456789ab;tp=1;pp=1;run=ba9876543210"


def _correction(weights: int = 15 << 30, tokens: int = 8192) -> Correction:
    return Correction((Start(1024, tokens, 8192, {"weights": Learned(weights, weights + 5, 1)}),))


def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    """A correction survives the way to disk and back, and the file is nobody else's to read."""
    path = tmp_path / "state" / "corrections.json"
    store(KEY, _correction(), path)
    assert read_corrections(path) == {KEY: _correction()}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(p.name for p in path.parent.iterdir()) == ["corrections.json", "corrections.json.lock"]


def test_starts_of_one_key_add_up(tmp_path: Path) -> None:
    """A second start joins the first, the same one again counts once, and only the newest sixteen stay."""
    path = tmp_path / "corrections.json"
    for tokens in (1, 2, 2):
        store(KEY, _correction(tokens=tokens), path)
    assert [start.max_num_batched_tokens for start in read_corrections(path)[KEY].starts] == [1, 2]
    for tokens in range(3, 30):
        store(KEY, _correction(tokens=tokens), path)
    starts = read_corrections(path)[KEY].starts
    assert len(starts) == STARTS_MAX
    assert starts[-1].max_num_batched_tokens == 29


def test_the_default_place_is_the_users_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_STATE_HOME rules; a relative one is ignored, as XDG wants."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    store(KEY, _correction())
    assert (tmp_path / "xdg" / "plimsoll" / "corrections.json").is_file()
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store(KEY, _correction())
    assert (tmp_path / "home" / ".local" / "state" / "plimsoll" / "corrections.json").is_file()
    assert forget() == 1
    assert read_corrections() == {}


def test_forgetting_says_how_much(tmp_path: Path) -> None:
    """All corrections go, and forgetting nothing is no error and leaves nothing behind."""
    path = tmp_path / "corrections.json"
    assert forget(path) == 0
    assert list(tmp_path.iterdir()) == []
    store(KEY, _correction(), path)
    store(KEY.replace("tp=1", "tp=2"), _correction(), path)
    assert forget(path) == 2
    assert not path.exists()


def _file(corrections: object, version: int = 1) -> bytes:
    return json.dumps({"schema": f"plimsoll.corrections/{version}", "corrections": corrections}).encode()


def _term(*figures: object) -> dict[str, object]:
    return {KEY: [[1, 1, 1, {"weights": figures}]]}


@each("content", [*(text.encode() for text in cases("plan", "a_file_that_is_not_understood_is_left_alone")), b"[" * 100_000])
def test_a_file_that_is_not_understood_is_left_alone(tmp_path: Path, content: bytes) -> None:
    """Reading, storing and forgetting say so in one line, newer or damaged, and not a byte changes."""
    path = tmp_path / "corrections.json"
    path.write_bytes(content)
    says = "written by a newer plimsoll" if content == _file({}, 2) else "not a corrections file of plimsoll, or damaged"
    for use in (read_corrections, forget, lambda path: store(KEY, _correction(), path)):
        with pytest.raises(BadInput, match=rf"corrections\.json: {says}") as refusal:
            use(path)
        assert "\n" not in str(refusal.value)
    assert path.read_bytes() == content


def test_a_pipe_a_folder_and_a_file_without_end(tmp_path: Path) -> None:
    """No file is nothing known; what is no plain file is refused without waiting, and a huge one without being read whole."""
    assert read_corrections(tmp_path / "no" / "such" / "corrections.json") == {}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="not a regular file"):
        read_corrections(tmp_path / "pipe")
    with pytest.raises(BadInput):
        read_corrections(tmp_path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(FILE_MAX_BYTES * 100)
    with pytest.raises(BadInput, match="damaged"):
        read_corrections(tmp_path / "huge")


def test_many_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Thirty writers, thirty corrections."""
    path = tmp_path / "corrections.json"
    keys = [KEY.replace("tp=1", f"tp={number}") for number in range(1, 31)]
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda key: store(key, _correction(), path), keys))
    assert sorted(read_corrections(path)) == sorted(keys)


def test_a_lock_that_is_never_given_back(tmp_path: Path) -> None:
    """Waiting ends with one line that says who is waited for."""
    path = tmp_path / "corrections.json"
    descriptor = os.open(tmp_path / "corrections.json.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(TimedOut, match="another plimsoll"):
            store(KEY, _correction(), path, wait_seconds=0.1)
    finally:
        os.close(descriptor)
    assert not path.exists()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """A state file that is kept elsewhere is replaced there."""
    real = tmp_path / "dotfiles" / "corrections.json"
    real.parent.mkdir()
    real.write_text('{"schema": "plimsoll.corrections/1", "corrections": {}}', encoding="utf-8")
    link = tmp_path / "corrections.json"
    link.symlink_to(real)
    store(KEY, _correction(), link)
    assert link.is_symlink()
    assert list(json.loads(real.read_text(encoding="utf-8"))["corrections"]) == [KEY]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where the folder should be is the world's fault, in one line; a folder in the file's place is the user's."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(WorldFailed, match="cannot be written"):
        store(KEY, _correction(), tmp_path / "file" / "corrections.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises((BadInput, WorldFailed)):
        store(KEY, _correction(), tmp_path / "folder")
    assert (tmp_path / "folder").is_dir()


_sizes = st.integers(0, 1 << 50)


@given(st.dictionaries(st.sampled_from(["weights", "remainder", "context"]), st.tuples(_sizes, _sizes, _sizes)), _sizes)
def test_encoding_is_undone_by_decoding(terms: dict[str, tuple[int, int, int]], limit: int) -> None:
    """Every correction comes back as it was."""
    start = Start(limit, limit, limit, {name: Learned(*term) for name, term in terms.items()})
    known = {KEY: Correction((start,))}
    assert decoded(encoded(known).encode(), "f") == known
