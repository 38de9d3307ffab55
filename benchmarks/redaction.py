"""Redaction is linear: what one byte costs in 10 MB of hostile text, against what it costs in 100 kB of it.

    python -m benchmarks.redaction

The last column is what counts: 1 is linear, 100 would be quadratic. The first row is an ordinary log.
"""

from __future__ import annotations

import time

from plimsoll.redaction import redact

SMALL, LARGE = 100_000, 10_000_000

LOG = (
    "(APIServer pid=500) INFO 11-15 01:17:16 [loggers.py:248] Engine 000: Avg prompt throughput: 1024.3 tokens/s, "
    "Avg generation throughput: 312.7 tokens/s, Running: 12 reqs, Waiting: 0 reqs, GPU KV cache usage: 41.2%, "
    "Prefix cache hit rate: 63.0%\n"
    '(APIServer pid=500) INFO:     127.0.0.1:41234 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
)
HOSTILE = {
    "an ordinary log": LOG,
    "one secret a line": "HF_TOKEN=hunter2 vllm serve m --api-key a b c --port 1\n",
    "names without end": "token",
    "names, one long line": "token:",
    "headers, one long line": "Authorization: ",
    "hidden already, one line": "password: [redacted] ",
    "quotes never closed": 'api_key="a\n',
    "other quotes never closed": "api_key='a password=\"b ",
    "backslashes": 'password="\\\\\\',
    "brackets never closed": "api_key=[\n",
    "brackets closed late": "api_key=['a', " + "x" * 3000 + "]\n",
    "flags": "--api-key ",
    "YAML children": "password:\n  - a\n",
    "YAML keys without value": "password:\n",
    "slashes": "//",
    "at signs": "//a@@",
    "key blocks never closed": "-----BEGIN PRIVATE KEY-----\nAAAA",
    "token shapes": "-eyJ-sk-xoxb-hf_ghp_",
    "dashes": "-----",
    "blanks": "key" + " " * 200,
}


def seconds_per_megabyte(piece: str, size: int) -> float:
    """The time redaction takes for this much of the piece repeated; the best of three unless that takes long."""
    text = (piece * (size // len(piece) + 1))[:size]
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < 2:
        begin = time.perf_counter()
        redact(text)
        taken.append(time.perf_counter() - begin)
    return min(taken) / size * 1e6


def main() -> None:
    """Print one row for each kind of text."""
    redact(LOG)  # the patterns are compiled at first use
    print(f"{'text':<28}{'s/MB in 100 kB':>16}{'s/MB in 10 MB':>16}{'ratio':>8}")
    for name, piece in HOSTILE.items():
        small, large = seconds_per_megabyte(piece, SMALL), seconds_per_megabyte(piece, LARGE)
        print(f"{name:<28}{small:>16.3f}{large:>16.3f}{large / small:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
