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
from plimsoll.vllm import flags
from plimsoll.vllm.extension_points import FIRST_ENGINE, PLUGIN_LIST, RUST_FRONT_END, InsidePart, PartVerdict
from plimsoll.vllm.versions import Engine

PROBE = "plimsoll.inside.Probe"
GATE = "plimsoll.inside.Gate"
EXTENSION_FLAG = "--worker-extension-cls"
MIDDLEWARE_FLAG = "--middleware"
FLAGS = (EXTENSION_FLAG, PROBE, MIDDLEWARE_FLAG, GATE)
PLUGIN_NAME = "plimsoll"  # of the stat logger, among vLLM's entry points
PROBE_PLUGIN_NAME = "plimsoll_probe"

_SERVER_PARTS = (InsidePart.GATE, InsidePart.DRAIN, InsidePart.SHED)
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
        says = "the demonstration server takes no middleware"
        remarks.append(Remark("vllm.entrypoints.api_server", says, (*_SERVER_PARTS, InsidePart.RECORDER), "no"))
    opaque = [argument.typed for argument in arguments if argument.is_opaque]
    if opaque:
        remarks.append(Remark(opaque[0], f"what it holds was not seen: look that there is no {EXTENSION_FLAG} in it"))
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


def _remarks(given: _CommandFlags) -> Iterator[Remark]:
    """Remarks on the flags and variables that matter to plimsoll.inside."""
    if (other := given.value(EXTENSION_FLAG)) not in ("", PROBE):
        says = f"{other} is the worker extension, and vLLM takes one: PLIMSOLL_PROBE=plugin adds the probe beside it"
        if given.plugins.has_probe:
            yield Remark(EXTENSION_FLAG, says)
        else:
            says += ", but only where plimsoll is installed or its wheel is mounted"
            yield Remark(EXTENSION_FLAG, says, (InsidePart.PROBE,), "no")
    if given.value("--worker-cls") not in ("", "auto"):
        says = "a worker class of its own: its names were not read, and vLLM refuses one that ours has too"
        yield Remark("--worker-cls", says)
    middleware = given.values(MIDDLEWARE_FLAG)
    if GATE in middleware and middleware[-1] != GATE:
        says = f"{GATE} should be the last: what stands behind it is outside the gate, and what that refuses is not counted"
        yield Remark(MIDDLEWARE_FLAG, says)
    if given.is_on(RUST_FRONT_END):
        says = "the Rust front-end takes neither middleware nor stat loggers; the probe's figures stay in their files"
        yield Remark(RUST_FRONT_END, says, (*_SERVER_PARTS, InsidePart.RECORDER), "no")
    if flags.is_read_in(FIRST_ENGINE, given.engine.release) and given.variables.get(FIRST_ENGINE, "").strip() == "0":
        says = "the first engine (V0) has no stat loggers and no list of its requests: only the probe was looked at for it"
        yield Remark(FIRST_ENGINE, says, (*_SERVER_PARTS, InsidePart.RECORDER), "no")
    if given.has("--grpc"):
        yield Remark("--grpc", "a gRPC server has no middleware", _SERVER_PARTS, "no")
    if given.has("--headless"):
        says = (
            "no API server runs here: the gate belongs to the command that has one, and it does not see these workers' figures"
        )
        yield Remark("--headless", says, (*_SERVER_PARTS, InsidePart.RECORDER), "no")
    # Several machines, Ray and several API servers.
    spread = "--nnodes" if given.number("--nnodes") > 1 else given.has("--data-parallel-address", "--data-parallel-start-rank")
    local, size = given.number("--data-parallel-size-local"), given.number("--data-parallel-size")
    spread = spread or ("--data-parallel-size-local" if 0 < local < size else "")
    if spread:
        yield Remark(
            spread, "several machines: figures of workers on the others are not seen here", (InsidePart.PROBE,), "partly"
        )
    backends = ("--distributed-executor-backend", "--data-parallel-backend")
    if flag := next((flag for flag in backends if given.value(flag) == "ray"), ""):
        says = "Ray starts the workers, so they are not known to be this server's: their figures are written but not shown"
        yield Remark(flag, says, (InsidePart.PROBE,), "partly")
    count = given.number("--api-server-count")
    if not given.has("--headless") and (count > 1 or (not count and size > 1)):
        says = "several API servers share their state through files of one user on one machine (in PLIMSOLL_DIR)"
        yield Remark("--api-server-count" if count else "--data-parallel-size", says)
    if given.has("--disable-log-stats"):
        if given.plugins.has_stat_logger:
            says = "a stat logger that is installed keeps vLLM's statistics on, though without vLLM's own lines and metrics"
            yield Remark("--disable-log-stats", says)
        else:
            says = "without statistics no step and no finished request is seen: nothing is recorded and no rate is known"
            yield Remark("--disable-log-stats", says, (InsidePart.SHED, InsidePart.RECORDER), "no")
    loaded = given.variables.get(PLUGIN_LIST)
    if loaded is not None and given.plugins.has_stat_logger and PLUGIN_NAME not in loaded.split(","):
        says = f"a list of what may be loaded: {PLUGIN_NAME} is added, else the gate brings the stat logger itself"
        yield Remark(PLUGIN_LIST, says)
    if flag := given.has("--kv-transfer-config", "--kv-offloading-size"):
        says = "finished requests may still hold blocks for the connector: an idle count does not mean that all is sent"
        yield Remark(flag, says)
    if flag := given.has("--max-num-queued-reqs", "--max-num-queued-tokens"):
        yield Remark(flag, "vLLM bounds its queue itself: shed adds nothing but Retry-After")
    if given.has("--enable-elastic-ep"):
        yield Remark("--enable-elastic-ep", "scaling makes vLLM's loggers anew; the gate puts the recorder back")
    if flag := given.has("--disable-frontend-multiprocessing"):
        yield Remark(flag, "changes nothing here: it concerns the first engine (V0) alone")


def with_remarks(verdicts: Sequence[PartVerdict], remarks: Sequence[Remark]) -> tuple[PartVerdict, ...]:
    lowered = []
    for verdict in verdicts:
        mine = [remark for remark in remarks if verdict.part in remark.parts and remark.makes != "yes"]
        works = max((verdict.works, *(remark.makes for remark in mine)), key=_WORKS.index)
        because = (*verdict.because, *(f"{remark.name}: {remark.says}" for remark in mine))
        lowered.append(replace(verdict, works=works, because=because))
    return tuple(lowered)
