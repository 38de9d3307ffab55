"""Answers questions about the real `vllm serve` parser: JSON lines in on stdin, JSON lines out on stdout.

Run by the engine's own Python; `lab.engine.parser` is the other end. Requests and answers:

    {"dump": true}                            -> {"ok": true, "version": "...", "actions": [{...}, ...]}
    {"parse": ["serve", "m", ...]}            -> {"ok": true, "namespace": {...}, "opaque": {...}, "warnings": [...]}
      with "entry": "api_server" for the older  | {"ok": false, "error": "...", "exit_code": 2, "warnings": [...]}
      `python -m vllm.entrypoints...` parser

The parsers are not rebuilt here: vLLM's own `main` runs until it is about to read the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

MAINS = {"serve": "vllm.entrypoints.cli.main", "api_server": "vllm.entrypoints.launchers.api_server.entry"}


class Caught(BaseException):
    """Carries a parser out of vLLM's main; no `except Exception` on the way may stop it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(entry: str) -> argparse.ArgumentParser:
    """The parser that vLLM's own main builds for this entry point."""
    flexible: Any = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    original = flexible.parse_args

    def catch(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Caught(self)

    sys.argv = ["vllm", "serve"] if entry == "serve" else ["api_server"]
    flexible.parse_args = catch
    try:
        importlib.import_module(MAINS[entry]).main()
    except Caught as caught:
        return caught.parser
    finally:
        flexible.parse_args = original
    raise AssertionError(f"{MAINS[entry]}.main never read its command line")


def serve_actions(main_parser: argparse.ArgumentParser) -> tuple[argparse.ArgumentParser, list[argparse.Action]]:
    """The `serve` subparser and everything it takes."""
    for action in main_parser._actions:  # noqa: SLF001 - argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            serve = action.choices["serve"]
            return serve, serve._actions  # noqa: SLF001
    raise AssertionError("the vllm parser has no subcommands")


def fits_json(value: Any) -> bool:
    """Whether JSON can hold this value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def plain(value: Any) -> Any:
    """The value itself where JSON can hold it, else its repr in a one-key object."""
    return value if fits_json(value) else {"repr": repr(value)}


def described(action: argparse.Action, deprecated: set[argparse.Action]) -> dict[str, Any]:
    """Everything about one option that decides how a command line is read."""
    kind = action.type
    choices = action.choices
    return {
        "option_strings": list(action.option_strings),
        "dest": action.dest,
        "default": plain(action.default),
        "nargs": action.nargs,
        "const": plain(action.const),
        "choices": None if choices is None else [plain(choice) for choice in choices],
        "type": None if kind is None else getattr(kind, "__name__", None) or repr(kind),
        "required": action.required,
        "deprecated": action in deprecated or bool(getattr(action, "deprecated", False)),
        "action": type(action).__name__,
    }


class Heard(logging.Handler):
    """Keeps the warnings that vLLM logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """A list that fills with what is warned about, by logging, by `warnings` and by argparse itself."""
    # vLLM says some things once per process; each question here deserves the answer of a fresh process.
    importlib.import_module("vllm.logger")._print_warning_once.cache_clear()  # noqa: SLF001
    heard = Heard()
    logger = logging.getLogger("vllm")
    logger.addHandler(heard)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield heard.messages
        heard.messages += [str(warning.message) for warning in caught]
    finally:
        logger.removeHandler(heard)


class Answerer:
    """The parsers, each built when first asked for."""

    def __init__(self) -> None:
        self._parsers: dict[str, argparse.ArgumentParser] = {}
        self._untouched: dict[str, dict[str, Any]] = {}

    def parser(self, entry: str) -> argparse.ArgumentParser:
        """The parser of one entry point."""
        if entry not in self._parsers:
            self._parsers[entry] = parser = parser_of(entry)
            self._untouched[entry] = vars(parser.parse_args(["serve"] if entry == "serve" else []))
        return self._parsers[entry]

    def dump(self) -> dict[str, Any]:
        """Every action of `vllm serve`."""
        serve, actions = serve_actions(self.parser("serve"))
        deprecated: set[argparse.Action] = getattr(serve, "_deprecated", set())
        version = importlib.import_module("importlib.metadata").version("vllm")
        return {"ok": True, "version": version, "actions": [described(action, deprecated) for action in actions]}

    def parse(self, argv: list[str], entry: str) -> dict[str, Any]:
        """What the CLI would make of this command line before it starts an engine."""
        parser = self.parser(entry)
        said = io.StringIO()
        with listening() as warned, contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            answer = self._parse(parser, argv, entry)
        lines = said.getvalue().splitlines()
        if not answer["ok"] and answer["error"] is None:
            # `--help` and `--version` end the CLI too, with exit code 0 and no ": error: "; all they said is kept then.
            before, _, message = said.getvalue().partition(": error: ")
            answer["error"] = (message or before).strip()
        # Python 3.13 and later print this themselves.
        warned += [line.split("warning: ", 1)[1] for line in lines if "warning: " in line]
        return {**answer, "warnings": warned}

    def _parse(self, parser: argparse.ArgumentParser, argv: list[str], entry: str) -> dict[str, Any]:
        validate: Any = importlib.import_module("vllm.entrypoints.launchers.cli_args").validate_parsed_serve_args
        try:
            given = vars(parser.parse_args(argv))
            validate(argparse.Namespace(**given))  # the CLI's next step, which may still refuse
        except SystemExit as end:
            return {"ok": False, "error": None, "exit_code": end.code}
        except Exception as error:
            # The CLI would end with a traceback here, and Python with exit code 1.
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "exit_code": 1}
        untouched = self._untouched[entry]
        changed = {name: value for name, value in given.items() if name not in untouched or untouched[name] != value}
        changed.pop("dispatch_function", None)  # how the CLI goes on, not what the user asked for
        shown = {name: value for name, value in changed.items() if fits_json(value)}
        opaque = {name: repr(value) for name, value in changed.items() if name not in shown}
        return {"ok": True, "namespace": shown, "opaque": opaque}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, whatever it is."""
        if request.get("dump"):
            return self.dump()
        return self.parse([str(word) for word in request["parse"]], request.get("entry", "serve"))


def private_stdout() -> TextIO:
    """The pipe to whoever asks; from now on everything else that prints to stdout reaches stderr."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def main() -> None:
    """Answer until stdin ends."""
    out = private_stdout()
    answerer = Answerer()
    for line in sys.stdin:
        try:
            answer = answerer.answer(json.loads(line))
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}", "exit_code": None, "warnings": []}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
