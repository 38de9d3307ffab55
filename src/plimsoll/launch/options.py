"""A command's options: fields of a frozen dataclass, from which click's parser, --help and the shell's completion are made.

`plimsoll flags --vllm 0.32.0 vllm serve MODEL --port 8000 --json`: `--vllm` and `--json` are ours, the rest is the user's
vLLM command and reaches us untouched. Ours win on an exact match before `--`; behind it every word is somebody else's.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import shutil
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from plimsoll.errors import BadInput
from plimsoll.render.terminal import show
from plimsoll.units import parse_vllm_integer

MOST = 2**31 - 2
WIDEST_HELP = 120
HELP_COLUMN = 24
_FILES = ("FILE", "LOG", "RUN", "PLAN.json", "TUNING.json", "PATH", "DIR")  # values that the shell completes itself


class OptionInfo(NamedTuple):
    """An option as it is typed and explained."""

    metavar: str  # empty: a switch
    help: str  # empty: not listed by --help
    name: str = ""  # as it is typed; empty: as the field is called
    read: Callable[[str, str], object] = lambda text, _: text  # a value and the option's name to what the field holds
    choices: Sequence[str] = ()  # all that it takes
    offers: Callable[[], Sequence[str]] = tuple  # what the shell completes it with
    heading: str = ""  # of the options from this one on
    may_repeat: bool = False
    bare: str | None = None  # its value where none follows
    short: str = ""  # a second name


def option(metavar: str, help: str = "", *, default: Any = None, **more: Any) -> Any:  # noqa: A002 - click's own word
    """A field for an option with a value; what `more` may hold is in `OptionInfo`."""
    return dataclasses.field(default=default, metadata={"option": OptionInfo(metavar, help, **more)})


def switch(help: str = "", **more: Any) -> Any:  # noqa: A002
    """A field for an option without a value: False unless it is given."""
    return dataclasses.field(default=False, metadata={"option": OptionInfo("", help, **more)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The words of a command line that are not our options."""

    rest: tuple[str, ...] = ()  # before `--`
    verbatim: tuple[str, ...] | None = None  # after `--`; None if there was no `--`
    typed: tuple[str, ...] = ()  # all of them, with our options


Options = TypeVar("Options", bound=Words)


def options_of(kind: type[Words] | Words) -> dict[str, OptionInfo]:
    """The options of a command by the field that holds them."""
    found = ((field.name, field.metadata["option"]) for field in dataclasses.fields(kind) if field.metadata)
    return {name: info if info.name else info._replace(name=f"--{name.replace('_', '-')}") for name, info in found}


def first_given(options: Words, *fields: str) -> str | None:
    """The option, as it is typed, of the first of these fields that the user filled."""
    known = options_of(options)
    return next((known[field].name for field in fields if getattr(options, field) not in (None, False)), None)


def meant(word: str, kind: type[Words] | Words) -> str:
    """`; did you mean --json?` for a mistyped option; empty where none is near."""
    near = difflib.get_close_matches(word.partition("=")[0], [info.name for info in options_of(kind).values()], n=1)
    return f"; did you mean {near[0]}?" if near else ""


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
        self.kind, self.run, self.offers = kind, run, offers
        self.unlisted = [info for base in unlisted for info in options_of(base).values()]
        params: list[click.Parameter] = [
            click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED, shell_complete=self._complete_word)
        ]
        for field, info in options_of(kind).items():
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
            takes_value = any(
                error.option_name in (info.name, info.short) and info.metavar for info in options_of(self.kind).values()
            )
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
        for field, info in options_of(self.kind).items():
            given = ctx.params[field]
            if not info.metavar or info.may_repeat:
                values[field] = given
            elif given:
                other = next((text for text in given if text != given[0]), None)
                if other is not None:
                    raise BadInput(f"{info.name} is given twice: {given[0]} and {other}")
                if info.choices and given[0] not in info.choices:
                    raise BadInput(f"{info.name} {given[0][:40]!r}: it is {', '.join(info.choices[:-1])} or {info.choices[-1]}")
                values[field] = info.read(given[0], info.name)
        return self.kind(**values)

    def invoke(self, ctx: click.Context) -> int:
        """Run it; the exit code."""
        return self.run(self.read(ctx))  # type: ignore[arg-type]  # an object of its own kind

    def get_help(self, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        """The text with its options, as wide as the screen; a block with indented lines stays as it is written."""
        width = min(shutil.get_terminal_size((WIDEST_HELP, 0)).columns, WIDEST_HELP)
        listed: list[str] = []
        for info in options_of(self.kind).values():
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


def pid_of(text: str, name: str) -> int:
    """A process id."""
    if not text.isascii() or not text.isdigit():
        raise BadInput(f"{name} {text!r} is not a process id")
    return int(text)


def whole(text: str, name: str, least: int = 0, most: int = MOST) -> int:
    """A count as vLLM writes them: 2048, 2k, 1.5k."""
    try:
        number = parse_vllm_integer(text)
    except BadInput:
        raise BadInput(f"{name}: {text[:40]!r} is not a whole number, such as 2048, 2k (2,000) or 2K (2,048)") from None
    if not least <= number <= most:
        raise BadInput(f"{name} must lie between {least} and {most}, not {text}")
    return number


def count(text: str, name: str, most: int = 10**9) -> int:
    """A whole number above 0, in digits."""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 0 < int(text) <= most:
        raise BadInput(f"{name} {text[:40]!r} is not a whole number {f'from 1 to {most}' if most < 10**9 else 'above 0'}")
    return int(text)


def decimal(text: str, name: str) -> float:
    """A finite number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{name} is not a number: {text[:40]!r}")
    return number
