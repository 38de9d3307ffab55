"""usage: plimsoll simulate TRACE... [options] [-- vllm serve MODEL ...]

Replays traffic through vLLM's own scheduling, block by block, and says what it does to the KV cache, to preemptions and to
latency. Needs no GPU and no vLLM.

TRACE is a file (Azure CSV, Mooncake JSON lines, BurstGPT, a recording of your own server, lengths only: docs/traces.md), `-`,
or made up: synthetic:requests=10000,rate=20,prompt=1000,output=200. Several traces are merged.

{options}

Exit codes: 0 whatever was preempted or rejected, 2 your input is wrong or leaves no cache to replay in, 3 a file could not be
written.
Read on: docs/simulate.md
"""

from __future__ import annotations

import gzip
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from plimsoll.cli.main import OptionsCommand
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.launch.options import first_given, option, switch
from plimsoll.render.terminal import bar, show, write_file
from plimsoll.simulate.options import FleetOptions, TrafficOptions, file_named

if TYPE_CHECKING:
    from plimsoll.simulate.inputs import Inputs
    from plimsoll.simulate.replay import Replay, Series
    from plimsoll.simulate.summary import Summary
    from plimsoll.simulate.trace import Integers

BLOCK_SIZES = (8, 16, 32, 64, 128)
RECORDINGS_MAX_BYTES = 4 << 30
GUARD_TIMEOUT_S = 30  # between two pieces of an answer
Fleet = TypeVar("Fleet", bound=FleetOptions)
COMPILING = (
    "plimsoll: compiling the scheduler for this machine, once (and once more for hybrid models); ten to twenty-five seconds"
)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(FleetOptions):
    json: bool = switch("one object, schema plimsoll.simulate/1", heading="What is written")
    html: str | None = option("FILE", "a page: use over time, preemptions, latency, block sizes", read=file_named)
    steps: str | None = option("FILE", "CSV, one row a step", read=file_named)
    requests: str | None = option("FILE", "CSV, one row a request", read=file_named)


def run(options: SimulateOptions) -> int:
    check_words(options, "simulate", written=("steps", "requests", "html", "save_times"))
    from plimsoll.simulate.compiled import telling

    with telling(say_compiling), recorded_by_guard(options) as (options_now, _):
        return _simulate(options_now)


def check_words(options: TrafficOptions, command: str, written: Sequence[str]) -> None:
    """What can be said before anything is read: outputs that cannot be written or fall upon what is read."""
    if "vllm" in options.rest:
        raise BadInput(f"put `--` before the command: plimsoll {command} TRACE --gpu H100 -- vllm serve MODEL ...")
    try:
        import numpy  # noqa: F401 - only whether it is there
    except ModuleNotFoundError:
        raise BadInput(f"{command} needs numpy and numba: pip install 'plimsoll-line[simulate]'") from None
    except ImportError as error:  # it is there, and a library of the system is not
        raise WorldFailed(f"numpy cannot be imported: {error.__cause__ or error}") from None
    read = [*options.rest, *(getattr(options, name, None) for name in ("fit", "fit_series", "plan", "times"))]
    taken = {os.path.realpath(word): word for word in read if word is not None and "\0" not in word}
    for field in written:
        path = getattr(options, field)
        if path is None:
            continue
        name, real = first_given(options, field), os.path.realpath(path)
        if real in taken and not real.startswith("/dev/"):
            raise BadInput(f"{name} {path} would overwrite {taken[real]}")
        taken[real] = f"what {name} writes"
        target = Path(real)
        if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
            raise WorldFailed(f"{path}: cannot be written")


@contextmanager
def recorded_by_guard(options: Fleet) -> Iterator[tuple[Fleet, int]]:
    """The options with what guard's engines recorded as their trace, where --from-guard asks for it, and how many engines."""
    if options.from_guard is None:
        if (name := first_given(options, "token_file")) is not None:
            raise BadInput(f"{name} goes with --from-guard")
        yield options, 0
        return
    from plimsoll.cli.guardctl import GuardClient, GuardctlOptions

    if options.rest:
        raise BadInput(f"either a trace or --from-guard, not both: {options.rest[0][:60]}")
    if not 0 < options.last_hours <= 366 * 24:
        raise BadInput(f"--last-hours must lie above 0 and at most at a year, not {options.last_hours:g}")
    guard = GuardClient(
        GuardctlOptions(at=options.from_guard, token_file=options.token_file, timeout=GUARD_TIMEOUT_S), os.environ
    )
    names = [str(one["engine"]) for one in guard.get("/recordings")[1]["recordings"]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "guard"
        folder.mkdir()
        for number, name in enumerate(names):
            with (folder / f"requests-{number}.jsonl").open("wb") as file:
                path = f"/recordings/{quote(name, safe='')}?seconds={math.ceil(3600 * options.last_hours)}"
                guard.download(path, file, RECORDINGS_MAX_BYTES)
        engines = sum(path.stat().st_size > 0 for path in folder.iterdir())
        if not engines:
            told = "guard reads no recording: [[engine]] recording = FOLDER in its configuration names one"
            none = f"no request was recorded in the last {options.last_hours:g} hours"
            raise BadInput(f"--from-guard {options.from_guard}: {none if names else told}")
        yield replace(options, rest=(str(folder),)), engines


def say_compiling() -> None:
    """The one line that explains the first wait."""
    print(COMPILING, file=sys.stderr, flush=True)


def _simulate(options: SimulateOptions) -> int:
    from plimsoll.render import simulate as report
    from plimsoll.simulate.inputs import read_inputs
    from plimsoll.simulate.summary import summarise

    given = read_inputs(options)
    if given.engines.number > 1:
        if (name := first_given(options, "steps", "html")) is not None:
            raise BadInput(f"{name} shows one engine: leave out --replicas, or replay one engine's share with --speedup")
        found, runs = replay_engines(given)
        engines, series = [summarise(run) for run in runs], None
    else:
        found, series = _replay(options, given)
        engines = []
    summary = summarise(found, fitted=given.fitted, is_poor=given.is_poor)
    if options.requests is not None:
        _write_requests(options.requests, found)
    if options.html is not None:
        assert series is not None, "a page needs the series"
        _write_page(options.html, options.typed, given, found, summary, series)
    router = options.router if engines else ""
    show((report.as_json if options.json else report.as_text)(summary, notes=given.notes, engines=engines, router=router))
    return 0


def replay_engines(given: Inputs, factor: float = 1.0) -> tuple[Replay, list[Replay]]:
    """Several engines behind a router: all of them as one run, and each by itself; steps take `factor` times as long."""
    from plimsoll.simulate.replicas import merge_replays, replay_routed

    step_time = given.step_time.scaled(factor) if factor != 1.0 else given.step_time
    with bar("replaying", "requests") as progress:
        engine_of, runs = replay_routed(
            given.trace, given.settings, step_time, given.engines,
            speedup=given.speedup, on_progress=progress, clock=time.perf_counter,
        )  # fmt: skip
    return merge_replays(given.trace, runs, engine_of), runs


def _replay(options: SimulateOptions, given: Inputs) -> tuple[Replay, Series | None]:
    """The run itself; steps are written and added up as they come."""
    from plimsoll.simulate.replay import STEP_COLUMNS, replay
    from plimsoll.simulate.summary import SeriesBuilder

    builder = SeriesBuilder() if options.html is not None else None
    with ExitStack() as stack:
        takers: list[Callable[[Integers], None]] = [builder.add] if builder else []
        if options.steps is not None:
            takers.append(stack.enter_context(_csv_file(options.steps, STEP_COLUMNS)))
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


@contextmanager
def _csv_file(path: str, columns: Sequence[str]) -> Iterator[Callable[[Integers], None]]:
    """Adds rows to a CSV; one that cannot be written is one line and exit code 3. `.gz` is compressed."""
    try:
        with (
            gzip.open(path, "wt", encoding="ascii", compresslevel=4)
            if path.endswith(".gz")
            else Path(path).open("w", encoding="ascii", newline="") as file
        ):
            file.write(",".join(columns) + "\n")
            yield lambda rows: file.writelines(",".join(map(str, row)) + "\n" for row in rows.tolist())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WorldFailed(f"{path}: cannot be written: {error.strerror or error}") from None


def _write_requests(path: str, found: Replay) -> None:
    """One row for each request that was not rejected."""
    import numpy as np

    from plimsoll.simulate.replay import REQUEST_COLUMNS

    trace = found.trace
    columns = (
        np.arange(trace.size),
        found.arrival_ns,
        found.first_sched_ns,
        found.first_token_ns,
        found.finish_ns,
        np.maximum(1, trace.prompt),
        found.produced,
        found.preemptions,
        found.cached_tokens,
    )
    with _csv_file(path, REQUEST_COLUMNS) as add:
        add(np.stack(columns, axis=1)[~found.is_rejected])


def _write_page(
    path: str, typed: Sequence[str], given: Inputs, found: Replay, summary: Summary, series: Series
) -> None:  # fmt: skip
    from plimsoll.render.simulate_html import page
    from plimsoll.simulate.summary import at_block_sizes

    server = (given.trace, given.settings, given.step_time)
    # The same memory cut into blocks of other sizes; groups have the sizes that vLLM gave them.
    sizes = () if given.settings.groups else BLOCK_SIZES
    with bar("other block sizes", "runs") as progress:
        by_size = at_block_sizes(*server, sizes, speedup=given.speedup, on_progress=progress)
    command = shlex.join(["plimsoll", "simulate", *typed])
    write_file(path, page(summary, found, series, by_size, command=command, notes=given.notes))


COMMAND = OptionsCommand("simulate", SimulateOptions, run, __doc__)
