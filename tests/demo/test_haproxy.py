"""HAProxy before the demo's engines: where its socket is, and what is said when it does not start."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from plimsoll.demo import haproxy
from plimsoll.errors import WorldFailed


def test_a_folder_that_is_too_deep_for_a_socket_gets_a_short_one(tmp_path: Path) -> None:
    """The kernel takes 107 bytes of a path; what was made for it is removed with the balancer."""
    deep = haproxy.HAProxy(tmp_path / ("x" * 100), {})
    place = Path(deep.table("a").split('"')[1])
    assert len(str(place)) <= haproxy.LONGEST_SOCKET_PATH
    assert place.parent.is_dir()
    asyncio.run(deep.stop())
    assert not place.parent.exists()


def test_what_haproxy_says_is_the_cause_and_not_that_there_was_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first alert names the line that is wrong, its last only that something was."""
    program = tmp_path / "haproxy"
    program.write_text("#!/bin/sh\necho '[NOTICE] hello'\necho '[ALERT] the cause'\necho '[ALERT] Fatal errors'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert shutil.which("haproxy") == str(program)
    with pytest.raises(WorldFailed, match=r"did not start: \[ALERT\] the cause"):
        asyncio.run(haproxy.HAProxy(tmp_path, {}).start())
