"""The same incidents and the same traffic three times: with nobody, with the article's sidecar, with `plimsoll guard --act`.

    python -m lab.article.compare --at-once 6                       the whole of it, some 25 minutes; prints the table
    python -m lab.article.compare --scale 5 --incidents full        one of them, five times as fast
    python -m lab.article.compare --into FILE                       keeps what is in FILE and adds the scenes that it lacks
    python -m lab.article.compare --from FILE                       prints the table of a run, and plays nothing

What is measured how: docs/article.md. `--json` prints the object that is kept under lab/results/article/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lab import haproxy
from lab.article.fleet import SERVE, START_S, WATCHERS
from lab.article.incidents import INCIDENTS, LEAD_S, NAMES, Incident
from lab.article.scene import Settings, play
from plimsoll.demo.fleet import GPU

SCHEMA = "plimsoll.lab.article/1"
RESULTS = Path(__file__).resolve().parents[1] / "results" / "article" / "comparison.json"
SEED = 1876
COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("restarts", lambda scene: str(sum(scene["restarts"].values()))),
    ("lost", lambda scene: f"{scene['lost']:,} of {scene['asked']:,}"),
    ("told to wait", lambda scene: f"{scene['told_to_wait']:,}"),
    ("out of service, s", lambda scene: f"{sum(scene['out_of_service_s'].values()):.0f}"),
    ("at the worst", lambda scene: f"{scene['fewest_in_service']} of {len(scene['restarts'])}"),
    ("noticed after, s", lambda scene: seconds(scene["noticed_s"], "never")),
    ("acted after, s", lambda scene: seconds(scene["acted_s"], "never")),
    ("whole again after, s", lambda scene: seconds(scene["whole_again_s"], f"not in {scene['watched_s']:.0f}")),
    ("answer p99, s", lambda scene: seconds(scene["took_s"]["p99"], "-")),
)


def seconds(value: float | None, otherwise: str) -> str:
    """Whole seconds, or what stands there in their place."""
    return otherwise if value is None else f"{value:.0f}"


def rows(result: dict[str, Any]) -> list[list[str]]:
    """One row a scene, in the order of the incidents and of the watchers."""
    by_place = {(scene["incident"], scene["watcher"]): scene for scene in result["scenes"]}
    return [
        [incident.title, watcher, *(show(by_place[incident.name, watcher]) for _, show in COLUMNS)]
        for incident in INCIDENTS
        for watcher in WATCHERS
        if (incident.name, watcher) in by_place
    ]


def text_table(result: dict[str, Any]) -> str:
    """For a terminal."""
    table = [["incident", "watcher", *(title for title, _ in COLUMNS)], *rows(result)]
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)


def head(asked: argparse.Namespace, *, use_haproxy: bool) -> dict[str, Any]:
    """What a run was made with."""
    return {
        "schema": SCHEMA,
        "scale": asked.scale,
        "seed": asked.seed,
        "balancer": "haproxy" if use_haproxy else "own",
        "engines": {"count": 3, "gpu": GPU, "serve": list(SERVE), "start_s": START_S},
        "lead_s": LEAD_S,
        "machine": {"cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()},
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "scenes": [],
    }


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Play what is asked for and not there yet."""
    use_haproxy = haproxy.find() is not None if asked.balancer is None else asked.balancer == "haproxy"
    result = head(asked, use_haproxy=use_haproxy)
    if asked.into is not None and asked.into.exists():
        result = read(asked.into)
        if (result["scale"], result["seed"]) != (asked.scale, asked.seed):
            raise SystemExit(f"{asked.into} was made with scale {result['scale']:g} and seed {result['seed']}")
    done = {(scene["incident"], scene["watcher"]) for scene in result["scenes"]}
    wanted = [
        (incident, watcher) for incident in sorted(INCIDENTS, key=lambda one: -one.lasts_s) for watcher in WATCHERS
        if incident.name in asked.incidents and watcher in asked.watchers and (incident.name, watcher) not in done
    ]  # fmt: skip
    asyncio.run(_all(wanted, Settings(asked.scale, asked.seed, use_haproxy), asked, result))
    return result


async def _all(
    wanted: Sequence[tuple[Incident, str]], settings: Settings, asked: argparse.Namespace, result: dict[str, Any]
) -> None:
    """Several at a time, the longest first; each is kept as soon as it is over."""
    places = asyncio.Semaphore(asked.at_once)

    async def one(incident: Incident, watcher: str) -> None:
        async with places:
            scene = await play(incident, watcher, settings)
        result["scenes"].append(scene | {"load": round(os.getloadavg()[0], 2), "at_once": asked.at_once})
        print(text_table({"scenes": [scene]}).splitlines()[-1], file=sys.stderr, flush=True)
        if asked.into is not None:
            asked.into.parent.mkdir(parents=True, exist_ok=True)
            asked.into.write_text(kept_text(result), encoding="utf-8")

    await asyncio.gather(*(one(incident, watcher) for incident, watcher in wanted))


def kept_text(result: dict[str, Any]) -> str:
    """As it is kept: one line a scene, in the order of the table."""
    order = {(incident, watcher): place for place, (incident, watcher) in enumerate(product(NAMES, WATCHERS))}
    scenes = sorted(result["scenes"], key=lambda scene: order[scene["incident"], scene["watcher"]])
    lines = ",\n".join(f"  {json.dumps(scene)}" for scene in scenes)
    return json.dumps({**result, "scenes": []}, indent=1).replace('"scenes": []', f'"scenes": [\n{lines}\n ]') + "\n"


def read(path: Path) -> dict[str, Any]:
    """A run that was kept."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise SystemExit(f"{path} is no run of the comparison")
    return found


def main(words: Sequence[str]) -> int:
    """Play, or show."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.article.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="how many times as fast as on a real machine; 1")
    parser.add_argument("--at-once", type=int, default=1, help="how many scenes, each with a fleet of its own; 1")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--incidents", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--watchers", nargs="+", choices=WATCHERS, default=WATCHERS)
    parser.add_argument("--balancer", choices=("own", "haproxy"), help="HAProxy where it is installed")
    parser.add_argument("--into", type=Path, help="a file that is added to after each scene")
    parser.add_argument("--from", dest="source", type=Path, help="a file to show")
    parser.add_argument("--json", action="store_true", help="the whole of it as one object")
    asked = parser.parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = run(asked) if asked.source is None else read(asked.source)
    print(json.dumps(result) if asked.json else text_table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
