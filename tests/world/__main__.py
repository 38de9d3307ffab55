"""Plays seeds of the simulated world.

python -m tests.world 42                          tells the story of one seed
python -m tests.world 42 --whole                  all of it, and not the 40 lines that matter most
python -m tests.world 0 --count 100000 --cores 2  plays many; exit 1 where one ends in a violation
python -m tests.world 0 --count 2000 --bugs       as many for each deliberate bug; exit 1 where one is not noticed
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator

from tests.world.bugs import BUGS, first_noticed
from tests.world.world import Story, play, play_some

CHUNK = 50


def many(first: int, count: int, cores: int) -> int:
    """Plays them all; prints each violation, and how fast it went."""
    chunks = [range(at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)]
    began, played, wrong = time.monotonic(), 0, 0
    for chunk, stories in zip(chunks, _results(chunks, cores), strict=True):
        played += len(chunk)
        wrong += len(stories)
        for _, story in stories:
            print(story, flush=True)
        rate = played / (time.monotonic() - began)
        text = f"{played:,} of {count:,} seeds, {wrong} violations, {rate:.1f} seeds a second on {cores} cores"
        print(text, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    print(f"{played:,} seeds from {first:,}, {wrong} violations, {rate:.1f} seeds a second on {cores} cores")
    return int(bool(wrong))


def _results(chunks: list[range], cores: int) -> Iterator[list[tuple[int, str]]]:
    if cores == 1:
        yield from map(play_some, chunks)
    else:
        with multiprocessing.get_context("spawn").Pool(cores) as pool:
            yield from pool.imap(play_some, chunks)


def bugs(first: int, count: int) -> int:
    """Looks for each deliberate bug; prints the seed that notices it."""
    missed = 0
    for name in BUGS:
        began = time.monotonic()
        story: Story | None = first_noticed(name, range(first, first + count))
        missed += story is None
        words = f"not noticed in {count:,} seeds" if story is None else f"seed {story.seed}: {story.wrong}"
        print(f"{name:<36} {words} ({time.monotonic() - began:.0f} s)", flush=True)
    return int(bool(missed))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--bugs", action="store_true")
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    if options.bugs:
        return bugs(options.seed, options.count)
    if options.count > 1:
        return many(options.seed, options.count, options.cores)
    story = play(options.seed)
    print("\n".join([str(story).partition("\n")[0], *story.lines]) if options.whole else story)
    return int(bool(story.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
