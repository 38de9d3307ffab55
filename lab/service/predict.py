"""What simulate says of a load, with step times fitted to another load of the same card."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lab.measured_runs import duration_error
from lab.service.runs import Load, measured
from plimsoll.cli.main import parse
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import PlanInput, read_command
from plimsoll.simulate.fit import Fit, error_of, fit
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import EngineLimits, StepTime, captured_sizes, planned_settings
from plimsoll.standin.config import step_time_of

GPU, RELEASE = "H200", "0.25.1"


class Errors(NamedTuple):
    """The replay against the run: shares, above 0 where the replay is slower; preemptions as counts."""

    duration: float
    ttft: float
    tpot: float
    preemptions: int
    preemptions_measured: int


class Planned(NamedTuple):
    """A server as plan describes it to the simulator."""

    settings: EngineLimits
    sheet: StepTime | None
    sizes: tuple[int, ...]


def _ready(load: Load, model: Path) -> PlanInput:
    words = ["--gpu", GPU, "--vllm", RELEASE, "--", "vllm", "serve", str(model), *load.flags]
    return read_command(parse(ServerOptions, words), learned=False)


def activation_bytes(load: Load, model: Path) -> int:
    """What plan sets aside for a step of this server."""
    ready = _ready(load, model)
    return ready.replan(ready.settings)[0].activation.value


def planned(load: Load, model: Path) -> Planned:
    """Blocks, limits and graphs from the command alone."""
    ready = _ready(load, model)
    ledger, _ = ready.replan(ready.settings)
    settings = planned_settings(ledger.settings, ledger.kv_plan)
    sizes = captured_sizes(settings, is_eager="--enforce-eager" in load.flags)
    return Planned(settings, step_time_of(ledger, ready.model.shape, settings, {}), sizes)  # a fit begins at the data sheet


def fitted(load: Load, model: Path) -> Fit:
    """Step times by the stamps of this load."""
    server = planned(load, model)
    return fit(measured(load), server.settings, start=server.sheet, sizes=server.sizes)


def errors(load: Load, times: StepTime, model: Path) -> Errors:
    """This load replayed with these step times, against what was measured."""
    run = measured(load)
    settings = planned(load, model).settings
    found = replay(run.trace, settings, times.reaching(settings.max_num_batched_tokens))
    off = error_of(run, found)
    assert off.mean_ttft is not None
    assert off.mean_tpot is not None
    counted = int(load.found["num_preemptions_total"])
    return Errors(duration_error(run, found), off.mean_ttft, off.mean_tpot, found.totals.preemptions, counted)
