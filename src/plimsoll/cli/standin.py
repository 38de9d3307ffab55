"""usage: plimsoll standin [options] [MODEL] [any vllm serve flag...]
       plimsoll standin [options] -- vllm serve MODEL ...

A vLLM-like server without a GPU: its scheduler is that of `plimsoll simulate`, its memory the ledger of `plimsoll plan`, and it
answers, fills, preempts and fails as vLLM would. For tests of alerts, scalers, clients and runbooks.

  --gpu NAME            the card it pretends to have; default: L4
  --gpus N              how many there are; default: as many as the command needs
  --gpu-memory-gib X    a card that is not known, by its memory; with --gpu it replaces the card's total
  --used-gib X          memory that other processes hold on the card
  --vllm VERSION        whose flags, metrics and log lines; default: the newest known
  --speed X             how fast its time passes; 10 is ten times as fast as real; default: 1
  --start-seconds X     how long the start takes; default: 0
  --fault KIND[@AT][:FOR][=VALUE]
                        what goes wrong and when: wedge@60s:30s, neighbour@10s=3GiB, oom@5m, start-failure=2; may be repeated
  --fleet N             so many servers in this process, each on a port of its own
  --port-range A-B      their ports; default: from --port on
  --base-ns, --token-ns, --seq-ns, --ctx-ps N
                        how long a step takes; default: by the data sheet of the card

MODEL and flags are vLLM's own; without a model it is meta-llama/Llama-3.1-8B-Instruct with --max-model-len 8192. It listens
on 127.0.0.1 unless --host says otherwise, and elsewhere only with PLIMSOLL_TOKEN or --api-key. A flag that the version does
not know is refused as vLLM refuses it, and a server that does not fit fails to start as vLLM fails.

Exit codes: as vLLM's: 0 stopped, or the engine died, 1 it did not start, 2 a flag or value is wrong; and 3 a package that it
needs is not installed, or a model that is not bundled could not be fetched.
Read on: docs/standin.md
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from plimsoll.errors import WorldFailed, printable
from plimsoll.render.terminal import show


def run(words: list[str]) -> int:
    """Read, plan, and serve until somebody stops it."""
    before = words[: words.index("--")] if "--" in words else words
    if {"--help", "-h"} & set(before):
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    need_packages("standin")
    from plimsoll.standin.launch import ParserRefused, read_options
    from plimsoll.standin.serve.server import serve

    try:
        options = read_options(words, os.environ)
    except ParserRefused as error:
        print(printable(str(error), "?")[:2000], file=sys.stderr, flush=True)
        return error.exit_code
    for note in options.notes:
        print(f"plimsoll: {note}", file=sys.stderr, flush=True)
    return serve(options.launches, speed=options.speed, faults=options.faults)


def need_packages(extra: str, *, or_else: str = "") -> None:
    """The packages of a stand-in, which are an extra; one that is missing is named with what brings it."""
    missing = [name for name in ("numpy", "pydantic", "starlette", "uvicorn", "uvloop", "httptools") if find_spec(name) is None]
    if missing:
        install = f"pip install 'plimsoll-line[{extra}]', or in a clone pip install '.[{extra}]'{or_else}"
        raise WorldFailed(f"a stand-in needs {', '.join(missing)}: {install}")
