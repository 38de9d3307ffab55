"""From what the scheduler did to the figures of the metrics page, at the moments at which vLLM counts them."""

from __future__ import annotations

from plimsoll.simulate import layout as at
from plimsoll.simulate import open_loop as loop
from plimsoll.simulate.open_run import OpenRun
from plimsoll.standin.faults import NS
from plimsoll.standin.figures import Figures
from plimsoll.standin.request import Request


def count_first(figures: Figures, run: OpenRun, request: Request, row: int, now_ns: int) -> None:
    """A first token: the prompt is done, and counts as a whole."""
    request.first_ns = now_ns
    request.cached_tokens = int(run.state.requests[row, at.CACHED])
    figures.prompt_cached += request.cached_tokens
    figures.prompt_computed += len(request.ask.prompt) - request.cached_tokens
    figures.histograms["ttft"].observe((now_ns - request.arrival_ns) / NS)


def count_end(figures: Figures, run: OpenRun, request: Request, row: int | None, now_ns: int) -> None:
    """A request is over; `row` is where the run keeps it, if it ever got there."""
    assert request.finish is not None, "it has ended"
    shown = figures.histograms
    request.finished_ns = now_ns
    figures.success[request.finish] += 1
    shown["e2e"].observe((now_ns - request.arrival_ns) / NS)
    shown["prompt"].observe(len(request.ask.prompt))
    shown["output"].observe(request.produced)
    _count_family(figures, request)
    if request.ask.max_tokens is not None:
        shown["params_max_tokens"].observe(request.ask.max_tokens)
    shown["prefill_kv_computed"].observe(len(request.ask.prompt) - request.cached_tokens)
    if row is not None:
        request.scheduled_ns = int(run.state.stamps[row, at.FIRST_SCHED])
        request.preemptions = int(run.state.requests[row, at.PREEMPTIONS])
    # Who was never let in has spent all of its time in the queue, and none elsewhere.
    scheduled_ns = request.scheduled_ns if request.scheduled_ns >= 0 else now_ns
    first_ns = request.first_ns if request.first_ns >= 0 else now_ns
    shown["queue"].observe(max(0, scheduled_ns - request.arrival_ns) / NS)
    shown["prefill"].observe(max(0, first_ns - scheduled_ns) / NS)
    shown["inference"].observe(max(0, now_ns - scheduled_ns) / NS)
    shown["decode"].observe((now_ns - first_ns) / NS)
    shown["tpot"].observe((now_ns - first_ns) / NS / (request.produced - 1) if request.produced > 1 else 0.0)
    shown["request_preemptions"].observe(request.preemptions)


def _count_family(figures: Figures, request: Request) -> None:
    """What is counted once for all answers to a prompt: with the last of them."""
    family, longest = request.ask.family, request.produced
    if family is not None:
        family.left -= 1
        family.longest = longest = max(family.longest, longest)
        if family.left > 0:
            return
    figures.histograms["max_output"].observe(longest)
    figures.histograms["params_n"].observe(request.ask.n)


def show_step(figures: Figures, run: OpenRun) -> None:
    """After a step: gauges are as it left them, counters and the two histograms of the inner loop as far as it got."""
    sums = run.tally.sums
    figures.running, figures.waiting, figures.kv_usage = run.running, run.waiting, run.kv_usage
    figures.steps = int(sums[loop.OUTPUT_STEPS])
    figures.preemptions = int(sums[loop.PREEMPTIONS_TOLD])
    figures.prompt_tokens, figures.generation_tokens = int(sums[loop.PROMPT_TOKENS]), int(sums[loop.GENERATED])
    figures.prefix_queries, figures.prefix_hits = run.count(at.QUERIES), run.count(at.HITS)
    steps, gaps = figures.histograms["step_tokens"], figures.histograms["inter_token"]
    steps.counts, steps.total = run.tally.step_counts.tolist(), float(sums[loop.STEP_TOKENS])
    gaps.counts, gaps.total = run.tally.gap_counts.tolist(), float(sums[loop.GAP_NS]) / NS
