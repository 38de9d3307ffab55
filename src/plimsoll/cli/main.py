"""The command `plimsoll`: finds the sub-command, parses its options, turns failures into one line and an exit code.

`plimsoll flags --vllm 0.32.0 vllm serve MODEL --port 8000 --json`: `--vllm` and `--json` are ours, the rest is the user's
vLLM command and reaches us untouched. Ours win on an exact match before `--`; behind it every word is somebody else's.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

import plimsoll
from plimsoll.errors import BadInput, PlimsollError
from plimsoll.launch.options import OptionInfo, Words, meant, options_of
from plimsoll.redaction import printable, redact
from plimsoll.render.terminal import forget_stdout, show

# What each command answers; plimsoll.cli.NAME holds it as COMMAND, and is imported only when it is typed.
COMMANDS = {
    "plan": "will it fit, how many KV blocks remain, and what limits it?",
    "simulate": "what does my traffic do to the KV cache, to preemptions and to latency?",
    "tune": "which flags serve my traffic best on this card, and why?",
    "sweep": "what does each of these settings do with my traffic?",
    "whatif": "what would last day's traffic do with other flags, cards, engines, or twice as much of it?",
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
WIDEST_HELP = 120
HELP_COLUMN = 24
_FILES = ("FILE", "LOG", "RUN", "PLAN.json", "TUNING.json", "PATH", "DIR")  # values that the shell completes itself
EXIT_INTERNAL = 70  # a mistake of ours; 1, 2 and 3 have meanings of their own (see errors.py)

Options = TypeVar("Options", bound=Words)


def parse(kind: type[Options], words: Sequence[str]) -> Options:
    """The options in these words; a word that is none of them is in `rest`."""
    command = OptionsCommand("", kind, lambda _: 0, is_open=True)
    found = command.read(command.make_context("plimsoll", list(words)))
    assert isinstance(found, kind)
    return found


class OptionsCommand(click.Command):
    """A command whose `run` takes one object of `kind`; whatever is wrong with the words is one line of BadInput.

    `text` is what --help shows, with {options} where they are listed; `unlisted` are bases whose options it takes and the text
    tells of. `is_open`: options that it does not know belong to the vLLM command that follows. `offers`: its first words.
    """

    def __init__(
        self, name: str, kind: type[Options], run: Callable[[Options], int], text: str | None = "", *,
        is_open: bool = False, unlisted: Sequence[type[Words]] = (), offers: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.kind, self.run, self.offers, self.known = kind, run, offers, options_of(kind)
        self.unlisted = [info for base in unlisted for info in options_of(base).values()]
        params: list[click.Parameter] = [
            click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED, shell_complete=self._complete_word)
        ]
        for field, info in self.known.items():
            value: dict[str, Any] = {"is_flag": True}
            if info.metavar:
                value = {"multiple": True, "shell_complete": partial(_complete, info)}
            if info.bare is not None:
                value |= {"is_flag": False, "flag_value": info.bare}
            params.append(click.Option([info.name, *filter(None, [info.short]), field], help=info.help, **value))
        super().__init__(name, {"ignore_unknown_options": is_open}, params=params, help=text, add_help_option=False)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse; click's complaints in our words."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.NoSuchOption as error:
            near = meant(error.option_name, self.kind)
            raise BadInput(f"there is no option {error.option_name!r}{near} (plimsoll {self.name} --help)") from None
        except click.BadOptionUsage as error:
            takes_value = any(error.option_name in (info.name, info.short) and info.metavar for info in self.known.values())
            raise BadInput(f"{error.option_name} {'needs a' if takes_value else 'takes no'} value") from None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep what stands behind `--` from the parser; `-h` is help only as a word of its own, for vLLM has `-dph`."""
        place = args.index("--") if "--" in args else len(args)
        ctx.obj = {"verbatim": tuple(args[place + 1 :]) if place < len(args) else None, "typed": tuple(args)}
        if {"-h", "--help"} & set(args[:place]) and not ctx.resilient_parsing:
            show(self.get_help(ctx))
            ctx.exit()
        return super().parse_args(ctx, args[:place])

    def read(self, ctx: click.Context) -> Words:
        """The options that were parsed; BadInput for a value that is wrong, or two that differ."""
        values: dict[str, Any] = {"rest": ctx.params["rest"], **ctx.obj}
        for field, info in self.known.items():
            given = ctx.params[field]
            if not info.metavar or info.may_repeat:
                values[field] = given
            elif given:
                other = next((text for text in given if text != given[0]), None)
                if other is not None:
                    raise BadInput(f"{info.name} is given twice: {given[0]} and {other}")
                if info.choices and given[0] not in info.choices:
                    raise BadInput(f"{info.name} {given[0][:40]!r}: it is {', '.join(info.choices[:-1])} or {info.choices[-1]}")
                values[field] = info.read(given[0], info.name) if info.read else given[0]
        return self.kind(**values)

    def invoke(self, ctx: click.Context) -> int:
        return self.run(self.read(ctx))  # type: ignore[arg-type]  # an object of its own kind

    def get_help(self, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """The text with its options, as wide as the screen; a block with indented lines stays as it is written."""
        width = min(shutil.get_terminal_size((WIDEST_HELP, 0)).columns, WIDEST_HELP)
        listed: list[str] = []
        for info in self.known.values():
            if info.help and info not in self.unlisted:
                head = f"  {', '.join(filter(None, [info.short, info.name]))} {info.metavar}".rstrip()
                lines = textwrap.wrap(info.help, max(20, width - HELP_COLUMN), break_on_hyphens=False)
                lines = [f"{head:<{HELP_COLUMN}}{lines[0]}", *lines[1:]] if len(head) < HELP_COLUMN else [head, *lines]
                listed += [*([f"{info.heading}:"] if info.heading else []), f"\n{' ' * HELP_COLUMN}".join(lines)]
        blocks = inspect.cleandoc(self.help or "").split("\n\n")
        for place, block in enumerate(blocks):
            if "\n " not in f"\n{block}" and not block.startswith("usage:"):
                blocks[place] = textwrap.fill(block, width, break_on_hyphens=False)
        return "\n\n".join(blocks).replace("{options}", "\n".join(listed))

    def _complete_word(self, ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self.offers and not ctx.params.get("rest"):
            return [CompletionItem(word) for word in self.offers if word.startswith(incomplete)]
        return [CompletionItem(incomplete, type="file")]


def _complete(info: OptionInfo, _: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    if info.metavar in _FILES:
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(word) for word in info.choices or info.offers() if word.lower().startswith(incomplete.lower())]


class Plimsoll(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return [*COMMANDS, "completion", "help"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
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
        forget_stdout()
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        forget_stdout()
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
        hint = f"did you mean plimsoll {near[0]}?" if near else f"there is: {', '.join(COMMANDS)}"
        raise BadInput(f"there is no command {name!r}; {hint}")
    try:
        with command.make_context(name, rest, context) as inner:
            code: int = command.invoke(inner)
            return code
    except click.exceptions.Exit as ended:
        return ended.exit_code


def _say(message: str) -> None:
    one_line = printable(" ".join(redact(message).split()), "?")
    print(f"plimsoll: {one_line[:2000]}", file=sys.stderr)


def run_and_exit() -> None:
    sys.exit(main(sys.argv[1:]))
