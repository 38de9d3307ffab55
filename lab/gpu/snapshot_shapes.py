"""Records what torch's memory snapshots look like for known shapes of a process's memory: healthy, split, pinned, growing.

    python3 -m lab.gpu.snapshot_shapes OUT        # on a host with a GPU and torch; no vLLM; half a minute, under 4 GiB each

Writes SHAPE[-frames].pickle.gz and the allocator's summary beside it; `split` and `expandable` end in a failed allocation,
whose text is kept in SHAPE[-frames].error.txt.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.gpu.snapshot_extension import dump, record

MIB = 1 << 20
SHAPES = ("healthy", "split", "pinned", "expandable", "growing")
LIMIT_MIB = 2048  # what `split` may reserve: it fails there while half of it is free
ONE_RUN_S = 90


def block(torch: Any, mib: float) -> Any:
    """A live piece of GPU memory of this size."""
    return torch.empty(int(mib * MIB), dtype=torch.int8, device="cuda")


def healthy(torch: Any) -> list[Any]:
    """Weights, one KV cache, a graph with its private pool, and activations that were freed again."""
    weights = [block(torch, size) for _ in range(24) for size in (48, 16, 32, 1)]
    cache = block(torch, 1024)
    still = torch.ones(4 * MIB, device="cuda")
    (still * 2 + 1).sqrt()  # kernels are loaded before the capture, not in it
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = (still * 2 + 1).sqrt()
    graph.replay()
    activations = [block(torch, size) for size in (64, 32, 128, 12, 6)]
    del activations
    torch.cuda.synchronize()
    return [weights, cache, still, graph, out]


def split(torch: Any) -> list[Any]:
    """Every second of many equal blocks is free: a block of 64 MiB finds no place though half of everything is unused."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_MIB * MIB / total)
    blocks = [block(torch, 5) for _ in range(4 * (LIMIT_MIB // 20 - 1))]
    live = blocks[::2]
    del blocks
    return live


def pinned(torch: Any) -> list[Any]:
    """Four segments of 512 MiB, each held by one live block of 4 MiB."""
    pins, fillers = [], []
    for _ in range(4):
        whole = block(torch, 512)
        del whole
        fillers.append(block(torch, 508))
        pins.append(block(torch, 4))
    fillers.clear()
    return pins


def fail(torch: Any, target: Path) -> None:
    """Ask for more in one piece than is free in one piece, and keep what torch says."""
    try:
        block(torch, 64)
    except torch.OutOfMemoryError as error:
        target.write_text(f"torch.OutOfMemoryError: {error}\n", encoding="utf-8")
    else:
        target.write_text("nothing failed\n", encoding="utf-8")


def make(shape: str, out: Path, *, frames: bool) -> dict[str, Any]:
    """Build one shape in this process and write its snapshots."""
    torch = importlib.import_module("torch")
    name = shape + ("-frames" if frames else "")
    torch.cuda.init()
    if frames:
        record()
    if shape == "growing":
        kept = [block(torch, 8) for _ in range(20)]
        first = dump(out / f"{name}-early.pickle.gz")
        kept += [block(torch, 8) for _ in range(60)]
        return {"name": name, "early": first, "late": dump(out / f"{name}-late.pickle.gz")}
    live = {"healthy": healthy, "pinned": pinned}.get(shape, split)(torch)
    if shape in ("split", "expandable"):
        fail(torch, out / f"{name}.error.txt")
    found = dump(out / f"{name}.pickle.gz")
    return {"name": name, "live": len(live), **found}


def main(arguments: list[str]) -> int:
    """Without a shape: every shape with and without frames, each in a process of its own, all at once."""
    out = Path(arguments[0]).absolute()
    out.mkdir(parents=True, exist_ok=True)
    if len(arguments) == 3:
        print(json.dumps(make(arguments[1], out, frames=arguments[2] == "frames")), flush=True)
        return 0
    running = []
    for shape in SHAPES:
        for how in ("plain", "frames"):
            conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if shape == "expandable" else {}
            command = [sys.executable, "-m", "lab.gpu.snapshot_shapes", str(out), shape, how]
            running.append(
                subprocess.Popen(command, env=os.environ | conf, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
    failed = 0
    for process in running:
        try:
            said = process.communicate(timeout=ONE_RUN_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0] + "\ntook too long"
        failed += process.returncode != 0
        print(said.strip()[-2000:], flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
