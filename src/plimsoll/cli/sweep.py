"""usage: plimsoll sweep TRACE... name=values... [options] [-- vllm serve MODEL ...]

Replays the traffic with every combination of some settings, over all cores, and says what each does.

  block_size=8,16,32,64 max_num_seqs=64..1024      lists, and ranges that double from one end to the other
  gpu_memory_utilization=0.85..0.95                by hundredths; needs --gpu and a command
  also: num_blocks, max_num_batched_tokens, max_model_len, long_prefill_token_threshold, watermark, speedup,
        prefix_caching=on,off, chunked_prefill, async_scheduling, reserve_full_isl

The traffic, the engine and its step times: as for `plimsoll simulate` (--limit, --speedup, --num-blocks, --gpu NAME -- vllm
serve MODEL ..., --fit, --times, ...); --model MODEL is short for -- vllm serve MODEL. With --gpu and a command every setting is
planned, so that its cache is the one it would have; what plan warns of is marked. Without, the cache keeps its size in tokens.

  --slo ttft=2s,tpot=50ms   what is promised: results are ranked by requests a second that get it
  --into FILE           keeps each run as it ends: a sweep that was killed goes on where it stopped
  --on ray              runs on a Ray cluster (ray://HOST:PORT, or one of this machine)
  --json                one object, schema plimsoll.sweep/1     --csv FILE   a row a setting     --html FILE   a page
  --top N               rows of the table (20)

Exit codes: 0 all were replayed, 1 some could not be, 2 your input is wrong, 3 something outside failed.
Read on: docs/sweep.md
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from plimsoll.cli.simulate import REPLAYING, SWITCHES, checked_words, say_compiling
from plimsoll.errors import BadInput
from plimsoll.launch.options import Split, split_options
from plimsoll.render.terminal import bar, show, write_file

if TYPE_CHECKING:
    from plimsoll.render.tune import SweepReport
    from plimsoll.tune.goodput import Result, RunAll, Traffic
    from plimsoll.tune.grid import Axes, Point

_MORE = "--model --slo --into --on --csv --html --top".split()


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    options = split_options(words, with_value=(*REPLAYING, *_MORE), switches=SWITCHES)
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    checked_words(options, "sweep", written=("--csv", "--html", "--save-times", "--into"))
    from plimsoll.simulate.compiled import telling

    with telling(say_compiling):
        swept = _sweep(options)
    from plimsoll.render import tune as report

    if "--csv" in options.values:
        write_file(options.values["--csv"], report.as_csv(swept))
    if "--html" in options.values:
        from plimsoll.render.tune_html import sweep_page

        write_file(options.values["--html"], sweep_page(swept))
    show(report.sweep_as_json(swept) if "--json" in options.switches else report.sweep_as_text(swept, _top(options)))
    return 0 if not swept.failures else 1


def _top(options: Split) -> int:
    from plimsoll.simulate.inputs import whole

    return whole(options.values["--top"], "--top", 1) if "--top" in options.values else 20


def _sweep(given: Split) -> SweepReport:
    from plimsoll.render.tune import SweepReport
    from plimsoll.tune.grid import parse_axes
    from plimsoll.tune.inputs import kept_in, simulator_version, split_axes, with_model
    from plimsoll.tune.runners import remembering, runner_on

    options, words = split_axes(with_model(given))
    axes = parse_axes(words)
    traffic, points, label, notes = _points(options, axes)
    with ExitStack() as stack:
        kept = kept_in(options, stack)
        progress = stack.enter_context(bar("sweeping", "settings"))
        run = remembering(runner_on(options.values.get("--on")), kept, simulator_version(), progress)
        results = _results(traffic, points, run)
    return SweepReport(traffic, axes, points, results, label, notes)


def _points(options: Split, axes: Axes) -> tuple[Traffic, list[Point], str, tuple[str, ...]]:
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
        if "num_blocks" in axes.values:
            given = given._replace(notes=tuple(note for note in given.notes if note != NO_SERVER))
        slo = parse_slo(options.values["--slo"]) if "--slo" in options.values else Slo()
        traffic = Traffic(given.trace, given.speedup, slo)
        points = plain_points(axes, given.settings, given.step_time, given.speedup)
        return traffic, points, trust(given.fitted, is_poor=given.is_poor), given.notes
    asked = read_tune_inputs(options)
    points = planned_points(axes, asked.server, asked.traffic.speedup, asked.server.step_time)
    return asked.traffic, points, trust(asked.server.fitted, is_poor=asked.server.is_poor), asked.notes


def _results(traffic: Traffic, points: list[Point], run: RunAll) -> list[Result | None]:
    """In the points' order; None where nothing could be replayed. All of one speed go together."""
    found: list[Result | None] = [None] * len(points)
    for speed in dict.fromkeys(point.speedup for point in points):
        places = [place for place, point in enumerate(points) if point.speedup == speed and point.job is not None]
        jobs = [job for place in places if (job := points[place].job) is not None]
        for nth, result in run(traffic._replace(speedup=speed), jobs):
            found[places[nth]] = result
    return found
