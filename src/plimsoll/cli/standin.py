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
import time
from collections.abc import Iterable

from plimsoll.errors import WorldFailed, printable
from plimsoll.render.terminal import show

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.standin.config import Launchable
    from plimsoll.standin.launch_log import Line


def run(words: list[str]) -> int:
    """Read, plan, and serve until somebody stops it."""
    before = words[: words.index("--")] if "--" in words else words
    if {"--help", "-h"} & set(before):
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    need_parts("standin")
    from plimsoll.standin.launch import ParserRefused, read_asked

    try:
        asked = read_asked(words, os.environ)
    except ParserRefused as error:
        print(_one_line(str(error)), file=sys.stderr, flush=True)
        return error.exit_code
    for note in asked.notes:
        print(f"plimsoll: {note}", file=sys.stderr, flush=True)
    first = asked.launches[0]
    if first.failure is not None:
        return _fail(first, asked.speed)
    from plimsoll.standin.serve.server import serve

    return serve(asked.launches, speed=asked.speed, faults=asked.faults)


def need_parts(extra: str, *, or_else: str = "") -> None:
    """The packages of a stand-in, which are an extra; one that is missing is named with what brings it."""
    from importlib.util import find_spec

    missing = [name for name in ("numpy", "uvicorn", "uvloop", "httptools", "prometheus_client") if find_spec(name) is None]
    if missing:
        install = f"pip install 'plimsoll-line[{extra}]', or in a clone pip install '.[{extra}]'{or_else}"
        raise WorldFailed(f"a stand-in needs {', '.join(missing)}: {install}")


def _one_line(text: str) -> str:
    """What was typed may hold anything; a terminal gets none of it."""
    return printable(text, "?")[:2000]


def _fail(launch: Launchable, speed: float) -> int:
    """The start that the plan says will not succeed."""
    from plimsoll.standin.start_failures import failed_lines

    assert launch.failure is not None
    _print(failed_lines(launch.log, launch.failure), launch, speed)
    return 1


def _print(lines: Iterable[Line], launch: Launchable, speed: float) -> None:
    """Each line when its share of the start's time has passed."""
    from plimsoll.standin.launch_log import Pids, written

    pids = Pids(os.getpid(), os.getpid())
    passed = 0.0
    for line in lines:
        time.sleep(max(0.0, line.share - passed) * launch.log.seconds / speed)
        passed = max(passed, line.share)
        text = written(line, time.strftime("%m-%d %H:%M:%S"), pids, launch.log.release)
        print(text, file=sys.stderr if line.is_error else sys.stdout, flush=True)
