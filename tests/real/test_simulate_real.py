"""The scheduler is compiled once, in a process of its own; a run with several groups of layers takes long to compile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.simulate import compiled
from tests.simulate.test_compiled import SAYS_WHEN, _python
from tests.simulate.test_invariants import Case, _cases
from tests.simulate.test_open_run import assert_as_replayed


@pytest.mark.skipif(not compiled.HAS_NUMBA, reason="numba is not installed")
def test_compiling_is_announced_once_and_kept(tmp_path: Path) -> None:
    """A first run says that it compiles, also where no home can be written; the next one finds it done and says nothing."""
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "home")
    for compiled_now in ("1", "0"):
        said = _python("-c", SAYS_WHEN, HOME=nowhere, XDG_CACHE_HOME=nowhere, TMPDIR=str(tmp_path))
        assert said.split() == ["True", compiled_now, "3"]
        assert [*(tmp_path / f"plimsoll-{os.getuid()}" / "compiled").rglob("*.nbc")]


@given(_cases(hybrid=True), st.sampled_from([7, 500, 3000, 10**6]))
def test_with_groups_it_is_the_replay_of_all(case: Case, piece_ns: int) -> None:
    """Requests handed to an open run with full, sliding and Mamba groups: every token at the same nanosecond as in a replay."""
    assert_as_replayed(case, piece_ns)
