"""Containment in a real vLLM server: steps run out of memory at every site, and no client notices.

One server for all tests of this file, in their order: first come those that need large steps.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.survive.clients import COMPLETIONS, Answer, Ask, ask_all, ask_one, differences, mistakes, mixed_asks, text_of
from lab.survive.models import lively_model
from lab.survive.rounds import TEXT_SITES, Clients, Reference, play_rounds
from lab.survive.scenarios import play_scenarios
from lab.survive.server import SurviveServer
from tests.real.conftest import need_vllm

pytestmark = pytest.mark.once
WARM_UP_ROUNDS = 8
SHORTAGE_S, SHORTAGE_SOAK_S = 30.0, 60.0
ABOVE = 128  # tokens; steps can be 375 when the shortage begins
MOST_CONTAINED = 12  # in one shortage
CREEP_BYTES, CREEP_SHARE = 50 << 20, 0.05
SUBJECT_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose every token depends on all before it."""
    need_vllm()
    return lively_model(tmp_path_factory.mktemp("model") / "lively")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SurviveServer]:
    """The server of this file, armed."""
    with SurviveServer(tmp_path_factory.mktemp("survive"), model) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def reference(server: SurviveServer) -> Reference:
    """Mixed requests and their answers before the first fault."""
    return Reference.of(server.port, mixed_asks(96, 1))


def greedy(prompt: str) -> Ask:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": SUBJECT_TOKENS, "ignore_eos": True, "temperature": 0}
    streamed = {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    return Ask("plain", COMPLETIONS, body | streamed)


def ask_named(server: SurviveServer, subject: Ask, name: str, others: list[Ask]) -> tuple[Answer, list[Answer]]:
    """Ask one under this id, and others beside it."""

    async def both() -> tuple[Answer, list[Answer]]:
        companions = asyncio.create_task(ask_all(server.port, others))
        return await ask_one(server.port, subject, name), await companions

    return asyncio.run(both())


def wrong_ones(answers: list[Answer], wanted: list[Answer]) -> list[str]:
    """Mistakes, and differences from what was wanted."""
    found = [each for answer in answers for each in mistakes(answer)]
    return found or [each for answer, other in zip(answers, wanted, strict=True) for each in differences(answer, other)]


def check_shortage(server: SurviveServer, reference: Reference, seconds: float) -> str:
    """Every step above so many tokens fails for a while: steps shrink, and serving goes on."""
    before, raised = server.figures(), len(server.raised())
    server.set_faults({"site": "forward", "above": ABOVE, "until": time.time() + seconds})
    with Clients(server.port, reference) as clients:
        time.sleep(seconds)
        served = clients.tokens()
        server.set_faults()
    assert not clients.noticed()
    after, faults = server.figures(), server.raised()[raised:]
    contained = after["plimsoll_survive_contained_total"] - before["plimsoll_survive_contained_total"]
    recomputed = after["plimsoll_survive_recomputed_tokens_total"] - before["plimsoll_survive_recomputed_tokens_total"]
    assert 0 < contained == len(faults) <= MOST_CONTAINED
    # Once steps are small enough, only a size that failed is tried again, after a pause that doubles each time.
    first = min(fault["at"] for fault in faults)
    assert sum(fault["at"] > first + seconds / 2 for fault in faults) <= 2
    assert after["plimsoll_survive_tokens_per_step"] <= ABOVE
    assert served > 1000
    # Each failure costs at most what was running.
    assert recomputed < contained * 32 * 700
    return f"{contained:.0f} contained, {served} tokens served in {seconds:.0f} s, {recomputed:.0f} recomputed"


def test_it_is_armed_and_changes_nothing(server: SurviveServer, reference: Reference) -> None:
    """The log and the state say so; without faults every answer is whole and nothing was contained."""
    assert "plimsoll: survive: armed (vLLM 0.32.0, first runner, synchronous scheduling)" in server.log_text()
    state = server.survive_state()
    assert (state["armed"], state["contained"], state["last"], state["limping"]) == (True, 0, None, False)
    assert state["tokens_per_step"]["now"] == state["tokens_per_step"]["start"] > ABOVE
    assert reference.allowed_share <= 0.02


def test_no_later_prompt_reads_blocks_that_a_failed_step_left_unwritten(server: SurviveServer) -> None:
    """A prompt whose forward pass failed is answered as on a fresh server, and so is the next one that begins as it does.

    With the cache kept, which is what containment must not do, the same comparison fails.
    """
    answers = {}
    for keeps in (False, True):
        prompt = text_of(random.Random(f"cache {keeps}"), 700)
        server.set_faults({"site": "forward", "request": "cached", "outputs": 0, "times": 1}, keep_cache=keeps)
        count = len(server.raised())
        asked = [ask_named(server, greedy(prompt), name, [])[0] for name in ("cached-1", "again-2")]
        assert server.raised()[count]["tokens"] >= 128, "not one whole block was planned in the step that failed"
        server.set_faults()
        assert server.post("/reset_prefix_cache").status == 200
        fresh = ask_named(server, greedy(prompt), "fresh", [])[0]
        answers[keeps] = [wrong_ones([answer], [fresh]) for answer in asked]
    assert answers[False] == [[], []]
    assert answers[True][0], "a hit on an unwritten block went unnoticed"


def test_a_shortage_that_lasts_ends_in_smaller_steps(server: SurviveServer, reference: Reference, record_property: Any) -> None:
    """No cascade of recomputing: a few contained failures, then steps that fit, and answers all the while."""
    record_property("figures", check_shortage(server, reference, SHORTAGE_S))


def test_every_site_at_the_first_a_middle_and_the_last_step(server: SurviveServer, reference: Reference) -> None:
    """Whichever step of a request fails, and where: it and those beside it get the tokens of an undisturbed run."""
    # A failure behind the sampler has drawn from a seeded request's generator already: it goes on with other tokens.
    beside = [number for number, ask in enumerate(reference.asks[12:24], 12) if not ask.is_sampled]
    before = [number for number, ask in enumerate(reference.asks[12:24], 12) if ask.kind == "seeded"] + beside
    prompts = {"model": "tiny", "prompt_logprobs": 2, "stream": False}
    places = [(site, place) for site in TEXT_SITES for place in (0, SUBJECT_TOKENS // 2, SUBJECT_TOKENS - 1)]
    for site, place in places:
        if site == "prompt_logprobs" and place:
            continue
        subject = greedy(f"subject of {site} {place} " * 3)
        if site == "prompt_logprobs":
            body = {name: value for name, value in subject.body.items() if name != "stream_options"}
            subject = Ask("prompt logprobs", COMPLETIONS, {**body, **prompts})
        wanted = asyncio.run(ask_one(server.port, subject))
        others = beside if site in ("sampled", "prompt_logprobs") else before
        count = len(server.raised())
        server.set_faults({"site": site, "request": "subject", "outputs": place, "times": 1})
        answer, companions = ask_named(server, subject, f"subject-{site}-{place}", [reference.asks[each] for each in others])
        server.set_faults()
        assert [fault["site"] for fault in server.raised()[count:]] == [site], (site, place)
        assert not wrong_ones([answer, *companions], [wanted, *(reference.answers[each] for each in others)]), (site, place)


def test_a_request_that_always_fails_is_aborted_and_no_other(server: SurviveServer, reference: Reference) -> None:
    """Its client is told why in words; everybody else is answered as if it had never come."""
    before, count = server.figures(), len(server.raised())
    greedy_ones = [number for number, ask in enumerate(reference.asks) if not ask.is_sampled][:20]
    server.set_faults({"site": "forward", "request": "doomed"})
    asks = [reference.asks[each] for each in greedy_ones]
    doomed, others = ask_named(server, greedy("a request that no card can hold"), "doomed-1", asks)
    server.set_faults()
    assert "out of device memory" in doomed.error
    assert "this request was aborted" in doomed.error
    assert not wrong_ones(others, [reference.answers[each] for each in greedy_ones])
    assert server.figures()["plimsoll_survive_aborted_total"] - before["plimsoll_survive_aborted_total"] == 1
    assert len(server.raised()) - count <= 20
    assert server.log_text().count("plimsoll: survive: aborted request ") == 1


@pytest.mark.parametrize(("rounds", "seed"), [(20, 11), pytest.param(500, 23, marks=pytest.mark.soak)])
def test_nobody_notices_rounds_of_faults(
    server: SurviveServer, reference: Reference, record_property: Any, rounds: int, seed: int
) -> None:
    """32 streaming clients with mixed options: none is lost, none sees a wrong, repeated or missing token; no memory creeps."""
    started = time.monotonic()
    with Clients(server.port, reference, seed=seed) as clients:
        play_rounds(server, clients, WARM_UP_ROUNDS, seed)
        resident = server.resident_bytes()
        play_rounds(server, clients, rounds - WARM_UP_ROUNDS, seed + 1)
        later = server.resident_bytes()
    assert server.exit_code() is None
    assert not clients.noticed()
    for name, size in resident.items():
        assert later[name] - size < max(CREEP_BYTES, CREEP_SHARE * size), f"{name}: {size} to {later[name]} bytes"
    grown = {name: f"{(later[name] - size) / 2**20:+.1f} MiB" for name, size in resident.items()}
    record_property("figures", f"{rounds} rounds in {time.monotonic() - started:.0f} s, {clients.told()}, {grown}")


def test_the_accounts_add_up_at_the_end(server: SurviveServer) -> None:
    """Nothing runs, waits or holds a block; every fault was contained, told and counted."""
    found = server.wait_idle()
    assert (found["vllm:kv_cache_usage_perc"], found["plimsoll_in_flight"]) == (0, 0)
    raised = len(server.raised())
    assert found["plimsoll_survive_contained_total"] == raised
    assert [number for number, *_ in server.contained()] == list(range(1, raised + 1))
    state = server.survive_state()
    assert state["contained"] == raised
    assert state["stalled_s"] > 0
    assert state["last"]["asked_bytes"] == pytest.approx(1.95 * 2**30, rel=0.01)
    assert "SchedulerOutput(" not in server.log_text(), "vLLM's dump of a step is in the log"


def test_without_the_setting_vllm_dies_as_before(tmp_path: Path) -> None:
    """The plugin is there and PLIMSOLL_SURVIVE is not set: the engine core raises what the step raised."""
    need_vllm()
    (answer,) = play_scenarios([{"planned": {"5": "forward"}, "share": 0.0}], tmp_path, env={"PLIMSOLL_SURVIVE": ""})
    assert not answer["ok"]
    assert answer["error"].startswith("OutOfMemoryError")


@pytest.mark.soak
def test_steps_grow_back_after_a_shortage_of_a_minute(model: Path, tmp_path: Path, record_property: Any) -> None:
    """A minute of failures, then none: after a while steps are as large as at the start."""
    with SurviveServer(tmp_path, model) as server:
        server.wait_ready()
        reference = Reference.of(server.port, mixed_asks(96, 2))
        record_property("figures", check_shortage(server, reference, SHORTAGE_SOAK_S))
        deadline = time.monotonic() + 400
        with Clients(server.port, reference, count=4):
            while (now := server.survive_state()["tokens_per_step"])["now"] < now["start"]:
                assert time.monotonic() < deadline, "steps never grew back"
                time.sleep(2)
        assert "plimsoll: survive: growing back" in server.log_text()
