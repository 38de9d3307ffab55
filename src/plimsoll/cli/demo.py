"""usage: plimsoll demo [--speed X] [--keep] [--json]

The whole loop in about a minute, without a GPU: three stand-ins for vLLM behind a balancer, clients, and a real guard that
acts. A burst is shed; a neighbour gets memory by compaction; a full cache is rightly left alone; a wedged engine is drained,
restarted, verified and back in rotation. Tells what guard saw, decided and did, and ends with what came of every request.

{options}

Exit codes: 0 no request was lost and every incident ended as it should, 1 not so, 2 an option is wrong, 3 it could not be
played. Nothing is left behind: its files live in a temporary folder.
Read on: docs/demo.md
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial

from plimsoll.cli.main import OptionsCommand
from plimsoll.cli.standin import need_packages
from plimsoll.demo.play import play, show_summary
from plimsoll.demo.screen import Screen
from plimsoll.demo.summary import DemoSummary
from plimsoll.errors import BadInput
from plimsoll.launch.options import Words, option, switch
from plimsoll.render.terminal import show, tell

NEXT = (
    "plimsoll plan --gpu H100 -- vllm serve MODEL ...     will mine fit?",
    "plimsoll guard --engine http://HOST:8000             watch one of mine; it only looks",
    "plimsoll doctor LOG                                  what went wrong?",
    "plimsoll demo --keep                                 the same, and the page stays open",
)


SLOWEST, FASTEST = 0.25, 4.0


def _speed(text: str, name: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = float("nan")
    if not SLOWEST <= speed <= FASTEST:
        raise BadInput(f"{name} {text[:40]}: a number from {SLOWEST:g} to {FASTEST:g}")
    return speed


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Words):
    speed: float = option("X", "how fast it is played, 0.25 to 4; default: 1", read=_speed, default=1.0)
    keep: bool = switch("let it run on after the summary, with its page, until Ctrl-C")
    json: bool = switch("print the summary as one JSON object; the story goes to standard error")


def run(options: DemoOptions) -> int:
    """Play it, and say how it ended."""
    if options.rest or options.verbatim is not None:
        raise BadInput(f"demo takes no {(*options.rest, '--')[0]!r}; plimsoll demo --help lists its options")
    need_packages("demo", or_else=" or make demo")
    out = sys.stderr if options.json else sys.stdout
    screen = Screen(partial(tell, file=out), time.time())
    about = "plimsoll demo: three stand-ins for vLLM, clients, and a guard that acts. No GPU is needed; it takes a good minute."
    screen.plain([about], "")
    summary, number = asyncio.run(_until_stopped(play(screen, options.speed, keeps=options.keep)))
    if summary is None:
        print("plimsoll: stopped; all that was started has ended", file=sys.stderr, flush=True)
        return 128 + number
    if not options.keep:
        show_summary(screen, summary)
        screen.head("Next")
        screen.plain(NEXT)
    if options.json:
        show(json.dumps(summary.as_json(), indent=2))
    return 0 if summary.is_fine else 1


async def _until_stopped(begun: Coroutine[None, None, DemoSummary]) -> tuple[DemoSummary | None, int]:
    """The summary; or None and the signal by which it was stopped. However often that comes, what was started is ended."""
    loop = asyncio.get_running_loop()
    playing = asyncio.ensure_future(begun)
    caught: list[int] = []

    def stop(number: int) -> None:
        if not caught:
            playing.cancel()
        caught.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, int(number))
    try:
        return await playing, 0
    except asyncio.CancelledError:
        return None, caught[0] if caught else int(signal.SIGINT)


COMMAND = OptionsCommand("demo", DemoOptions, run, __doc__)
