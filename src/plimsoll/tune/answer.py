"""From traffic and a planned command to an answer: search, doubt, margin and drift, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.domain.model import ModelShape
from plimsoll.plan.ledger import Ledger
from plimsoll.simulate.settings import StepTime
from plimsoll.tune.doubt import Doubt, contenders, doubt, how_many
from plimsoll.tune.fingerprint import Change, Fingerprint, drift, fingerprint
from plimsoll.tune.goodput import Score
from plimsoll.tune.options import Option, Replan, candidate_of, plan_all, sheet_times
from plimsoll.tune.search import Found, Search, Tried
from plimsoll.tune.space import Candidate, Space, is_taken
from plimsoll.tune.work import Job, RunAll, Traffic


class Server(NamedTuple):
    """What is tuned: a planned command, and how long its steps take."""

    ledger: Ledger
    shape: ModelShape
    replan: Replan
    step_time: StepTime | None = None
    """Fitted to a real run; None: by the data sheet."""
    fitted: str | None = None
    """What the fit says of its own error."""
    most_running: int | None = None
    """Requests at once in the run that the fit saw."""
    is_poor: bool = False
    """Whether the fit is so far off that what it leads to is a rough guide all the same."""

    def job_of(self, option: Option) -> Job:
        """One candidate as a piece of work."""
        settings = option.settings
        times = self.step_time or sheet_times(option.ledger, self.shape, settings) or StepTime()
        return Job(settings, times.reaching(settings.max_num_batched_tokens))


class Last(NamedTuple):
    """What an earlier tuning saw, and what it chose."""

    traffic: Fingerprint
    chosen: Candidate


class Tuning(NamedTuple):
    """The answer."""

    traffic: Traffic
    seen: Fingerprint
    server: Server
    space: Space
    own: Candidate
    """The command's setting."""
    own_option: Option
    found: Found | None
    """None: no candidate is safe, or none can run."""
    refused: tuple[Option, ...]
    """Candidates that plan objects to."""
    failures: tuple[str, ...]
    """Why safe candidates could not be replayed to the end, each reason once."""
    doubt: Doubt | None
    """None where step times were fitted."""
    at_low_end: Score | None
    """The chosen setting, if the cache turns out as small as plan's band allows; None where that is not a cache."""
    requests: int
    """Replayed over all runs, doubts and margins included."""
    last: Last | None = None
    last_now: Tried | None = None
    """What was chosen last time, with today's traffic."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """Then and now; empty where there is no earlier tuning."""
        return drift(self.last.traffic, self.seen) if self.last is not None else ()


def tune(traffic: Traffic, server: Server, space: Space, run: RunAll, last: Last | None = None) -> Tuning:
    """The best setting of the space for this traffic, and all that is to be said about it."""
    own = candidate_of(server.ledger)
    space = _of_this_model(space, server.ledger).with_values_of(own)
    wished = [last.chosen] if last is not None and is_taken(last.chosen) else []
    options = plan_all(dict.fromkeys([own, *wished, *space.candidates]), server.ledger, server.replan)
    doubted = how_many(sum(one.is_safe for one in options)) if server.fitted is None else 0
    after = 1 + 2 * doubted
    search = Search(traffic, options, space, server.job_of, run, reserved=after)
    found = search.find(own, wished)
    doubts, low = None, None
    requests = search.requests
    if found is not None:
        chosen = found.best.option
        if server.fitted is None:
            doubts = doubt(traffic, contenders(found.tried, chosen.candidate, doubted), chosen.candidate, server.job_of, run)
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
        last=last,
        last_now=search.tried.get(last.chosen) if last is not None else None,
    )


def _of_this_model(space: Space, ledger: Ledger) -> Space:
    """vLLM sets the block size where kinds of layers share the pool, and a cache of a set size knows no utilisation."""
    if len(ledger.kv_plan.groups) > 1:
        space = space._replace(block_size=(ledger.kv_plan.block_size,))
    if ledger.settings.has_fixed_cache:
        space = space._replace(gpu_memory_utilization=(ledger.settings.utilization,))
    return space


def _at_low_end(traffic: Traffic, job: Job, chosen: Option, run: RunAll) -> Score | None:
    """The same run in the smallest cache that plan thinks possible."""
    kv = chosen.ledger.kv
    blocks = int(job.settings.num_blocks * kv.low / kv.value) if kv.value > 0 else 0
    if blocks < 2 or blocks == job.settings.num_blocks:
        return None
    ((_, result),) = run(traffic, [job._replace(settings=job.settings._replace(num_blocks=blocks))])
    return result if isinstance(result, Score) else None


def curve(tuning: Tuning, name: str) -> list[Tried]:
    """For each value of this flag the best that was replayed with the other of the two limits as chosen.

    Cache and blocks may differ along it: what is asked is what this value can do, not what it does in a cache made for another.
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


def runner_up(tuning: Tuning) -> Tried | None:
    """The best setting with another number of requests at once, or of tokens in a step."""
    if tuning.found is None:
        return None
    chosen = tuning.found.best.option.candidate
    others: Sequence[Tried] = [one for one in tuning.found.tried if one.option.candidate[:2] != chosen[:2]]
    return others[0] if others else None
