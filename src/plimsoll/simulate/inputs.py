"""Reads the options of `plimsoll simulate`: the traffic, the engine, and how long a step takes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plimsoll.errors import BadInput, PlimsollError
from plimsoll.launch.command_line import launches_named
from plimsoll.launch.options import MOST, first_given, whole
from plimsoll.models.files import read_json
from plimsoll.models.shape import ModelShape
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import MemoryPlan, plan_launch
from plimsoll.render import plan as report
from plimsoll.render.terminal import bar, write_file
from plimsoll.simulate.compiled import HAS_NUMBA
from plimsoll.simulate.features import NO_ADAPTERS, REPLAYED, UNREPLAYED_DRAFTS, Features, with_drafts, with_features
from plimsoll.simulate.fit import fit
from plimsoll.simulate.options import STEP_FIELDS, ReplayOptions, RoutedOptions, StepOptions, TrafficOptions
from plimsoll.simulate.replicas import ONE_ENGINE, RoutedEngines
from plimsoll.simulate.settings import (
    REPLAYED_ALL_THE_SAME,
    CacheGroup,
    EngineLimits,
    Kind,
    StepTime,
    captured_sizes,
    group_of,
    with_groups,
)
from plimsoll.simulate.silicon import planned_clock, sheet_clock, sheet_of
from plimsoll.simulate.start import check_start
from plimsoll.simulate.summary import POOR_FIT
from plimsoll.simulate.trace import Arrivals, Trace
from plimsoll.simulate.trace_files import read_measured, read_trace
from plimsoll.simulate.traffic import SCHEME, cut, generate, merge, parse_synthetic, take
from plimsoll.vllm.versions import Coverage

# Numbers of a plan's JSON; a KeyError names the one that is wrong.


def object_in(parent: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A JSON object, or KeyError."""
    if not isinstance(found := parent.get(name), dict):
        raise KeyError(name)
    return found


def list_in(parent: Mapping[str, object], name: str) -> list[object]:
    """A JSON list, or KeyError."""
    if not isinstance(found := parent.get(name), list):
        raise KeyError(name)
    return found


def number_in(parent: Mapping[str, object], name: str) -> int:
    """A count, or KeyError."""
    found = parent.get(name)
    if not isinstance(found, int) or isinstance(found, bool):
        raise KeyError(name)
    if not 0 <= found <= MOST:
        raise BadInput(f"the plan's {name} of {found:.6g} cannot be replayed")
    return found


def amount(parent: Mapping[str, object], name: str) -> float:
    """A size that may be large, or KeyError."""
    found = parent.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= 1e18:
        raise KeyError(name)
    return float(found)


# Step times for `plimsoll simulate`: given, fitted to a real run, or by the data sheet of the plan's card.


ABOUT_TRIES = 300
TIMES_SCHEMA = "plimsoll.step-time/1"
HOPELESS = 5.0
AS_GIVEN = "step times as given, the others those of no card; the data sheet is not used"


class Times(NamedTuple):
    """Step times, the fit's sentence about its error (None: a rough guide), and notes on their source."""

    step_time: StepTime
    fitted: str | None = None
    notes: tuple[str, ...] = ()
    most_running: int | None = None  # Requests at once in the run that the fit saw
    is_poor: bool = False  # The fit is so far off that the times are a rough guide all the same
    band: tuple[float, float] = (1.0, 1.0)  # Factors on a step's time: lowest and highest


def read_times(
    options: TrafficOptions, plan: Mapping[str, object] | None, settings: EngineLimits, planned: MemoryPlan | None
) -> Times:
    """Returns the user's step times, else a fit's, else those by measured kernels or the data sheet, else the reference's."""
    said = options.said if isinstance(options, StepOptions) else {}
    if said and options.fit is not None:
        raise BadInput(f"either --fit or {first_given(options, *STEP_FIELDS)}, not both")
    if options.times is not None:
        if said or options.fit is not None:
            raise BadInput("either --times, --fit or step times of your own")
        return _kept(options.times, settings)
    if options.save_times is not None and options.fit is None:
        raise BadInput("--save-times goes with --fit: it keeps what was learnt")
    by_plan = _by_plan(planned, settings, is_fitted=options.fit is not None) if plan is not None and not said else None
    if options.fit is not None:
        return _fitted(options, options.fit, planned, settings, by_plan)
    if options.fit_series is not None:
        raise BadInput("--fit-series goes with --fit")
    if by_plan is not None:
        return by_plan
    notes = (AS_GIVEN,) if said and plan is not None else ()
    return Times(StepTime(**{**StepTime()._asdict(), **said}), notes=notes)


def _fitted(
    options: TrafficOptions, path: str, planned: MemoryPlan | None, settings: EngineLimits, by_plan: Times | None
) -> Times:
    """The step times fitted to a run; the search begins at the data sheet's, where there is one."""
    start = by_plan.step_time if by_plan is not None and by_plan.step_time.by_tokens is not None else None
    sheet = sheet_of(planned.ledger, planned.shape) if planned is not None else None
    experts = sheet.experts if sheet is not None else None
    sizes = captured_sizes(settings, is_eager=sheet is not None and sheet.is_eager)
    with bar("fitting", f"or so tries to run as {path} did") as draw:

        def on_try(number: int) -> None:
            draw(min(number, ABOUT_TRIES - 1), ABOUT_TRIES)

        measured = read_measured(path, timeseries=options.fit_series)
        found = fit(measured, settings, start=start, sizes=sizes, experts=experts, on_try=on_try)
    if max(found.error.ttft or 0.0, found.error.tpot or 0.0, found.error.e2e or 0.0) > HOPELESS:
        raise BadInput(f"--fit {path}: {found.sentence}; nothing can be learnt from that; {POOR_FIT}")
    is_poor = found.error.is_poor
    if options.save_times is not None:
        times = found.step_time
        table = None if times.by_tokens is None else times.by_tokens.tolist()
        kept = {"schema": TIMES_SCHEMA, "fitted": found.sentence, "is_poor": is_poor, "most_running": found.most_running}
        write_file(options.save_times, json.dumps({**kept, **times._asdict(), "by_tokens": table}) + "\n")
    return Times(found.step_time, found.sentence, (POOR_FIT,) if is_poor else (), found.most_running, is_poor)


def _kept(path: str, settings: EngineLimits) -> Times:
    """The step times of an earlier fit; a table that is too short goes on as a line."""
    said = read_json(Path(path), 1 << 28)
    if said.get("schema") != TIMES_SCHEMA:
        raise BadInput(f"{path}: not step times; --fit RUN --save-times FILE writes them")
    try:
        numbers = {name: round(amount(said, name)) for name in STEP_FIELDS}
        table = said.get("by_tokens")
        if table is not None:
            found = np.array([round(amount({"ns": one}, "ns")) for one in list_in(said, "by_tokens")], dtype=np.int64)
            table = found if len(found) else None
    except KeyError as error:
        raise BadInput(f"{path}: {error.args[0]} is missing or not a time") from None
    further = {name: round(amount(said, name)) for name in ("pair_fs", "prompt_ns", "front_ns") if said.get(name) is not None}
    times = StepTime(**numbers, **further, by_tokens=table).reaching(settings.max_num_batched_tokens)
    most, is_poor = said.get("most_running"), said.get("is_poor") is True  # files of an earlier release have neither
    notes = (POOR_FIT,) if is_poor else ()
    return Times(times, str(said.get("fitted") or "read from a file"), notes, most if isinstance(most, int) else None, is_poor)


def _by_plan(planned: MemoryPlan | None, settings: EngineLimits, *, is_fitted: bool) -> Times:
    """Step times of a planned server. A fit begins at the data sheet's: from the kernels' it predicts other loads less well."""
    if planned is None:
        return Times(StepTime(), notes=("the plan's command cannot be planned here: step times are those of no card",))
    clock = (sheet_clock if is_fitted else planned_clock)(planned.ledger, planned.shape, settings)
    if clock is None:
        card = planned.ledger.card.name
        return Times(StepTime(), notes=(f"no data sheet gives the rates of {card}: step times are those of no card",))
    low, high = (f"{factor - 1:+.0%}" for factor in clock.band)
    sure = f"step times by {clock.basis}, {low} to {high}; --fit corrects them by a real run"
    return Times(clock.step_time, notes=(sure,), band=clock.band)


_THRESHOLD = "long_prefill_token_threshold"
PLAN_MAX_BYTES = 16 << 20
_FEWER, _LONGER = "fewer run at once than here, so that more waits", "it takes longer than here"
NOT_REPLAYED: Mapping[str, str] = {
    "--max-num-active-seqs": _FEWER,
    "--long-prefill-token-threshold-adaptive": "long prompts come later and others sooner than here",
    "--max-num-scheduled-tokens": "steps are smaller than here: prompts take more of them",
    "--max-num-queued-reqs": "what would wait longest is refused, so that the rest waits less than here",
    "--max-num-queued-tokens": "what would wait longest is refused, so that the rest waits less than here",
    "--prefix-cache-retention-interval": "hits of sliding and Mamba layers differ from those here",
    "--prefix-match-unit": "fewer tokens of a prompt are hits than here",
    "--enable-lora": f"a request waits while --max-loras other adapters run, and steps with adapters cost more: {_LONGER}",
    "--max-loras": f"a request waits while so many other adapters run: {_LONGER}",
    "--limit-mm-per-prompt": "pictures and sounds are tokens here, without their encoder: first tokens come later than here",
    "--decode-context-parallel-size": "the cache holds more and steps cost otherwise than here",
    "--prefill-context-parallel-size": "prompts take less time than here",
    "--kv-offloading-size": "prompts that were seen before and left the card cost less: first tokens come sooner than here",
    "--scheduler-cls": "which way is not known",
    "--enable-mamba-shared-prefix-checkpoint": "more tokens of a prompt are hits than here",
    "--mamba-cache-mode": "hits of Mamba layers differ from those here",
}
NOT_REPLAYED_SHORT = {"-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size"}
"""Flags that move the scheduler's decisions and that nothing here knows about, with what that means for a replay;
docs/simulate.md lists them."""
NO_ENCODER = (
    "the model's encoder is not replayed: requests with pictures or sounds take longer to their first token than here; a trace "
    "says in a field `images` how many tokens each is"
)
FIT_OF_ONE = "--fit takes the run for one engine's, with all of its traffic"
WITHOUT_NUMBA = "without numba this is a hundred times slower: pip install 'plimsoll-line[simulate]'"
NO_SERVER = (
    f"no server was named: a cache of {EngineLimits().num_blocks:,} blocks stands for it; for yours, "
    "--gpu NAME -- vllm serve MODEL ..."
)

REPLICA_OF = Coverage.SCHEDULER.last  # The release whose scheduler is replayed
_OWN_KINDS: Mapping[str, Kind] = {"full": "full", "sliding": "sliding", "mamba": "mamba"}


class Inputs(NamedTuple):
    """Everything a run needs."""

    trace: Trace
    settings: EngineLimits
    step_time: StepTime
    speedup: float
    fitted: str | None  # The fit's sentence about its error; None without a fit
    notes: tuple[str, ...]
    is_poor: bool = False  # That error makes the times a rough guide all the same
    engines: RoutedEngines = ONE_ENGINE
    band: tuple[float, float] = (1.0, 1.0)  # Lowest and highest factor on a step's time, where nothing was fitted


def read_inputs(options: ReplayOptions) -> Inputs:
    """The inputs of a run; BadInput in one line where something is wrong."""
    if not options.rest:
        raise BadInput("which trace? plimsoll simulate TRACE [options]; plimsoll simulate --help says what a trace can be")
    check_options(options)
    planned = _planned(options)
    plan = _plan(options) if planned is None else json.loads(report.as_json(planned, None, None))
    planned = planned or _planned_again(plan)
    settings, notes, wider = _settings(options, plan, planned)
    trace = read_traffic(options)
    times = read_times(options, plan, settings, planned)
    said = plan.get("settings") if plan is not None else None
    routed, more = routed_engines(options, said if isinstance(said, dict) else {}, None if planned is None else planned.shape)
    further = {
        NO_ADAPTERS: settings.max_loras is not None and not trace.adapter.any(),
        NO_ENCODER: planned is not None and planned.shape.towers and not any(trace.images),
        FIT_OF_ONE: options.fit is not None and routed.number > 1,
        WITHOUT_NUMBA: not HAS_NUMBA,
        NO_SERVER: plan is None and options.num_blocks is None,
    }
    notes = (*notes, *(note for note, is_so in further.items() if is_so), *more, *times.notes)
    return Inputs(
        trace, settings, times.step_time, options.speedup, times.fitted, notes, times.is_poor, routed,
        (times.band[0] * wider[0], times.band[1] * wider[1]),
    )  # fmt: skip


def routed_engines(
    options: TrafficOptions, said: Mapping[str, object], shape: ModelShape | None
) -> tuple[RoutedEngines, tuple[str, ...]]:
    """The engines of --replicas, or the data-parallel ones of a plan's settings, and notes on what they leave out."""
    of_command = said.get("data_parallel_size")
    of_command = of_command if isinstance(of_command, int) and 1 <= of_command <= 1000 else 1
    routed = RoutedEngines(of_command)
    if isinstance(options, RoutedOptions):
        routed = RoutedEngines(options.replicas or of_command, options.router)
    if of_command == 1 or shape is None or shape.moe is None:
        return routed, ()
    if routed.number % of_command == 0:
        return routed._replace(together=of_command), ()
    left_out = "wait for each other in every step; here no engine waits, and steps are shorter than they will be"
    return routed, (f"the {of_command} data-parallel engines of a mixture of experts {left_out}",)


def check_options(options: TrafficOptions) -> None:
    """Raises BadInput for an option that would be ignored."""
    if options.verbatim is None and (name := first_given(options, "gpus", "used_gib", "vllm")) is not None:
        raise BadInput(f"{name} is for a command: plimsoll simulate TRACE --gpu H100 {name} ... -- vllm serve MODEL ...")
    of_files = ("rate", "arrivals", "seed", "burstiness", "trace_block_size", "skip_bad")
    if all(word.startswith(SCHEME) for word in options.rest) and (name := first_given(options, *of_files)) is not None:
        raise BadInput(f"{name} is for a file; made-up traffic says such things itself: {SCHEME}rate=20,seed=1")
    if options.rate is None and options.arrivals is None and (name := first_given(options, "seed", "burstiness")) is not None:
        raise BadInput(f"{name} is for traffic with --rate or --arrivals")


def read_traffic(options: TrafficOptions) -> Trace:
    """The named traces, merged and cut as the options say."""
    arrivals = None
    if options.rate is not None or options.arrivals is not None:
        burstiness = 0.25 if options.burstiness is None else options.burstiness
        arrivals = Arrivals(options.arrivals or "poisson", options.rate or 0.0, options.seed or 0, burstiness)
    traces = []
    for word in options.rest:
        if word.startswith(SCHEME):
            made = generate(parse_synthetic(word))
            traces.append(take(made, 0, min(options.limit, made.size)) if options.limit else made)
        else:
            block = options.trace_block_size or 512
            found = read_trace(word, limit=options.limit, prefix_block=block, arrivals=arrivals, skip_bad=options.skip_bad)
            traces.append(found)
    trace = traces[0] if len(traces) == 1 else merge(traces)
    if options.from_s is not None or options.until_s is not None:
        last = float(trace.arrival_ns[-1]) / 1e9 + 1 if trace.size else 1.0
        trace = cut(trace, options.from_s or 0.0, options.until_s if options.until_s is not None else last)
    if not trace.size:
        raise BadInput(f"{trace.name}: no request is left to replay")
    return trace


def _planned(options: ReplayOptions) -> MemoryPlan | None:
    """The plan of the command after `--`."""
    if options.verbatim is None and options.gpu is None and options.gpu_memory_gib is None:
        return None
    if options.plan is not None:
        raise BadInput("either --plan FILE or a command after `--`, not both")
    if options.verbatim is None:
        raise BadInput("--gpu needs the command: plimsoll simulate TRACE --gpu H100 -- vllm serve MODEL ...")
    server = replace(options, rest=())
    return plan_launch(server, *launches_named(server, "plan")[0])


def _planned_again(plan: Mapping[str, object] | None) -> MemoryPlan | None:
    """Plans the command of a plan's file again, for facts of its model that are not in the file; None where that fails here."""
    try:
        words = shlex.split(str(object_in(plan or {}, "flags")["rewritten"]))
        card, release = str(object_in(plan or {}, "gpu")["name"]), str((plan or {})["vllm"])
        server = ServerOptions(gpu=card, vllm=release, verbatim=tuple(words))
        return plan_launch(server, *launches_named(server, "plan")[0])
    except (KeyError, ValueError, PlimsollError):
        return None


def _plan(options: ReplayOptions) -> Mapping[str, object] | None:
    """Returns the plan in a file that `plan --json` or `tune --json` wrote; None without --plan."""
    if options.plan is None:
        return None
    path, loaded = options.plan, read_json(Path(options.plan), PLAN_MAX_BYTES)
    inner = loaded.get("plan") if loaded.get("schema") == "plimsoll.tune/1" else None
    loaded = inner if isinstance(inner, dict) else loaded
    if loaded.get("schema") != "plimsoll.plan/1":
        raise BadInput(f"{path}: not a plan; plimsoll plan --json ... writes one")
    return loaded


def _settings(options: ReplayOptions, plan: Mapping[str, object] | None, planned: MemoryPlan | None) -> Features:
    settings, notes = (EngineLimits(), ()) if plan is None else settings_of_plan(plan, is_known=planned is not None)
    found = Features(settings)
    if planned is not None:
        found = with_features(settings, planned.ledger, planned.shape, options.acceptance_rate)
    if plan is not None and (name := first_given(options, "block_size", "groups")) is not None:
        raise BadInput(f"{name} is the plan's; give the vllm command what it needs instead")
    if options.speculative_config is not None:
        if plan is not None:
            raise BadInput("--speculative-config is the plan's; give it to the vllm command")
        found = with_drafts(settings, options.speculative_config, options.acceptance_rate)
    if options.acceptance_rate is not None and found.settings.speculation is None:
        raise BadInput("--acceptance-rate is for a server with --speculative-config and num_speculative_tokens")
    if options.async_scheduling and options.no_async_scheduling:
        raise BadInput("either --async-scheduling or --no-async-scheduling, not both")
    changes: dict[str, Any] = {
        name: value
        for name in EngineLimits._fields
        if name != "groups" and not isinstance(value := getattr(options, name, None), bool | None)
    }
    changes |= {
        name: False
        for name in ("prefix_caching", "chunked_prefill", "reserve_full_isl", "async_scheduling")
        if getattr(options, f"no_{name}")
    }
    changes |= {"async_scheduling": True} if options.async_scheduling else {}
    if options.groups is not None:
        groups = _groups(options.groups)
        changes = {"block_size": min(group.block_size for group in groups), **changes, "groups": groups}
    changed = found.settings._replace(**changes)
    check_start(changed)
    return Features(changed, (*notes, *found.notes), found.band)


def _groups(text: str) -> tuple[CacheGroup, ...]:
    """full:16,sliding:16:1024,mamba:16"""
    found = []
    for part in text.split(","):
        words = part.strip().split(":")
        kind = _OWN_KINDS.get(words[0])
        if kind is None or len(words) != (3 if kind == "sliding" else 2):
            raise BadInput(f"--groups: {part[:40]!r} is not full:BLOCK, sliding:BLOCK:WINDOW or mamba:BLOCK")
        numbers = [whole(word, "--groups", 1) for word in words[1:]]
        found.append(CacheGroup(kind, *numbers))
    return tuple(found)


def settings_of_plan(
    plan: Mapping[str, object], *, is_replayed: bool = True, is_known: bool = False
) -> tuple[EngineLimits, tuple[str, ...]]:
    """Blocks, groups and limits of a plan, and notes on what is not replayed; BadInput where the plan has no blocks.

    `is_known`: the command itself was read, so that `with_features` adds its further parts.
    """
    try:
        kv, said = object_in(plan, "kv"), object_in(plan, "settings")
        groups = [object_in({"group": one}, "group") for one in list_in(kv, "groups")]
        number_of_blocks, block_size = number_in(kv, "num_blocks"), number_in(kv, "block_size")
        settings = EngineLimits(
            num_blocks=number_of_blocks,
            block_size=block_size,
            max_num_seqs=number_in(said, "max_num_seqs"),
            max_num_batched_tokens=number_in(said, "max_num_batched_tokens"),
            max_model_len=number_in(kv, "max_model_len"),
            prefix_caching=bool(said.get("enable_prefix_caching", True)),
            chunked_prefill=bool(said.get("enable_chunked_prefill", True)),
            long_prefill_token_threshold=number_in({_THRESHOLD: 0, **said}, _THRESHOLD),
            async_scheduling=bool(said.get("async_scheduling", True)),
            watermark=amount({"watermark": 0, **said}, "watermark"),
            reserve_full_isl=bool(said.get("scheduler_reserve_full_isl", True)),
            policy="priority" if said.get("scheduling_policy") == "priority" else "fcfs",
        )
        own = []
        for group in groups:
            window = number_in(group, "window") if group.get("window") is not None else None
            own.append(group_of(group.get("kind"), number_in(group, "block_size"), window))
            if own[-1].kind == "sliding" and window is None:
                raise KeyError("window")
        settings = with_groups(settings, own)
    except KeyError as error:
        raise BadInput(f"the plan has no {error.args[0]}") from None
    if is_replayed and number_of_blocks < 2:
        raise BadInput(f"the plan leaves no KV block, so that nothing can be replayed{_why_no_block(plan)}")
    return settings, tuple(_notes_of_plan(plan, said, is_known=is_known))


def _why_no_block(plan: Mapping[str, object]) -> str:
    """The first finding of a plan, and the first thing that would help."""
    found, offers = (plan.get(name) for name in ("findings", "advice"))
    first = found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}
    offer = offers[0] if isinstance(offers, list) and offers and isinstance(offers[0], dict) else {}
    why = f": {first.get('because')} ({first.get('code')})" if first else ""
    also = offer.get("also")
    flags = [offer, *(one for one in also if isinstance(one, dict))] if isinstance(also, list) else [offer]
    words = " ".join(f"{one.get('flag')} {one.get('value')}" for one in flags)
    return why + (f". What would help: {words}" if offer else "")


def _notes_of_plan(plan: Mapping[str, object], said: Mapping[str, object], *, is_known: bool) -> Iterator[str]:
    """Yields notes on what the replay leaves out of the planned server, and on why that server would not start."""
    findings = plan.get("findings")
    if plan.get("fits") is False:
        codes = [one.get("code") for one in findings if isinstance(one, dict)] if isinstance(findings, list) else []
        why = f": {', '.join(str(code) for code in codes)}" if codes else ""
        yield f"the plan says that this server does not start{why}{REPLAYED_ALL_THE_SAME}"
    if plan.get("vllm") != REPLICA_OF:
        yield f"the plan is for vLLM {plan.get('vllm')}; replayed is the scheduler of {REPLICA_OF}"
    if isinstance(stages := said.get("pipeline_parallel_size"), int) and stages > 1:
        yield f"the {stages} pipeline stages are replayed as one, without batches that follow each other through them"
    if said.get("num_speculative_tokens") and not is_known:
        yield UNREPLAYED_DRAFTS
    if said.get("kv_connector"):
        yield f"what {said['kv_connector']} loads and keeps elsewhere is not replayed: prompts it has seen cost less than here"
    flags = plan.get("flags")
    items = flags.get("items") if isinstance(flags, dict) else None
    for item in items if isinstance(items, list) else ():
        name = item.get("name") if isinstance(item, dict) else None
        if is_known and name in REPLAYED:
            continue
        if isinstance(name, str) and (means := NOT_REPLAYED.get(NOT_REPLAYED_SHORT.get(name, name))) is not None:
            yield f"{name} is not replayed: {means}"
