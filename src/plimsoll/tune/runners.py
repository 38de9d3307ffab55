"""Does many simulated runs on all cores of this machine, or on a Ray cluster.

Threads are enough here: compiled code releases Python's lock, and all threads read the one trace.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.tune.goodput import Job, Result, RunAll, Traffic, do

# On a Ray cluster each run is a task, and Ray repeats the tasks of a lost worker.

RETRIES = 10  # How often a run is repeated after its worker was lost
MISSING = "--on ray needs Ray: pip install 'plimsoll-line[ray]'"


def ray_runner(where: str) -> RunAll:
    """A runner on this cluster; `ray` alone means one that runs on this machine, or is started here."""
    try:
        import ray
    except ImportError:
        raise BadInput(MISSING) from None
    if not ray.is_initialized():
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the line below says the same
                ray.init(**quiet, include_dashboard=False) if where == "ray" else ray.init(address=where, **quiet)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, ImportError) as error:
            why = "no Ray cluster answers there, or it wants a token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN)"
            raise WorldFailed(f"--on {where}: {why}: {error}") from None
    task = ray.remote(max_retries=RETRIES, num_cpus=1)(do)

    def run(traffic: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        shared = ray.put(traffic)
        places = {task.remote(shared, job): place for place, job in enumerate(jobs)}
        waiting = list(places)
        while waiting:
            done, waiting = ray.wait(waiting)
            for one in done:
                try:
                    yield places[one], ray.get(one)
                except ray.exceptions.RayError as error:
                    raise WorldFailed(f"--on {where}: a run was lost: {type(error).__name__}") from None

    return run


def on_cores(traffic: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
    """Yields the results of the jobs, run on as many threads as this process may use cores."""
    if not jobs:
        return
    # The first job alone, so that code is compiled only once.
    yield 0, do(traffic, jobs[0])
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        places = {pool.submit(do, traffic, job): place for place, job in enumerate(jobs[1:], 1)}
        waiting = set(places)
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for one in done:
                    yield places[one], one.result()
        finally:
            for one in waiting:  # after Ctrl-C the rest is not needed
                one.cancel()


def runner_on(where: str | None) -> RunAll:
    """This machine's cores, or `ray` (a cluster that is found or started here), or `ray://HOST:PORT`."""
    if where is None or where == "local":
        return on_cores
    if where == "ray" or where.startswith("ray://"):
        return ray_runner(where)
    raise BadInput(f"--on {where[:60]!r}: there is local, ray, ray://...")


def with_progress(run: RunAll, on_done: Callable[[int, int], None]) -> RunAll:
    """The same runner, which tells after each run how many of them are done."""

    def run_all(traffic: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        for done, result in enumerate(run(traffic, jobs), 1):
            on_done(done, len(jobs))
            yield result

    return run_all
