"""How near the worker's memory comes to an H200's (vLLM 0.25.1, Llama-3.1-8B, eager, 16,384 tokens a step): docs/standin.md."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.catalogue.log_lines import log_line
from plimsoll.doctor.rules.diagnose import diagnose_log
from plimsoll.doctor.rules.out_of_memory import parse_oom
from plimsoll.standin.memory import DeviceModel, MemorySizes, OutOfMemory
from tests.each import sure
from tests.log_bytes import log_of_bytes

CAPTURES = Path(__file__).parents[1] / "captures"
MIB = 1 << 20
GIB = 1 << 30
STEP_TOKENS = 16384


def recorded(name: str) -> Any:
    return json.loads((CAPTURES / "vllm-0.25.1-h200-inside" / f"{name}.json").read_text(encoding="utf-8"))


def worker_at_start() -> dict[str, Any]:
    found: dict[str, Any] = recorded("figures")["workers_at_start"][0]
    return found


def h200() -> MemorySizes:
    """The recorded worker's own reckoning; the peak is that of a Llama's layer over 16,384 tokens."""
    worker = worker_at_start()
    budget, torch, device = worker["budget"], worker["allocator"], worker["device_memory"]
    context = budget["total_at_start"] - budget["free_at_start"] - device["by_others"]
    return MemorySizes(
        total=budget["total_at_start"],
        context=context,
        neighbours=device["by_others"],
        requested=budget["requested"],
        weights=budget["weights"],
        non_torch=device["by_this_process"] - torch["reserved"] - context,
        activation_peak=STEP_TOKENS * (3 * 14336 + 3 * 4096) * 2,
        graphs=0,
        kv_cache=budget["kv_cache"],
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=128,
        vocab=128256,
        buffers=torch["allocated"] - budget["weights"] - budget["kv_cache"],
        is_profiled=False,
    )


def torch_of(memory: DeviceModel) -> dict[str, Any]:
    return memory.figures()["allocator"]


def windows(seed: int, count: int) -> Iterator[list[tuple[int, int]]]:
    """The steps of every 3 s, 64 clients as in the recording: each asks again after its answer, every 16th time at length.

    A step takes 20 ms and 27 us a token, which makes 450 ms for the longest, as the gaps there were.
    """
    draw = random.Random(seed)
    asked = 0
    clients = [[0, 0] for _ in range(64)]  # how much of the prompt is to do, and of the answer
    now, steps = 0.0, []
    while count:
        tokens = sequences = 0
        for client in clients:
            if client == [0, 0]:
                long = asked % 16 == 0
                client[:] = draw.randint(*((6000, 20000) if long else (64, 512))), draw.randint(128, 256)
                asked += 1
            taken = min(client[0] or 1, STEP_TOKENS - tokens)
            tokens += taken
            client[0] = max(0, client[0] - taken)
            if client[0] == 0 and taken:
                client[1] -= 1
                sequences += 1
        steps.append((tokens, max(1, sequences)))
        now += 0.02 + tokens * 27e-6
        if now > 3:
            yield steps
            now, steps, count = 0.0, [], count - 1


def test_the_start_is_the_recorded_one() -> None:
    """Every figure of the budget and what is live to the byte; the cache within a sixth."""
    memory, worker = DeviceModel(h200()), worker_at_start()
    figures = memory.figures()
    assert figures["budget"] == worker["budget"]
    for name in ("allocated", "active", "inactive_split", "unreleasable", "largest_free_block", "alloc_retries", "ooms"):
        assert figures["allocator"][name] == worker["allocator"][name], name
    assert figures["allocator"]["releasable"] == pytest.approx(worker["allocator"]["releasable"], rel=0.17)
    assert figures["allocator"]["reserved"] == pytest.approx(worker["allocator"]["reserved"], rel=0.005)
    assert figures["device_memory"]["by_this_process"] == pytest.approx(worker["device_memory"]["by_this_process"], rel=0.005)
    assert figures["device_memory"]["by_others"] == worker["device_memory"]["by_others"]
    assert figures["host_memory"]["resident"] == pytest.approx(worker["host_memory"]["resident"], rel=0.001)
    assert figures["host_memory"]["used_by_group"] == pytest.approx(worker["host_memory"]["used_by_group"], rel=0.001)


def test_the_longest_step_leaves_the_recorded_cache() -> None:
    """On the cache of the start it adds 448 MiB, as there; on an empty one it leaves 2,052 MiB within a percent."""
    memory = DeviceModel(h200())
    before = torch_of(memory)["releasable"]
    assert memory.step(STEP_TOKENS, 64) is None
    pairs = recorded("figures")["pairs"]
    idle, after = (next(p["ours"]["allocator"] for p in pairs if p["moment"] == moment) for moment in ("idle", "after"))
    assert torch_of(memory)["releasable"] - before == after["releasable"] - idle["releasable"] == 448 * MIB
    assert torch_of(memory)["largest_free_block"] == after["largest_free_block"] == 896 * MIB
    peak = torch_of(memory)["allocated_peak"] - torch_of(memory)["allocated"]
    assert abs(peak - (after["allocated_peak"] - after["allocated"])) < MIB
    memory.compact()
    memory.step(STEP_TOKENS, 64)
    assert torch_of(memory)["releasable"] == pytest.approx(2052 * MIB, rel=0.01)


def test_compactions_under_64_streams_give_back_what_was_recorded() -> None:
    """The same reserved after each, to the byte; before it 0.7 to 3.1 GiB more, around the recorded median."""
    then = [each["said"]["workers"][0] for each in recorded("compact")["compactions"]]
    memory = DeviceModel(h200())
    returned: list[int] = []
    shares: list[float] = []
    for window in windows(seed=1, count=60):
        for step in window:
            assert memory.step(*step) is None
            shares.append(torch_of(memory)["allocated"] / torch_of(memory)["reserved"])
        releasable = torch_of(memory)["releasable"]
        answer = memory.compact()
        assert answer["returned"] == releasable
        assert {answer["reserved_after"]} == {each["reserved_after"] for each in then}
        assert set(answer) == set(then[0]) - {"pid", "rank", "at"}
        returned.append(releasable)
    middle = statistics.median(each["returned"] for each in then)
    assert statistics.median(returned) == pytest.approx(middle, rel=0.15)
    assert sum(0.7 * GIB < size < 3.1 * GIB for size in returned) >= 0.9 * len(returned)
    assert 0.93 < min(shares) <= max(shares) < 0.999
    assert abs(torch_of(memory)["segments"] - 170) <= 5


def test_the_neighbour_of_the_recording_fares_as_there() -> None:
    """Refused, granted after a compaction, harmless to short prompts, fatal to long ones while it stays."""
    steps = {step["step"]: step for step in recorded("neighbour")["steps"]}
    assert steps["ask without compaction"]["did"]["wrong"]
    assert steps["ask after compaction"]["did"]["wrong"] is None
    memory = DeviceModel(h200())
    memory.step(STEP_TOKENS, 64)
    assert memory.take_neighbour(memory.free - 1023 * MIB)
    wanted = 1023 * MIB + int(torch_of(memory)["releasable"] * 0.7)  # there 3,066 of 1,023 free and 2,920 cached
    assert not memory.take_neighbour(wanted)
    memory.compact()
    assert memory.take_neighbour(wanted)
    assert all(memory.step(tokens, 16) is None for tokens in (16, 2000, 500, 1300))
    memory.take_neighbour(-wanted)
    assert memory.step(STEP_TOKENS, 16) is None
    assert torch_of(memory)["alloc_retries"] == 0
    memory.compact()
    assert memory.take_neighbour(wanted)
    assert parse_oom(sure(memory.step(STEP_TOKENS, 16)).message).has_neighbour
    assert (torch_of(memory)["alloc_retries"], torch_of(memory)["ooms"]) == (1, 1)


def failing() -> OutOfMemory:
    """The worker of forward.log: four layers, a cache that leaves next to nothing, and a step of 8,007 tokens."""
    sizes = h200()._replace(
        neighbours=0, weights=int(3.63 * GIB), buffers=0, kv_cache=144_859_725_824, activation_peak=864 * MIB,
        max_num_batched_tokens=8192, max_num_seqs=64, is_profiled=True,
    )  # fmt: skip
    memory = DeviceModel(sizes)
    # What else was live there nobody tells: as much as leaves the recorded 303 MiB after the tensors before it.
    memory = DeviceModel(sizes._replace(total=sizes.total - memory.free + (303 + 64) * MIB))
    return sure(memory.step(8007, 1))


def test_the_recorded_failure_is_the_same_request() -> None:
    """Both halves of the feed-forward for 8,007 tokens, 438 MiB, after torch has given back what it could."""
    text = (CAPTURES / "vllm-0.25.1-h200-failures" / "forward.log").read_text(encoding="utf-8")
    theirs, ours = parse_oom(text[text.index("CUDA out of memory.") :]), parse_oom(failing().message)
    assert (ours.tried, ours.gpu, ours.private, ours.processes) == (theirs.tried, theirs.gpu, None, ())
    assert theirs.free is not None
    assert ours.free == pytest.approx(theirs.free, abs=MIB)


@pytest.mark.parametrize("name", ["forward", "neighbour"])
def test_the_doctor_reads_our_words_as_torch_s(name: str) -> None:
    """In the place of the recorded message ours leads to the same diagnosis; it differs from it in figures alone."""
    text = (CAPTURES / "vllm-0.25.1-h200-failures" / f"{name}.log").read_text(encoding="utf-8")
    (theirs,) = set(re.findall(r"CUDA out of memory\. Tried.*", text))
    ours = failing().message
    if name == "neighbour":
        memory = DeviceModel(h200())
        memory.compact()
        assert memory.take_neighbour(memory.free - 100 * MIB)
        ours = sure(memory.step(STEP_TOKENS, 1)).message
    figure = r"\d+(?:\.\d\d)? (?:bytes|KiB|MiB|GiB)|Process \d+"
    assert re.sub(figure, "#", ours) == re.sub(figure, "#", theirs)
    assert re.search(log_line("torch-oom").pattern, ours)
    found = [
        diagnose_log(log_of_bytes("server.log", said.encode()), lambda _: None) for said in (text, text.replace(theirs, ours))
    ]
    assert found[1].memory_failure is True
    assert found[0].findings[0].code == found[1].findings[0].code


def test_a_refusal_reads_like_a_device_that_is_full() -> None:
    """An injected failure: less free than asked for, everything else this process's; counted, and graphs are named."""
    memory = DeviceModel(h200()._replace(graphs=GIB, is_profiled=True))
    trouble = memory.refusal(STEP_TOKENS, 64)
    said = parse_oom(trouble.message)
    assert (trouble.tried, said.tried, said.private) == (896 * MIB, 896 * MIB, GIB)
    assert trouble.free < trouble.tried
    assert not said.has_neighbour
    assert (torch_of(memory)["alloc_retries"], torch_of(memory)["ooms"]) == (1, 1)
    assert said.allocated is not None
    assert said.allocated < memory.sizes.total
