"""usage: plimsoll sweep TRACE... name=values... [options] [-- vllm serve MODEL ...]

Replays the traffic with every combination of some settings, over all cores, and says what each does.

  block_size=8,16,32,64 max_num_seqs=64..1024      lists, and ranges that double from one end to the other
  gpu_memory_utilization=0.85..0.95                by hundredths; needs --gpu and a command
  also: num_blocks, max_num_batched_tokens, max_model_len, long_prefill_token_threshold, watermark, speedup,
        prefix_caching=on,off, chunked_prefill, async_scheduling, reserve_full_isl

The traffic, the engine and its step times: as for `plimsoll simulate` (--limit, --speedup, --num-blocks, --gpu NAME -- vllm
serve MODEL ..., --fit, --times, ...); --model MODEL is short for -- vllm serve MODEL. With --gpu and a command every setting is
planned, so that its cache is the one it would have; what plan warns of is marked. Without, the cache keeps its size in tokens.

{options}

Exit codes: 0 all were replayed, 1 some could not be, 2 your input is wrong, 3 something outside failed.
Read on: docs/sweep.md
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from plimsoll.cli.main import OptionsCommand
from plimsoll.cli.simulate import check_words, say_compiling
from plimsoll.errors import BadInput
from plimsoll.launch.options import option, switch, whole
from plimsoll.render.terminal import bar, show, write_file
from plimsoll.simulate.options import ReplayOptions, file_named

if TYPE_CHECKING:
    from plimsoll.render.tune import SweepReport
    from plimsoll.tune.goodput import Result, Traffic
    from plimsoll.tune.grid import Axes, Point


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ReplayOptions):
    model: str | None = option("MODEL")
    slo: str | None = option("ttft=2s,tpot=50ms", "what is promised: results are ranked by requests a second that get it")
    on: str | None = option("ray", "runs on a Ray cluster (ray://HOST:PORT, or one of this machine)")
    json: bool = switch("one object, schema plimsoll.sweep/1")
    csv: str | None = option("FILE", "a row a setting", read=file_named)
    top: int = option("N", "rows of the table (20)", read=partial(whole, least=1), default=20)


def run(options: SweepOptions) -> int:
    check_words(options, "sweep", written=("csv", "save_times"))
    from plimsoll.simulate.compiled import telling

    with telling(say_compiling):
        swept = _sweep(options)
    from plimsoll.render import tune as report

    if options.csv is not None:
        write_file(options.csv, report.as_csv(swept))
    show(report.sweep_as_json(swept) if options.json else report.sweep_as_text(swept, options.top))
    return 0 if not swept.failures else 1


def _sweep(given: SweepOptions) -> SweepReport:
    from plimsoll.render.tune import SweepReport
    from plimsoll.tune.grid import parse_axes
    from plimsoll.tune.inputs import split_axes, with_model
    from plimsoll.tune.runners import runner_on, with_progress

    options, words = split_axes(with_model(given, given.model))
    axes = parse_axes(words)
    traffic, points, label, notes = _points(options, axes)
    with bar("sweeping", "settings") as progress:
        run = with_progress(runner_on(given.on), progress)
        # In the points' order; None where nothing could be replayed. All of one speed go together.
        results: list[Result | None] = [None] * len(points)
        for speed in dict.fromkeys(point.speedup for point in points):
            places = [place for place, point in enumerate(points) if point.speedup == speed and point.job is not None]
            jobs = [job for place in places if (job := points[place].job) is not None]
            for nth, result in run(traffic._replace(speedup=speed), jobs):
                results[places[nth]] = result
    return SweepReport(traffic, axes, points, results, label, notes)


def _points(options: SweepOptions, axes: Axes) -> tuple[Traffic, list[Point], str, tuple[str, ...]]:
    """What is replayed, setting by setting; with a command each is planned."""
    from plimsoll.simulate.inputs import NO_SERVER, read_inputs
    from plimsoll.simulate.summary import trust
    from plimsoll.tune.goodput import Slo, Traffic, parse_slo
    from plimsoll.tune.grid import plain_points, planned_points
    from plimsoll.tune.inputs import read_tune_inputs

    if not options.rest:
        raise BadInput("which trace? plimsoll sweep TRACE name=values...; plimsoll simulate --help says what a trace can be")
    if options.verbatim is None:
        given = read_inputs(options)
        if "num_blocks" in axes:
            given = given._replace(notes=tuple(note for note in given.notes if note != NO_SERVER))
        traffic = Traffic(given.trace, given.speedup, Slo() if options.slo is None else parse_slo(options.slo))
        points = plain_points(axes, given.settings, given.step_time, given.speedup, given.engines)
        return traffic, points, trust(given.fitted, is_poor=given.is_poor), given.notes
    asked = read_tune_inputs(options, None, options.slo)
    points = planned_points(axes, asked.server, asked.traffic.speedup, asked.server.step_time)
    return asked.traffic, points, trust(asked.server.fitted, is_poor=asked.server.is_poor), asked.notes


COMMAND = OptionsCommand("sweep", SweepOptions, run, __doc__, unlisted=(ReplayOptions,))
