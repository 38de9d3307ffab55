"""What a plan costs: start-up against `python -c pass`, peak memory, and plans through the Python API.

python -m benchmarks.planning
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plimsoll.launch.command_line import read_command_line
from plimsoll.models.shape import ModelShape
from plimsoll.plan.ledger import ModelFacts, plan_ledger
from plimsoll.plan.settings import Card, Flags, read_settings
from plimsoll.units import GIB

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
CARD = Card("H100 SXM 80GB", int(79.19 * GIB), int(79.15 * GIB), int(79.25 * GIB), (9, 0))
PLANS = 1000


def _median(command: list[str], rounds: int = 21) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the three figures beside what is promised."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        plimsoll = str(Path(sys.executable).with_name("plimsoll"))
        command = [plimsoll, "plan", "--gpu", "H100", "--vllm", "0.32.0", "vllm", "serve", folder]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        base, plan = _median([sys.executable, "-c", "pass"]), _median(command)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    shape = ModelFacts("llama", ModelShape.from_config(CONFIG))
    line = read_command_line(["m", "--max-model-len", "32k"], "0.32.0")
    start = time.perf_counter()
    for _ in range(PLANS):
        plan_ledger(shape, read_settings(Flags(line, "0.32.0"), {}, shape.shape, CARD), CARD)
    taken = time.perf_counter() - start
    print(f"plimsoll plan FOLDER             {plan * 1000:6.1f} ms   {plan / base:5.2f}x python -c pass   promised 12x")
    print(f"peak memory of the command       {peak:6.1f} MB              promised 60 MB")
    print(f"{PLANS} plans through the API      {taken:6.2f} s               promised 1 s")


if __name__ == "__main__":
    main()
