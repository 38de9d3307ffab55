"""A sweep: every combination of the given values, each with the server that it means."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.launch.options import decimal
from plimsoll.plan.ledger import Ledger
from plimsoll.simulate.replicas import ONE_ENGINE, RoutedEngines
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.start import check_start
from plimsoll.simulate.summary import same_memory
from plimsoll.tune.answer import Server
from plimsoll.tune.goodput import Job
from plimsoll.tune.space import Candidate, Option, candidate_of, launch_of, parse_counts, parse_shares

COUNTS = (
    "num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "long_prefill_token_threshold",
)  # fmt: skip
SWITCHES = ("prefix_caching", "chunked_prefill", "async_scheduling", "reserve_full_isl")
PLANNED = (*Candidate._fields, "max_model_len")  # They change the memory, and so the cache: each value is planned again
KEYS = (*COUNTS, "gpu_memory_utilization", "watermark", "speedup", *SWITCHES)
MOST_POINTS = 100_000

Value = int | float | bool


Axes = Mapping[str, tuple[Value, ...]]  # the values of each name


def combinations(axes: Axes) -> list[dict[str, Value]]:
    """Every combination, the last name fastest."""
    return [dict(zip(axes, one, strict=True)) for one in itertools.product(*axes.values())]


class Point(NamedTuple):
    """One combination: the job to replay, or the reason why there is none."""

    values: Mapping[str, Value]
    speedup: float
    job: Job | None
    option: Option | None = None  # Its plan; None where nothing is planned
    problem: str = ""


def parse_axes(words: Mapping[str, str]) -> Axes:
    """`block_size=8,16 max_num_seqs=64..1024 prefix_caching=on,off`"""
    if not words:
        raise BadInput(f"what is to be varied? for example max_num_seqs=64..1024; there is: {', '.join(KEYS)}")
    axes = {name: _values(name, text) for name, text in words.items()}
    count = math.prod(map(len, axes.values()))
    if count > MOST_POINTS:
        raise BadInput(f"{count} combinations are more than {MOST_POINTS}")
    return axes


def _values(name: str, text: str) -> tuple[Value, ...]:
    if name in COUNTS:
        return parse_counts(text, name, 0 if name == "long_prefill_token_threshold" else 1)  # 0: off
    if name == "gpu_memory_utilization":
        return parse_shares(text, name)
    if name in SWITCHES:
        words = [part.strip() for part in dict.fromkeys(text.split(","))]
        if odd := [word for word in words if word not in ("on", "off")]:
            raise BadInput(f"{name}= takes on and off, not {odd[0][:40]!r}")
        return tuple(word == "on" for word in words)
    if name in ("watermark", "speedup"):
        numbers = {part: decimal(part, name) for part in text.split(",")}
        if wrong := [part for part, number in numbers.items() if number < 0 or (name == "speedup" and number == 0)]:
            raise BadInput(f"{name}={wrong[0].strip()[:40]!r} is not a number above 0")
        return tuple(sorted(set(numbers.values())))
    raise BadInput(f"{name!r} cannot be varied; there is: {', '.join(KEYS)}")


def plain_points(
    axes: Axes, settings: EngineLimits, step_time: StepTime, speedup: float, engines: RoutedEngines = ONE_ENGINE
) -> list[Point]:
    """The points without a plan: with another block size the cache keeps its tokens, unless the blocks are varied too."""
    if "gpu_memory_utilization" in axes:
        raise BadInput("gpu_memory_utilization needs a card and a command: --gpu H100 -- vllm serve MODEL ...")
    points = []
    for values in combinations(axes):
        changes = {name: value for name, value in values.items() if name != "speedup"}
        speed, base = float(values.get("speedup", speedup)), settings
        if "block_size" in changes and "num_blocks" not in changes:
            cut = same_memory(settings, int(changes.pop("block_size")))
            if cut is None:
                points.append(Point(values, speed, None, problem="the cache is smaller than one block"))
                continue
            base = cut
        points.append(_checked(values, speed, base._replace(**changes), step_time, None, engines))  # type: ignore[arg-type]
    return points


def planned_points(axes: Axes, server: Server, speedup: float, said: StepTime | None) -> list[Point]:
    """Returns the points of a planned command, replanned where the memory changes. `said` are step times for all of them."""
    if "num_blocks" in axes:
        raise BadInput("num_blocks is what plan finds; leave it or the command out")
    return [_planned(values, server, speedup, said) for values in combinations(axes)]


def _planned(values: Mapping[str, Value], server: Server, speedup: float, said: StepTime | None) -> Point:
    ledger: Ledger = server.ledger
    own = candidate_of(ledger)
    candidate = own._replace(**{name: value for name, value in values.items() if name in Candidate._fields})  # type: ignore[arg-type]
    launch = launch_of(candidate, ledger.settings, ledger.kv_plan.block_size)
    if "max_model_len" in values:
        launch = replace(launch, max_model_len=int(values["max_model_len"]))
    speed = float(values.get("speedup", speedup))
    try:
        found, findings = server.replan(launch)
        option = Option(candidate, found, tuple(findings))
        settings = server.features_of(option).settings
    except BadInput as error:
        return Point(values, speed, None, problem=str(error))
    if settings.num_blocks < 2:
        return Point(values, speed, None, option, f"no block of cache is left{option.because}")
    rest = {name: value for name, value in values.items() if name not in (*PLANNED, "speedup")}
    times = said or server.job_of(option).step_time
    return _checked(values, speed, settings._replace(**rest), times, option, server.engines)  # type: ignore[arg-type]


def _checked(
    values: Mapping[str, Value], speedup: float, settings: EngineLimits, step_time: StepTime, option: Option | None,
    engines: RoutedEngines,
) -> Point:  # fmt: skip
    try:
        check_start(settings)
    except BadInput as error:
        return Point(values, speedup, None, option, str(error))
    return Point(values, speedup, Job(settings, step_time.reaching(settings.max_num_batched_tokens), engines), option)
