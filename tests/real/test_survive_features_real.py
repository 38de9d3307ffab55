"""Containment in a real vLLM server with LoRA adapters and speculative decoding, and in one with pictures.

vLLM 0.32.0's CPU build has faults of its own here, without plimsoll too, that the requests keep away from: beside an adapter it
computes the base model with that adapter's weights, log-probabilities of a prompt with an adapter end the engine, and a grammar
with drafts ends the request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lab.survive.clients import Answer, Ask, ask_all, ask_one, differences, mistakes, mixed_asks, picture_asks, with_adapters
from lab.survive.models import lively_adapter, lively_model, picture_model
from lab.survive.rounds import EVERY_STEP, Clients, Reference, play_rounds
from lab.survive.server import SurviveServer
from tests.real.conftest import need_vllm

pytestmark = pytest.mark.once
ADAPTERS = ("port", "starboard", "stern")
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
UNPROVEN = {"PLIMSOLL_SURVIVE": "unproven"}
ROUNDS_SOAK = 200


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SurviveServer]:
    """A server with three adapters, one slot for them, and drafts of three tokens."""
    need_vllm()
    home = tmp_path_factory.mktemp("adapters")
    adapters = [f"{name}={lively_adapter(home / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    flags = ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "3", "--lora-modules", *adapters]
    flags += ["--speculative-config", DRAFTS]
    env = {**UNPROVEN, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # as in production
    with SurviveServer(home / "server", lively_model(home / "lively"), flags, env=env) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def drafted(drafting: SurviveServer) -> Reference:
    """Mixed requests with each adapter, and their answers before the first fault."""
    kinds = ("plain", "chat", "logprobs", "stop", "long")
    return Reference.of(drafting.port, with_adapters([ask for ask in mixed_asks(24, 5) if ask.kind in kinds], ADAPTERS))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SurviveServer]:
    """A server that sees pictures."""
    need_vllm()
    home = tmp_path_factory.mktemp("pictures")
    env = {**UNPROVEN, "PLIMSOLL_LAB_LIVELY": "1"}
    with SurviveServer(home / "server", picture_model(home), ["--load-format", "dummy"], env=env) as server:
        server.wait_ready()
        yield server


def check_rounds(server: SurviveServer, reference: Reference, rounds: int, sites: tuple[str, ...], seed: int) -> str:
    """So many faults at these sites under 16 clients; fails where anybody noticed."""
    count = len(server.raised())
    with Clients(server.port, reference, count=16, seed=seed) as clients:
        play_rounds(server, clients, rounds, seed, sites)
    assert not clients.noticed()
    raised = Counter(fault["site"] for fault in server.raised()[count:])
    assert set(raised) == set(sites)
    assert len(server.contained()) == len(server.raised())
    figures = server.wait_idle()
    assert figures["vllm:kv_cache_usage_perc"] == figures["plimsoll_survive_aborted_total"] == 0
    return f"{clients.told()}, {dict(raised)}"


def answer_of(server: SurviveServer, ask: Ask, name: str = "") -> Answer:
    return asyncio.run(ask_one(server.port, ask, name))


@pytest.mark.parametrize(("rounds", "seed"), [(32, 3), pytest.param(ROUNDS_SOAK, 4, marks=pytest.mark.soak)])
def test_adapters_and_drafts_survive_rounds_of_faults(
    drafting: SurviveServer, drafted: Reference, record_property: Any, rounds: int, seed: int
) -> None:
    """An adapter that was copied in part is copied again, drafts of a dropped step are forgotten: all tokens equal."""
    assert drafted.allowed_share <= 0.05
    assert drafting.figures()["vllm:spec_decode_num_accepted_tokens_total"] > 0, "no draft was ever taken"
    tokens = {tuple(answer.tokens[0]) for answer in drafted.answers}
    assert len(tokens) > 0.9 * len(drafted.answers), "adapters do not change the answers"
    sites = (*EVERY_STEP, "adapter", "drafter")
    record_property("figures", check_rounds(drafting, drafted, rounds, sites, seed))


def test_an_adapter_left_half_copied_would_be_noticed(drafting: SurviveServer, drafted: Reference) -> None:
    """Where the slot is not emptied, which is what containment must not leave out, the answer is another."""
    asks = {ask.body["model"]: (ask, answer) for ask, answer in zip(drafted.asks, drafted.answers, strict=True)}
    (port, _), (stern, wanted) = asks["port"], asks["stern"]
    for keeps in (False, True):
        answer_of(drafting, port)  # takes the slot
        drafting.set_faults({"site": "adapter", "times": 1}, keep_adapters=keeps)
        count = len(drafting.raised())
        answer = answer_of(drafting, stern)
        drafting.set_faults()
        assert len(drafting.raised()) == count + 1
        assert not mistakes(answer)
        assert bool(differences(answer, wanted)) == keeps
    assert drafting.post("/reset_prefix_cache").status == 200  # it was filled with what the half adapter computed
    answer_of(drafting, port)
    assert not differences(answer_of(drafting, stern), wanted), "copied again, it is whole again"


@pytest.mark.soak
def test_pictures_survive_rounds_of_faults(seeing: SurviveServer, record_property: Any) -> None:
    """A picture whose encoding was dropped is encoded again: all tokens equal, and each picture has tokens of its own.

    One that never fits is refused alone, with the reason; the others' pictures are encoded.
    """
    seen = Reference.of(seeing.port, picture_asks(60))
    assert len({tuple(answer.tokens[0][:8]) for answer in seen.answers}) > 50
    sites = (*EVERY_STEP, "encoder", "encoded")
    record_property("figures", check_rounds(seeing, seen, ROUNDS_SOAK, sites, 6))
    seeing.set_faults({"site": "encoder", "request": "doomed"})

    async def both() -> tuple[Answer, list[Answer]]:
        others = asyncio.create_task(ask_all(seeing.port, seen.asks[:12]))
        return await ask_one(seeing.port, picture_asks(90)[-1], "doomed-1"), await others

    doomed, others = asyncio.run(both())
    seeing.set_faults()
    assert "out of device memory" in doomed.error
    assert "at encoder" in doomed.error
    assert not [each for answer in others for each in mistakes(answer)]
    assert not [each for one, other in zip(others, seen.answers, strict=False) for each in differences(one, other)]
