"""usage: plimsoll simulate TRACE... [options] [-- vllm serve MODEL ...]

Replays traffic through vLLM's own scheduling, block by block, and says what it does to the KV cache, to preemptions and to
latency. Needs no GPU and no vLLM.

TRACE is a file (Azure CSV, Mooncake JSON lines, BurstGPT, a recording of your own server, lengths only: docs/traces.md), `-`,
or made up: synthetic:requests=10000,rate=20,prompt=1000,output=200. Several traces are merged.

What is replayed:
  --limit N             the first N of each trace       --from-s S, --until-s S   a part, by seconds from its start
  --speedup X           arrivals X times as fast        --skip-bad                leave out rows that cannot be read
  --trace-block-size N  tokens that one hash id of the trace stands for (512)
  --rate X              requests a second, for lengths only; --arrivals poisson|constant|bursty|at-once, --burstiness, --seed
The engine (defaults in brackets, names as vLLM's):
  --num-blocks N        blocks of KV cache, one of them the null block (8192)
  --plan PLAN.json      blocks, groups and limits from `plimsoll plan --json`; or give --gpu NAME and the command after `--`,
                        with --gpus, --gpu-memory-gib, --used-gib and --vllm as for plan
  --block-size N (16)   --max-num-seqs N (256)   --max-num-batched-tokens N (2048)   --max-model-len N (16384)
  --no-prefix-caching   --no-chunked-prefill     --long-prefill-token-threshold N (0)
  --watermark X (0)     --no-reserve-full-isl    --scheduling-policy fcfs|priority (fcfs)
  --async-scheduling, --no-async-scheduling      two steps under way at once (off, or the plan's)
  --groups full:16,sliding:16:1024,mamba:16      layers of several kinds that share the blocks
How long a step takes:
  --fit FILE            learn it from a real run: requests with stamps, or a page of metrics (docs/step-time.md);
                        --fit-series FILE adds what a run with stamps showed every second. The engine's options must then be
                        those of that run; --save-times FILE keeps the result, --times FILE replays other options with it
  --base-ns --token-ns --seq-ns --ctx-ps         or say it (6000000, 20000, 10000, 40000)
What is written:
  --json                one object, schema plimsoll.simulate/1
  --html FILE           a page to look at: use over time, preemptions, latency, block sizes, the busiest minute block by block
  --steps FILE          CSV, one row a step             --requests FILE           CSV, one row a request

Exit codes: 0 whatever was preempted or rejected, 2 your input is wrong or leaves no cache to replay in, 3 a file could not be
written.
Read on: docs/simulate.md
"""

from __future__ import annotations

import gzip
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.launch.options import Split, split_options
from plimsoll.render.terminal import bar, show, write_file

if TYPE_CHECKING:
    from plimsoll.simulate.inputs import Inputs
    from plimsoll.simulate.replay import AtBlockSize, Replay, Series
    from plimsoll.simulate.trace import Integers

REPLAYING = (  # what says how a server replays traffic, for `sweep` too
    "--num-blocks --block-size --max-num-seqs --max-num-batched-tokens --max-model-len --long-prefill-token-threshold "
    "--watermark --scheduling-policy --groups --base-ns --token-ns --seq-ns --ctx-ps --limit --from-s --until-s --speedup "
    "--trace-block-size --rate --arrivals --burstiness --seed --plan --gpu --gpus --gpu-memory-gib --used-gib --vllm --fit "
    "--fit-series --times --save-times"
).split()
SWITCHES = (
    "--no-prefix-caching --no-chunked-prefill --async-scheduling --no-async-scheduling --no-reserve-full-isl --skip-bad --json "
    "--help -h"
).split()
BLOCK_SIZES = (8, 16, 32, 64, 128)
COMPILING = (
    "plimsoll: compiling the scheduler for this machine, once (and once more for hybrid models); ten to twenty-five seconds"
)
_WRITTEN = ("--steps", "--requests", "--html")
_READ = ("--fit", "--fit-series", "--plan", "--times", "--last")


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    options = split_options(words, with_value=(*REPLAYING, *_WRITTEN), switches=SWITCHES)
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    checked_words(options, "simulate", written=(*_WRITTEN, "--save-times"))
    from plimsoll.simulate.compiled import telling

    with telling(say_compiling):
        return _simulate(options, words)


def checked_words(options: Split, command: str, written: Sequence[str]) -> None:
    """What can be said before anything is read: typing mistakes, and outputs that cannot be or fall upon what is read."""
    if "vllm" in options.rest:
        raise BadInput(f"put `--` before the command: plimsoll {command} TRACE --gpu H100 -- vllm serve MODEL ...")
    unknown = next((word for word in options.rest if word.startswith("-") and word != "-"), None)
    if unknown is not None:
        raise BadInput(f"there is no option {unknown!r}; plimsoll {command} --help lists them")
    try:
        import numpy  # noqa: F401 - only whether it is there
    except ImportError:
        raise BadInput(f"{command} needs numpy and numba: pip install 'plimsoll-line[simulate]'") from None
    read = [*options.rest, *(options.values[name] for name in _READ if name in options.values)]
    taken = {os.path.realpath(word): word for word in read if "\0" not in word}
    for name in written:
        path = options.values.get(name)
        if path is None:
            continue
        if not path or path == "-" or "\0" in path:
            raise BadInput(f"{name} needs the name of a file, not {path!r}")
        real = os.path.realpath(path)
        if real in taken and not real.startswith("/dev/"):
            raise BadInput(f"{name} {path} would overwrite {taken[real]}")
        taken[real] = f"what {name} writes"
        target = Path(real)
        if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
            raise WorldFailed(f"{path}: cannot be written")


def say_compiling() -> None:
    """The one line that explains the first wait."""
    print(COMPILING, file=sys.stderr, flush=True)


def _simulate(options: Split, words: list[str]) -> int:
    from plimsoll.render import simulate as report
    from plimsoll.simulate.inputs import read_inputs
    from plimsoll.simulate.summary import summarise

    given = read_inputs(options)
    found, series = _replay(options, given)
    summary = summarise(found, fitted=given.fitted, is_poor=given.is_poor)
    if "--requests" in options.values:
        _write_requests(options.values["--requests"], found)
    if "--html" in options.values:
        _write_page(options, words, given, found, series)
    is_json = "--json" in options.switches
    show(report.as_json(summary, notes=given.notes) if is_json else report.as_text(summary, notes=given.notes))
    return 0


def _replay(options: Split, given: Inputs) -> tuple[Replay, Series | None]:
    """The run itself; steps are written and added up as they come."""
    from plimsoll.simulate.replay import STEP_COLUMNS, replay
    from plimsoll.simulate.summary import SeriesBuilder

    builder = SeriesBuilder() if "--html" in options.values else None
    with ExitStack() as stack:
        takers: list[Callable[[Integers], None]] = [builder.add] if builder else []
        if "--steps" in options.values:
            takers.append(stack.enter_context(_CsvFile(options.values["--steps"], STEP_COLUMNS)).add)
        progress = stack.enter_context(bar("replaying", "requests"))

        def on_steps(rows: Integers) -> None:
            for take in takers:
                take(rows)

        found = replay(
            given.trace,
            given.settings,
            given.step_time,
            given.speedup,
            on_steps=on_steps if takers else None,
            on_progress=progress,
            clock=time.perf_counter,
        )
    return found, builder.finish() if builder else None


class _CsvFile:
    """A CSV that grows; one that cannot be written is one line and exit code 3. `.gz` is compressed."""

    def __init__(self, path: str, columns: list[str]) -> None:
        self.path, self.columns = path, columns
        self.file: TextIO

    def __enter__(self) -> Self:
        with self._errors_named():
            if self.path.endswith(".gz"):
                self.file = gzip.open(self.path, "wt", encoding="ascii", compresslevel=4)
            else:
                self.file = Path(self.path).open("w", encoding="ascii", newline="")
            self.file.write(",".join(self.columns) + "\n")
        return self

    def add(self, rows: Integers) -> None:
        """Write whole rows of numbers."""
        with self._errors_named():
            self.file.write("".join(",".join(map(str, row)) + "\n" for row in rows.tolist()))

    def __exit__(self, *_: object) -> None:
        with self._errors_named():
            self.file.close()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise WorldFailed(f"{self.path}: cannot be written: {error.strerror or error}") from None


def _write_requests(path: str, found: Replay) -> None:
    """One row for each request that was not rejected."""
    import numpy as np

    from plimsoll.simulate.replay import REQUEST_COLUMNS

    trace = found.trace
    columns = (
        np.arange(trace.size), found.arrival_ns, found.first_sched_ns, found.first_token_ns, found.finish_ns,
        np.maximum(1, trace.prompt), found.produced, found.preemptions, found.cached_tokens,
    )  # fmt: skip
    with _CsvFile(path, REQUEST_COLUMNS) as file:
        file.add(np.stack(columns, axis=1)[~found.is_rejected])


def _write_page(options: Split, words: list[str], given: Inputs, found: Replay, series: Series | None) -> None:
    from plimsoll.render.simulate_html import page
    from plimsoll.simulate.replay import busiest_minute, map_blocks
    from plimsoll.simulate.summary import summarise

    assert series is not None, "a page needs the series"
    begin, end = busiest_minute(series)
    blocks = map_blocks(given.trace, given.settings, given.step_time, begin, end, speedup=given.speedup) if end else None
    html = page(
        summarise(found, fitted=given.fitted, is_poor=given.is_poor),
        found,
        series,
        _by_block_size(given),
        blocks,
        command=shlex.join(["plimsoll", "simulate", *words]),
        notes=given.notes,
    )
    write_file(options.values["--html"], html)


def _by_block_size(given: Inputs) -> list[AtBlockSize]:
    """The same memory cut into blocks of other sizes; groups have the sizes that vLLM gave them, so nothing is varied there."""
    from plimsoll.simulate.summary import at_block_sizes

    if given.settings.groups:
        return []
    with bar("other block sizes", "runs") as progress:
        return at_block_sizes(
            given.trace, given.settings, given.step_time, BLOCK_SIZES, speedup=given.speedup, on_progress=progress
        )
