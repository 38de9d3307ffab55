"""What Docker's API is asked over a real Unix socket, and what is made of its answers; Docker itself is not here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import BadInput
from plimsoll.guard.adapters.docker import DockerContainer
from tests.net.raw_answers import Answer, Answers, answer, on_unix_socket

STATE = {"Status": "running", "Running": True, "Restarting": False, "Pid": 4711, "ExitCode": 0, "OOMKilled": False}


def container(path: str = "vllm", args: tuple[str, ...] = ("serve",), **state: Any) -> dict[str, Any]:
    return {"Id": "abc", "Path": path, "Args": list(args), "RestartCount": 1, "State": {**STATE, **state},
            "Config": {"StopSignal": "SIGTERM"}, "HostConfig": {"Init": None}}  # fmt: skip


class Docker:
    """A daemon with one container."""

    def __init__(self, found: dict[str, Any], **replies: Answer) -> None:
        self.found, self.replies = found, replies
        self.exit_code = 0

    def reply(self, line: str) -> Answer:
        verb = line.split()[1].split("/")[-1].split("?")[0]
        if verb in self.replies:
            return self.replies[verb]
        if verb in ("stop", "kill"):
            code = 137 if verb == "kill" else self.exit_code
            self.found["State"].update(Running=False, Status="exited", Pid=0, ExitCode=code)
        if verb == "start":
            self.found["State"].update(Running=True, Pid=4800)
        return answer(200, self.found, chunked=True) if verb == "json" else answer(204)


def run(tmp_path: Path, docker: Docker, act: Callable[[DockerContainer], Awaitable[None]]) -> Answers:
    """With a container called vllm-1 behind this daemon."""

    async def inner() -> Answers:
        async with on_unix_socket(tmp_path / "docker.sock", docker.reply) as answers:
            await act(DockerContainer("vllm-1", str(tmp_path / "docker.sock"), grace_s=0.5))
            return answers

    return asyncio.run(asyncio.wait_for(inner(), 60))


def test_stop_and_start(tmp_path: Path) -> None:
    """Inspected, stopped with its seconds, seen to be over, started: these requests and no others."""

    async def act(engine: DockerContainer) -> None:
        assert await engine.is_running() is True
        stopped = await engine.stop(30.4)
        assert stopped.is_done, stopped
        expected = {"exit_code": 0, "restarts": 1, "oom_killed": False, "stop_signal": "SIGTERM", "may_not_pass_on": False,
                    "how": "term", "was_running": True}  # fmt: skip
        assert stopped.facts == expected
        assert await engine.is_running() is False
        assert (await engine.stop(30)).facts["was_running"] is False
        assert (await engine.start()).is_done
        assert (await engine.start()).facts["running"] is True

    answers = run(tmp_path, Docker(container()), act)
    assert [line for line in answers.lines if "json" not in line] == [
        "POST /containers/vllm-1/stop?t=30", "POST /containers/vllm-1/start"
    ]  # fmt: skip
    assert answers.got[0].startswith(b"GET /containers/vllm-1/json HTTP/1.1\r\nHost: localhost\r\n")
    assert all(b"\r\nConnection: close\r\n" in one for one in answers.got)


@pytest.mark.parametrize(
    ("path", "args", "may_not"),
    [
        ("/bin/sh", ("-c", "vllm serve m"), True),
        ("/bin/bash", ("/start.sh",), True),
        ("/bin/sh", ("-c", "export A=1; exec vllm serve m"), False),
        ("/usr/bin/tini", ("--", "vllm"), False),
        ("vllm", ("serve",), False),
    ],
)
def test_a_shell_as_first_process_is_said(tmp_path: Path, path: str, args: tuple[str, ...], may_not: bool) -> None:
    """It was killed when the time was over, and that is why."""
    docker = Docker(container(path, args))
    docker.exit_code = 137

    async def act(engine: DockerContainer) -> None:
        outcome = await engine.stop(1.0)
        assert (outcome.is_done, outcome.facts["how"]) == (True, "kill")
        assert outcome.facts["may_not_pass_on"] is may_not
        assert ("does not pass signals on" in outcome.message) is may_not

    run(tmp_path, docker, act)


def test_a_daemon_that_hangs_in_stop_is_told_to_kill(tmp_path: Path) -> None:
    """No answer in time: SIGKILL, and it is looked at whether that helped."""

    async def act(engine: DockerContainer) -> None:
        outcome = await engine.stop(1.0)
        assert (outcome.is_done, outcome.facts["how"]) == (True, "kill")

    answers = run(tmp_path, Docker(container(), stop=30.0), act)
    assert "POST /containers/vllm-1/kill?signal=SIGKILL" in answers.lines


@pytest.mark.parametrize(
    "told", [None, b"nonsense\r\n\r\n", answer(200, []), answer(200, {"State": 5}), answer(500, {"message": "x"})]
)
def test_answers_that_say_nothing(tmp_path: Path, told: Answer) -> None:
    """Nobody knows whether it runs; nothing is stopped or started."""

    async def act(engine: DockerContainer) -> None:
        assert await engine.is_running() is None
        assert (await engine.stop(1.0)).is_done is None
        assert (await engine.start()).is_done is None
        assert await engine.pids() == ()

    answers = run(tmp_path, Docker(container(), json=told), act)
    assert all("json" in line for line in answers.lines)


def test_refusals_and_absence(tmp_path: Path) -> None:
    """No such container, a start that Docker refuses, no Docker at all: each in one sentence."""

    async def absent(engine: DockerContainer) -> None:
        assert (await engine.stop(1.0)).facts == {"status": 404}

    run(tmp_path, Docker({}, json=answer(404, {"message": "No such container"})), absent)

    async def refused(engine: DockerContainer) -> None:
        outcome = await engine.start()
        assert outcome.is_done is False
        assert "port is already allocated" in outcome.message

    run(tmp_path, Docker(container(Running=False), start=answer(500, {"message": "port is already allocated"})), refused)
    nobody = DockerContainer("x1", str(tmp_path / "none.sock"))
    assert asyncio.run(nobody.is_running()) is None
    assert asyncio.run(nobody.stop(1.0)).is_done is None


def test_one_that_docker_starts_again_itself(tmp_path: Path) -> None:
    """Between two tries of Docker's own nobody knows; it is not started beside."""

    async def act(engine: DockerContainer) -> None:
        assert await engine.is_running() is None
        assert (await engine.start()).is_done is False

    run(tmp_path, Docker(container(Running=False, Restarting=True)), act)


def test_its_processes(tmp_path: Path) -> None:
    """The first one, then what `top` shows; odd rows are left out."""
    rows = [["root", "4711", "1"], ["root", "4712", "4711"], ["root"], "x", ["root", "-3", "1"]]
    top = answer(200, {"Titles": ["UID", "PID", "PPID"], "Processes": rows})

    async def act(engine: DockerContainer) -> None:
        assert await engine.pids() == (4711, 4712)

    run(tmp_path, Docker(container(), top=top), act)


@pytest.mark.parametrize("name", ["", "-x", "a/b", "a b", "x?y", "../json"])
def test_names_that_are_none(name: str) -> None:
    """No name leads to another path."""
    with pytest.raises(BadInput, match="no name of a container"):
        DockerContainer(name)


@pytest.mark.parametrize(
    ("state", "policy", "by_hand"),
    [
        ({"ExitCode": 0}, "no", True),
        ({"ExitCode": 143}, "", True),
        ({"ExitCode": 137}, "no", None),
        ({"ExitCode": 137}, "always", True),
        ({"ExitCode": 137}, "unless-stopped", True),
        ({"ExitCode": 137, "OOMKilled": True}, "always", None),
        ({"ExitCode": 0, "OOMKilled": None}, "no", None),
        ({"ExitCode": 1}, "on-failure", None),
        ({"Running": True}, "no", False),
        ({"Restarting": True}, "always", False),
    ],
)
def test_what_somebody_stopped_is_told_from_what_ended(
    tmp_path: Path, state: dict[str, Any], policy: str, by_hand: bool | None
) -> None:
    """By its exit code, and by whether Docker would have started it again itself; what is not sure is not known."""
    found = container(**{"Running": False, "Status": "exited", **state})
    found["HostConfig"]["RestartPolicy"] = {"Name": policy, "MaximumRetryCount": 0}

    async def act(engine: DockerContainer) -> None:
        outcome = await engine.last_exit()
        assert (outcome.is_done, outcome.facts.get("by_hand", False)) == (by_hand, by_hand is True)

    run(tmp_path, Docker(found), act)


def test_how_a_container_ended_that_is_not_there_is_not_known(tmp_path: Path) -> None:
    """Removed, or a daemon that does not answer: neither says that somebody stopped it."""

    async def act(engine: DockerContainer) -> None:
        assert (await engine.last_exit()).is_done is None

    run(tmp_path, Docker(container(), json=answer(404, {"message": "No such container"})), act)
    assert asyncio.run(DockerContainer("x", str(tmp_path / "nobody.sock")).last_exit()).is_done is None
