"""What Docker's API is asked over a real Unix socket, and what is made of its answers; Docker itself is not here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from plimsoll.guard.adapters.docker import DockerConfig, DockerContainer
from tests.each import cases, each, in_loop
from tests.net.raw_answers import Answer, Answers, answer, on_unix_socket

STATE = {"Status": "running", "Running": True, "Restarting": False, "Pid": 4711, "ExitCode": 0, "OOMKilled": False}
ABSENT = answer(404, {"message": "No such container"})


def container(path: str = "vllm", args: tuple[str, ...] = ("serve",), policy: str = "", **state: Any) -> dict[str, Any]:
    return {"Id": "abc", "Path": path, "Args": list(args), "State": {**STATE, **state},
            "HostConfig": {"Init": None, "RestartPolicy": {"Name": policy}}}  # fmt: skip


@asynccontextmanager
async def docker(
    tmp_path: Path, found: dict[str, Any], exit_code: int = 0, **replies: Answer
) -> AsyncIterator[tuple[DockerContainer, Answers]]:
    """A daemon with one container, vllm-1, and what it is asked; a verb that has its own reply does nothing."""

    def reply(line: str) -> Answer:
        verb = line.split()[1].split("/")[-1].split("?")[0]
        if verb in replies:
            return replies[verb]
        if verb in ("stop", "kill"):
            found["State"].update(Running=False, Status="exited", Pid=0, ExitCode=137 if verb == "kill" else exit_code)
        if verb == "start":
            found["State"].update(Running=True, Pid=4800)
        return answer(200, found, chunked=True) if verb == "json" else answer(204)

    async with on_unix_socket(tmp_path / "docker.sock", reply) as answers:
        engine = DockerContainer(DockerConfig("vllm-1", str(tmp_path / "docker.sock")))
        engine.grace_s = 0.5
        yield engine, answers
    (tmp_path / "docker.sock").unlink(missing_ok=True)


@in_loop
async def test_stop_and_start_and_a_daemon_that_hangs_in_stop(tmp_path: Path) -> None:
    """Inspected, stopped with its seconds, seen to be over, started: no other requests; no answer in time: SIGKILL."""
    async with docker(tmp_path, container()) as (engine, answers):
        assert await engine.is_running() is True
        stopped = await engine.stop(30.4)
        assert stopped.is_done, stopped
        assert stopped.facts == {"exit_code": 0, "oom_killed": False, "how": "term", "was_running": True}
        assert await engine.is_running() is False
        assert (await engine.stop(30)).facts["was_running"] is False
        assert (await engine.start()).is_done
        assert (await engine.start()).message == "the container runs already"
    assert [line for line in answers.lines if "json" not in line] == [
        "POST /containers/vllm-1/stop?t=30", "POST /containers/vllm-1/start"
    ]  # fmt: skip
    assert answers.got[0].startswith(b"GET /containers/vllm-1/json HTTP/1.1\r\nHost: localhost\r\n")
    assert all(b"\r\nConnection: close\r\n" in one for one in answers.got)
    async with docker(tmp_path, container(), stop=30.0) as (engine, answers):
        outcome = await engine.stop(1.0)
        assert (outcome.is_done, outcome.facts["how"]) == (True, "kill")
    assert "POST /containers/vllm-1/kill?signal=SIGKILL" in answers.lines


@each(("path", "args", "may_not"), cases("guard", "first processes of a container"))
@in_loop
async def test_a_shell_as_first_process_is_said(tmp_path: Path, path: str, args: tuple[str, ...], may_not: bool) -> None:
    """It was killed when the time was over, and that is why."""
    async with docker(tmp_path, container(path, args), exit_code=137) as (engine, _):
        outcome = await engine.stop(1.0)
        assert (outcome.is_done, outcome.facts["how"]) == (True, "kill")
        assert ("does not pass signals on" in outcome.message) is may_not


@each("told", [None, b"nonsense\r\n\r\n", answer(200, []), answer(200, {"State": 5}), answer(500, {"message": "x"}), ABSENT])
@in_loop
async def test_answers_that_say_nothing(tmp_path: Path, told: Answer) -> None:
    """Nobody knows whether it runs or how it ended; nothing is stopped or started."""
    async with docker(tmp_path, container(), json=told) as (engine, answers):
        assert await engine.is_running() is (await engine.last_exit()).is_done is None
        for outcome in (await engine.stop(1.0), await engine.start()):
            assert outcome.is_done is (False if told == ABSENT else None)
        assert await engine.pids() == ()
    assert all("json" in line for line in answers.lines)


@in_loop
async def test_refusals_absence_and_odd_rows(tmp_path: Path) -> None:
    """A start that is refused or done by Docker itself, no Docker at all; of what `top` shows odd rows are left out."""
    why = answer(500, {"message": "port is already allocated"})
    async with docker(tmp_path, container(Running=False), start=why) as (engine, _):
        outcome = await engine.start()
        assert outcome.is_done is False
        assert "port is already allocated" in outcome.message
    async with docker(tmp_path, container(Running=False, Restarting=True)) as (engine, _):
        assert await engine.is_running() is None
        assert (await engine.start()).is_done is False
    nobody = DockerContainer(DockerConfig("x1", str(tmp_path / "none.sock")))
    assert await nobody.is_running() is (await nobody.last_exit()).is_done is None
    assert (await nobody.stop(1.0)).is_done is None
    rows = [["root", "4711", "1"], ["root", "4712", "4711"], ["root"], "x", ["root", "-3", "1"]]
    top = answer(200, {"Titles": ["UID", "PID", "PPID"], "Processes": rows})
    async with docker(tmp_path, container(), top=top) as (engine, _):
        assert await engine.pids() == (4711, 4712)


@each(("state", "policy", "by_hand"), cases("guard", "ends of a container"))
@in_loop
async def test_what_somebody_stopped_or_what_ended(
    tmp_path: Path, state: dict[str, Any], policy: str, by_hand: bool | None
) -> None:
    """By its exit code, and by whether Docker would have started it again itself; what is not sure is not known."""
    async with docker(tmp_path, container(policy=policy, **{"Running": False, "Status": "exited", **state})) as (engine, _):
        outcome = await engine.last_exit()
        assert (outcome.is_done, outcome.facts.get("by_hand", False)) == (by_hand, by_hand is True)
