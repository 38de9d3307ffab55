"""What a service gains or loses by a setting, on a real GPU: the same requests at the same times, setting by setting.

    PYTHONPATH=src python3 -m lab.gpu.measure_service seats blocks --work DIR [--until 560]      # a host with vLLM and a GPU
    .venv/bin/python -m lab.gpu.measure_service --all --work DIR --cpu                           # a dry run on the CPU engine

From the root of the repository. `service_runs.json` has the servers, the loads and the stages; README.md says what a stage may
hold. Each stage writes $OUT/STAGE.json after every step, and $OUT/LOAD.requests.jsonl.gz for every load; what `plimsoll.inside`
recorded is in recordings.tar.gz, what the servers printed in logs.tar.gz.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tarfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from lab.gpu.inside_bench import Kept
from lab.gpu.models import make_models
from lab.gpu.provoke_failures import HERE
from lab.gpu.service_bench import Service

STOP_S = 20.0  # kept back at the end for stopping servers and packing what they left
TOLD = (
    "load", "seconds", "requests_per_s", "good_per_s", "num_preemptions_total", "failed", "told_to_wait", "most_running",
    "ready_after_s",
)  # fmt: skip


class OutOfTime(Exception):
    """The whole has had its time."""


def servers_of(stage: dict[str, Any]) -> list[str]:
    """Those that run from the stage's beginning; others are started by its steps."""
    return list(stage.get("servers", []))


def play(service: Service, name: str, stage: dict[str, Any]) -> None:
    """One stage: its servers, then its steps, each written down when it is done."""
    kept = Kept(service.out / f"{name}.json")
    kept.put(stage=name, servers={one: service.plan["servers"][one] for one in all_servers(stage)})
    here = servers_of(stage)
    kept.add("ready", service.ready(here))
    for one in here:
        service.warm_up(one)
    for step in stage["steps"]:
        said = _step(service, kept, step)
        kept.add("steps", {"step": step, "at": round(time.time(), 3), "said": said})
        told = {key: said[key] for key in TOLD if key in said} if isinstance(said, dict) else said
        print(json.dumps({"stage": name, "step": step, "said": told}, default=str)[:600], flush=True)
    service.stop(*[one for one in all_servers(stage) if service.runs(one)])


def all_servers(stage: dict[str, Any]) -> list[str]:
    """Every server that the stage speaks of, each once."""
    return list(dict.fromkeys([*servers_of(stage), *(step[1] for step in stage["steps"])]))


def _step(service: Service, kept: Kept, step: list[Any]) -> Any:
    verb, server = step[0], step[1]
    if verb == "load":
        return service.load(kept, server, step[2], service.plan["traffic"][step[3]])
    if verb == "start":
        began = time.monotonic()
        service.ready([server])
        return {"ready_after_s": round(time.monotonic() - began, 2)}
    if verb == "stop":
        service.stop(server)
        return None
    if verb == "warm-up":
        return service.warm_up(server)
    assert verb == "say", verb
    return service.say(server, *step[2:])


def pack(work: Path, out: Path) -> None:
    """What the servers printed and recorded, beside the results."""
    with tarfile.open(out / "logs.tar.gz", "w:gz", compresslevel=6) as archive:
        for path in sorted(work.glob("*.log")):
            archive.add(path, path.name)
    with tarfile.open(out / "recordings.tar.gz", "w:gz", compresslevel=6) as archive:
        for path in sorted(work.glob("record-*/*")):
            archive.add(path, f"{path.parent.name}/{path.name}")


def _time_is_over(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise OutOfTime


def main(arguments: list[str]) -> int:
    """Read what to do and do it."""
    parser = argparse.ArgumentParser(description="Measure the stages of service_runs.json on this host's GPU.")
    parser.add_argument("stages", nargs="*")
    parser.add_argument("--all", action="store_true", help="every stage, in its order")
    parser.add_argument("--runs", type=Path, default=HERE / "service_runs.json")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--until", type=float, default=560.0, help="seconds for all of it")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(arguments)
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    out = Path(os.environ.get("OUT", str(work / "out")))
    out.mkdir(parents=True, exist_ok=True)
    plan = json.loads(options.runs.read_text(encoding="utf-8"))
    names = list(plan["stages"]) if options.all else options.stages
    unknown = set(names) - set(plan["stages"])
    assert not unknown, f"no such stage: {', '.join(sorted(unknown))}"
    if not options.cpu:  # the lab's engine has its own
        make_models(plan["models"], work / "models")
    service = Service(plan, work, out, is_cpu=options.cpu)
    signal.signal(signal.SIGALRM, _time_is_over)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, options.until - STOP_S))
    failed = 0
    with service.whatever_happens():
        try:
            if not options.cpu:
                for one in dict.fromkeys(one for name in names for one in servers_of(plan["stages"][name])):
                    service.begin(one, waits=True)
                service.until_at_the_gate()
            for name in names:
                try:
                    play(service, name, plan["stages"][name])
                except (RuntimeError, OSError, KeyError) as error:  # the next stage must get its turn
                    failed += 1
                    print(f"{name}: {error}\n{traceback.format_exc()}", flush=True)
        except OutOfTime:
            failed += 1
            print("out of time", flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
    pack(work, out)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
