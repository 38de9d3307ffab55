"""The door of a real vLLM 0.32.0: what a table does not cover is refused as vLLM itself refuses, and every account closes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab.engine.clients import HttpAnswer, ask, is_finished
from lab.engine.install import model_home
from lab.engine.server import EngineServer
from tests.real.conftest import BEARER, TOKEN, declare, ready

TOKENS, SEQUENCES = 512, 16
FLAGS = (
    "--max-num-batched-tokens", str(TOKENS), "--max-num-seqs", str(SEQUENCES), "--enable-scale-out",
    "--middleware", "plimsoll.inside.Gate",
)  # fmt: skip
MIB = 1 << 20
SPARE = 100 * MIB
# 1 MiB for each prompt token whose log-probabilities are asked for: 100 of them fit, 60 twice do not.
PROMPT_LOGPROBS = {"kind": "prompt_logprobs", "unit": "prompt tokens", "bytes_per_unit": MIB, "most_units": TOKENS}
LOGPROBS = {"kind": "logprobs", "unit": "log-probabilities", "bytes_per_unit": 10 * MIB, "most_units": 20}
BATCH = {"kind": "batch", "unit": "tokens in a step", "bytes_per_unit": 1, "most_units": TOKENS}
ASSUMES = {
    "free_bytes_at_start": 1, "neighbours_bytes": 0, "pieces_bytes": 0, "alive_bytes": 0, "max_num_batched_tokens": TOKENS,
    "max_num_seqs": SEQUENCES, "max_logprobs": 20, "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
    "v2_model_runner": False, "max_model_len": 2048,
}  # fmt: skip
# As `attach` does when the server starts, with another table: so that one start of the engine is enough.
SWITCH = """
import json
from plimsoll.inside.door import DOOR
from plimsoll.inside.door import set_up
from plimsoll.inside.settings import InsideSettings

class Switch:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/lab/door":
            return await self.app(scope, receive, send)
        import vllm
        wanted = InsideSettings(json.loads((await receive())["body"]))
        is_used = set_up(DOOR, scope["app"].state.engine_client, wanted, vllm.__version__)
        body = json.dumps(is_used).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})
"""


class Site(NamedTuple):
    """A running server with a door, and the folder of its tables."""

    server: EngineServer
    folder: Path

    async def state(self) -> dict[str, Any]:
        """The door's part of /plimsoll/state."""
        told = await ask(self.server.port, "/plimsoll/state", None, BEARER)
        assert told.status == 200, told.body
        found: dict[str, Any] = told.json()
        assert found["faults"] == {}
        door: dict[str, Any] = found["door"]
        return door

    async def use(self, mode: str, table: Path) -> bool:
        """Have the door read another table; whether it is used."""
        body = {"PLIMSOLL_ADMIT": mode, "PLIMSOLL_CERTIFICATE": str(table)}
        return bool((await ask(self.server.port, "/lab/door", body)).json())

    async def send(self, manner: str = "well", **more: Any) -> HttpAnswer:
        """One completion of two tokens, or of as many as `more` says."""
        body = {"model": "tiny", "max_tokens": 2, "ignore_eos": True, **more}
        return await ask(self.server.port, "/v1/completions", body, manner=manner)

    async def wait_empty(self) -> None:
        """The accounts are at 0 again, within a moment."""
        async with asyncio.timeout(20):
            while (await self.state())["admitted_bytes"]:
                await asyncio.sleep(0.1)


def write_table(path: Path, *kinds: dict[str, Any], **changed: Any) -> Path:
    """A table for the lab's server, as the certificate's contract says."""
    rows = [{"fixed_bytes": 0, "scope": "step", "smallest": 1, "closes": "", "source": ""} | kind for kind in kinds]
    table = {
        "schema": "plimsoll.certificate/1", "vllm": "0.32.0", "model": str(model_home()), "gpu": "none",
        "made": "2026-01-01T00:00:00Z", "certified": False, "spare_bytes": SPARE,
        "assumes": ASSUMES, "kinds": rows,
    }  # fmt: skip
    path.write_text(json.dumps(table | changed))
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One server whose door is closed from the start; each test leaves it so, with empty accounts."""
    folder = tmp_path_factory.mktemp("door")
    path = declare(folder, "plimsoll_door = plimsoll.inside.door:install")
    (folder / "door_switch.py").write_text(SWITCH)
    (folder / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    env = {
        "PYTHONPATH": path, "PLIMSOLL_TOKEN": TOKEN, "VLLM_PLUGINS": "plimsoll_door",
        "PLIMSOLL_ADMIT": "certified",
        "TORCHDYNAMO_DISABLE": "1",  # the rank of a prompt's tokens is compiled when first asked for: half a minute
        "PLIMSOLL_CERTIFICATE": str(write_table(folder / "good.json", PROMPT_LOGPROBS, LOGPROBS)),
    }  # fmt: skip
    flags = (*FLAGS, "--middleware", "door_switch.Switch", "--chat-template", str(folder / "chat.jinja"))
    with ready(flags, env) as server:
        yield Site(server, folder)


def prompt(tokens: int) -> list[int]:
    """A prompt of so many tokens."""
    return [5 + place % 90 for place in range(tokens)]


async def test_the_log_says_what_the_door_does_and_the_state_shows_it(site: Site) -> None:
    """One line when the engine's client is made, in the API server alone; nothing is refused yet."""
    lines = [line for line in site.server.log_text().splitlines() if "plimsoll: door:" in line]
    assert len(lines) == 1
    assert "door: refuses what 0.10 GiB of spare memory do not cover: prompt_logprobs, logprobs" in lines[0]
    found = await site.state()
    assert (found["mode"], found["open_because"], found["spare_bytes"], found["admitted_bytes"]) == ("certified", "", SPARE, 0)
    assert found["refused"] == {"never": {}, "not_now": {}}


async def test_what_never_fits_gets_vllms_own_400_on_every_route_and_what_fits_is_served(site: Site) -> None:
    """By the prompt's tokens as vLLM counts them, its copies, and the log-probabilities; plain requests of any size pass."""
    too_large: list[dict[str, Any]] = [
        {"prompt": prompt(101), "prompt_logprobs": 1}, {"prompt": prompt(51), "prompt_logprobs": 1, "n": 2},
        {"prompt": prompt(5), "logprobs": 11}, {"prompt": [prompt(3), prompt(101), prompt(3)], "prompt_logprobs": 0},
    ]  # fmt: skip
    covered: list[dict[str, Any]] = [
        {"prompt": prompt(100), "prompt_logprobs": 1}, {"prompt": prompt(50), "prompt_logprobs": 1, "n": 2},
        {"prompt": prompt(1000)}, {"prompt": prompt(1000), "n": 4}, {"prompt": prompt(5), "logprobs": 10},
        {"prompt": [prompt(30), prompt(30), prompt(30)], "prompt_logprobs": 0},
    ]  # fmt: skip
    for more in too_large:
        for stream in (False, True):
            if stream and "prompt_logprobs" in more:
                continue  # vLLM gives none in a stream
            told = await site.send(stream=stream, **more)
            error = told.json()["error"]
            assert (told.status, error["code"], error["type"]) == (400, 400, "BadRequestError"), told.body
            assert error["param"] == ("logprobs" if "logprobs" in more else "prompt_logprobs")
            assert "cannot run this request within its GPU memory" in error["message"]
            assert "retry-after" not in told.headers
    for more in covered:
        assert is_finished(await site.send(**more)), more
    assert (await site.state())["refused"] == {"never": {"prompt_logprobs": 3, "logprobs": 2}, "not_now": {}}
    await site.wait_empty()
    chat = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": " ".join(["word"] * 150)}]}
    for more, status in (({"prompt_logprobs": 1}, 400), ({"logprobs": True, "top_logprobs": 12}, 400), ({}, 200)):
        for stream in (False, True) if "prompt_logprobs" not in more else (False,):
            told = await ask(site.server.port, "/v1/chat/completions", {**chat, **more, "stream": stream})
            assert told.status == status, (more, stream, told.body)
            assert (b"within its GPU memory" in told.body) == (status == 400)
    for count, status in ((120, 400), (20, 200)):
        body = {"model": "tiny", "token_ids": prompt(count), "sampling_params": {"prompt_logprobs": 1, "max_tokens": 2}}
        assert (await ask(site.server.port, "/inference/v1/generate", body)).status == status
    await site.wait_empty()


async def test_what_does_not_fit_now_gets_503_and_when_to_come_again(site: Site) -> None:
    """Two requests of 60 tokens at once: the second waits its turn elsewhere, and is served when the first has ended."""
    one = asyncio.create_task(site.send(max_tokens=400, prompt=prompt(60), prompt_logprobs=1))
    while not (await site.state())["admitted_bytes"]:
        assert not one.done(), "the first request was to run meanwhile"
        await asyncio.sleep(0.01)
    two = await site.send(prompt=prompt(60), prompt_logprobs=1)
    batch = await site.send(prompt=[prompt(3), prompt(60), prompt(3)], prompt_logprobs=1)
    small = await site.send(prompt=prompt(40), prompt_logprobs=1)
    assert not one.done(), "the first request was to run meanwhile"
    for told in (two, batch):
        error = told.json()["error"]
        assert (told.status, error["code"], error["type"]) == (503, 503, "Service Unavailable"), told.body
        assert int(told.headers["retry-after"]) >= 1
        assert "try again later" in error["message"]
    assert is_finished(await one)
    assert is_finished(small)
    await site.wait_empty()
    assert is_finished(await site.send(prompt=prompt(60), prompt_logprobs=1))
    assert (await site.state())["refused"]["not_now"] == {"prompt_logprobs": 2}
    await site.wait_empty()


async def test_whoever_leaves_gives_back_what_it_held(site: Site) -> None:
    """Clients that reset, half-close or go at once, one or two copies: the accounts come back to 0, and stay there."""
    for manner in ("leave", "reset", "half-close"):
        for copies in (1, 2):
            await site.send(manner, max_tokens=300, prompt=prompt(20), n=copies, prompt_logprobs=1)
    await site.wait_empty()
    assert is_finished(await site.send(prompt=prompt(100), prompt_logprobs=1))
    await site.wait_empty()


async def test_a_shadow_counts_and_a_foreign_table_opens_the_door(site: Site) -> None:
    """Nothing is refused in shadow or by a table of another engine; both are said, and the counters are on vLLM's page."""
    before = (await site.state())["refused"]
    assert await site.use("shadow", write_table(site.folder / "shadow.json", PROMPT_LOGPROBS, BATCH))
    assert is_finished(await site.send(prompt=prompt(101), prompt_logprobs=1))
    assert is_finished(await site.send(prompt=prompt(60), prompt_logprobs=1, n=2))
    found = await site.state()
    assert (found["mode"], found["would_refuse"]) == ("shadow", {"never": {"prompt_logprobs": 2}, "not_now": {}})
    assert (found["refused"], found["not_judged"]) == (before, ["batch"])
    for name, changed, says in (
        ("vllm.json", {"vllm": "0.31.0"}, "for vLLM 0.31.0"),
        ("model.json", {"model": "meta-llama/Llama-3.1-8B"}, "for the model meta-llama/Llama-3.1-8B"),
        ("batch.json", {"assumes": ASSUMES | {"max_num_batched_tokens": 8192}}, "max_num_batched_tokens 8192"),
        ("runner.json", {"assumes": ASSUMES | {"v2_model_runner": True}}, "v2_model_runner True"),
        ("schema.json", {"schema": "plimsoll.certificate/9"}, "schema is missing, or its value cannot be"),
    ):
        assert not (await site.use("certified", write_table(site.folder / name, PROMPT_LOGPROBS, **changed)))
        assert says in (await site.state())["open_because"]
        assert is_finished(await site.send(prompt=prompt(101), prompt_logprobs=1))
    assert "door: open, nothing is refused: the certificate is for vLLM 0.31.0" in site.server.log_text()
    assert await site.use("certified", site.folder / "good.json")
    assert (await site.send(prompt=prompt(101), prompt_logprobs=1)).status == 400
    page = (await ask(site.server.port, "/metrics")).body.decode()
    assert 'plimsoll_door_would_refuse_total{kind="prompt_logprobs",why="never"} 2.0' in page
    never = (await site.state())["refused"]["never"]["prompt_logprobs"]
    assert f'plimsoll_door_refused_total{{kind="prompt_logprobs",why="never"}} {never}.0' in page
    (spare,) = (line for line in page.splitlines() if line.startswith("plimsoll_door_spare_bytes"))
    assert float(spare.split()[-1]) == SPARE
    await site.wait_empty()
