"""Writes down what vLLM's own scheduler does with a few random cases, so that the fast tests can compare without vLLM.

python -m lab.engine.record_scheduler        # writes tests/captures/vllm-0.32.0-scheduler/cases.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from lab.engine.scheduler import SchedulerProcess
from lab.engine.scheduler_cases import random_case, with_more

SEED, CASES, MORE, MOST_STEPS = 2026, 40, 30, 800
WHERE = Path(__file__).resolve().parents[2] / "tests" / "captures" / "vllm-0.32.0-scheduler" / "cases.jsonl.gz"


def main() -> None:
    """Record the first cases of the seed that are short enough to keep."""
    dice = random.Random(SEED)
    kept: list[str] = []
    with SchedulerProcess() as scheduler:
        while len(kept) < CASES + MORE:
            found = random_case(dice)
            case = (found if len(kept) < CASES else with_more(found, dice)).as_json()
            answer = scheduler.run(case)
            if answer["ok"] and len(answer["steps"]) <= MOST_STEPS:
                rows = {"steps": answer["steps"], "requests": answer["requests"]}
                kept.append(json.dumps({"case": case, **rows}, separators=(",", ":")))
    WHERE.parent.mkdir(parents=True, exist_ok=True)
    WHERE.write_bytes(gzip.compress(("\n".join(kept) + "\n").encode(), 9, mtime=0))
    print(f"{len(kept)} cases, {WHERE.stat().st_size} bytes: {WHERE}")


if __name__ == "__main__":
    main()
