"""Notifications over real sockets: in order, tried again, bounded, and given up where there is no sense in going on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from plimsoll.guard.adapters.webhook import MOST_WAITING, DeliveryCounts, WebhookNotifier
from plimsoll.net.address import address
from tests.each import each, in_loop
from tests.net.raw_answers import Answers, answer, on_a_port
from tests.net.raw_server import free_port


def told(answers: Answers) -> list[Any]:
    return [json.loads(one.partition(b"\r\n\r\n")[2]) for one in answers.got]


def sent(statuses: list[int], alerts: int, is_over: Callable[[DeliveryCounts], bool]) -> tuple[Answers, WebhookNotifier]:
    """So many notifications to a receiver that answers with these statuses first, then 200."""

    async def act() -> tuple[Answers, WebhookNotifier]:
        async with asyncio.timeout(30), on_a_port(lambda _: answer(statuses.pop(0) if statuses else 200)) as (answers, url):
            hook = WebhookNotifier(replace(address(f"{url}/api/v2/alerts?x=1"), login="Basic abc"), first_pause_s=0.01)
            task = asyncio.create_task(hook.run())
            for number in range(alerts):
                hook.put([{"n": number}])
            while not is_over(hook.counts):
                await asyncio.sleep(0.01)
            task.cancel()
            return answers, hook

    return asyncio.run(act())


def test_they_arrive_in_order_and_once() -> None:
    """Each is one request with its body, the path as given, and the login in its header."""
    answers, hook = sent([], 5, lambda counts: counts.sent == 5)
    assert hook.counts == DeliveryCounts(sent=5)
    assert told(answers) == [[{"n": number}] for number in range(5)]
    assert set(answers.lines) == {"POST /api/v2/alerts?x=1"}
    assert all(b"\r\nAuthorization: Basic abc\r\n" in one for one in answers.got)


@each(
    ("statuses", "counts", "order"),
    [
        ([500, 429, 503], DeliveryCounts(sent=2, failed=3), [0, 0, 0, 0, 1]),  # its own errors and too many requests pass
        ([400], DeliveryCounts(sent=1, failed=1, dropped=1), [0, 1]),  # what it does not take now it will not take later
    ],
)
def test_a_receiver_in_trouble_is_tried_again_and_one_that_refuses_is_not(
    statuses: list[int], counts: DeliveryCounts, order: list[int]
) -> None:
    """The order stays, and the next one has its chance."""
    answers, hook = sent(statuses, 2, lambda now: now.sent + now.dropped == 2)
    assert (hook.counts, hook.trouble) == (counts, "")
    assert [alerts[0]["n"] for alerts in told(answers)] == order


@in_loop
async def test_nobody_there() -> None:
    """The newest wait, the oldest go; the end is not held up, but what waits then gets one chance."""
    hook = WebhookNotifier(address(f"http://127.0.0.1:{free_port()}/x?key=hush"), first_pause_s=0.01)
    task = asyncio.create_task(hook.run())
    for number in range(MOST_WAITING + 15):
        hook.put([{"a": number}])
    while hook.counts.failed < 3:
        await asyncio.sleep(0.01)
    assert (hook.counts.waiting, hook.counts.dropped) == (MOST_WAITING, 15)
    assert ("cannot be reached" in hook.trouble, "hush" in hook.trouble) == (True, False)
    task.cancel()
    await hook.flush(0.2)
    async with on_a_port(lambda _: answer(200)) as (answers, url):
        hook = WebhookNotifier(address(url))
        hook.put([{"a": 1}])
        hook.put([{"a": 2}])
        await hook.flush(5.0)
        assert hook.counts == DeliveryCounts(sent=len(answers.got)) == DeliveryCounts(sent=2)
