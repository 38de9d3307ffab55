"""The token that guard leaves for its user: nobody else can read it, and only its own is taken away."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from plimsoll.guard.api import token


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    """Mode 0600 in a folder of mode 0700, whatever was there before; a token that is not written whole replaces none."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    victim = tmp_path / "victim"
    victim.write_text("keep", encoding="ascii")
    token.write_token(1, "first", environ)
    path = token.token_path(1, environ)
    assert path is not None
    path.unlink()
    path.symlink_to(victim)
    token.write_token(1, "second", environ)
    assert (path.read_text(encoding="ascii"), victim.read_text(encoding="ascii")) == ("second\n", "keep")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(UnicodeEncodeError):
        token.write_token(1, "half \N{SNOWMAN}", environ)
    assert path.read_text(encoding="ascii") == "second\n"


def test_only_its_own_is_taken_away(tmp_path: Path) -> None:
    """A guard that came later on the same port has left another."""
    environ = {"HOME": str(tmp_path)}
    token.write_token(1, "mine", environ)
    path = token.token_path(1, environ)
    assert path is not None
    token.remove_token(1, "another", environ)
    assert path.exists()
    token.remove_token(1, "mine", environ)
    token.remove_token(1, "mine", environ)
    assert not path.exists()


def test_without_a_folder_there_is_no_place() -> None:
    """Then the API is not served, and that is said."""
    assert token.token_path(1, {}) is None
    with pytest.raises(OSError, match="neither"):
        token.write_token(1, "x", {})
