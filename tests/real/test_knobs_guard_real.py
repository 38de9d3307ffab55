"""Guard's knobs beside a real vLLM: guard killed, lease over, engine restarted; and advice from the engine's own recording."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lab.engine.clients import complete
from lab.survive.models import lively_model
from lab.survive.server import TOKEN
from plimsoll.cli.main import main
from plimsoll.guard.config import PromiseConfig
from plimsoll.guard.daemon.knob_advice import KnobAdvisor
from plimsoll.guard.engine_config import EngineConfig
from tests.cli.test_guard import config
from tests.fakes import eventually
from tests.guard.daemon.guards import Guard, guarding
from tests.real.conftest import need_vllm
from tests.real.test_knobs_real import KnobServer

SEQS, BURST = 16, 48
FLAGS = ("--max-num-seqs", str(SEQS), "--max-num-batched-tokens", "512")


def engine(folder: Path, port: int | None = None) -> KnobServer:
    """A server that records; its port, to start it again there."""
    model = folder / "lively"
    env = {"PLIMSOLL_SURVIVE": "", "VLLM_PLUGINS": "plimsoll_probe", "PLIMSOLL_RECORD": str(folder / "recording")}
    home = folder / f"server-{len(list(folder.glob('server-*')))}"
    return KnobServer(home, model if model.exists() else lively_model(model), FLAGS, env=env, port=port)


def in_force(server: KnobServer) -> Any:
    """Sequences that the engine admits, by its own word."""
    return server.knobs()[1]["knobs"]["max-num-seqs"]["in_force"]


def order(guard: Guard, *words: str) -> None:
    """guardctl set, which must be accepted."""
    assert main(["guardctl", "set", "one", *words, "--at", f"http://127.0.0.1:{guard.port}"]) == 0


@pytest.mark.once
@pytest.mark.timeout(900)
def test_guard_killed_lease_over_and_engine_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease outlives its guard and no engine; the next guard sets it again; one that ends leaves the start-up value."""
    need_vllm()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PLIMSOLL_GUARD_TOKEN", raising=False)
    (tmp_path / "token").write_text(TOKEN, encoding="ascii")
    with engine(tmp_path) as server:
        text = f"[act]\njournal = 'journal'\n[[engine]]\nname = 'one'\nurl = '{server.url}'\ntoken_file = 'token'\n"
        path = config(tmp_path, text)
        server.wait_ready()
        with guarding(tmp_path, "--act", "--config", path) as guard:
            guard.hears("one: answers", 60.0)
            order(guard, "max-num-seqs=3", "--for", "1h")
            assert in_force(server) == 3
            asyncio.run(burst(server.port, 6))
            eventually(lambda: "verified by its steps" in str(guard.json("/engines")), 90)
            guard.process.kill()
            guard.process.wait(20)
        assert in_force(server) == 3, "a lease lives in the engine"
        assert server.knobs({"epoch": 0, "max-num-seqs": 1})[0] == 409, "an older guard's order"
    for token in (tmp_path / "plimsoll").glob("guard-*.token"):
        token.unlink()
    with engine(tmp_path, server.port) as again:
        again.wait_ready()
        assert in_force(again) == SEQS, "a restarted engine has no lease"
        with guarding(tmp_path, "--act", "--config", path) as guard:
            eventually(lambda: in_force(again) == 3, 90)  # the next guard has the journal, and sets it again
            order(guard, "max-num-seqs=2", "--for", "4s")
            assert in_force(again) == 2
            guard.process.kill()
            guard.process.wait(20)
        eventually(lambda: in_force(again) == SEQS, 30)
        asyncio.run(burst(again.port, 6))


async def burst(port: int, count: int) -> list[bool]:
    """Requests of about 350 tokens in and 48 out, forty a second; whether each was answered."""

    async def one(number: int) -> bool:
        await asyncio.sleep(number / 40)
        text = f"{number} " + "the ship may be loaded as deep as the line allows " * 30
        return (await complete(port, 48, stream=True, prompt=text)).status == 200

    return list(await asyncio.gather(*map(one, range(count))))


@pytest.mark.timeout(600)
def test_advice_replays_what_this_engine_has_just_served(tmp_path: Path, record_property: Any) -> None:
    """From the engine's own recording, limits and clock: a setting with its forecast, or the reason why none is given."""
    need_vllm()
    with engine(tmp_path) as server:
        server.wait_ready()
        asyncio.run(burst(server.port, 4))
        began = time.time()
        gaps = sorted(gaps_of(server, tmp_path))
        # What one in eight has got: a promise that this load does not keep as it is.
        promise = PromiseConfig(ttft_s=120.0, tpot_s=gaps[BURST // 8], window_s=time.time() - began + 20)
        about = EngineConfig(name="one", url=server.url, token=TOKEN, recording=str(tmp_path / "recording"))
        advisor = KnobAdvisor(promise, [about], lambda *_: None)
        advice, why_not = asyncio.run(advisor.advise(about))
        print(advice or why_not)
        record_property("figures", advice or why_not)
        counted = re.search(r" of (\d+)\b", advice or why_not)
        assert counted is not None, why_not
        assert BURST // 2 <= int(counted[1]) <= BURST + 4, "the replay begins where the engine was idle"
        if not advice:  # a busy machine: the clock does not fit, or the gain is within its error, and it says so
            assert re.match("the replay of what happened keeps |no setting keeps clearly more: ", why_not), why_not
            return
        found = re.match(
            r"with (\S+) (\d+), (\d+) of \d+ requests instead of (\d+) within the promise; guardctl set one ", advice
        )
        assert found, advice
        assert int(found[3]) > int(found[4])
        assert server.knobs({found[1]: int(found[2]), "lease_s": 600})[0] == 200
        assert asyncio.run(advisor.advise(about))[1] == "knobs are set: what they give is not known before they are let go"
        kept = sum(gap <= promise.tpot_s for gap in gaps_of(server, tmp_path))
        print(f"with it set, {kept} of {BURST} were within the promise")


def gaps_of(server: KnobServer, folder: Path) -> list[float]:
    """A burst, and the seconds from token to token of each of its requests, as the engine recorded them."""
    began = time.time()
    assert all(asyncio.run(burst(server.port, BURST)))

    def rows() -> list[dict[str, Any]]:
        texts = [path.read_text(encoding="utf-8") for path in (folder / "recording").glob("*.jsonl")]
        found = [json.loads(line) for text in texts for line in text.splitlines()]
        return [row for row in found if row["arrival"] >= began]

    eventually(lambda: len(rows()) == BURST, 90)
    return [(row["finished"] - row["first_token"]) / (row["output_tokens"] - 1) for row in rows()]
