"""The stage `figures`: what `/plimsoll/memory` says beside what nvidia-smi says within the same second."""

from __future__ import annotations

import statistics
import time
from typing import Any

from lab.gpu.inside_bench import GIB_MIB, Bench, Kept
from lab.gpu.inside_server import Served, ask, ask_smi, read_apps, read_gpu, workers
from lab.streams import Streams, failures

FRESH_LIMIT_S = 3.0
BALLAST_GIB = 20
NAMES = ("used", "total", "by_this_process", "by_others", "by_others_listed")


def figures(bench: Bench, kept: Kept) -> None:
    """Idle, under load, after it, and beside a neighbour; then the pages as they are."""
    server, scale = bench.shared(), bench.scale
    kept.put(flags=scale.flags, workers_at_start=workers(server.port))
    take(server, kept, "idle", scale.pairs_a_moment)
    with Streams(server.port, scale.model_name, scale.mixed, scale.load_s) as load:
        time.sleep(min(3.0, scale.load_s / 4))
        take(server, kept, "load", scale.pairs_a_moment)
        load.stop_early()
        answers = load.finish()
    kept.put(load={"requests": len(answers), "failed": failures(answers)})
    take(server, kept, "after", scale.pairs_a_moment)
    with bench.neighbour() as neighbour:
        if neighbour is not None:
            kept.put(ballast=neighbour.tell(f"hold {BALLAST_GIB * GIB_MIB}"))
            take(server, kept, "neighbour", scale.pairs_a_moment)
    take(server, kept, "neighbour gone", 2)
    pairs = kept.data["pairs"]
    kept.put(agreement=agreement(pairs), by_moment=_by_moment(pairs), cost=cost(workers(server.port)))
    kept.put(captures=captures(server))


def take(server: Served, kept: Kept, moment: str, count: int) -> None:
    """So many pairs, a second apart."""
    for _ in range(count):
        kept.add("pairs", pair(server, moment))
        time.sleep(0.5)


def pair(server: Served, moment: str) -> dict[str, Any]:
    """nvidia-smi's answer, and the first figures that the worker took after it was asked."""
    said = ask_smi()
    limit = time.monotonic() + FRESH_LIMIT_S
    found = workers(server.port)
    while (not found or found[0]["at"] < said["at"]) and time.monotonic() < limit:
        time.sleep(0.05)
        found = workers(server.port)
    ours = found[0] if found else {}
    row: dict[str, Any] = {"moment": moment, "apart_s": round(ours["at"] - said["at"], 3) if ours else None}
    return row | {"smi": said, "ours": ours, "off_percent": compare(said, ours)}


def compare(said: dict[str, Any], ours: dict[str, Any]) -> dict[str, float | None]:
    """How far each of our figures is from nvidia-smi's, in percent of what it says is used; None where one is unknown."""
    gpu, apps = read_gpu(said["gpu"]), read_apps(said["apps"])
    memory = ours.get("device_memory")
    if gpu is None or not memory:
        return dict.fromkeys(NAMES)
    own = apps.get(ours["pid"])
    # What the driver itself holds counts as used and belongs to no process: by others, as we and the first of these have it.
    theirs = {
        "used": gpu["used"],
        "total": gpu["total"],
        "by_this_process": own,
        "by_others": None if own is None else gpu["used"] - own,
        "by_others_listed": None if own is None else sum(apps.values()) - own,
    }
    mine = {**memory, "by_others_listed": memory["by_others"]}
    return {name: off_percent(mine[name], theirs[name], gpu["used"]) for name in NAMES}


def off_percent(ours: int | None, theirs: int | None, used: int) -> float | None:
    """The distance in percent of what is used."""
    if ours is None or theirs is None or used <= 0:
        return None
    return round(abs(ours - theirs) / used * 100, 4)


def agreement(pairs: list[dict[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """For each figure: how many pairs, the largest distance and the mean, in percent."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name in NAMES:
        known = [row["off_percent"][name] for row in pairs if row["off_percent"][name] is not None]
        found[name] = {
            "pairs": len(known),
            "unknown": len(pairs) - len(known),
            "max_percent": max(known, default=None),
            "mean_percent": round(statistics.fmean(known), 4) if known else None,
        }
    return found


def _by_moment(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    moments = dict.fromkeys(row["moment"] for row in pairs)
    return {moment: agreement([row for row in pairs if row["moment"] == moment]) for moment in moments}


def cost(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the figures cost each worker."""
    return [{name: worker.get(name) for name in ("rank", "samples", "sample_us", "walk_us", "faults")} for worker in found]


def captures(server: Served) -> dict[str, Any]:
    """The pages as they are: our lines of the metrics, the state, the memory."""
    _, page = ask(server.port, "GET", "/metrics")
    lines = str(page).splitlines()
    ours = [line for line in lines if line.startswith(("plimsoll_", "# HELP plimsoll_", "# TYPE plimsoll_"))]
    return {
        "metrics": ours,
        "state": ask(server.port, "GET", "/plimsoll/state"),
        "memory": ask(server.port, "GET", "/plimsoll/memory"),
        "ready": ask(server.port, "GET", "/plimsoll/ready"),
    }
