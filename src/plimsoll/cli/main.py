"""The command `plimsoll`: finds the sub-command, turns failures into one line and an exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

import plimsoll
from plimsoll.errors import BadInput, PlimsollError, printable
from plimsoll.redaction import redact

# Name, what it answers, the module that holds it. A module is imported only when its command is typed.
COMMANDS = (
    ("plan", "will it fit, how many KV blocks remain, and what limits it?", "plimsoll.cli.plan"),
    ("simulate", "what does my traffic do to the KV cache, to preemptions and to latency?", "plimsoll.cli.simulate"),
    ("tune", "which flags serve my traffic best on this card, and why?", "plimsoll.cli.tune"),
    ("sweep", "what does each of these settings do with my traffic?", "plimsoll.cli.sweep"),
    ("doctor", "what went wrong, what shows it, and what fixes it?", "plimsoll.cli.doctor"),
    (
        "guard",
        "is each of my servers healthy, and for how long? Watches; acts only with --act",
        "plimsoll.cli.guard",
    ),
    ("guardctl", "what does a running guard say? And what to tell it: pause, drain, restart, ...", "plimsoll.cli.guardctl"),
    ("assets", "what do I need to launch it and to watch it? Units, manifests, alerts, dashboards", "plimsoll.cli.assets"),
    ("flags", "which flags of this command does that vLLM version take?", "plimsoll.cli.flags"),
    ("inside", "will my vLLM take plimsoll.inside, and how does it get there?", "plimsoll.cli.inside"),
    ("demo", "what does all of this do? The whole loop in about a minute, without a GPU", "plimsoll.cli.demo"),
    ("standin", "how do my alerts, scalers and clients behave? A vLLM-like server without a GPU", "plimsoll.cli.standin"),
)

EXIT_INTERNAL = 70  # a mistake of ours; 1, 2 and 3 have meanings of their own (see errors.py)


def usage() -> str:
    """The first screen."""
    lines = [
        "usage: plimsoll COMMAND [options]",
        "",
        "Keeps a vLLM server inside its GPU memory.",
        "",
        *(f"  {name:10} {answers}" for name, answers, _ in COMMANDS),
        "",
        "plimsoll COMMAND --help says more. Exit codes: 0 fine, 1 a problem was found, 2 your input is wrong,",
        "3 something outside failed.",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code; never raises for what a user can cause."""
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(usage(), flush=True)
            return 0
        if arguments[0] in ("-V", "--version", "version"):
            print(f"plimsoll {plimsoll.__version__}", flush=True)
            return 0
        return _run(arguments)
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except OSError as error:  # from the two prints above: commands turn theirs into a PlimsollError
        _forget_stdout()
        _say(f"cannot write the answer: {error.strerror or error}")
        return 3


def _run(arguments: list[str]) -> int:
    try:
        module_name = next((module for name, _, module in COMMANDS if name == arguments[0]), None)
        if module_name is None:
            raise BadInput(f"there is no command {arguments[0]!r}; {_meant(arguments[0])}")
        code = importlib.import_module(module_name).run(arguments[1:])
        assert isinstance(code, int)
        return code
    except PlimsollError as error:
        _forget_stdout()
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("PLIMSOLL_DEBUG") == "1":
            raise
        _say(f"a mistake of ours: {type(error).__name__}: {error}; PLIMSOLL_DEBUG=1 shows where. Please report it")
        return EXIT_INTERNAL


def _meant(typed: str) -> str:
    """Suggests the nearest command, else lists them all."""
    known = [name for name, _, _ in COMMANDS]
    near = difflib.get_close_matches(typed, known, n=1)
    return f"did you mean plimsoll {near[0]}?" if near else f"there is: {', '.join(known)}"


def _forget_stdout() -> None:
    """Keep Python from trying once more, at its end, to write what could not be written."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    one_line = printable(" ".join(redact(message).split()), "?")
    print(f"plimsoll: {one_line[:2000]}", file=sys.stderr)


def run_and_exit() -> None:
    """The entry point of the installed command."""
    sys.exit(main(sys.argv[1:]))
