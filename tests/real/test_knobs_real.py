"""Knobs turned at random in a real vLLM server under load, with few blocks: nobody notices, and every account adds up.

One server for all tests of this file, in their order. Asynchronous scheduling and the second runner: vLLM's own core over a
worker without a model, as in test_survive_async_real.py.
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.survive.clients import mixed_asks
from lab.survive.models import lively_model
from lab.survive.rounds import LONGEST_S, Clients, Reference
from lab.survive.scenarios import play_scenarios, turned_scenarios
from lab.survive.server import TOKEN, SurviveServer
from plimsoll.inside.knobs import KNOBS, strictest
from tests.each import cases
from tests.fakes import eventually
from tests.real.conftest import need_vllm

pytestmark = pytest.mark.once
FLAGS = ("--num-gpu-blocks-override", "20", "--max-num-seqs", "24", "--max-num-batched-tokens", "512")
LONGEST_WAIT_S = 60.0
START: dict[str, float | None] = {
    "max-num-seqs": 24, "max-num-batched-tokens": 512, "kv-headroom": 0.0, "long-prefill-token-threshold": 0,
    "max-num-queued-reqs": None, "max-num-queued-tokens": None,
}  # fmt: skip


class KnobServer(SurviveServer):
    """A server whose knobs are turned over HTTP."""

    def knobs(self, order: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and answer of an order; without one, what holds."""
        body = None if order is None else json.dumps(order).encode()
        request = urllib.request.Request(f"{self.url}/plimsoll/knobs", body, headers={"Authorization": f"Bearer {TOKEN}"})
        reply = self._ask(request, 60.0)
        return reply.status, reply.json()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KnobServer]:
    """The server of this file, with containment armed."""
    need_vllm()
    model = lively_model(tmp_path_factory.mktemp("model") / "lively")
    plugins = {"VLLM_PLUGINS": "plimsoll_survive,plimsoll_probe,survive_faults"}
    with KnobServer(tmp_path_factory.mktemp("knobs"), model, FLAGS, env=plugins) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def reference(server: KnobServer) -> Reference:
    """Mixed requests and their answers before the first turn."""
    return Reference.of(server.port, mixed_asks(96, 3))


def random_value(dice: random.Random, knob: str) -> float:
    """A value that refuses nobody."""
    if knob == "kv-headroom":
        return round(dice.uniform(0.0, 0.6), 3)
    low, high = {
        "max-num-seqs": (1, 24), "max-num-batched-tokens": dice.choice(((1, 64), (1, 512))),
        "long-prefill-token-threshold": (1, 512), "max-num-queued-reqs": (200, 2000), "max-num-queued-tokens": (10**5, 10**6),
    }[knob]  # fmt: skip
    return dice.randint(low, high)


@pytest.mark.parametrize(
    ("turns", "seed"), [(60, 5), pytest.param(1000, 6, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_knobs_turned_at_random_change_no_token(
    server: KnobServer, reference: Reference, record_property: Any, turns: int, seed: int
) -> None:
    """32 streaming clients, few blocks: no request is lost, no greedy token is another one, nobody starves."""
    dice, before, began = random.Random(seed), server.figures(), time.monotonic()
    _, told = server.knobs()
    first = epoch = told["epoch"]
    left = dict.fromkeys(KNOBS, turns)
    largest = {"running": 0, "tokens": 0}
    with Clients(server.port, reference, seed=seed) as clients:
        while left:
            chosen = dice.sample(list(left), min(len(left), dice.choice((1, 1, 2, 3))))
            order = {knob: random_value(dice, knob) for knob in chosen}
            left = {knob: count - (knob in order) for knob, count in left.items() if count > (knob in order)}
            epoch += 1
            # Some leases end by themselves before the next order comes.
            status, told = server.knobs({"epoch": epoch, "lease_s": dice.choice((0.1, 0.3, 60.0)), **order})
            assert status == 200, told
            for knob, row in told["knobs"].items():
                assert row["start"] == START[knob]
                if row["lease"] is not None:
                    assert row["lease"] == order[knob]
                    assert row["in_force"] == strictest(knob, START[knob], order[knob])
            if epoch % 25 == 0:
                clients.wait_answers(len(clients.answers) + 1, LONGEST_WAIT_S)
                _, told = server.knobs()
                largest["running"] = max(largest["running"], told["since_order"]["most_running"])
                largest["tokens"] = max(largest["tokens"], told["since_order"]["largest_step"])
        server.knobs({"epoch": epoch})
        assert server.knobs({"epoch": epoch - 1, "max-num-seqs": 1})[0] == 409
    assert server.exit_code() is None
    assert not clients.noticed()
    assert largest["running"] <= 24
    assert largest["tokens"] <= 512
    after = server.wait_idle()
    counters = ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total")
    preempted, hits = (after[name] - before[name] for name in counters)
    assert min(preempted, hits) > 0
    assert clients.longest_s < LONGEST_S
    figures = (
        f"{turns} turns of each of {len(KNOBS)} knobs in {epoch - first} orders and {time.monotonic() - began:.0f} s; "
        f"{clients.told()}; {preempted:.0f} preemptions, "
        f"{hits:.0f} tokens from the prefix cache; the longest request took {clients.longest_s:.0f} s"
    )
    print(figures)
    record_property("figures", figures)


def test_what_cannot_be_is_refused_and_a_bound_on_the_queue_ends_with_its_lease(server: KnobServer) -> None:
    """Nothing goes above what was allocated, an order is whole or not at all; vLLM's own bound is turned, too."""
    before = server.knobs()[1]["knobs"]
    for order, why in cases("inside", "orders that cannot be"):
        status, told = server.knobs(order)
        assert status in (400, 409), order
        assert why in told["error"]["message"], order
    assert server.knobs()[1]["knobs"] == before
    assert server.knobs({"max-num-queued-reqs": 1, "lease_s": 60})[1]["knobs"]["max-num-queued-reqs"]["in_force"] == 1
    two = {"model": "tiny", "prompt": "two answers", "max_tokens": 2, "n": 2}
    assert server.post("/v1/completions", two).status == 503
    assert server.knobs({"max-num-queued-reqs": 1, "lease_s": 0.1})[0] == 200
    time.sleep(2.5)  # an API server looks once a second
    assert server.post("/v1/completions", two).status == 200
    assert server.knobs()[1]["knobs"]["max-num-queued-reqs"]["in_force"] is None


def test_containment_and_a_lease_meet_in_the_strictest(server: KnobServer, reference: Reference) -> None:
    """A failed step in the middle of a lease: the least of both holds, and the lease's end leaves containment's."""
    assert server.knobs({"max-num-seqs": 6, "max-num-batched-tokens": 400, "lease_s": 120})[0] == 200
    count = len(server.raised())
    with Clients(server.port, reference, count=8, seed=9):
        server.set_faults({"site": "forward", "times": 1, "above": 64})
        server.wait_raised(count + 1)
        server.set_faults()
        _, told = server.knobs()
        tokens, sequences = told["knobs"]["max-num-batched-tokens"], told["knobs"]["max-num-seqs"]
        assert tokens["containment"] < 400
        assert tokens["in_force"] == tokens["containment"]
        assert sequences["in_force"] == min(6, sequences["containment"] or 24)
        _, told = server.knobs({})
        assert told["knobs"]["max-num-seqs"]["lease"] is None
        assert told["knobs"]["max-num-batched-tokens"]["in_force"] == told["knobs"]["max-num-batched-tokens"]["containment"]
        assert told["knobs"]["max-num-seqs"]["in_force"] > 1
        assert server.figures()["plimsoll_knobs_lease_seconds"] == 0
        # It grows back with its own steps: a busy machine makes few.
        eventually(lambda: server.knobs()[1]["knobs"]["max-num-batched-tokens"]["in_force"] == 512, 240)


def test_the_accounts_add_up_at_the_end(server: KnobServer) -> None:
    """Nothing runs, waits or holds a block; every knob is where it was at the start, in the metrics as well."""
    found = server.wait_idle()
    assert (found["vllm:kv_cache_usage_perc"], found["plimsoll_in_flight"]) == (0, 0)
    rows = server.knobs()[1]["knobs"]
    assert {knob: row["in_force"] for knob, row in rows.items()} == START
    assert {knob: row["why_not"] for knob, row in rows.items()} == dict.fromkeys(KNOBS, "")
    page = server.metrics()
    for source, value in (("start", "24.0"), ("in_force", "24.0"), ("lease", "NaN"), ("containment", "NaN")):
        assert f'plimsoll_knob{{knob="max-num-seqs",of="{source}"}} {value}' in page
    assert "plimsoll: turning a knob failed" not in server.log_text()


@pytest.mark.parametrize(
    ("engines", "seed"), [(10, 5), pytest.param(60, 8, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_asynchronous_scheduling_and_both_runners(tmp_path: Path, record_property: Any, engines: int, seed: int) -> None:
    """vLLM's AsyncScheduler with two batches in flight, knobs turned in every second step: every token right, no block lost."""
    need_vllm()
    scenarios = turned_scenarios(engines, seed)
    answers = play_scenarios(scenarios, tmp_path, limit_s=3600)
    wrong = [(asked, answer) for asked, answer in zip(scenarios, answers, strict=True) if not answer["ok"]]
    assert not wrong, wrong[:1]
    sums = {name: sum(answer[name] for answer in answers) for name in ("turns", "steps", "contained", "preemptions")}
    assert min(sums.values()) > 0
    record_property("figures", f"{engines} engines: {sums}")
