"""Does many simulated runs on all cores of this machine, or on a Ray cluster; runs whose results are kept are not repeated.

Threads are enough here: compiled code releases Python's lock, and all threads read the one trace.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO, Self

from plimsoll.errors import BadInput, TooLarge, WorldFailed
from plimsoll.tune.goodput import Failed, Job, Result, RunAll, Score, Traffic, do, job_digest, traffic_digest

# Results of runs in a file that only grows: one JSON line each, so that a process that was killed can resume.

SCHEMA = "plimsoll.run/1"
BYTES_MAX = 1 << 30


class KeptRuns:
    """The results in a file, which can be added to; a context."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.results: dict[str, Result] = {}
        self.begun_with = 0
        """Results that were there before."""
        self._file: BinaryIO

    def __enter__(self) -> Self:
        try:
            self._file = Path(self.path).open("a+b")
            if not Path(self.path).is_file():
                raise BadInput(f"{self.path}: not a file")
            self._read()
        except OSError as error:
            raise WorldFailed(f"{self.path}: cannot be written: {error.strerror or error}") from None
        self.begun_with = len(self.results)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self) -> None:
        """Reads the whole lines; a last line that a kill left unfinished is removed."""
        self._file.seek(0)
        text = self._file.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:  # the part that was not read must not be removed
            raise TooLarge(f"{self.path}: more than {BYTES_MAX >> 20} MiB of results; begin another file")
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                said = json.loads(line)
                if said["schema"] != SCHEMA:
                    raise KeyError("schema")
                self.results[said["run"]] = Failed(str(said["failed"])) if "failed" in said else Score(**said["score"])
            except (ValueError, KeyError, TypeError):
                raise BadInput(f"{self.path}, line {number}: not a result that sweep or tune kept") from None
        if len(whole) < len(text):
            self._file.truncate(len(whole))
        self._file.seek(0, os.SEEK_END)

    def add(self, name: str, result: Result) -> None:
        """Keeps a result; returns once it is on the disk."""
        said = {"failed": result.why} if isinstance(result, Failed) else {"score": result._asdict()}
        try:
            self._file.write(json.dumps({"schema": SCHEMA, "run": name, **said}).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise WorldFailed(f"{self.path}: cannot be written: {error.strerror or error}") from None
        self.results[name] = result


# The same runs on a Ray cluster: each run is a task, and Ray repeats the tasks of a lost worker.

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


OnDone = Callable[[int, int], None]
SCHEMES = ("local", "ray", "ray://...")


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
    raise BadInput(f"--on {where[:60]!r}: there is {', '.join(SCHEMES)}")


def remembering(run: RunAll, kept: KeptRuns | None, version: str, on_done: OnDone | None = None) -> RunAll:
    """A runner that takes kept results from the file, and puts each new result into it at once."""

    def run_missing(traffic: Traffic, jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
        whole = traffic_digest(traffic) if kept is not None else ""
        names = [job_digest(job, whole, version) if kept is not None else "" for job in jobs]
        before = {} if kept is None else kept.results
        known = {place: before[name] for place, name in enumerate(names) if name in before}
        yield from known.items()
        missing = [place for place in range(len(jobs)) if place not in known]
        for done, (nth, result) in enumerate(run(traffic, [jobs[place] for place in missing]), len(known) + 1):
            if kept is not None:
                kept.add(names[missing[nth]], result)
            if on_done is not None:
                on_done(done, len(jobs))
            yield missing[nth], result

    return run_missing
