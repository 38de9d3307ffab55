"""How long a step takes, for `plimsoll simulate`: said, fitted to a real run, or by the data sheet of the plan's card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from plimsoll.cli.output import write_file
from plimsoll.cli.progress import bar
from plimsoll.cli.simulate_numbers import amount, list_in, number_in, object_in, whole
from plimsoll.domain.trace import Trace
from plimsoll.errors import BadInput
from plimsoll.simulate.settings import Settings, StepTime
from plimsoll.simulate.summary import POOR_FIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.simulate.fit import Fit
    from plimsoll.simulate.roofline import Experts

_SAID = {"--base-ns": "base_ns", "--token-ns": "token_ns", "--seq-ns": "seq_ns", "--ctx-ps": "ctx_ps"}
ABOUT_TRIES = 300
TIMES_SCHEMA = "plimsoll.step-time/1"
HOPELESS = 5.0
AS_GIVEN = "step times as given, the others those of no card; the data sheet is not used"
_MOST_NS = 10**13


class Times(NamedTuple):
    """Step times, what the fit says about its error (None: a rough guide), and where they are from."""

    step_time: StepTime
    fitted: str | None = None
    notes: tuple[str, ...] = ()
    most_running: int | None = None
    """Requests at once in the run that the fit saw."""
    is_poor: bool = False
    """Whether the fit is so far off that the times are a rough guide all the same."""


def said_times(values: Mapping[str, str]) -> dict[str, int]:
    """Those that the options name."""
    return {field: whole(values[name], name, most=_MOST_NS) for name, field in _SAID.items() if name in values}


def read_times(values: Mapping[str, str], plan: Mapping[str, object] | None, settings: Settings, trace: Trace) -> Times:
    """What the user said, else a fit, else the data sheet, else the reference's constants."""
    said = said_times(values)
    if said and "--fit" in values:
        raise BadInput(f"either --fit or {next(name for name in _SAID if name in values)}, not both")
    if "--times" in values:
        if said or "--fit" in values:
            raise BadInput("either --times, --fit or step times of your own")
        return _kept(values["--times"], settings)
    if "--save-times" in values and "--fit" not in values:
        raise BadInput("--save-times goes with --fit: it keeps what was learnt")
    by_sheet = _data_sheet(plan, settings) if plan is not None and not said else None
    if "--fit" in values:
        return _fitted(values, plan, settings, trace, by_sheet)
    if "--fit-series" in values:
        raise BadInput("--fit-series goes with --fit")
    if by_sheet is not None:
        return by_sheet
    notes = (AS_GIVEN,) if said and plan is not None else ()
    return Times(StepTime(**{**StepTime()._asdict(), **said}), notes=notes)


def _fitted(
    values: Mapping[str, str], plan: Mapping[str, object] | None, settings: Settings, trace: Trace, by_sheet: Times | None
) -> Times:
    """Learnt from a run; the data sheet, where there is one, is where the search begins."""
    from plimsoll.simulate.fit import fit
    from plimsoll.simulate.fit_histograms import fit_histograms
    from plimsoll.sources.metric_histograms import looks_like_metrics, read_histograms
    from plimsoll.sources.traces import read_measured

    path, series = values["--fit"], values.get("--fit-series")
    start = by_sheet.step_time if by_sheet is not None and by_sheet.step_time.by_tokens is not None else None
    experts, sizes = _mixture(plan), _graphs(plan, settings)
    with bar("fitting", f"or so tries to run as {path} did") as draw:

        def on_try(number: int) -> None:
            draw(min(number, ABOUT_TRIES - 1), ABOUT_TRIES)

        if looks_like_metrics(path):
            if series is not None:
                raise BadInput("--fit-series is for a run with stamps; a page of metrics has none")
            pages = read_histograms(path)
            found = fit_histograms(trace, settings, pages, start=start, sizes=sizes, experts=experts, on_try=on_try)
        else:
            measured = read_measured(path, timeseries=series)
            found = fit(measured, settings, start=start, sizes=sizes, experts=experts, on_try=on_try)
    error = max(abs(value or 0.0) for value in found.error[1:])  # of single requests, and of means where a page has no more
    if error > HOPELESS:
        raise BadInput(f"--fit {path}: {found.sentence}; nothing can be learnt from that; {POOR_FIT}")
    is_poor = found.error.is_poor
    if "--save-times" in values:
        _keep(values["--save-times"], found, is_poor=is_poor)
    return Times(found.step_time, found.sentence, (POOR_FIT,) if is_poor else (), found.most_running, is_poor)


def _keep(path: str, found: Fit, *, is_poor: bool) -> None:
    import json

    times = found.step_time
    table = None if times.by_tokens is None else times.by_tokens.tolist()
    said = {
        "schema": TIMES_SCHEMA,
        "fitted": found.sentence,
        "is_poor": is_poor,
        "most_running": found.most_running,
        **times._asdict(),
        "by_tokens": table,
    }
    write_file(path, json.dumps(said) + "\n")


def _kept(path: str, settings: Settings) -> Times:
    """Step times that an earlier fit learnt; a table that is too short goes on as a line."""
    from pathlib import Path

    import numpy as np

    from plimsoll.sources.model_folders import read_json

    said = read_json(Path(path), 1 << 28)
    if said.get("schema") != TIMES_SCHEMA:
        raise BadInput(f"{path}: not step times; --fit RUN --save-times FILE writes them")
    try:
        numbers = {name: round(amount(said, name)) for name in _SAID.values()}
        table = said.get("by_tokens")
        if table is not None:
            found = np.array([round(amount({"ns": one}, "ns")) for one in list_in(said, "by_tokens")], dtype=np.int64)
            table = found if len(found) else None
    except KeyError as error:
        raise BadInput(f"{path}: {error.args[0]} is missing or not a time") from None
    times = StepTime(**numbers, by_tokens=table).reaching(settings.max_num_batched_tokens)
    most, is_poor = said.get("most_running"), said.get("is_poor") is True  # files of an earlier release have neither
    notes = (POOR_FIT,) if is_poor else ()
    return Times(times, str(said.get("fitted") or "read from a file"), notes, most if isinstance(most, int) else None, is_poor)


def _graphs(plan: Mapping[str, object] | None, settings: Settings) -> tuple[int, ...]:
    from plimsoll.simulate.planned import captured_sizes

    return captured_sizes(settings, is_eager=_is_eager(plan))


def _is_eager(plan: Mapping[str, object] | None) -> bool:
    said = plan.get("settings") if plan is not None else None
    return isinstance(said, dict) and said.get("enforce_eager") is True


def _mixture(plan: Mapping[str, object] | None) -> Experts | None:
    """The experts of a mixture, of which a step reads only some."""
    from plimsoll.simulate.planned import experts_of

    counted = plan.get("parameters") if plan is not None else None
    if not isinstance(counted, dict) or not isinstance(counted.get("total"), int):
        return None
    if not (isinstance(counted.get("experts"), int) and isinstance(counted.get("experts_per_token"), int)):
        return None
    return experts_of(counted["total"], amount(counted, "routed"), counted["experts"], counted["experts_per_token"])


def _data_sheet(plan: Mapping[str, object], settings: Settings) -> Times:
    """By the card's bandwidth and rate and the model's size."""
    from plimsoll.domain.gpu import gpu_named
    from plimsoll.simulate.planned import Sheet, sheet_time

    try:
        card = gpu_named(str(object_in(plan, "gpu").get("name")))
        counted, said = object_in(plan, "parameters"), object_in(plan, "settings")
        sheet = Sheet(
            weights_bytes=amount(object_in(object_in(plan, "ledger"), "weights"), "value"),
            block_bytes=amount(object_in(plan, "kv"), "bytes_per_block"),
            parameters=amount(counted, "total"),
            routed=amount(counted, "routed"),
            experts=_mixture(plan),
            cards=number_in(said, "tensor_parallel_size"),
            stages=number_in(said, "pipeline_parallel_size"),
            is_eager=_is_eager(plan),
        )
    except (KeyError, BadInput):
        return Times(StepTime(), notes=("the plan does not say enough of card and model: step times are those of no card",))
    step_time = sheet_time(sheet, card, settings)
    if step_time is None:
        return Times(StepTime(), notes=(f"no data sheet gives the rates of {card.name}: step times are those of no card",))
    return Times(
        step_time, notes=(f"step times by the data sheet of {sheet.cards} x {card.name}; --fit learns them from a real run",)
    )
