"""The lines we recognise, against lines that vLLM really printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.catalogue.log_lines import LOG_LINES, log_line
from tests.each import each

TOO_LONG = (
    "To serve at least one request with the model's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than "
    "the available KV cache memory (9.50 GiB). Based on the available memory, the estimated maximum model length is 77824."
)
NOT_FREE = (
    "Free memory on device cuda:1 (60.33/79.19 GiB) on startup is less than desired GPU memory utilization (0.95, 75.23 GiB)."
)
TORCH_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.19 GiB of "
    "which 552.50 MiB is free."
)
CAPTURES = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200"


@each("name", [line.name for line in LOG_LINES])
def test_every_pattern_compiles_and_every_own_line_was_seen_in_a_wheel(name: str) -> None:
    """No pattern is a guess: vLLM's own lines stand in the source of at least one release."""
    line = log_line(name)
    re.compile(line.pattern)
    assert line.seen_in() if line.speaker == "vllm" else not line.fragment


@each(
    ("name", "text", "groups"),
    [
        ("engine-version", "Initializing a V1 LLM engine (v0.25.1) with config: model='m'", {"version": "0.25.1"}),
        ("weights-loaded", "Model loading took 14.99 GiB memory and 3.521 seconds", {"gib": "14.99"}),
        ("weights-loaded", "Model loading took 14.99 GB and 3.5 seconds", {"gib": "14.99", "seconds": "3.5"}),
        ("kv-available", "Available KV cache memory: -4.76 GiB", {"gib": "-4.76"}),
        ("kv-size", "GPU KV cache size: 919,824 tokens", {"tokens": "919,824", "concurrency": None}),
        (
            "kv-size",
            "GPU KV cache size: 327,680 tokens, Maximum concurrency for 131,072 tokens per request: 2.50x",
            {"tokens": "327,680", "context": "131,072", "concurrency": "2.50"},
        ),
        ("blocks-v0", "# GPU blocks: 1234, # CPU blocks: 512", {"gpu_blocks": "1234", "cpu_blocks": "512"}),
        ("graph-estimate", "Estimated CUDA graph memory: 0.91 GiB total", {"gib": "0.91"}),
        ("graphs-captured", "Graph capturing finished in 21 secs, took 0.55 GiB", {"gib": "0.55"}),
        ("free-memory-check", NOT_FREE, {"free_gib": "60.33", "requested_gib": "75.23"}),
        ("context-too-long", TOO_LONG, {"context": "131072", "needed_gib": "16.00", "available_gib": "9.50", "fits": "77824"}),
        ("worker-died", "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down", {"exit_code": "-9"}),
        ("worker-died", "Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", {"exit_code": None}),
        ("torch-oom", TORCH_OOM, {"tried": "786.00", "tried_unit": "MiB", "free": "552.50"}),
        ("kernel-oom-kill", "Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:1kB", {"pid": "4242"}),
        ("nvidia-xid", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", {"xid": "79"}),
    ],
)
def test_known_lines_give_their_figures(name: str, text: str, groups: dict[str, str | None]) -> None:
    """Each pattern finds its line and takes the figures out of it."""
    found = re.search(log_line(name).pattern, text)
    assert found is not None
    assert {key: found.groupdict()[key] for key in groups} == groups


@pytest.mark.parametrize(
    ("log", "names"),
    [
        ("base.log", {"engine-version", "weights-loaded", "kv-available", "kv-size", "graphs-captured", "engine-ready"}),
        ("eager90.log", {"engine-version", "weights-loaded", "kv-available", "kv-size", "engine-ready"}),
    ],
)
def test_recorded_starts_on_an_h200_are_read(log: str, names: set[str]) -> None:
    """Whole logs of real 0.25.1 starts hold the lines we say they hold."""
    text = (CAPTURES / log).read_text(encoding="utf-8", errors="replace")
    found = {line.name for line in LOG_LINES if re.search(line.pattern, text)}
    assert names <= found
