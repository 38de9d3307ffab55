"""usage: plimsoll demo [--speed X] [--keep] [--balancer own|haproxy] [--json]

The whole loop in about a minute, without a GPU: three stand-ins for vLLM behind a balancer, clients, and a real guard that
acts. A burst is shed; a neighbour gets memory by compaction; a full cache is rightly left alone; a wedged engine is drained,
restarted, verified and back in rotation. Tells what guard saw, decided and did, and ends with what came of every request.

  --speed X        how fast it is played, 0.25 to 4; guard's own shortest times set the limit; default: 1
  --keep           let it run on after the summary, with its page, until Ctrl-C
  --balancer KIND  own: the small one in this process; haproxy; default: haproxy where it is installed
  --json           print the summary as one JSON object; the story goes to standard error

Exit codes: 0 no request was lost and every incident ended as it should, 1 not so, 2 an option is wrong, 3 it could not be
played. Nothing is left behind: its files live in a temporary folder.
Read on: docs/demo.md
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from plimsoll.cli.standin import need_packages
from plimsoll.errors import BadInput
from plimsoll.launch.options import split_options
from plimsoll.render.terminal import show

if TYPE_CHECKING:
    from plimsoll.demo.play import Options
    from plimsoll.demo.screen import Screen
    from plimsoll.demo.summary import Summary

SLOWEST, FASTEST = 0.25, 4.0
NEXT = (
    "plimsoll plan --gpu H100 -- vllm serve MODEL ...     will mine fit?",
    "plimsoll guard --engine http://HOST:8000             watch one of mine; it only looks",
    "plimsoll doctor LOG                                  what went wrong?",
    "plimsoll demo --keep                                 the same, and the page stays open",
)


def run(words: list[str]) -> int:
    """Play it, and say how it ended."""
    if {"--help", "-h"} & set(words):
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    options, as_json = _read(words)
    need_packages("demo", or_else=" or make demo")
    from plimsoll.demo.play import show_summary
    from plimsoll.demo.screen import Screen, wants_colour

    out = sys.stderr if as_json else sys.stdout
    screen = Screen(
        lambda line: print(line, file=out, flush=True) if as_json else show(line),
        is_coloured=wants_colour(os.environ, is_terminal=out.isatty()), began=time.time(),
    )  # fmt: skip
    screen.plain(
        ["plimsoll demo: three stand-ins for vLLM, clients, and a guard that acts. No GPU is needed; it takes a good minute."],
        "",
    )
    summary, number = asyncio.run(_until_stopped(options, screen))
    if summary is None:
        print("plimsoll: stopped; all that was started has ended", file=sys.stderr, flush=True)
        return 128 + number
    if not options.keep:
        show_summary(screen, summary)
        screen.head("Next")
        screen.plain(NEXT)
    if as_json:
        show(json.dumps(summary.as_json(), indent=2))
    return 0 if summary.is_fine else 1


def _read(words: list[str]) -> tuple[Options, bool]:
    from plimsoll.demo.play import Options

    found = split_options(words, with_value=("--speed", "--balancer"), switches=("--keep", "--json"))
    if found.rest or found.verbatim is not None:
        raise BadInput(f"demo takes no {(*found.rest, '--')[0]!r}; plimsoll demo --help lists its options")
    text = found.values.get("--speed", "1")
    try:
        speed = float(text)
    except ValueError:
        speed = float("nan")
    if not SLOWEST <= speed <= FASTEST:
        raise BadInput(f"--speed {text[:40]}: a number from {SLOWEST:g} to {FASTEST:g}")
    kind = found.values.get("--balancer")
    if kind not in (None, "own", "haproxy"):
        raise BadInput(f"--balancer {kind[:40]}: own or haproxy")
    return Options(speed, "--keep" in found.switches, None if kind is None else kind == "haproxy"), "--json" in found.switches


async def _until_stopped(options: Options, screen: Screen) -> tuple[Summary | None, int]:
    """The summary; or None and the signal by which it was stopped. However often that comes, what was started is ended."""
    from plimsoll.demo.play import play

    loop = asyncio.get_running_loop()
    playing = asyncio.ensure_future(play(options, screen))
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
