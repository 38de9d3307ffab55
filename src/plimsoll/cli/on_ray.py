"""The same runs on a Ray cluster: each run is a task, and Ray does again what a lost worker had in hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from plimsoll.errors import BadInput, WorldFailed
from plimsoll.tune.work import Job, Result, RunAll, Traffic, do

RETRIES = 10
"""How often a run is begun anew after its worker was lost."""
MISSING = "--on ray needs Ray: pip install 'plimsoll-line[ray]'"


def ray_runner(where: str) -> RunAll:
    """A runner on this cluster; `ray` alone is one that runs on this machine, or is started here."""
    ray = _ray()
    if not ray.is_initialized():
        _connect(ray, where)
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


def _connect(ray: Any, where: str) -> None:
    import warnings

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say, the line below says
            ray.init(**quiet, include_dashboard=False) if where == "ray" else ray.init(address=where, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ImportError) as error:
        raise WorldFailed(
            f"--on {where}: no Ray cluster answers there, or it wants a token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN): {error}"
        ) from None


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise BadInput(MISSING) from None
    return ray
