"""usage: plimsoll standin [options] [MODEL] [any vllm serve flag...]
       plimsoll standin [options] -- vllm serve MODEL ...

A vLLM-like server without a GPU: its scheduler is that of `plimsoll simulate`, its memory the ledger of `plimsoll plan`, and it
answers, fills, preempts and fails as vLLM would. For tests of alerts, scalers, clients and runbooks.

{options}

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

from plimsoll.cli.main import OptionsCommand
from plimsoll.errors import WorldFailed
from plimsoll.redaction import printable
from plimsoll.simulate.options import StandinCommandOptions


def run(given: StandinCommandOptions) -> int:
    """Read, plan, and serve until somebody stops it."""
    need_packages("standin")
    from plimsoll.standin.launch import ParserRefused, read_options
    from plimsoll.standin.serve.server import serve

    try:
        options = read_options(given, os.environ)
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


COMMAND = OptionsCommand("standin", StandinCommandOptions, run, __doc__, is_open=True)
