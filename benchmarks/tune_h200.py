"""One server on an H200 with 4 GiB of cache, run twice: unlimited, and with 24 requests at once. Is one predicted by the other?

    python -m benchmarks.tune_h200

Unlimited: 400 requests (prompt 200 to 1500, output 200 to 800 tokens) all at once took 176.5 s, with 232 preemptions; what the
server showed every half second is kept (tests/captures/vllm-0.25.1-h200/thrash.series.json), single requests are not. With
--max-num-seqs 24: 150 such requests took 57.4 s, without preemption; nothing else was kept. The traffic is made again from its
seed; the prompt tokens are those the server counted.

Then two pairs that were each made in one hour on one card, with stamps: stages `seats` and `seats-graphs` of
lab/gpu/measure_service.py. The last lines are another with stamps: `tight` and `storm` of lab/gpu/measure_traffic.py, one
fitted and the other predicted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.simulate_h200 import CAPTURES, LLAMA_8B, data_sheet, load, settings_of
from lab.service import score
from plimsoll.hardware.cards import gpu_named
from plimsoll.simulate.fit import fit
from plimsoll.simulate.replay import replay
from plimsoll.simulate.settings import EngineLimits, StepTime, sheet_time
from plimsoll.simulate.trace import Floats, Trace, make_trace

SERIES = CAPTURES.parent / "vllm-0.25.1-h200" / "thrash.series.json"
UNLIMITED_S, LIMITED_S = 176.5, 57.4
UNLIMITED, LIMITED = 400, 150
SEATS = 24
# --max-model-len 8192 --enforce-eager --kv-cache-memory-bytes 4294967296; the others are that release's own for this card.
SERVER = EngineLimits(
    num_blocks=2048, max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=8192, async_scheduling=True
)


class Seen(NamedTuple):
    """The unlimited run, every half second."""

    at_s: Floats
    running: Floats
    waiting: Floats
    preemptions: Floats
    prompt_tokens: Floats
    output_tokens: Floats


def seen() -> Seen:
    """What the server showed."""
    rows = np.array(json.loads(SERIES.read_text(encoding="utf-8")), dtype=np.float64).T
    return Seen(rows[0], rows[1], rows[2], rows[4], rows[7], rows[8])


def traffic(count: int) -> Trace:
    """The first so many requests of that load, all at once."""
    dice = random.Random(0)
    lengths = []
    for _ in range(count):
        prompt, output = dice.randint(200, 1500), dice.randint(200, 800)
        for _ in range(prompt):  # the prompt's own tokens were drawn next
            dice.randrange(3, 2000)
        lengths.append((prompt, output))
    prompts, outputs = zip(*lengths, strict=True)
    return make_trace("at once", [0] * count, prompts, outputs)


def seconds(count: int, seats: int, times: StepTime) -> float:
    """How long a replay of the first so many requests takes."""
    return replay(traffic(count), SERVER._replace(max_num_seqs=seats), times).totals.end_ns / 1e9


def start() -> StepTime:
    """The data sheet, without graphs."""
    found = sheet_time(LLAMA_8B._replace(is_eager=True), gpu_named("H200"), SERVER)
    assert found is not None, "the card has rates"
    return found


def slowed(is_short: Callable[[StepTime], bool]) -> StepTime:
    """The data sheet's steps, so much slower that a run with them is just not short any more."""
    low, high = 0.1, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_short(start().scaled(middle)) else (low, middle)
    return start().scaled(high)


def fitted_to_unlimited() -> StepTime:
    """By the mean time in the server: requests in it, added up over time, over their number."""
    run = seen()
    mean = float(np.trapezoid(run.running + run.waiting, run.at_s)) / UNLIMITED
    return slowed(lambda times: replay(traffic(UNLIMITED), SERVER, times).finish_ns.mean() / 1e9 < mean)


def fitted_to_limited() -> StepTime:
    """By the one number that is known of it: how long it takes."""
    return slowed(lambda times: seconds(LIMITED, SEATS, times) < LIMITED_S)


def step_ms(least: float, most: float) -> float:
    """The median step of the unlimited run while so many requests ran and no prompt was computed: each step is a token each."""
    run = seen()
    running = (run.running[1:] + run.running[:-1]) / 2
    made = np.diff(run.output_tokens)
    quiet = (np.diff(run.prompt_tokens) == 0) & (np.diff(run.preemptions) == 0) & (made > 0)
    chosen = quiet & (running >= least) & (running < most)
    return float(np.median(1e3 * np.diff(run.at_s)[chosen] * running[chosen] / made[chosen]))


def crossed(fitted: str, predicted: str) -> float:
    """Requests a second of one run, by the steps of another, over what was measured; less one."""
    times = fit(load(fitted), settings_of(fitted), start=data_sheet()).step_time
    measured = load(predicted)
    took = replay(measured.trace, settings_of(predicted), times).totals.end_ns
    return float(measured.finish_ns.max()) / took - 1


def paired(fitted: str) -> tuple[float, float]:
    """From one run of stage `seats` or `seats-graphs`: requests a second of the run of the other setting beside it, over what
    was measured, and of unlimited over 24 at once, by the same replay; both less one."""
    kind = "graphs-" if fitted.startswith("graphs-") else ""
    one, other = (f"{kind}{name}-{fitted[-1]}" for name in ("unlimited", "seats-24"))
    wanted = other if fitted == one else one
    took = {name: score.seen(name).duration_s * (1 + score.foretold(fitted, name).duration) for name in (one, other)}
    return score.seen(wanted).duration_s / took[wanted] - 1, took[other] / took[one] - 1


def main() -> None:
    """Print it all."""
    limited_steps = replay(traffic(LIMITED), SERVER._replace(max_num_seqs=SEATS), start()).totals.steps
    print(f"traffic: {int(traffic(UNLIMITED).prompt.sum())} prompt tokens, the server counted {int(seen().prompt_tokens[-1])}")
    for name, times in (("fitted to unlimited", fitted_to_unlimited()), ("fitted to 24", fitted_to_limited())):
        long, short = seconds(UNLIMITED, 1024, times), seconds(LIMITED, SEATS, times)
        print(f"{name}: unlimited {UNLIMITED / long:.2f}/s, {UNLIMITED_S / long - 1:+.1%} of measured; "
              f"24 at once {LIMITED / short:.2f}/s, {LIMITED_S / short - 1:+.1%}; "
              f"400 requests: 24 at once do {long / seconds(UNLIMITED, SEATS, times) - 1:+.1%} against unlimited")  # fmt: skip
    parts = [f"{low} to {high}: {step_ms(low, high):.1f} ms" for low, high in ((1, 6), (6, 20), (20, 26), (26, 40))]
    print(f"steps of the unlimited run by requests running: {', '.join(parts)}")
    storm = replay(traffic(UNLIMITED), SERVER, fitted_to_unlimited()).totals
    print(f"the unlimited run replayed: {storm.preemptions} preemptions, {storm.peak_running} at once")
    print(f"a step of the run with 24, all told: {1e3 * LIMITED_S / limited_steps:.1f} ms")
    settings = ("unlimited", "seats-24", "graphs-unlimited", "graphs-seats-24")
    for name in (f"{setting}-{number}" for setting in settings for number in (1, 2)):
        off, gain = paired(name)
        print(f"fitted to {name}, the other setting predicted: {off:+.1%} in requests a second; unlimited does {gain:+.1%}")
    for kind in ("", "graphs-"):
        took = [[score.seen(f"{kind}{setting}-{n}").duration_s for n in (1, 2)] for setting in ("seats-24", "unlimited")]
        more = [few / many - 1 for few, many in zip(*took, strict=True)]
        print(f"measured, {kind}unlimited does {more[0]:+.1%} and {more[1]:+.1%}")
    for one, other in (("tight", "storm"), ("storm", "tight")):
        print(f"fitted to {one}, {other} predicted: {crossed(one, other):+.1%} in requests a second")


if __name__ == "__main__":
    main()
