"""The recorder in a real vLLM: one line for each request, with the numbers that the client was told."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.engine.clients import complete
from lab.engine.server import EngineServer
from plimsoll.simulate.trace_files import read_trace
from tests.fakes import eventually
from tests.real.conftest import declare, ready
from tests.real.small_farm import ran

SHARED_PROMPT = "the ship may be loaded as deep as the line allows " * 40
# Says from inside the API server what the pulse holds, and attaches as a server without plugins would.
WITNESS = """
import json

class Witness:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/witness":
            return await self.app(scope, receive, send)
        from plimsoll.inside.tick import attach
        from plimsoll.inside.faults import FAULTS
        from plimsoll.inside.pulse import Listener
        from plimsoll.inside.pulse import PULSE
        from plimsoll.inside.recorder import RECORDER
        client = scope["app"].state.engine_client
        before = sum(isinstance(one, Listener) for one in client.logger_manager.stat_loggers)
        done = attach(client)
        after = sum(isinstance(one, Listener) for one in client.logger_manager.stat_loggers)
        body = json.dumps({
            "attached": [before, done, after], "fed": PULSE.is_fed, "steps": PULSE.steps, "running": PULSE.running,
            "waiting": PULSE.waiting, "finished": PULSE.finished, "asleep": PULSE.sleep_level,
            "output": PULSE.output_tokens.value, "longest": PULSE.longest_step_s, "faults": FAULTS.counts,
            "dropped": RECORDER.dropped,
        }).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})
"""


class Recorded(NamedTuple):
    """A server that records, where to, and what its clients were told."""

    server: EngineServer
    folder: Path
    told: list[tuple[int, int]]
    """Prompt and output tokens of each choice of each request that was answered whole."""
    aborted: int

    def lines(self) -> list[dict[str, Any]]:
        """One for each choice of each request."""
        return lines_of(self.folder, len(self.told) + self.aborted)


def environment(at: Path, **more: str) -> dict[str, str]:
    """What the engine is started with: the witness and the plugin on its path, and where to record."""
    path = declare(at / "site", "plimsoll = plimsoll.inside.stat_logger:StatLogger", "vllm.stat_logger_plugins")
    (at / "site" / "witness.py").write_text(WITNESS)
    return {"PYTHONPATH": path, "PLIMSOLL_RECORD": str(at / "record"), "PLIMSOLL_RECORD_PREFIXES": "1", **more}


def ask(server: EngineServer, number: int) -> list[tuple[int, int]]:
    """A stream, one with two choices, one with a shared beginning or a plain one; the tokens of each choice."""
    kind = number % 4
    prompt, tokens, more = (
        (f"stream {number}", 5 + number, {"stream": True, "stream_options": {"include_usage": True}}),
        (f"two of {number}", 7, {"n": 2, "temperature": 1.0}),
        (SHARED_PROMPT + str(number), 1 + number, {"priority": 0}),
        (f"plain {number}", 1 + number, {}),
    )[kind]
    reply = server.complete(prompt, tokens, ignore_eos=True, **more)
    assert reply.status == 200, reply.text
    last = [line for line in reply.text.splitlines() if line.startswith("data: {")][-1][6:] if kind == 0 else reply.text
    usage = json.loads(last)["usage"]
    choices = 2 if kind == 1 else 1
    return [(usage["prompt_tokens"], usage["completion_tokens"] // choices)] * choices


def give_up(server: EngineServer, number: int) -> None:
    """A client that goes away after the first bytes of its stream."""
    told = asyncio.run(complete(server.port, 1500, stream=True, prompt=f"gone {number}", manner="reset"))
    assert (told.status, told.is_whole) == (200, False)


def lines_of(folder: Path, at_least: int) -> list[dict[str, Any]]:
    """All lines, once there are so many."""

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for file in folder.glob("requests-*.jsonl") for line in file.read_text().splitlines()]

    eventually(lambda: len(lines()) >= at_least, 30)
    return lines()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """One server with the plugin, after 40 requests of which 4 were given up."""
    at = tmp_path_factory.mktemp("recorder")
    env = environment(at, VLLM_PLUGINS="plimsoll", PLIMSOLL_DIR=str(at / "run"))
    with ready(["--middleware", "witness.Witness"], env) as server:
        with ThreadPoolExecutor(8) as clients:
            gone = [clients.submit(give_up, server, number) for number in range(4)]
            told = [one for answer in clients.map(lambda n: ask(server, n), range(36)) for one in answer]
            for one in gone:
                one.result()
        yield Recorded(server, at / "record", told, len(gone))


def test_there_is_a_line_for_each_request_with_the_numbers_the_client_was_told_which_simulate_replays(
    recorded: Recorded,
) -> None:
    """Also for those that were given up; hashes of shared beginnings, and no prompt, token or id; every line is replayed."""
    lines = recorded.lines()
    whole = [line for line in lines if line["finish_reason"] != "abort"]
    assert Counter((line["prompt_tokens"], line["output_tokens"]) for line in whole) == Counter(recorded.told)
    cut = [line for line in lines if line["finish_reason"] == "abort"]
    assert len(cut) == recorded.aborted
    assert all(0 <= line["output_tokens"] < 1500 for line in cut)
    assert {line["finish_reason"] for line in whole} == {"length"}
    assert {line["max_tokens"] for line in cut} == {1500}
    for line in lines:  # arrival, first scheduled, first token, finished; all within the last minutes
        stamps = [line[name] for name in ("arrival", "scheduled", "first_token", "finished") if name in line]
        assert stamps == sorted(stamps)
        assert time.time() - 600 < stamps[0] <= stamps[-1] <= time.time() + 1
        assert len(stamps) == 4 or line["finish_reason"] == "abort"
    lines = recorded.lines()
    long = [line for line in lines if line["prompt_tokens"] > 200]
    assert len(long) == 9
    for line in lines:
        assert len(line.get("prefix_hashes", [])) == line["prompt_tokens"] // 16
    common = set.intersection(*(set(line["prefix_hashes"]) for line in long))
    assert len(common) >= min(line["prompt_tokens"] for line in long) // 16 - 1
    assert sum(line["cached_tokens"] > 0 for line in long) >= 1  # vLLM found some of them, by blocks of 128
    lines = recorded.lines()
    (file,) = recorded.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(recorded.folder.stat().st_mode) == 0o700
    assert not any(word in file.read_text() for word in ("ship", "plain", "cmpl", "token_ids", "request_id"))
    assert len(read_trace(str(file)).prompt) == len(lines)
    words = ("simulate", str(file), "--num-blocks", "4096", "--block-size", "128", "--json")
    done = ran(sys.executable, "-m", "plimsoll", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"] == len(lines)


def test_the_pulse_is_fed_once_settles_and_hears_sleep(recorded: Recorded) -> None:
    """Attaching where the plugin is changes nothing; nothing of ours went wrong; a pause of level 0 is heard, and its end."""
    recorded.lines()
    said = recorded.server.get("/witness").json()
    assert said["steps"] > 30
    wanted = {"attached": [1, True, 1], "fed": True, "running": 0, "waiting": 0, "asleep": None, "dropped": 0, "faults": {}}
    assert {name: said[name] for name in wanted} == wanted
    assert said["finished"] == len(recorded.told) + recorded.aborted
    assert recorded.server.post("/sleep?level=0").status == 200
    assert recorded.server.get("/witness").json()["asleep"] == 0
    assert recorded.server.post("/wake_up?tags=scheduling").status == 200
    assert recorded.server.get("/witness").json()["asleep"] is None
    assert recorded.server.complete("awake", 4).status == 200


@pytest.mark.soak
def test_a_server_without_the_plugin_records_once_attached(tmp_path: Path) -> None:
    """With plugins switched off the first look attaches, and only that one; a stop writes what is left."""
    with ready(["--middleware", "witness.Witness"], environment(tmp_path, VLLM_PLUGINS="")) as server:
        assert server.get("/witness").json()["attached"] == [0, True, 1]
        assert server.get("/witness").json()["attached"] == [1, True, 1]
        assert server.complete("one", 5, ignore_eos=True).status == 200
        server.stop()
    (line,) = lines_of(tmp_path / "record", 1)
    assert line["output_tokens"] == 5
