"""Does many simulated runs: on all cores of this machine, or on a Ray cluster; what was done before is not done again.

Threads are enough here: compiled code lets go of Python's lock, and all of them read the one trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from plimsoll.cli.kept_runs import KeptRuns
from plimsoll.errors import BadInput
from plimsoll.tune.work import Job, Result, RunAll, Traffic, do, job_digest, traffic_digest

OnDone = Callable[[int, int], None]
SCHEMES = ("local", "ray", "ray://...")


def on_cores(traffic: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
    """As many at once as this process may use cores."""
    if not jobs:
        return
    # The first one alone: what must be compiled is compiled once.
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
            for one in waiting:  # after Ctrl-C nobody waits for the rest
                one.cancel()


def runner_on(where: str | None) -> RunAll:
    """This machine's cores, or `ray` (a cluster that is found or started here), or `ray://HOST:PORT`."""
    if where is None or where == "local":
        return on_cores
    if where == "ray" or where.startswith("ray://"):
        from plimsoll.cli.on_ray import ray_runner

        return ray_runner(where)
    raise BadInput(f"--on {where[:60]!r}: there is {', '.join(SCHEMES)}")


def remembering(run: RunAll, kept: KeptRuns | None, version: str, on_done: OnDone | None = None) -> RunAll:
    """The same, but what the file holds is taken from it, and each new result is put into it at once."""

    def run_missing(traffic: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        whole = traffic_digest(traffic) if kept is not None else ""
        names = [job_digest(job, whole, version) if kept is not None else "" for job in jobs]
        missing = []
        count = 0
        for place, name in enumerate(names):
            known = kept.results.get(name) if kept is not None else None
            if known is None:
                missing.append(place)
                continue
            count += 1
            yield place, known
        for nth, result in run(traffic, [jobs[place] for place in missing]):
            place = missing[nth]
            if kept is not None:
                kept.add(names[place], result)
            count += 1
            if on_done is not None:
                on_done(count, len(jobs))
            yield place, result

    return run_missing
