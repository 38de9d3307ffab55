"""HAProxy before the lab's engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lab import haproxy


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
