"""A small planned server for the tests of `tune`: Llama-3.1-8B on an L4, and traffic that presses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from plimsoll.cli.main import parse
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import PlanInput, read_command
from plimsoll.simulate.traffic import generate, parse_synthetic
from plimsoll.tune.answer import Server
from plimsoll.tune.goodput import Job, Result, Traffic, do, parse_slo
from plimsoll.tune.space import Space

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SMALL = Space((8, 16, 32, 64), (512, 1024, 2048), (16, 32), (0.88, 0.92, 0.94))


@cache
def ready(*flags: str) -> PlanInput:
    words = ["--gpu", "L4", "--vllm", "0.32.0", "--", "vllm", "serve", LLAMA, *(flags or ("--max-model-len", "8192"))]
    return read_command(parse(ServerOptions, words), learned=False)


def server(*flags: str) -> Server:
    """As it is planned, with the step times of the data sheet."""
    found = ready(*flags)
    ledger, _ = found.replan(found.settings)
    return Server(ledger, found.model.shape, found.replan)


def traffic(slo: str = "ttft=5s,tpot=200ms", rate: float = 0.8, requests: int = 400) -> Traffic:
    """Chats that fill the card."""
    words = f"synthetic:requests={requests},rate={rate},prompt=1000,output=200,prompt_max=4096,seed=3"
    return Traffic(generate(parse_synthetic(words)), 1.0, parse_slo(slo))


def run(given: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
    yield from ((place, do(given, job)) for place, job in enumerate(jobs))
