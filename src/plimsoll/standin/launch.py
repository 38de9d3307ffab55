"""Finds the server that `plimsoll standin` is to imitate: reads the typed words, and plans the command in them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from plimsoll.errors import BadInput, PlimsollError
from plimsoll.inside.settings import InsideSettings
from plimsoll.launch.check_flags import row_problem, with_config
from plimsoll.launch.command_line import (
    Argument,
    CommandLine,
    EntryPoint,
    Launch,
    UnresolvedWords,
    config_of,
    find_launch,
    launches_named,
    read_command_line,
)
from plimsoll.plan.read import plan_launch
from plimsoll.plan.settings import Flags
from plimsoll.simulate.inputs import NOT_REPLAYED, REPLICA_OF
from plimsoll.simulate.options import StandinCommandOptions
from plimsoll.standin.config import Launchable, launch_of
from plimsoll.standin.faults import Fault, parse_fault
from plimsoll.vllm.versions import engine_named

# The errors of vLLM's own parser, which then ends with exit code 2.

_KINDS = {"int": "int", "float": "float", "human-int": "human_readable_int", "human-int-or-auto": "human_readable_int_or_auto"}


def complaint_of(line: CommandLine, unseen: UnresolvedWords, *, knows_all: bool = True) -> str | None:
    """Returns the last line that vLLM's parser prints for a bad command; None if it takes the command.

    `knows_all`: flags that our table of the release does not have are refused, too.
    """
    for argument in line.arguments:
        if argument.candidates:
            return f"vllm serve: error: ambiguous option: {argument.typed} could match {', '.join(argument.candidates)}"
    if problem := next(filter(None, (_problem(argument, unseen) for argument in line.arguments)), None):
        return f"vllm serve: error: {problem}"
    strange: list[str] = []
    for argument in line.arguments:
        if argument.row is None and not argument.is_opaque:
            strange += [f"{argument.typed}={argument.values[0]}"] if argument.has_equals else [argument.typed, *argument.values]
    strange += [word for argument in line.arguments if _is_loose(argument) for word in argument.values]
    strange += line.leftovers
    return f"vllm: error: unrecognized arguments: {' '.join(strange)}" if strange and knows_all else None


def _is_loose(argument: Argument) -> bool:
    """True if the parser takes the word after a switch for a separate one: `--enforce-eager true`."""
    return argument.row is not None and not argument.row.takes_value and not argument.has_equals


def _problem(argument: Argument, unseen: UnresolvedWords) -> str | None:
    row = argument.row
    if row is None or argument.path:
        return None
    name = "/".join(row.spellings)
    if argument.lacks_value:
        return f"argument {name}: expected {'at least one argument' if row.nargs == '+' else 'one argument'}"
    if not row.takes_value:
        word = argument.values[0] if argument.values and not _is_loose(argument) else None
        return f"argument {name}: ignored explicit argument {word!r}" if word is not None else None
    for value in argument.values:
        if value not in unseen and row_problem(row, value) is not None:
            if row.choices is not None and value not in row.choices:
                return f"argument {name}: invalid choice: {value!r} (choose from {', '.join(map(repr, row.choices))})"
            return f"argument {name}: invalid {_KINDS.get(row.kind, row.kind)} value: {value!r}"
    return None


MODEL = "meta-llama/Llama-3.1-8B-Instruct"
CARD = "L4"
CONTEXT = "8192"  # the server for an empty command: all three are known without a network

# Flags that change the scheduler and work here, though a replay does not know them.
_QUEUE_LIMITS = frozenset(("--max-num-queued-reqs", "--max-num-queued-tokens"))


NOT_IMITATED = frozenset(NOT_REPLAYED.keys() - _QUEUE_LIMITS) | frozenset(
    "--speculative-config --kv-transfer-config --kv-events-config --reasoning-parser --enable-auto-tool-choice --lora-modules "
    "--chat-template --logits-processors --enable-mfu-metrics --kv-cache-metrics --otlp-traces-endpoint".split()
)
"""What a stand-in takes and does nothing about, though a client or a page would show it."""


class ParserRefused(PlimsollError):
    """vLLM's own parser would refuse the command; the sentence is the parser's own."""

    exit_code = 2


class ConfigRefused(ParserRefused):
    """vLLM's parser takes the command, but its configuration refuses the values."""

    exit_code = 1


class StandinOptions(NamedTuple):
    """The servers to start, and how: one command line, read and checked."""

    launches: tuple[Launchable, ...]
    speed: float
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


def read_options(given: StandinCommandOptions, environ: Mapping[str, str]) -> StandinOptions:
    """Reads the command line. Raises BadInput, or the refusal of vLLM's own parser, in one line."""
    faults = tuple(map(parse_fault, given.fault))
    if any(word.partition("=")[0] == "--fault" for word in given.verbatim or ()):
        raise BadInput("--fault is the stand-in's own: it goes in front of --")
    options = replace(given, gpu=CARD) if given.gpu is None and given.gpu_memory_gib is None else given
    launch, folder = _launch(options)
    environment = {name: value for name, value in environ.items() if name.startswith("VLLM_")} | dict(launch.environment)
    launch = replace(launch, environment=tuple(environment.items()))
    engine = engine_named(options.vllm)
    options = replace(options, vllm=engine.asked, rest=(), verbatim=None)
    places = [word for name, value in (("--host", given.host), ("--port", given.port)) if value for word in (name, value)]
    launch = replace(launch, arguments=(*launch.arguments, *places))
    config = config_of(launch, folder)
    if config is not None and config.entries is None:
        raise BadInput(f"{config.name}: no such file (--config)")
    line = with_config(_line(launch, engine.release), config, engine)
    if line.model is None:
        has_length = any(argument.row is not None and argument.row.name == "--max-model-len" for argument in line.arguments)
        added = () if has_length else ("--max-model-len", CONTEXT)
        launch = replace(launch, arguments=(MODEL, *launch.arguments, *added))
        line = with_config(_line(launch, engine.release), config, engine)
    refused = complaint_of(line, UnresolvedWords(launch.unresolved), knows_all=engine.is_exact)
    if refused is not None:
        raise ParserRefused(refused)
    flags = Flags(line, engine.release)
    tokens, sequences = flags.integer("--max-num-batched-tokens"), flags.integer("--max-num-seqs")
    if tokens is not None and sequences is not None and tokens < sequences:
        raise ConfigRefused(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig: Value error, "
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({sequences})."
        )
    planned = plan_launch(options, launch, folder, learned=False)  # learned corrections differ from machine to machine
    token = InsideSettings(environ).token
    server = launch_of(planned, line, {**environment, "PLIMSOLL_TOKEN": token}, options.said or {}, options.start_seconds)
    launches = _fleet(server, options)
    listening = server.options
    if not (_is_loopback(listening.host) or any(listening.api_keys) or listening.token):  # open to others only with a secret
        raise BadInput(
            f"--host {listening.host} can be reached from elsewhere: set PLIMSOLL_TOKEN or --api-key, or stay on 127.0.0.1 "
            "(the token guards /standin and /plimsoll, the key /v1 as in vLLM)"
        )
    notes = [engine.note] if engine.note is not None else []
    if engine.release != REPLICA_OF:
        notes.append(f"flags, pages and log are those of vLLM {engine.release}, the scheduler is that of {REPLICA_OF}")
    if left_out := [a.row.name for a in line.arguments if a.row is not None and a.row.name in NOT_IMITATED]:
        notes.append(f"read and not acted on: {', '.join(dict.fromkeys(left_out))}")
    return StandinOptions(launches, options.speed, faults, tuple(notes))


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # longer than any name, or not one at all
        return False


def _launch(options: StandinCommandOptions) -> tuple[Launch, str]:
    """Returns the vLLM start and its folder, from a whole command, a file with one, or only vLLM's flags."""
    if options.verbatim is not None or (len(options.rest) == 1 and (" " in options.rest[0] or _is_file(options.rest[0]))):
        launches = launches_named(options, "standin")
        if len(launches) > 1:
            raise BadInput(f"{len(launches)} vLLM starts found; give the one you mean as a command")
        return launches[0]
    launch = find_launch(options.rest, (), "command line")
    return launch or Launch("command line", EntryPoint.SERVE, options.rest), ""


def _line(launch: Launch, release: str) -> CommandLine:
    takes_model = launch.entry is not EntryPoint.API_SERVER
    return read_command_line(launch.arguments, release, takes_model=takes_model, unseen=UnresolvedWords(launch.unresolved))


def _fleet(server: Launchable, options: StandinCommandOptions) -> tuple[Launchable, ...]:
    count, first = options.fleet or 1, server.options.port
    if count > 1 and not 0 < first <= 65536 - count:
        raise BadInput(f"{count} servers need {count} ports, and from --port {first} on there are not so many")
    fleet = []
    for place in range(count):  # each with its own seed, so its own answers
        places = replace(server.options, port=first + place)
        config = replace(server.config, seed=server.config.seed + place)
        fleet.append(replace(server, config=config, options=places, log=replace(server.log, address=places.address)))
    return tuple(fleet)


def _is_loopback(host: str) -> bool:
    """True for a loopback address or `localhost`; any other name may lead anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
