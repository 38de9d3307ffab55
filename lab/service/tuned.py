"""What tune says of the article's flags, from what the engine recorded under them: python -m lab.service.tuned

The burst of long prompts is recorded under the article's flags; tune reads that recording, as traffic and as measurement,
and names other flags. `service_runs.json` has them as the server `tuned`, which then got the same burst.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lab.gpu.models import config_of
from lab.gpu.provoke_failures import HERE
from lab.service.predict import GPU, RELEASE
from lab.service.runs import Load, loads_in, recorded

RESULTS = Path(__file__).parents[1] / "results" / "service-h200"
MODEL = "llama-3.1-8b"


def model_in(folder: Path) -> Path:
    """The shape that all runs have."""
    models = json.loads((HERE / "service_runs.json").read_text(encoding="utf-8"))["models"]
    (folder / "config.json").write_text(json.dumps(config_of(models, MODEL)), encoding="utf-8")
    return folder


def asked(load: Load, folder: Path, *more: str) -> str:
    """What `plimsoll tune` prints of this load, with its server's flags and its own promise."""
    trace = folder / f"{load.name}.jsonl"
    trace.write_text("".join(f"{line}\n" for line in recorded(load)), encoding="utf-8")
    first, further = load.found["promise"]
    promise = f"ttft={first:g}s,tpot={1e3 * further:g}ms"
    command = [
        sys.executable, "-m", "plimsoll", "tune", trace.name, "--fit", trace.name, "--gpu", GPU, "--vllm", RELEASE, "--slo",
        promise, *more, "--", "vllm", "serve", str(model_in(folder)), *load.flags,
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300).stdout


def answer(name: str) -> dict[str, Any]:
    """tune's whole answer to a load under the article's flags."""
    load = next(load for load in loads_in(RESULTS / "article") if load.name == name)
    with tempfile.TemporaryDirectory() as place:
        return dict(json.loads(asked(load, Path(place), "--json")))


def main() -> int:
    """Print the answer to the first burst, for people."""
    with tempfile.TemporaryDirectory() as place:
        print(asked(loads_in(RESULTS / "article")[0], Path(place)).replace(place, MODEL), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
