"""Reads the inputs of `plimsoll tune` and `plimsoll sweep`: traffic, promises, prices, and the planned server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from plimsoll.errors import BadInput
from plimsoll.launch.command_line import find_launch
from plimsoll.models.files import read_json
from plimsoll.plan.read import MemoryPlan, plan_launch, read_command
from plimsoll.render import plan as report
from plimsoll.simulate.compiled import HAS_NUMBA
from plimsoll.simulate.features import with_features
from plimsoll.simulate.inputs import (
    FIT_OF_ONE,
    NO_ENCODER,
    WITHOUT_NUMBA,
    check_options,
    read_times,
    read_traffic,
    routed_engines,
    settings_of_plan,
)
from plimsoll.simulate.options import TrafficOptions
from plimsoll.simulate.settings import REPLAYED_ALL_THE_SAME
from plimsoll.tune.answer import Server, flags_of, with_flags
from plimsoll.tune.capacity import Prices
from plimsoll.tune.goodput import Slo, Traffic, parse_slo
from plimsoll.tune.space import Candidate, Space, candidate_of, parse_space

PRICES_MAX_BYTES = 1 << 20
Given = TypeVar("Given", bound=TrafficOptions)


class TuneInputs(NamedTuple):
    """Everything a tuning needs."""

    traffic: Traffic
    server: Server
    space: Space
    planned: MemoryPlan
    options: TrafficOptions
    notes: tuple[str, ...]

    def replanned(self, candidate: Candidate) -> MemoryPlan:
        """The plan of the command with this setting in it."""
        checked = self.planned.checked
        words = with_flags(checked.rewritten, flags_of(candidate, candidate_of(self.planned.ledger)))
        launch = find_launch(words, checked.launch.environment, "tune")
        assert launch is not None, "a vLLM start with other flags is one still"
        return plan_launch(self.options, launch, "")


def split_axes(options: Given) -> tuple[Given, dict[str, str]]:
    """Splits `name=values` words from the traces; a word that names a file is a trace."""
    axes: dict[str, str] = {}
    rest = []
    for word in options.rest:
        name, equals, values = word.partition("=")
        if equals and name.isidentifier() and not word.startswith("synthetic:") and not Path(word).exists():
            if name in axes:
                raise BadInput(f"{name}= is given twice")
            axes[name] = values
        else:
            rest.append(word)
    return replace(options, rest=tuple(rest)), axes


def with_model(options: Given, model: str | None) -> Given:
    """The options with `--model M` read as `-- vllm serve M`."""
    if model is None:
        return options
    if options.verbatim is not None:
        raise BadInput("either --model or a command after `--`, not both")
    return replace(options, verbatim=("vllm", "serve", model))


def read_tune_inputs(given: TrafficOptions, model: str | None, slo: str | None) -> TuneInputs:
    """The inputs of a tuning; BadInput in one line where something is wrong."""
    options, axes = split_axes(with_model(given, model))
    space = parse_space(axes)
    server_options = replace(options, rest=())
    ready = read_command(server_options)
    planned = ready.plan()
    if not options.rest:
        raise BadInput("which trace? a file, the recorder's folder, `-`, or synthetic:...")
    check_options(options)
    promise = Slo() if slo is None else parse_slo(slo)
    traffic = Traffic(read_traffic(options), options.speedup, promise)
    plan = json.loads(report.as_json(planned))
    # A command that leaves no cache may be one flag away from a good one; only a fit replays it as it is.
    settings, notes = settings_of_plan(plan, is_replayed=options.fit is not None, is_known=True)
    found = with_features(settings, planned.ledger, planned.shape, options.acceptance_rate)
    notes = (*notes, *found.notes)
    times = read_times(options, plan, found.settings, planned)
    engines, more = routed_engines(options, plan["settings"], ready.model.shape)
    further = {
        f"{engines.number} engines with these flags share the traffic, {engines.router}": engines.number > 1,
        FIT_OF_ONE: options.fit is not None and engines.number > 1,
        NO_ENCODER: ready.model.shape.towers and not any(traffic.trace.images),
        WITHOUT_NUMBA: not HAS_NUMBA,
    }
    more = (*more, *times.notes, *(note for note, is_so in further.items() if is_so))
    notes = (*(note.removesuffix(REPLAYED_ALL_THE_SAME) for note in notes), *more)
    step_time = times.step_time if times.fitted is not None else None
    server = Server(
        planned.ledger,
        ready.model.shape,
        ready.replan,
        step_time,
        times.fitted,
        times.most_running,
        times.is_poor,
        options.acceptance_rate,
        engines,
    )
    return TuneInputs(traffic, server, space, planned, server_options, (*planned.notes, *notes))


def read_prices(path: str) -> Prices:
    """{"date": "2026-11-01", "usd_per_gpu_hour": {"H100": 2.5, "L40S": 0.9}}"""
    found = read_json(Path(path), PRICES_MAX_BYTES)
    table, date = found.get("usd_per_gpu_hour"), found.get("date")
    if not isinstance(table, dict) or not table or not isinstance(date, str):
        raise BadInput(f'{path}: prices are {{"date": "2026-11-01", "usd_per_gpu_hour": {{"H100": 2.5}}}}')
    for name, price in table.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < 1e6:
            raise BadInput(f"{path}: the price of {str(name)[:40]} is not a number of dollars above 0")
    return Prices(date[:40], {str(name): float(price) for name, price in table.items()})
