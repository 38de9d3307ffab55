"""Hooks to balancers: real commands and real sockets, honest and otherwise; how a command is run is in test_run_command.py."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.hooks import CommandBalancer, ReadinessBalancer, WebhookBalancer
from tests.each import cases, each
from tests.net.raw_server import Visitor, free_port, raw_server


def command(folder: Path, script: str, **more: Any) -> CommandBalancer:
    path = folder / "lb"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return CommandBalancer([str(path), "{verb}", "--engine={engine}"], "gpu-1 $(x)", **more)


async def all_answers(balancer: CommandBalancer | WebhookBalancer | ReadinessBalancer) -> list[Any]:
    """Whether it was taken out and put back, whether it is out, and its connections."""
    acted = [(await balancer.take_out()).is_done, (await balancer.put_back()).is_done]
    return [*acted, await balancer.is_out(), await balancer.connections()]


def test_a_command_is_told_what_and_for_whom_and_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and variables as documented; no shell looks at them, and guard's own secrets are not passed on."""
    monkeypatch.setenv("PLIMSOLL_TOKEN", "a-secret-of-guards")
    script = f'cd {tmp_path}; printf "%s\\n" "$@" > words; env > env; echo "$OLDPWD" > cwd; cat >> words; echo fine'
    balancer = command(tmp_path, script, environment={"LB_POOL": "3"})
    balancer.epoch = 42
    told = asyncio.run(balancer.take_out())
    assert (told.is_done, told.message) == (True, "fine")
    assert (tmp_path / "words").read_text() == "take-out\n--engine=gpu-1 $(x)\n"
    found = (tmp_path / "env").read_text().splitlines()
    assert {"PLIMSOLL_VERB=take-out", "PLIMSOLL_ENGINE=gpu-1 $(x)", "PLIMSOLL_EPOCH=42", "LB_POOL=3"} <= set(found)
    assert "a-secret-of-guards" not in "".join(found)
    assert (tmp_path / "cwd").read_text() == "/\n"
    # Any program will do, also with words that look like places of ours.
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "{verb}/{engine}", "{other}", "{{verb}}"]
    told = asyncio.run(CommandBalancer(words, "{verb}").put_back())
    assert told.message == "['put-back/{verb}', '{other}', '{put-back}']"


@each(("script", "done", "is_out", "connections"), cases("guard", "exit codes of a hook"))
def test_exit_codes_mean_what_the_contract_says(
    tmp_path: Path, script: str, done: bool | None, is_out: bool | None, connections: int | None
) -> None:
    """0 yes, 3 no or not yet, others failed; a question that failed is not answered."""
    balancer = command(tmp_path, script)
    assert asyncio.run(all_answers(balancer)) == [done, done, is_out, connections]
    assert asyncio.run(balancer.take_out()).facts.get("again", False) is (script.endswith("exit 3"))


def test_what_a_command_says_and_what_one_that_did_not_end_or_begin_has_done(tmp_path: Path) -> None:
    """Its last line, clean and short; after its limit it may have done it; one that cannot be started did nothing."""
    for script, says in cases("guard", "what commands say"):
        assert asyncio.run(command(tmp_path, script).take_out()).message == says
    told = asyncio.run(command(tmp_path, "head -c 2000000 /dev/zero | tr '\\0' x").take_out())
    assert told.is_done is True
    assert len(told.message) <= 300
    told = asyncio.run(command(tmp_path, "sleep 30", deadline_s=0.2).take_out())
    assert told.is_done is None
    assert "killed" in told.message
    for path in ("/nowhere/lb", "/etc/passwd", "/"):
        assert asyncio.run(all_answers(CommandBalancer([path], "a"))) == [False, False, None, None]
    for words in ([], ["lb"], ["./lb"], ["/bin/lb", "a\0b"]):
        with pytest.raises(BadInput, match="the whole path of a program"):
            CommandBalancer(words, "a")


async def asked(answer: bytes, seen: list[Any]) -> list[Any]:
    """What a webhook that says these bytes makes of every verb; `seen` gets heads and bodies."""

    async def talk(visitor: Visitor) -> None:
        head = await visitor.asked()
        length = int(head.lower().split("content-length:")[1].split()[0])
        seen.append((head, json.loads(await visitor.reader.readexactly(length))))
        await visitor.say(answer)

    async with raw_server(talk) as server:
        balancer = WebhookBalancer(f"{server.url}/lb?pool=3", "gpu-1", "Bearer a-login", deadline_s=2)
        balancer.epoch = 42
        return [(await balancer.take_out()).message, *await all_answers(balancer)]


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_webhook_is_asked_as_the_contract_says_and_where_nobody_is_nothing_was_done() -> None:
    """One POST of one JSON object, the login in its header; query and login are not shown; readiness claims nothing."""
    seen: list[Any] = []
    assert asyncio.run(asked(reply(b'{"done": true, "says": "out of pool 3"}'), seen))[:2] == ["out of pool 3", True]
    assert seen[0][0].startswith("POST /lb?pool=3 HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer a-login\r\n" in seen[0][0]
    assert seen[0][1] == {"schema": "plimsoll.hook/1", "verb": "take-out", "engine": "gpu-1", "epoch": 42}
    balancer = WebhookBalancer(f"http://127.0.0.1:{free_port()}/lb?key=k", "a", "Basic c2VjcmV0")
    assert asyncio.run(all_answers(balancer)) == [False, False, None, None]
    assert "c2VjcmV0" not in f"{asyncio.run(balancer.take_out())}{balancer.label}"
    assert "key=k" not in balancer.label
    with pytest.raises(BadInput, match="letters that a header cannot have"):
        WebhookBalancer("http://a", "a", "two\nlines")
    alone = ReadinessBalancer()
    assert asyncio.run(all_answers(alone)) == [True, True, None, None]
    assert asyncio.run(alone.take_out()).facts["readiness"] is asyncio.run(alone.put_back()).facts["readiness"] is True


@each(
    ("answer", "done", "is_out", "connections"),
    [
        *((reply(body.encode(), status), *wanted) for status, body, *wanted in cases("guard", "answers of a webhook")),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n{"done"\r\n7\r\n: true}\r\n0\r\n\r\n', True, True, None),
        (b"", None, None, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", None, None, None),
    ],
)
def test_a_webhooks_answers_mean_what_the_contract_says(
    answer: bytes, done: bool | None, is_out: bool | None, connections: int | None
) -> None:
    """True, false and null by name; what is none of them is not known."""
    assert asyncio.run(asked(answer, []))[1:] == [done, done, is_out, connections]
