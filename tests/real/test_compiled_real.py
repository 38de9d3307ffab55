"""The scheduler is compiled once, in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll.simulate import compiled
from tests.simulate.test_compiled import SAYS_WHEN, _python


@pytest.mark.skipif(not compiled.HAS_NUMBA, reason="numba is not installed")
def test_compiling_is_announced_once_and_kept(tmp_path: Path) -> None:
    """A first run says that it compiles, also where no home can be written; the next one finds it done and says nothing."""
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "home")
    cold = _python("-c", SAYS_WHEN, HOME=nowhere, XDG_CACHE_HOME=nowhere, TMPDIR=str(tmp_path))
    assert cold.split() == ["True", "1", "3"]
    kept = tmp_path / f"plimsoll-{os.getuid()}" / "compiled"
    assert [path for path in kept.rglob("*") if path.suffix == ".nbc"]
    warm = _python("-c", SAYS_WHEN, HOME=nowhere, XDG_CACHE_HOME=nowhere, TMPDIR=str(tmp_path))
    assert warm.split() == ["True", "0", "3"]
