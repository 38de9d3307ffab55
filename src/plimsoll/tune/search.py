"""Finds a setting whose goodput is as good as the best of all, for a tenth of the runs that trying all would take.

1. Plan gives every candidate its pool. Candidates that plan warns of are never run. Among those with equal requests at once
and tokens in a step only the one with the largest cache goes on; the others come back in step 4.
2. Screening: all of these on a short stretch of the traffic, the busiest one.
3. The best of them, and the command's own setting, on the whole traffic; none whose ceiling is below a goodput already reached.
4. Every utilisation for the best of them: a larger cache is not always better. Where further tokens must come quickly, a
smaller cache keeps steps short.
5. Climbing: the neighbours of the best in all four flags, until none is better. Then all values of requests at once, and of
   tokens in a step, with the others as they are; these are also the curves that are shown. From a better one it goes on at 4.
6. Each flag as the command had it, beside the others as chosen: this shows the gain from that flag alone.

A run counts by the requests it replays. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from plimsoll.simulate.trace import Trace
from plimsoll.simulate.traffic import take
from plimsoll.tune.goodput import Failed, Job, Result, RunAll, Score, Traffic
from plimsoll.tune.space import Candidate, Option, Space, roomiest

# The goodput that no run of a setting can exceed, from the pool and the step times alone: a bound that costs no replay.
#
# Three things take time whatever the scheduler does: requests arrive when they arrive; each further token needs a place in
# some step, of which there are `max_num_seqs`; and each of those steps holds the whole request in the cache, which has so
# many tokens.


class Demand(NamedTuple):
    """The work in the requests that can be served at all."""

    requests: int
    span_s: float
    tokens: int  # To be computed at least: prompts, if none is shared, and all but the last token of each answer
    output_tokens: int
    token_steps: float  # Tokens in the cache, added up over the steps in which they must be there; 0 if prompts are shared


def demand(traffic: Traffic, max_model_len: int) -> Demand:
    """Returns the demand of requests that are not too long; shared prompts count nothing, since hits may save any of them."""
    trace = traffic.trace
    fits = trace.prompt + trace.output <= max_model_len
    prompt, output = trace.prompt[fits].astype(np.float64), trace.output[fits].astype(np.float64)
    is_shared = trace.shares_content
    steps = output - 1
    return Demand(
        requests=int(np.count_nonzero(fits)),
        span_s=traffic.span_s,
        tokens=int(steps.sum() + (0 if is_shared else prompt.sum())),
        output_tokens=int(output.sum()),
        token_steps=0.0 if is_shared else float((steps * (prompt + steps / 2)).sum()),
    )


def ceiling(asked: Demand, job: Job) -> float:
    """The requests a second that this setting cannot exceed."""
    settings, times = job.settings, job.step_time
    table = times.table(settings.max_num_batched_tokens)[: settings.max_num_batched_tokens + 1].astype(np.float64)
    count = np.arange(1, len(table), dtype=np.float64)
    most = min(settings.max_num_seqs, len(table) - 1)
    a_token = float((table[1:] / count).min())
    a_decoded = float((table[1 : most + 1] / count[:most]).min()) + times.seq_ns
    held = (settings.num_blocks - 1) * settings.block_size if not settings.groups else 2**62
    steps = asked.token_steps / max(1, held)
    # A step reads the context of those in it: that part is the same for any order of work.
    context = asked.token_steps * times.ctx_ps / 1e3
    decoding = (asked.output_tokens - asked.requests) * a_decoded
    busy_ns = (max(asked.tokens * a_token, decoding, steps * float(table[1:].min())) + context) / job.engines.number
    seconds = max(asked.span_s, busy_ns / 1e9)
    return asked.requests / seconds if seconds > 0 else float("inf")


SHARE = 0.1  # Of the runs that trying everything would take
SCREEN_SHARE = 0.1  # Of the requests, in screening
SCREEN_LEAST = 100  # The fewest requests in a stretch that says anything
FINALISTS = 6
LEAST_REQUESTS = 40_000  # Replaying them takes about a second: allowed for short traffic, whatever share that is
LEAST_RUNS = 14  # Allowed for a small space, even if that is more than the share
TIE = 0.005
"""Settings whose goodput differs by less are equally good: then the command's own stays, or the one that changes least."""


class Trial(NamedTuple):
    """A candidate and its score with the whole traffic."""

    option: Option
    score: Score


class SearchResult(NamedTuple):
    """The result of a search."""

    best: Trial
    own: Trial | None  # The command's own setting; None where plan calls it unsafe or it cannot run
    tried: tuple[Trial, ...]  # All on the whole traffic, best first
    most: float  # Requests a second that no setting can exceed
    candidates: int
    safe: int
    ruled_out: int  # Finalists that were never run: their ceiling is below another's goodput
    runs: int
    requests: int  # Replayed, over all runs


def busiest(trace: Trace, count: int) -> Trace:
    """The `count` requests in a row that have the most tokens in the shortest time."""
    if count >= trace.size:
        return trace
    work = np.concatenate(([0.0], np.cumsum(trace.prompt + trace.output, dtype=np.float64)))
    # For a stretch of this length at any place: tokens over the time until the request after it came.
    begins = np.arange(trace.size - count)
    took = (trace.arrival_ns[begins + count] - trace.arrival_ns[begins]).astype(np.float64)
    rate = (work[begins + count] - work[begins]) / np.maximum(1.0, took)
    return take(trace, int(np.argmax(rate)), count)


class Search:
    """One search: the runs so far, and the budget left."""

    def __init__(
        self,
        traffic: Traffic,
        options: Sequence[Option],
        space: Space,
        job_of: Callable[[Option], Job],
        run: RunAll,
        *,
        reserved: int = 0,
        least_requests: int = LEAST_REQUESTS,
    ) -> None:
        self.traffic, self.space, self.job_of, self.run = traffic, space, job_of, run
        self.options = {option.candidate: option for option in options}
        self.safe = {candidate: option for candidate, option in self.options.items() if option.is_safe}
        self.tried: dict[Candidate, Trial] = {}
        self.failed: dict[Candidate, str] = {}
        self.runs = self.requests = self.ruled_out = 0
        self.held_back = len(Candidate._fields)
        """Runs for step 6."""
        # The runs after the search (slower clocks, a smaller cache) are part of the same tenth.
        runs = max(LEAST_RUNS, int(SHARE * len(self.safe)) - reserved)
        self.budget = max(least_requests, runs * traffic.trace.size)

    def find(self, own: Candidate) -> SearchResult | None:
        """The best setting; None if no candidate is safe, or none can run. `own` is the command's."""
        if len(self.safe) * self.traffic.trace.size <= self.budget:
            self.try_all(self.safe)
        else:
            self.try_all([own])
            ranked = self._screened()
            reached = max((one.score.goodput for one in self.tried.values()), default=0.0)
            able = [one for one in ranked if self._ceiling(self.safe[one]) >= reached]
            self.ruled_out += len(ranked) - len(able)
            self.try_all(able[:FINALISTS])
            self._climb_and_draw()
        if not self.tried:
            return None
        best = self._compared_flag_by_flag(own)
        return SearchResult(
            best=best,
            own=self.tried.get(own),
            tried=tuple(self._ranked()),
            most=max(self._ceiling(option) for option in self.safe.values()),
            candidates=len(self.options),
            safe=len(self.safe),
            ruled_out=self.ruled_out,
            runs=self.runs,
            requests=self.requests,
        )

    def _compared_flag_by_flag(self, own: Candidate) -> Trial:
        """The preferred trial, after each of its flags was also run as the command had it: that may find a better one."""
        keeps, stood = not self.traffic.slo.is_empty, None
        self.held_back = 0
        while True:
            best = preferred(self._ranked(), own, keeps_promises=keeps)
            chosen = best.option.candidate
            if chosen == stood or not self.left:
                return best
            stood = chosen
            self.try_all(chosen._replace(**{name: getattr(own, name)}) for name in chosen.differences(own))

    def _ranked(self) -> list[Trial]:
        return sorted(self.tried.values(), key=lambda one: -one.score.goodput)

    @property
    def left(self) -> int:
        """The number of runs of the whole traffic that the budget still allows."""
        size = max(1, self.traffic.trace.size)
        return max(0, self.budget - self.held_back * size - self.requests) // size

    def try_all(self, candidates: Iterable[Candidate]) -> None:
        """Runs the candidates that are safe and were not run yet, on the whole traffic, as far as the budget goes."""
        wanted = [one for one in candidates if one in self.safe and one not in self.tried and one not in self.failed]
        wanted = wanted[: self.left]
        for candidate, result in zip(wanted, self._run(self.traffic, wanted), strict=True):
            if isinstance(result, Failed):
                self.failed[candidate] = result.why
            else:
                self.tried[candidate] = Trial(self.safe[candidate], result)

    def _run(self, traffic: Traffic, candidates: Sequence[Candidate]) -> list[Result]:
        jobs = [self.job_of(self.safe[candidate]) for candidate in candidates]
        results = dict(self.run(traffic, jobs))
        self.runs += len(jobs)
        self.requests += len(jobs) * traffic.trace.size
        return [results[place] for place in range(len(jobs))]

    def _screened(self) -> list[Candidate]:
        """The roomiest candidate of each pair of limits, best first by a stretch of the traffic."""
        pairs = [option.candidate for option in roomiest(list(self.safe.values())).values()]
        count = max(SCREEN_LEAST, int(SCREEN_SHARE * self.traffic.trace.size))
        stretch = self.traffic._replace(trace=busiest(self.traffic.trace, count))
        results = self._run(stretch, pairs)
        marks = {one: result.goodput for one, result in zip(pairs, results, strict=True) if isinstance(result, Score)}
        return sorted(marks, key=lambda one: -marks[one])

    def _ceiling(self, option: Option) -> float:
        return ceiling(demand(self.traffic, option.ledger.kv_plan.max_model_len), self.job_of(option))

    def _climb_and_draw(self) -> None:
        """Runs lines through the best setting and climbs, in turn, until neither finds a better one."""
        stood = None
        while self.left and self.tried and (here := self._best()) != stood:
            stood = here
            self._along("gpu_memory_utilization")
            below = None
            while self.left and (top := self._best()) != below:
                below, neighbours = top, []
                for name, values in self.space._asdict().items():
                    lower = [one for one in values if one < getattr(top, name)][-1:]
                    higher = [one for one in values if one > getattr(top, name)][:1]
                    neighbours += [top._replace(**{name: one}) for one in (*lower, *higher)]
                self.try_all(neighbours)
            self._along("max_num_seqs")
            self._along("max_num_batched_tokens")

    def _along(self, name: str) -> None:
        here = self._best()
        self.try_all(here._replace(**{name: value}) for value in getattr(self.space, name))

    def _best(self) -> Candidate:
        return max(self.tried.values(), key=lambda one: one.score.goodput).option.candidate


def preferred(ranked: Sequence[Trial], own: Candidate, *, keeps_promises: bool = False) -> Trial:
    """Returns the command's own trial if it is as good as the best, else of the best ones the nearest to it, with most slack.

    `keeps_promises`: where something is promised, an own setting that keeps it for all requests is as good as any: a better
    one would only finish the last answers sooner, which is not promised.
    """
    best = ranked[0].score.goodput
    is_own = next((one for one in ranked if one.option.candidate == own), None)
    if keeps_promises and is_own is not None and is_own.score.met == is_own.score.requests - is_own.score.rejected:
        return is_own
    as_good = [one for one in ranked if one.score.goodput >= best * (1 - TIE)]
    if is_own is not None and is_own not in as_good:  # a change must gain enough
        as_good = [one for one in as_good if one.score.goodput >= is_own.score.goodput * (1 + TIE)]

    def rank(one: Trial) -> tuple[int, int, float]:
        return len(one.option.candidate.differences(own)), -one.option.ledger.slack.value, -one.score.goodput

    return min(as_good, key=rank)
