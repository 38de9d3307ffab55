"""Traffic and its figures: arrivals, streaming clients, and the statistics of paired runs."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from pathlib import Path

import pytest

from lab import streams
from lab.arrivals import Arrival, Outcome, Traffic, as_recording, bodies, body_of, must_wait_s, send, summary
from lab.paired import loss_of, t95, upper_bound
from lab.streams import Answer, Gap
from plimsoll.simulate.trace_files import read_measured

HELD = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 0\r\nConnection: close\r\n\r\n"
SERVED = (
    b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    b'data: {"choices": [1]}\n\ndata: {"choices": [2]}\n\ndata: {"usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)


def test_the_same_rule_is_the_same_requests() -> None:
    """Lengths and times are within their ranges and the same in every run; no prompt begins as another, in any round."""
    rule = Traffic(200, (10, 20), (3, 5), per_s=50.0, seed=4)
    arrivals = rule.arrivals()
    assert arrivals == rule.arrivals() != rule._replace(seed=5).arrivals()
    assert all(10 <= one.prompt <= 20 and 3 <= one.output <= 5 for one in arrivals)
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)
    assert 3.0 < arrivals[-1].at_s < 5.5  # 200 of them at 50 a second
    assert {one.at_s for one in rule._replace(per_s=None).arrivals()} == {0.0}
    found = [json.loads(body_of("m", Arrival(0, 40, 2), number, 0).split(b"\r\n\r\n")[1]) for number in range(3_000)]
    assert {len(body["prompt"]) for body in found} == {40}
    assert len({tuple(body["prompt"][:2]) for body in found}) == 3_000
    rule = Traffic(50, (40, 60), (3, 5), words=1)
    first, second = ([json.loads(one.split(b"\r\n\r\n")[1]) for one in bodies("m", rule._replace(words=n))] for n in (1, 2))
    assert [len(one["prompt"]) for one in first] == [len(one["prompt"]) for one in second]
    assert not {tuple(one["prompt"][:16]) for one in first} & {tuple(one["prompt"][:16]) for one in second}
    assert bodies("m", rule) == bodies("m", rule)


async def _against(refusals: int, traffic: Traffic) -> list[Outcome]:
    left = refusals

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        left -= 1
        writer.write(HELD if left >= 0 else SERVED)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        return await send(server.sockets[0].getsockname()[1], "m", traffic)


def test_a_client_that_is_told_to_wait_asks_again_and_what_is_counted(tmp_path: Path) -> None:
    """Its wait counts from its first try; rates are from first arrival to last token, good is within both promises."""
    for wrong, wait_s in (
        (None, None), ("HTTP/1.1 503 Service Unavailable\r\nretry-after: 7\r\n", 7.0), ("the stream broke off", None),
        ("HTTP/1.1 503 Service Unavailable\r\n", None), ("HTTP/1.1 500 Internal Server Error\r\nretry-after: 7\r\n", None),
    ):  # fmt: skip
        assert must_wait_s(Answer(0.0, (), 0, wrong)) == wait_s
    rule = Traffic(3, (4, 8), (2, 2))
    patient = asyncio.run(_against(2, rule._replace(patience_s=5.0)))
    assert [one.wrong for one in patient] == [None] * 3
    assert sum(one.told_to_wait for one in patient) == 2
    found = summary(asyncio.run(_against(2, rule)), 2.0, 1.0)
    assert (found["served"], found["failed"], found["told_to_wait"]) == (1, 2, 2)
    assert found["first_failures"][0].startswith("HTTP/1.1 503")
    rows = [
        Outcome(100.0, 101.0, 103.0, 10, 5, 0, None),
        Outcome(100.5, 104.0, 105.0, 10, 5, 3, None),
        Outcome(101.0, None, None, 10, 5, 1, "no"),
    ]
    found = summary(rows, 2.0, 0.6)
    assert (found["seconds"], found["served"], found["failed"], found["good"]) == (5.0, 2, 1, 1)
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (0.4, 2.0)
    assert (found["ttft_ms"]["mean"], found["tpot_ms"]["mean"]) == (2250.0, 375.0)
    path = tmp_path / "run.jsonl"
    path.write_text("".join(as_recording(one) + "\n" for one in rows if one.wrong is None))
    measured = read_measured(str(path))
    assert measured.trace.prompt.tolist() == [10, 10]
    assert int(measured.finish_ns.max()) == 5_000_000_000


def test_a_stream_is_whole_or_wrong_and_the_bound_is_the_one_of_the_textbook() -> None:
    """Too few tokens, an error and a missing end are wrong; a gap partly in a window counts; one pair has no bound."""
    head, usage = b"HTTP/1.1 200 OK", b'data: {"usage":{"completion_tokens":7}}\n\n'
    done = b"data: [DONE]\n\n"
    assert streams.judge(head, usage + done, 7) == (7, None)
    assert streams.judge(head, usage + done, 8) == (7, "7 tokens of 8")
    assert streams.judge(head, usage, 7)[1] == "the stream broke off"
    assert '"error"' in (streams.judge(head, b'data: {"error": {}}\n\n' + done, 7)[1] or "")
    assert streams.judge(b"", b"", 7)[1] == "no answer"
    answer = Answer(0.0, (1.0, 2.0, 3.0, 4.0, 5.0), 10, None)
    assert streams.tokens_between([answer], 2.0, 4.0) == 4.0
    assert streams.tokens_between([answer, Answer(0.0, (), 0, "no")], 0.0, 9.0) == 10.0
    found = [Gap(at=10.0, seconds=4.0), Gap(at=12.0, seconds=0.5), Gap(at=20.0, seconds=9.0)]
    assert streams.longest_gap_s(found, 9.0, 12.0) == 9.0
    assert streams.longest_gap_s(found, 9.0, 10.5) == 4.0
    assert streams.longest_gap_s(found, 30.0, 31.0) is None
    assert streams.percentile([], 0.5) is None
    assert streams.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert streams.percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert upper_bound([1, 2, 3, 4, 5]) == pytest.approx(3 + 2.132 * math.sqrt(2.5 / 5))
    assert upper_bound([0.1]) is None
    loss = loss_of([(9.0, 10.0)])
    assert loss.upper is None
    assert loss.mean == pytest.approx(0.1)
    assert "unknown" in str(loss)
    quantiles = [t95(degrees) for degrees in range(1, 40)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[-1] == 1.697 > statistics.NormalDist().inv_cdf(0.95)
