"""Hashes of a prompt's blocks: what begins alike looks alike, and nothing else does."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.recorder import iter_hashes, shared_salt

IDS = st.lists(st.integers(-1, 300_000), max_size=200)


def _hashes(*arguments: Any, **named: Any) -> list[str]:
    return list(iter_hashes(*arguments, **named))


@given(IDS, IDS, st.integers(1, 20))
def test_two_prompts_share_hashes_exactly_as_far_as_their_blocks_are_equal(one: list[int], two: list[int], block: int) -> None:
    """The first hash that differs is that of the first block that differs, and all after it differ too."""
    two = one[: len(one) // 2] + two
    first, second = _hashes(one, b"salt", block), _hashes(two, b"salt", block)
    for at, (left, right) in enumerate(zip(first, second, strict=False)):
        assert (left == right) == (one[: (at + 1) * block] == two[: (at + 1) * block])


@given(IDS)
def test_only_full_blocks_have_a_hash(ids: list[int]) -> None:
    """Sixteen hex digits for each full block of sixteen; the rest of a prompt has none."""
    found = _hashes(ids, b"salt")
    assert len(found) == len(ids) // 16
    assert all(re.fullmatch("[0-9a-f]{16}", one) for one in found)


def test_what_the_cache_does_not_share_has_other_hashes() -> None:
    """Another salt, adapter or picture from its block on; without the key no hash follows from the one before it."""
    assert not set(_hashes(list(range(64)), b"a")) & set(_hashes(list(range(64)), b"b"))
    ids = list(range(32))
    whole = _hashes(ids, b"key one")
    guess = _hashes([*ids[16:]], bytes.fromhex(whole[0]))
    assert whole[1] not in guess
    ids = list(range(32))
    assert not set(_hashes(ids, b"k", seed="adapter")) & set(_hashes(ids, b"k"))
    ids = [7] * 64
    cat, dog, none = (_hashes(ids, b"k", marks=marks) for marks in (((20, "cat"),), ((20, "dog"),), ()))
    assert cat[0] == dog[0] == none[0]
    assert len({cat[1], dog[1], none[1]}) == 3
    assert not set(cat[1:]) & set(dog[1:])


def test_servers_of_one_start_share_a_salt(tmp_path: Path) -> None:
    """The one that was set, or a random one that the first writes for this user alone; another start has another."""
    assert shared_salt("pinch", str(tmp_path), os.getpid()) == b"pinch"
    assert list(tmp_path.iterdir()) == []
    salt = shared_salt("", str(tmp_path), os.getpid())
    assert len(salt) == 32
    assert shared_salt("", str(tmp_path), os.getpid()) == salt
    assert shared_salt("", str(tmp_path), os.getppid()) != salt
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_salts_of_servers_that_are_gone_are_removed(tmp_path: Path) -> None:
    """And nothing else in the folder is."""
    for name in ("salt-999999999-1", "salt-x", "worker-1.json"):
        (tmp_path / name).write_bytes(b"x" * 32)
    shared_salt("", str(tmp_path), os.getpid())
    left = {file.name for file in tmp_path.iterdir()}
    assert "salt-999999999-1" not in left
    assert {"salt-x", "worker-1.json"} < left


def test_without_a_folder_or_with_a_torn_file_the_salt_is_this_process_own(tmp_path: Path) -> None:
    """A salt of too few bytes is not used, and a folder that cannot be written is no error."""
    assert len(shared_salt("", None, os.getpid())) == 32
    assert len(shared_salt("", str(tmp_path / "missing"), os.getpid())) == 32
    shared_salt("", str(tmp_path), os.getpid())
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"torn")
    assert len(shared_salt("", str(tmp_path), os.getpid())) == 32
