"""Sweeps on a real Ray with two workers: the same results to the digit, also when a worker is killed in the middle."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from lab.gpu.fleet_parts import children
from plimsoll.cli.main import main
from plimsoll.simulate.settings import EngineLimits, StepTime
from plimsoll.simulate.traffic import generate, parse_synthetic
from plimsoll.tune.goodput import Job, Traffic, parse_slo
from plimsoll.tune.runners import on_cores, ray_runner
from tests.real.small_farm import missing

ROOT = Path(__file__).resolve().parents[2]
BUSY = "synthetic:requests=300,rate=20,prompt=600,output=100,families=4,family_tokens=256,seed=7"
LONG = "synthetic:requests=60000,rate=20,prompt=600,output=100,seed=8"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray with two workers, which lets nobody in but us: its token is made here and ends with it."""
    if find_spec("ray") is None:
        missing("Ray is not installed: pip install 'plimsoll-line[dev]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        command = [sys.executable, "-m", "lab.ray_head"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as head:
            assert head.stdout is not None
            said, _, port = head.stdout.readline().strip().partition(" ")
            assert said == "ready"
            yield f"ray://127.0.0.1:{port}"
            import ray

            ray.shutdown()
            head.communicate(timeout=30)


def test_a_sweep_on_ray_says_what_the_local_one_says(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole answer is the same, letter by letter."""
    words = ["sweep", BUSY, "max_num_seqs=4..64", "block_size=8,16", "--num-blocks", "600", "--slo", "ttft=2s", "--json"]
    assert main([*words, "--on", cluster]) == 0
    on_ray = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == on_ray
    assert on_ray.count('"goodput"') == 10


def test_a_killed_worker_costs_time_and_no_result(cluster: str) -> None:
    """kill -9 to whoever is at work: the runs in hand are done again, and all results are those of the cores here."""
    traffic = Traffic(generate(parse_synthetic(LONG)), 1.0, parse_slo("ttft=1s"))
    jobs = [Job(EngineLimits(num_blocks=600 + 50 * nth), StepTime()) for nth in range(6)]
    on_ray = ray_runner(cluster)(traffic, jobs)
    results = dict([next(on_ray)])
    deadline = time.monotonic() + 20
    while not (victims := [pid for pid, _, title in children(os.getpid()) if title.startswith("ray::do")]):
        assert time.monotonic() < deadline, "no worker was at work"
        time.sleep(0.01)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    results |= dict(on_ray)
    assert results == dict(on_cores(traffic, jobs))
    assert len(set(results.values())) == len(jobs), "runs that differ in nothing would prove nothing"
