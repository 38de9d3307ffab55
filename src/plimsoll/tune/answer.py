"""Tunes a planned command for traffic: search, doubt and margin, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.models.shape import ModelShape
from plimsoll.plan.ledger import Ledger
from plimsoll.simulate.features import Features, with_features
from plimsoll.simulate.replicas import ONE_ENGINE, RoutedEngines
from plimsoll.simulate.settings import StepTime
from plimsoll.simulate.silicon import SHEET_BAND, StepClock, planned_clock
from plimsoll.simulate.summary import percentile
from plimsoll.tune.goodput import Job, RunAll, Score, Traffic
from plimsoll.tune.search import Search, SearchResult, Trial
from plimsoll.tune.space import (
    FLAGS,
    Candidate,
    Option,
    Replan,
    Space,
    candidate_of,
    plan_all,
    value_text,
)

# How much an answer depends on step times that were not measured.
#
# Step times by measured kernels or by a data sheet have a band (docs/step-time.md). So the settings that might be chosen are
# replayed with steps as fast and as slow as it allows; the best settings of the three are a range, not a recommendation.

CONTENDERS = 8
FEWEST_CONTENDERS = 3
SETTINGS_A_CONTENDER = 60  # A smaller space has fewer contenders, so that doubt takes no more than its part of the effort
AS_GOOD = 0.01


class StretchedScores(NamedTuple):
    """The contenders' scores, with steps `factor` times as long."""

    factor: float
    scores: tuple[tuple[Candidate, Score], ...]

    @property
    def best(self) -> float:
        """The highest goodput of them."""
        return max((score.goodput for _, score in self.scores), default=0.0)

    @property
    def good(self) -> tuple[Candidate, ...]:
        """The contenders within one per cent of the best."""
        return tuple(candidate for candidate, score in self.scores if score.goodput >= self.best * (1 - AS_GOOD))


class Doubt(NamedTuple):
    """The best settings if steps take longer, or shorter, than the data sheet says."""

    clocks: tuple[StretchedScores, ...]
    ranges: dict[str, tuple[float, float]]  # For each flag the lowest and the highest value that is best in any of them
    steady: bool  # The chosen setting is as good as any with each of the clocks


def contenders(tried: Sequence[Trial], chosen: Candidate, own: Candidate, most: int) -> list[Trial]:
    """The chosen setting, the command's own, and the best with each value of the two flags that matter most, best first."""
    found = {one.option.candidate: one for one in tried if one.option.candidate in (chosen, own)}
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        best: dict[int, Trial] = {}
        for one in tried:
            best.setdefault(getattr(one.option.candidate, name), one)
        found |= {one.option.candidate: one for one in best.values()}
    first = (chosen, own)
    return sorted(found.values(), key=lambda one: (one.option.candidate not in first, -one.score.goodput))[:most]


def doubt(
    traffic: Traffic,
    asked: Sequence[Trial],
    chosen: Candidate,
    job_of: Callable[[Option], Job],
    run: RunAll,
    band: tuple[float, float] = SHEET_BAND,
) -> Doubt:
    """Replays the contenders with faster and with slower steps."""
    clocks = [StretchedScores(1.0, tuple((one.option.candidate, one.score) for one in asked))]
    jobs = [job_of(one.option) for one in asked]
    for factor in band:
        results = dict(run(traffic, [job._replace(step_time=job.step_time.scaled(factor)) for job in jobs]))
        scores = ((one.option.candidate, results[place]) for place, one in enumerate(asked))
        clocks.append(
            StretchedScores(factor, tuple((candidate, result) for candidate, result in scores if isinstance(result, Score)))
        )
    good = {candidate for clock in clocks for candidate in clock.good if clock.best > 0} or {chosen}
    return Doubt(
        tuple(clocks),
        {name: (min(values), max(values)) for name in Candidate._fields if (values := [getattr(one, name) for one in good])},
        all(chosen in clock.good for clock in clocks),
    )


# Traffic in a few numbers.

MINUTE_NS = 60 * 10**9


class Fingerprint(NamedTuple):
    """Counts, tokens, seconds; no text and no single request."""

    requests: int
    span_s: float
    rate: float  # Requests a second
    busiest_minute_rate: float
    prompt_mean: float
    prompt_p50: float
    prompt_p99: float
    output_mean: float
    output_p50: float
    output_p99: float
    shared: float  # Share of the prompts' beginnings that an earlier request also had


def fingerprint(traffic: Traffic) -> Fingerprint:
    """The numbers of this traffic at its speed."""
    trace, span = traffic.trace, traffic.span_s

    arrivals = (trace.arrival_ns / traffic.speedup).astype(np.int64)
    after, between_s = np.searchsorted(arrivals, arrivals + MINUTE_NS), float(arrivals[-1] - arrivals[0]) / 1e9

    prompts, outputs = np.sort(trace.prompt).astype(np.float64), np.sort(trace.output).astype(np.float64)
    return Fingerprint(
        requests=trace.size,
        span_s=span,
        rate=trace.size / span if span > 0 else 0.0,
        busiest_minute_rate=int((after - np.arange(len(arrivals))).max()) / min(60.0, between_s) if between_s > 0 else 0.0,
        prompt_mean=float(trace.prompt.mean()),
        prompt_p50=percentile(prompts, 50) or 0.0,
        prompt_p99=percentile(prompts, 99) or 0.0,
        output_mean=float(trace.output.mean()),
        output_p50=percentile(outputs, 50) or 0.0,
        output_p99=percentile(outputs, 99) or 0.0,
        shared=1 - len(np.unique(trace.prefix_ids)) / len(trace.prefix_ids) if trace.shares_content else 0.0,
    )


# The command with a chosen setting in it.


def flags_of(candidate: Candidate, own: Candidate) -> dict[str, str]:
    """The flags in which a setting differs from the command's own, with their values."""
    return {FLAGS[name]: value_text(getattr(candidate, name)) for name in candidate.differences(own)}


def with_flags(words: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """The words of a command with its values of these flags replaced; flags that it did not have come last."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") not in flags:
            found.append(word)
        elif not equals:
            next(rest, None)  # its value
    return [*found, *(word for flag, value in flags.items() for word in (flag, value))]


class Server(NamedTuple):
    """The server to tune: a planned command, and its step times."""

    ledger: Ledger
    shape: ModelShape
    replan: Replan
    step_time: StepTime | None = None  # Fitted to a real run; None: by the data sheet
    fitted: str | None = None  # The fit's sentence on its error
    most_running: int | None = None  # Requests at once in the run that the fit saw
    is_poor: bool = False  # The fit is so far off that the answer is a rough guide all the same
    acceptance: float | None = None  # Share of drafted tokens that are accepted; None: nobody said it
    engines: RoutedEngines = ONE_ENGINE

    def features_of(self, option: Option) -> Features:
        """A candidate's limits."""
        return with_features(option.settings, option.ledger, self.shape, self.acceptance)

    def clock_of(self, option: Option) -> StepClock:
        """Unfitted step times of a candidate; without the card's rates the reference's constants."""
        settings, _, wider = self.features_of(option)
        found = planned_clock(option.ledger, self.shape, settings) or StepClock(StepTime(), SHEET_BAND, "no card")
        return found._replace(band=(found.band[0] * wider[0], found.band[1] * wider[1]))

    def job_of(self, option: Option) -> Job:
        """One candidate as a piece of work."""
        settings = self.features_of(option).settings
        times = self.step_time or self.clock_of(option).step_time
        return Job(settings, times.reaching(settings.max_num_batched_tokens), self.engines)


class Tuning(NamedTuple):
    """The answer."""

    traffic: Traffic
    seen: Fingerprint
    server: Server
    space: Space
    own: Candidate  # The command's setting
    own_option: Option
    found: SearchResult | None  # None: no candidate is safe, or none can run
    refused: tuple[Option, ...]  # Candidates that plan objects to
    failures: tuple[str, ...]  # The reasons why safe candidates could not be replayed to the end, each once
    doubt: Doubt | None  # None where step times were fitted
    at_low_end: Score | None
    """The chosen setting, if the cache turns out as small as plan's band allows; None where that is not a cache."""
    requests: int  # Replayed over all runs, doubts and margins included

    @property
    def result(self) -> SearchResult:
        """The search's result, where there is one."""
        assert self.found is not None, "asked only of an answer"
        return self.found


def tune(traffic: Traffic, server: Server, space: Space, run: RunAll) -> Tuning:
    """Finds the best setting of the space for this traffic, with its doubt and margin."""
    own = candidate_of(server.ledger)
    # vLLM sets the block size where kinds of layers share the pool, and a cache of a set size knows no utilisation.
    if len(server.ledger.kv_plan.groups) > 1:
        space = space._replace(block_size=(server.ledger.kv_plan.block_size,))
    if server.ledger.settings.has_fixed_cache:
        space = space._replace(gpu_memory_utilization=(server.ledger.settings.utilization,))
    # The command's own values are searched, too.
    space = Space._make(tuple(sorted({*values, value})) for values, value in zip(space, own, strict=True))
    options = plan_all(dict.fromkeys([own, *space.candidates]), server.ledger, server.replan)
    safe = sum(one.is_safe for one in options)
    doubted = min(CONTENDERS, max(FEWEST_CONTENDERS, safe // SETTINGS_A_CONTENDER)) if server.fitted is None else 0
    search = Search(traffic, options, space, server.job_of, run, reserved=1 + 2 * doubted)
    found = search.find(own)
    doubts, low = None, None
    requests = search.requests
    if found is not None:
        chosen = found.best.option
        if server.fitted is None:
            asked, band = contenders(found.tried, chosen.candidate, own, doubted), server.clock_of(chosen).band
            doubts = doubt(traffic, asked, chosen.candidate, server.job_of, run, band)
            requests += traffic.trace.size * sum(len(clock.scores) for clock in doubts.clocks[1:])
        low = _at_low_end(traffic, server.job_of(chosen), chosen, run)
        requests += traffic.trace.size if low is not None else 0
    return Tuning(
        traffic=traffic,
        seen=fingerprint(traffic),
        server=server,
        space=space,
        own=own,
        own_option=next(one for one in options if one.candidate == own),
        found=found,
        refused=tuple(one for one in options if not one.is_safe),
        failures=tuple(dict.fromkeys(search.failed.values())),
        doubt=doubts,
        at_low_end=low,
        requests=requests,
    )


def _at_low_end(traffic: Traffic, job: Job, chosen: Option, run: RunAll) -> Score | None:
    kv = chosen.ledger.kv
    blocks = int(job.settings.num_blocks * kv.low / kv.value) if kv.value > 0 else 0
    if blocks < 2 or blocks == job.settings.num_blocks:
        return None
    ((_, result),) = run(traffic, [job._replace(settings=job.settings._replace(num_blocks=blocks))])
    return result if isinstance(result, Score) else None


def curve(tuning: Tuning, name: str) -> list[Trial]:
    """The best replayed trial for each value of this flag, with the other of the two limits as chosen.

    Cache and blocks may differ along the curve: it shows the best that each value can do, not its result in another's cache.
    """
    if tuning.found is None:
        return []
    best = tuning.found.best
    chosen = best.option.candidate
    fixed = "max_num_batched_tokens" if name == "max_num_seqs" else "max_num_seqs"
    found = {getattr(chosen, name): best}
    for one in tuning.found.tried:
        candidate = one.option.candidate
        if getattr(candidate, fixed) == getattr(chosen, fixed):
            found.setdefault(getattr(candidate, name), one)
    return [found[value] for value in sorted(found)]


def runner_up(tuning: Tuning) -> Trial | None:
    """The best setting with another number of requests at once, or of tokens in a step."""
    if tuning.found is None:
        return None
    chosen = tuning.found.best.option.candidate
    return next((one for one in tuning.found.tried if one.option.candidate[:2] != chosen[:2]), None)
