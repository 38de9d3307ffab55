"""The command `plimsoll`: finds the sub-command, turns failures into one line and an exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

import plimsoll
from plimsoll.errors import BadInput, PlimsollError, printable
from plimsoll.redaction import redact
from plimsoll.render.terminal import show

# What each command answers; plimsoll.cli.NAME holds it as COMMAND, and is imported only when it is typed.
COMMANDS = {
    "plan": "will it fit, how many KV blocks remain, and what limits it?",
    "simulate": "what does my traffic do to the KV cache, to preemptions and to latency?",
    "tune": "which flags serve my traffic best on this card, and why?",
    "sweep": "what does each of these settings do with my traffic?",
    "doctor": "what went wrong, what shows it, and what fixes it?",
    "guard": "is each of my servers healthy, and for how long? Watches; acts only with --act",
    "guardctl": "what does a running guard say? And what to tell it: pause, drain, restart, ...",
    "assets": "what do I need to launch it and to watch it? Units, manifests, alerts, dashboards",
    "flags": "which flags of this command does that vLLM version take?",
    "lint": "what will go wrong with this compose file, manifest or unit, and on which line?",
    "inside": "will my vLLM take plimsoll.inside, and how does it get there?",
    "demo": "what does all of this do? The whole loop in about a minute, without a GPU",
    "standin": "how do my alerts, scalers and clients behave? A vLLM-like server without a GPU",
}
USAGE = "\n".join([
    "usage: plimsoll COMMAND [options]", "", "Keeps a vLLM server inside its GPU memory.", "",
    *(f"  {name:10} {answers}" for name, answers in COMMANDS.items()), "",
    "plimsoll help COMMAND says more. Completion: plimsoll completion bash|zsh|fish prints what to put into your shell's",
    "configuration. Exit codes: 0 fine, 1 a problem was found, 2 your input is wrong, 3 something outside failed.",
])  # fmt: skip
SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_PLIMSOLL_COMPLETE"
EXIT_INTERNAL = 70  # a mistake of ours; 1, 2 and 3 have meanings of their own (see errors.py)


class Plimsoll(click.Group):
    """All commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Their names, and the two words that are about them."""
        return [*COMMANDS, "completion", "help"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the one that was typed."""
        if cmd_name in COMMANDS:
            command: click.Command = importlib.import_module(f"plimsoll.cli.{cmd_name}").COMMAND
            return command
        return super().get_command(ctx, cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Their names with what they answer, none of them imported."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS.get(name)) for name in names]


ROOT = Plimsoll("plimsoll", add_help_option=False, help=USAGE)


@ROOT.command("help", add_help_option=False)
@click.argument("words", nargs=-1, shell_complete=lambda *given: ROOT.shell_complete(given[0], given[2]))
def _help(words: tuple[str, ...]) -> int:
    if not words or words[0] == "help":
        show(USAGE)
        return 0
    return _run([words[0], "--help"])


@ROOT.command("completion", add_help_option=False)
@click.argument("words", nargs=-1, shell_complete=lambda *_: [CompletionItem(name) for name in SHELLS])
def _completion(words: tuple[str, ...]) -> int:
    kind = get_completion_class(words[0]) if len(words) == 1 and words[0] in SHELLS else None
    if kind is None:
        raise BadInput(f"which shell? plimsoll completion {'|'.join(SHELLS)}; docs/terminal.md says where to put it")
    show(kind(ROOT, {}, "plimsoll", COMPLETE_VARIABLE).source().strip())
    return 0


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code; never raises for what a user can cause."""
    try:
        if COMPLETE_VARIABLE in os.environ:
            return shell_complete(ROOT, {}, "plimsoll", COMPLETE_VARIABLE, os.environ[COMPLETE_VARIABLE])
        if not arguments or arguments[0] in ("-h", "--help"):
            arguments = ["help"]
        if arguments[0] in ("-V", "--version", "version"):
            show(f"plimsoll {plimsoll.__version__}")
            return 0
        return _run(arguments)
    except PlimsollError as error:
        _forget_stdout()
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except Exception as error:
        if os.environ.get("PLIMSOLL_DEBUG") == "1":
            raise
        _say(f"a mistake of ours: {type(error).__name__}: {error}; PLIMSOLL_DEBUG=1 shows where. Please report it")
        return EXIT_INTERNAL


def _run(arguments: list[str]) -> int:
    name, *rest = arguments
    context = click.Context(ROOT, info_name="plimsoll")
    command = ROOT.get_command(context, name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean plimsoll {near[0]}?" if near else f"there is: {', '.join(COMMANDS)}"
        raise BadInput(f"there is no command {name!r}; {meant}")
    try:
        with command.make_context(name, rest, context) as inner:
            code: int = command.invoke(inner)
            return code
    except click.exceptions.Exit as ended:
        return ended.exit_code


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
