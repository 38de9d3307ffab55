"""Hooks to balancers: real commands and real sockets, honest and otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.hooks import CommandBalancer, ReadinessBalancer, WebhookBalancer
from tests.each import each
from tests.fakes import eventually
from tests.net.raw_server import Visitor, free_port, raw_server


def run(scene: Awaitable[Any]) -> Any:
    async def go() -> Any:
        return await asyncio.wait_for(scene, 60)

    return asyncio.run(go())


def command(folder: Path, script: str, **more: Any) -> CommandBalancer:
    path = folder / "lb"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return CommandBalancer([str(path), "{verb}", "--engine={engine}"], "gpu-1 $(x)", **more)


def test_a_command_is_told_what_and_for_whom_and_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and variables as documented; no shell looks at them, and guard's own secrets are not passed on."""
    monkeypatch.setenv("PLIMSOLL_TOKEN", "a-secret-of-guards")
    script = f'cd {tmp_path}; printf "%s\\n" "$@" > words; env > env; echo "$OLDPWD" > cwd; cat >> words; echo fine'
    balancer = command(tmp_path, script, environment={"LB_POOL": "3"})
    balancer.epoch = 42
    told = run(balancer.take_out())
    assert (told.is_done, told.message) == (True, "fine")
    assert (tmp_path / "words").read_text() == "take-out\n--engine=gpu-1 $(x)\n"
    found = (tmp_path / "env").read_text().splitlines()
    assert {"PLIMSOLL_VERB=take-out", "PLIMSOLL_ENGINE=gpu-1 $(x)", "PLIMSOLL_EPOCH=42", "LB_POOL=3"} <= set(found)
    assert "a-secret-of-guards" not in "".join(found)
    assert (tmp_path / "cwd").read_text() == "/\n"


@pytest.mark.parametrize(
    ("script", "done", "is_out", "connections"),
    [
        ("exit 0", True, True, None),
        ("echo 7", True, True, 7),
        ("echo some; echo 0", True, True, 0),
        ("echo -7", True, True, None),
        ("echo 99999999999999999999", True, True, None),
        ("exit 3", False, False, None),
        ("echo 4; exit 3", False, False, None),
        ("exit 1", False, None, None),
        ("exit 127", False, None, None),
        ("kill -9 $$", None, None, None),
    ],
)
def test_exit_codes_mean_what_the_contract_says(
    tmp_path: Path, script: str, done: bool | None, is_out: bool | None, connections: int | None
) -> None:
    """0 yes, 3 no or not yet, others failed; a question that failed is not answered."""
    balancer = command(tmp_path, script)

    async def scene() -> None:
        for told in (await balancer.take_out(), await balancer.put_back()):
            assert told.is_done is done
            assert told.facts.get("again", False) is (script.endswith("exit 3"))
        assert await balancer.is_out() is is_out
        assert await balancer.connections() == connections

    run(scene())


def test_the_last_line_is_the_sentence_and_holds_no_secret(tmp_path: Path) -> None:
    """Of the output, else of the error output where it failed; clean and short."""
    for script, says in (
        ("echo first; echo last; echo why >&2", "last"),
        ("echo why >&2; exit 1", "exit code 1: why"),
        ("printf 'a\\033[2Jb\\n'", "a [2Jb"),
        ("echo --api-key=sk-1234567890abcdefghijkl", "--api-key=[redacted]"),
    ):
        assert run(command(tmp_path, script).take_out()).message == says
    told = run(command(tmp_path, "head -c 2000000 /dev/zero | tr '\\0' x").take_out())
    assert told.is_done is True
    assert len(told.message) <= 300


def test_one_that_does_not_end_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """After the limit the group is gone, and what it did is not known."""
    script = f"(while :; do sleep 0.05; done) & echo $! > {tmp_path}/pid; trap '' TERM; while :; do sleep 1; done"
    balancer = command(tmp_path, script, deadline_s=0.5)
    began = time.monotonic()
    told = run(balancer.take_out())
    assert told.is_done is None
    assert "killed" in told.message
    assert time.monotonic() - began < 5
    child = int((tmp_path / "pid").read_text())
    eventually(lambda: not is_alive(child))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def test_what_is_left_behind_with_the_output_open_holds_nobody_up(tmp_path: Path) -> None:
    """The command has ended: that counts, whoever else still holds its output."""
    balancer = command(tmp_path, f"echo done; sleep 30 & echo $! > {tmp_path}/pid")
    began = time.monotonic()
    told = run(balancer.take_out())
    os.kill(int((tmp_path / "pid").read_text()), 9)
    assert (told.is_done, told.message) == (True, "done")
    assert time.monotonic() - began < 10


def test_one_that_gives_up_waiting_leaves_no_command_behind(tmp_path: Path) -> None:
    """Cancelled in the middle, the group is killed, too."""
    balancer = command(tmp_path, f"echo $$ > {tmp_path}/pid; sleep 30")

    async def scene() -> None:
        task = asyncio.create_task(balancer.take_out())
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run(scene())
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not is_alive(pid))


def test_a_hundred_calls_leave_no_open_file(tmp_path: Path) -> None:
    """Every pipe is closed again."""
    balancer = command(tmp_path, "echo 1")

    async def scene() -> tuple[int, int]:
        await balancer.connections()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(50):
            assert await balancer.connections() == 1
        await asyncio.sleep(0.05)
        return before, len(list(Path("/proc/self/fd").iterdir()))

    before, after = run(scene())
    assert after <= before + 2


@pytest.mark.parametrize("path", ["/nowhere/lb", "/etc/passwd", "/"])
def test_one_that_cannot_be_started_did_nothing(path: str) -> None:
    """Not done for sure, and a question is not answered."""
    balancer = CommandBalancer([path], "a")

    async def scene() -> None:
        assert (await balancer.take_out()).is_done is False
        assert await balancer.is_out() is None

    run(scene())


@pytest.mark.parametrize("words", [[], ["lb"], ["./lb"], ["/bin/lb", "a\0b"]])
def test_a_command_that_a_search_path_would_decide_is_refused(words: list[str]) -> None:
    """It is named whole."""
    with pytest.raises(BadInput):
        CommandBalancer(words, "a")


async def asked(answer: bytes, verb: str, heads: list[str] | None = None, bodies: list[Any] | None = None) -> Any:
    """What a webhook that says these bytes makes of one verb."""

    async def talk(visitor: Visitor) -> None:
        head = await visitor.asked()
        length = int(head.lower().split("content-length:")[1].split()[0])
        body = json.loads(await visitor.reader.readexactly(length))
        if heads is not None and bodies is not None:
            heads.append(head)
            bodies.append(body)
        await visitor.say(answer)

    async with raw_server(talk) as server:
        balancer = WebhookBalancer(f"{server.url}/lb?pool=3", "gpu-1", "Bearer a-login", deadline_s=2)
        balancer.epoch = 42
        return await getattr(balancer, verb)()


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_webhook_is_asked_as_the_contract_says() -> None:
    """One POST of one JSON object, with the login in its header."""
    heads: list[str] = []
    bodies: list[Any] = []
    told = run(asked(reply(b'{"done": true, "says": "out of pool 3"}'), "take_out", heads, bodies))
    assert (told.is_done, told.message) == (True, "out of pool 3")
    assert heads[0].startswith("POST /lb?pool=3 HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer a-login\r\n" in heads[0]
    assert bodies == [{"schema": "plimsoll.hook/1", "verb": "take-out", "engine": "gpu-1", "epoch": 42}]


@each(
    ("answer", "done", "is_out", "connections"),
    [
        (reply(b'{"done": true}'), True, True, None),
        (reply(b'{"done": false}'), False, False, None),
        (reply(b'{"done": null}'), None, None, None),
        (reply(b'{"done": true, "connections": 4}'), True, True, 4),
        (reply(b'{"done": null, "connections": 4}'), None, None, None),
        (reply(b'{"done": true, "connections": -4}'), True, True, None),
        (reply(b'{"done": true, "connections": "4"}'), True, True, None),
        (reply(b'{"done": 1}'), None, None, None),
        (reply(b'{"says": "well"}'), None, None, None),
        (reply(b"[true]"), None, None, None),
        (reply(b"", "204 No Content"), None, None, None),
        (reply(b'{"done": true}', "302 Found\r\nLocation: /other"), False, None, None),
        (reply(b'{"done": true}', "404 Not Found"), False, None, None),
        (reply(b'{"done": true}', "500 Oh"), None, None, None),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n{"done"\r\n7\r\n: true}\r\n0\r\n\r\n', True, True, None),
        (b"", None, None, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", None, None, None),
    ],
)
def test_a_webhooks_answers_mean_what_the_contract_says(
    answer: bytes, done: bool | None, is_out: bool | None, connections: int | None
) -> None:
    """True, false and null by name; what is none of them is not known."""

    async def scene() -> None:
        assert (await asked(answer, "take_out")).is_done is done
        assert (await asked(answer, "put_back")).is_done is done
        assert await asked(answer, "is_out") is is_out
        assert await asked(answer, "connections") == connections

    run(scene())


def test_a_webhook_where_nobody_is_did_nothing() -> None:
    """Not done for sure; its address is shown without its query, and its login never."""
    balancer = WebhookBalancer(f"http://127.0.0.1:{free_port()}/lb?key=k", "a", "Basic c2VjcmV0")

    async def scene() -> None:
        told = await balancer.take_out()
        assert told.is_done is False
        assert "c2VjcmV0" not in f"{told}{balancer.label}"
        assert "key=k" not in balancer.label
        assert await balancer.is_out() is None

    run(scene())


def test_with_readiness_alone_nothing_is_claimed() -> None:
    """There is nothing to tell, and nobody to ask: whether it is out is never known."""

    async def scene() -> None:
        balancer = ReadinessBalancer()
        for told in (await balancer.take_out(), await balancer.put_back()):
            assert (told.is_done, told.facts["readiness"]) == (True, True)
        assert await balancer.is_out() is None
        assert await balancer.connections() is None

    run(scene())


def test_a_real_interpreter_as_a_hook(tmp_path: Path) -> None:
    """Any program will do, also with words that look like places of ours."""
    script = tmp_path / "lb.py"
    script.write_text("import sys; print(sys.argv[1:])", encoding="utf-8")
    balancer = CommandBalancer([sys.executable, str(script), "{verb}/{engine}", "{other}", "{{verb}}"], "{verb}")
    assert run(balancer.put_back()).message == "['put-back/{verb}', '{other}', '{put-back}']"
