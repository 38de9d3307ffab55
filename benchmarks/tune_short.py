"""The search on short traffic, held strictly to a tenth of trying everything: 75 made-up loads and promises on an L4.

    python -m benchmarks.tune_short

Takes about three minutes. `plimsoll tune` itself spends more on traffic this short (40,000 requests are always allowed).
"""

from __future__ import annotations

from plimsoll.cli.main import parse
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import read_command
from plimsoll.simulate.traffic import generate, parse_synthetic
from plimsoll.tune.answer import Server
from plimsoll.tune.goodput import Score, Traffic, parse_slo
from plimsoll.tune.runners import on_cores
from plimsoll.tune.search import Search
from plimsoll.tune.space import Space, candidate_of, plan_all

SPACE = Space((8, 16, 24, 32, 48, 64, 128, 256), (512, 1024, 2048, 4096), (16, 32), (0.85, 0.88, 0.9, 0.92, 0.94))
SERVER = "--gpu L4 --vllm 0.32.0 -- vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192"
PROMISES = ("ttft=5s,tpot=200ms", "ttft=1s", "tpot=90ms", "tpot=80ms", "ttft=3s,tpot=90ms")


def main() -> None:
    """Print every answer that is not within one per cent, and the count."""
    ready = read_command(parse(ServerOptions, SERVER.split()), learned=False)
    ledger, _ = ready.replan(ready.settings)
    server = Server(ledger, ready.model.shape, ready.replan)
    options = plan_all(SPACE.candidates, ledger, ready.replan)
    safe = [one for one in options if one.is_safe]
    ratios = []
    for requests in (250, 400, 800):
        for rate in (0.4, 0.6, 0.8, 1.0, 1.2):
            words = f"synthetic:requests={requests},rate={rate},prompt=1000,output=200,prompt_max=4096,seed=3"
            for slo in PROMISES:
                traffic = Traffic(generate(parse_synthetic(words)), 1.0, parse_slo(slo))
                results = [one for _, one in on_cores(traffic, [server.job_of(one) for one in safe])]
                best = max(one.goodput for one in results if isinstance(one, Score))
                found = Search(traffic, options, SPACE, server.job_of, on_cores, least_requests=0).find(candidate_of(ledger))
                assert found is not None
                ratios.append(found.best.score.goodput / best)
                if ratios[-1] < 0.99:
                    cost = found.requests / (len(safe) * requests)
                    print(f"{requests} requests, {rate:g} a second, {slo}: {ratios[-1]:.1%} for {cost:.1%}", flush=True)
    good = sum(one >= 0.99 for one in ratios)
    print(f"{good} of {len(ratios)} within 1 % of the best of {len(safe)}; the worst reached {min(ratios):.1%}")


if __name__ == "__main__":
    main()
