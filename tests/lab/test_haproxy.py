"""HAProxy before the lab's engines: where its socket is, and what is said when it does not start."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from lab import haproxy
from plimsoll.errors import WorldFailed


def test_a_folder_too_deep_for_a_socket_gets_a_short_one_and_the_cause_of_a_failed_start_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes 107 bytes of a path; HAProxy's first alert names the line that is wrong, its last only that one was."""
    deep = haproxy.RunningHAProxy(tmp_path / ("x" * 100), {})
    place = Path(deep.table("a").split('"')[1])
    assert len(str(place)) <= haproxy.LONGEST_SOCKET_PATH
    assert place.parent.is_dir()
    asyncio.run(deep.stop())
    assert not place.parent.exists()

    program = tmp_path / "haproxy"
    program.write_text("#!/bin/sh\necho '[NOTICE] hello'\necho '[ALERT] the cause'\necho '[ALERT] Fatal errors'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert shutil.which("haproxy") == str(program)
    with pytest.raises(WorldFailed, match=r"did not start: \[ALERT\] the cause"):
        asyncio.run(haproxy.RunningHAProxy(tmp_path, {}).start())


def test_who_gets_work_is_what_haproxy_says(tmp_path: Path) -> None:
    """Up is up, also while a check is under way; a server that drains, is held or is down gets none."""
    said = "# pxname,svname,status,wredis\ndemo,a,UP,0\ndemo,b,UP 1/2,0\ndemo,c,DRAIN,0\ndemo,d,MAINT,0\ndemo,BACKEND,UP,4\n"

    async def main() -> tuple[dict[str, bool], int | None]:
        async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readline() == b"show stat\n"
            writer.write(said.encode())
            writer.close()

        server = await asyncio.start_unix_server(visited, str(tmp_path / "haproxy.sock"))
        balancer = haproxy.RunningHAProxy(tmp_path, dict.fromkeys("abcd", 1))
        async with server:
            return await balancer.takes_work(), await balancer.count_sent_again()

    assert asyncio.run(main()) == ({"a": True, "b": True, "c": False, "d": False}, 4)
    assert asyncio.run(haproxy.RunningHAProxy(tmp_path / "nowhere", {"a": 1}).takes_work()) == {}
