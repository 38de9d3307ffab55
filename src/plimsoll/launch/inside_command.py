"""Adds plimsoll.inside to a start command, and remarks on how the command's flags affect it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from plimsoll.launch.check_flags import FlagReport, check, with_config
from plimsoll.launch.command_line import (
    DEMO_SERVER,
    Argument,
    ConfigFile,
    EntryPoint,
    Launch,
    UnresolvedWords,
    read_command_line,
)
from plimsoll.units import filled
from plimsoll.vllm import flags
from plimsoll.vllm.extension_points import FIRST_ENGINE, PLUGIN_LIST, RUST_FRONT_END, InsidePart, PartVerdict
from plimsoll.vllm.versions import Engine, table

PROBE = "plimsoll.inside.Probe"
GATE = "plimsoll.inside.Gate"
EXTENSION_FLAG = "--worker-extension-cls"
MIDDLEWARE_FLAG = "--middleware"
FLAGS = (EXTENSION_FLAG, PROBE, MIDDLEWARE_FLAG, GATE)
PLUGIN_NAME = "plimsoll"  # of the stat logger, among vLLM's entry points
PROBE_PLUGIN_NAME = "plimsoll_probe"

_TABLE = table("inside_remarks", "launch")
_WORKS = ("yes", "partly", "no")


class Remark(NamedTuple):
    name: str
    says: str
    parts: tuple[InsidePart, ...] = ()
    makes: str = "yes"  # whether those parts still work: yes, partly, no


class Plugins(NamedTuple):
    """Our entry points that vLLM will find and use."""

    has_stat_logger: bool
    has_probe: bool


class InsideLaunch(NamedTuple):
    """The command with plimsoll.inside, as far as the command allows it."""

    checked: FlagReport  # its words and variables are those of the new command
    remarks: tuple[Remark, ...]
    added: tuple[str, ...] = ()  # our words
    changed: tuple[tuple[str, str], ...] = ()  # our variables, and those that need another value


class _CommandFlags:
    def __init__(self, arguments: Iterable[Argument], variables: Mapping[str, str], engine: Engine, plugins: Plugins) -> None:
        self.by_name: dict[str, list[Argument]] = {}
        for argument in arguments:
            name = argument.row.name if argument.row is not None else argument.spelling
            self.by_name.setdefault(name, []).append(argument)
        self.variables = variables
        self.engine = engine
        self.plugins = plugins

    def has(self, *names: str) -> str:
        """Returns the first of the flags that is given and not negated; "" if none is."""
        return next((n for n in names if n in self.by_name and not self.by_name[n][-1].is_negated), "")

    def values(self, name: str) -> list[str]:
        return [value for argument in self.by_name.get(name, ()) for value in argument.values]

    def value(self, name: str) -> str:
        return (self.values(name) or [""])[-1]

    def number(self, name: str) -> int:
        """Returns the flag's number, 0 if none is given or it cannot be seen."""
        value = self.value(name)
        return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0

    def is_on(self, variable: str) -> bool:
        """True if the variable is set to yes and this release reads it."""
        is_read = flags.is_read_in(variable, self.engine.release)
        return is_read and self.variables.get(variable, "").strip().lower() in ("1", "true", "yes", "on")


def fit(launch: Launch, engine: Engine, config: ConfigFile | None, plugins: Plugins) -> InsideLaunch:
    checked = check(launch, engine, None, config)
    takes_model = launch.entry is not EntryPoint.API_SERVER
    unseen = UnresolvedWords(launch.unresolved)
    line = read_command_line(launch.arguments, engine.release, takes_model=takes_model, unseen=unseen)
    arguments = with_config(line, config, engine).arguments
    given = _CommandFlags(arguments, dict(launch.environment), engine, plugins)
    remarks = list(_remarks(given))
    if DEMO_SERVER in launch.notes:
        remarks.append(_remark("demonstration", "vllm.entrypoints.api_server"))
    opaque = [argument.typed for argument in arguments if argument.is_opaque]
    remarks += [_remark("opaque", name) for name in opaque[:1]]
    environment = dict(checked.rewritten_environment)
    words: list[str] = []  # to add to the command
    variables: dict[str, str] = {}  # to set
    names = [PLUGIN_NAME] if plugins.has_stat_logger else []
    if given.value(EXTENSION_FLAG) not in ("", PROBE):
        variables["PLIMSOLL_PROBE"] = "plugin"
        names.append(PROBE_PLUGIN_NAME)
    elif PROBE not in given.values(EXTENSION_FLAG):
        words += [EXTENSION_FLAG, PROBE]
    if GATE not in given.values(MIDDLEWARE_FLAG):
        words += [MIDDLEWARE_FLAG, GATE]
    if PLUGIN_LIST in environment and names:
        there = [name for name in environment[PLUGIN_LIST].split(",") if name.strip()]
        variables[PLUGIN_LIST] = ",".join([*there, *(name for name in names if name not in there)])
    environment |= variables
    checked = replace(checked, rewritten=(*checked.rewritten, *words), rewritten_environment=tuple(environment.items()))
    return InsideLaunch(checked, tuple(remarks), tuple(words), tuple(variables.items()))


def _remark(row: str, name: str, value: str = "") -> Remark:
    """The remark of that row of the table on a flag or variable."""
    found = _TABLE["remarks"][row]
    parts = [part for each in found.get("parts", ()) for part in (_TABLE["server"] if each == "server" else [each])]
    return Remark(name, filled(found["says"], {"value": value}), tuple(map(InsidePart, parts)), found.get("makes", "yes"))


def _remarks(given: _CommandFlags) -> Iterator[Remark]:
    """Remarks on the flags and variables that matter to plimsoll.inside."""

    def where(name: str, holds: bool) -> str:  # noqa: FBT001
        return name if holds else ""

    plugins, middleware = given.plugins, given.values(MIDDLEWARE_FLAG)
    lists_others = PLUGIN_NAME not in given.variables.get(PLUGIN_LIST, PLUGIN_NAME).split(",")
    other, reads_first = given.value(EXTENSION_FLAG), flags.is_read_in(FIRST_ENGINE, given.engine.release)
    extends = where(EXTENSION_FLAG, other not in ("", PROBE))
    local, size = given.number("--data-parallel-size-local"), given.number("--data-parallel-size")
    spread = "--nnodes" if given.number("--nnodes") > 1 else given.has("--data-parallel-address", "--data-parallel-start-rank")
    backends = ("--distributed-executor-backend", "--data-parallel-backend")
    count, is_headless = given.number("--api-server-count"), given.has("--headless")
    several = where("--api-server-count", count > 1) or where("--data-parallel-size", size > 1 and not count)
    # The flag or variable that each row is about; empty where it does not apply.
    names = {
        "other extension" if plugins.has_probe else "other extension, no plugin": extends,
        "worker class": where("--worker-cls", given.value("--worker-cls") not in ("", "auto")),
        "not the last": where(MIDDLEWARE_FLAG, GATE in middleware and middleware[-1] != GATE),
        "rust": where(RUST_FRONT_END, given.is_on(RUST_FRONT_END)),
        "first engine": where(FIRST_ENGINE, reads_first and given.variables.get(FIRST_ENGINE, "").strip() == "0"),
        "grpc": given.has("--grpc"),
        "headless": is_headless,
        "several machines": spread or where("--data-parallel-size-local", 0 < local < size),
        "ray": next((flag for flag in backends if given.value(flag) == "ray"), ""),
        "several servers": where(several, not is_headless),
        "no statistics" if plugins.has_stat_logger else "no statistics, no logger": given.has("--disable-log-stats"),
        "plugin list": where(PLUGIN_LIST, lists_others and plugins.has_stat_logger),
        "connector": given.has("--kv-transfer-config", "--kv-offloading-size"),
        "own queue limit": given.has("--max-num-queued-reqs", "--max-num-queued-tokens"),
        "elastic": given.has("--enable-elastic-ep"),
        "one process": given.has("--disable-frontend-multiprocessing"),
    }
    yield from (_remark(row, name, other) for row, name in names.items() if name)


def with_remarks(verdicts: Sequence[PartVerdict], remarks: Sequence[Remark]) -> tuple[PartVerdict, ...]:
    lowered = []
    for verdict in verdicts:
        mine = [remark for remark in remarks if verdict.part in remark.parts and remark.makes != "yes"]
        works = max((verdict.works, *(remark.makes for remark in mine)), key=_WORKS.index)
        because = (*verdict.because, *(f"{remark.name}: {remark.says}" for remark in mine))
        lowered.append(replace(verdict, works=works, because=because))
    return tuple(lowered)
