"""What a start command makes of plimsoll.inside, and the same command with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from plimsoll.launch.check_flags import ConfigFile, FlagReport, check, with_config
from plimsoll.launch.command_line import Argument, UnresolvedWords, read_command_line
from plimsoll.launch.recognise import EntryPoint, Launch
from plimsoll.vllm import flags
from plimsoll.vllm.extension_points import FIRST_ENGINE, PLUGIN_LIST, RUST_FRONT_END, Part, Verdict
from plimsoll.vllm.versions import Engine

PROBE = "plimsoll.inside.Probe"
GATE = "plimsoll.inside.Gate"
EXTENSION_FLAG = "--worker-extension-cls"
MIDDLEWARE_FLAG = "--middleware"
FLAGS = (EXTENSION_FLAG, PROBE, MIDDLEWARE_FLAG, GATE)
PLUGIN_NAME = "plimsoll"  # of the stat logger, among vLLM's entry points
PROBE_PLUGIN_NAME = "plimsoll_probe"

_SERVER_PARTS = (Part.GATE, Part.DRAIN, Part.SHED)
_WORKS = ("yes", "partly", "no")


class Remark(NamedTuple):
    """What one flag or variable of the command means for plimsoll.inside."""

    name: str
    says: str
    parts: tuple[Part, ...] = ()
    makes: str = "yes"  # what it leaves of those parts: yes, partly, no


class Plugins(NamedTuple):
    """Which of our entry points vLLM will find and use."""

    has_stat_logger: bool
    has_probe: bool


class InsideLaunch(NamedTuple):
    """The command with plimsoll.inside, as far as the command allows it."""

    checked: FlagReport  # its words and variables are those of the new command
    remarks: tuple[Remark, ...]


class _CommandFlags:
    """The flags and variables of a command, by name."""

    def __init__(self, arguments: Iterable[Argument], variables: Mapping[str, str], engine: Engine, plugins: Plugins) -> None:
        self.by_name: dict[str, list[Argument]] = {}
        for argument in arguments:
            name = argument.row.name if argument.row is not None else argument.spelling
            self.by_name.setdefault(name, []).append(argument)
        self.variables = variables
        self.engine = engine
        self.plugins = plugins

    def has(self, *names: str) -> str:
        """The first of the flags that is given and not negated."""
        return next((n for n in names if n in self.by_name and not self.by_name[n][-1].is_negated), "")

    def values(self, name: str) -> list[str]:
        return [value for argument in self.by_name.get(name, ()) for value in argument.values]

    def value(self, name: str) -> str:
        return (self.values(name) or [""])[-1]

    def number(self, name: str) -> int:
        """The number, 0 where none is given or it cannot be seen."""
        value = self.value(name)
        return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0

    def is_on(self, variable: str) -> bool:
        """Whether the variable is set to yes and this release reads it."""
        is_read = flags.is_read_in(variable, self.engine.release)
        return is_read and self.variables.get(variable, "").strip().lower() in ("1", "true", "yes", "on")


def fit(launch: Launch, engine: Engine, config: ConfigFile | None, plugins: Plugins) -> InsideLaunch:
    """Judge a command and put the flags into it."""
    checked = check(launch, engine, None, config)
    takes_model = launch.entry is not EntryPoint.API_SERVER
    unseen = UnresolvedWords(launch.unresolved)
    line = read_command_line(launch.arguments, engine.release, takes_model=takes_model, unseen=unseen)
    arguments = with_config(line, config, engine).arguments
    given = _CommandFlags(arguments, dict(launch.environment), engine, plugins)
    remarks = [remark for rule in _RULES if (remark := rule(given)) is not None]
    opaque = [argument.typed for argument in arguments if argument.is_opaque]
    if opaque:
        remarks.append(Remark(opaque[0], f"what it holds was not seen: look that there is no {EXTENSION_FLAG} in it"))
    return InsideLaunch(_with_ours(checked, given), tuple(remarks))


def _with_ours(checked: FlagReport, given: _CommandFlags) -> FlagReport:
    words = list(checked.rewritten)
    variables = dict(checked.rewritten_environment)
    plugins = [PLUGIN_NAME] if given.plugins.has_stat_logger else []
    if _other_extension(given):
        variables["PLIMSOLL_PROBE"] = "plugin"
        plugins.append(PROBE_PLUGIN_NAME)
    elif PROBE not in given.values(EXTENSION_FLAG):
        words += [EXTENSION_FLAG, PROBE]
    if GATE not in given.values(MIDDLEWARE_FLAG):
        words += [MIDDLEWARE_FLAG, GATE]
    if PLUGIN_LIST in variables and plugins:
        there = [name for name in variables[PLUGIN_LIST].split(",") if name.strip()]
        variables[PLUGIN_LIST] = ",".join([*there, *(name for name in plugins if name not in there)])
    return checked._replace(rewritten=tuple(words), rewritten_environment=tuple(variables.items()))


def _other_extension(given: _CommandFlags) -> str:
    """Another worker extension: vLLM takes one alone."""
    value = given.value(EXTENSION_FLAG)
    return "" if value == PROBE else value


def _extension(given: _CommandFlags) -> Remark | None:
    other = _other_extension(given)
    if not other:
        return None
    says = f"{other} is the worker extension, and vLLM takes one: PLIMSOLL_PROBE=plugin adds the probe beside it"
    if given.plugins.has_probe:
        return Remark(EXTENSION_FLAG, says)
    return Remark(EXTENSION_FLAG, f"{says}, but only where plimsoll is installed or its wheel is mounted", (Part.PROBE,), "no")


def _worker_class(given: _CommandFlags) -> Remark | None:
    if given.value("--worker-cls") in ("", "auto"):
        return None
    return Remark("--worker-cls", "a worker class of its own: its names were not read, and vLLM refuses one that ours has too")


def _middleware_order(given: _CommandFlags) -> Remark | None:
    values = given.values(MIDDLEWARE_FLAG)
    if GATE not in values or values[-1] == GATE:
        return None
    return Remark(
        MIDDLEWARE_FLAG,
        f"{GATE} should be the last: what stands behind it is outside the gate, and what that refuses is not counted",
    )


def _rust(given: _CommandFlags) -> Remark | None:
    if not given.is_on(RUST_FRONT_END):
        return None
    says = "the Rust front-end takes neither middleware nor stat loggers; the probe's figures stay in their files"
    return Remark(RUST_FRONT_END, says, (*_SERVER_PARTS, Part.RECORDER), "no")


def _first_engine(given: _CommandFlags) -> Remark | None:
    is_read = flags.is_read_in(FIRST_ENGINE, given.engine.release)
    if not is_read or given.variables.get(FIRST_ENGINE, "").strip() != "0":
        return None
    says = "the first engine (V0) has no stat loggers and no list of its requests: only the probe was looked at for it"
    return Remark(FIRST_ENGINE, says, (*_SERVER_PARTS, Part.RECORDER), "no")


def _grpc(given: _CommandFlags) -> Remark | None:
    return Remark("--grpc", "a gRPC server has no middleware", _SERVER_PARTS, "no") if given.has("--grpc") else None


def _headless(given: _CommandFlags) -> Remark | None:
    if not given.has("--headless"):
        return None
    says = "no API server runs here: the gate belongs to the command that has one, and it does not see these workers' figures"
    return Remark("--headless", says, (*_SERVER_PARTS, Part.RECORDER), "no")


def _nodes(given: _CommandFlags) -> Remark | None:
    spread = "--nnodes" if given.number("--nnodes") > 1 else given.has("--data-parallel-address", "--data-parallel-start-rank")
    local, size = given.number("--data-parallel-size-local"), given.number("--data-parallel-size")
    spread = spread or ("--data-parallel-size-local" if 0 < local < size else "")
    if not spread:
        return None
    return Remark(spread, "several machines: figures of workers on the others are not seen here", (Part.PROBE,), "partly")


def _ray(given: _CommandFlags) -> Remark | None:
    for flag in ("--distributed-executor-backend", "--data-parallel-backend"):
        if given.value(flag) == "ray":
            says = "Ray starts the workers, so they are not known to be this server's: their figures are written but not shown"
            return Remark(flag, says, (Part.PROBE,), "partly")
    return None


def _servers(given: _CommandFlags) -> Remark | None:
    count = given.number("--api-server-count")
    if given.has("--headless") or (count < 2 and (count or given.number("--data-parallel-size") < 2)):
        return None
    name = "--api-server-count" if count else "--data-parallel-size"
    says = "several API servers share their state through files of one user on one machine (in PLIMSOLL_DIR)"
    return Remark(name, says)


def _no_stats(given: _CommandFlags) -> Remark | None:
    flag = "--disable-log-stats"
    if not given.has(flag):
        return None
    if given.plugins.has_stat_logger:
        says = "a stat logger that is installed keeps vLLM's statistics on, though without vLLM's own lines and metrics"
        return Remark(flag, says)
    says = "without statistics no step and no finished request is seen: nothing is recorded and no rate is known"
    return Remark(flag, says, (Part.SHED, Part.RECORDER), "no")


def _plugin_list(given: _CommandFlags) -> Remark | None:
    if PLUGIN_LIST not in given.variables or not given.plugins.has_stat_logger:
        return None
    if PLUGIN_NAME in given.variables[PLUGIN_LIST].split(","):
        return None
    return Remark(
        PLUGIN_LIST, f"a list of what may be loaded: {PLUGIN_NAME} is added, else the gate brings the stat logger itself"
    )


def _connector(given: _CommandFlags) -> Remark | None:
    flag = given.has("--kv-transfer-config", "--kv-offloading-size")
    says = "finished requests may still hold blocks for the connector: an idle count does not mean that all is sent"
    return Remark(flag, says) if flag else None


def _own_valve(given: _CommandFlags) -> Remark | None:
    flag = given.has("--max-num-queued-reqs", "--max-num-queued-tokens")
    return Remark(flag, "vLLM bounds its queue itself: shed adds nothing but Retry-After") if flag else None


def _elastic(given: _CommandFlags) -> Remark | None:
    flag = "--enable-elastic-ep"
    return Remark(flag, "scaling makes vLLM's loggers anew; the gate puts the recorder back") if given.has(flag) else None


def _one_process(given: _CommandFlags) -> Remark | None:
    flag = "--disable-frontend-multiprocessing"
    return Remark(flag, "changes nothing here: it concerns the first engine (V0) alone") if given.has(flag) else None


_RULES = (
    _extension, _worker_class, _middleware_order, _rust, _first_engine, _grpc, _headless, _nodes, _ray, _servers,
    _no_stats, _plugin_list, _connector, _own_valve, _elastic, _one_process,
)  # fmt: skip


def with_remarks(verdicts: Sequence[Verdict], remarks: Sequence[Remark]) -> tuple[Verdict, ...]:
    """The verdicts, lowered by what the command does."""
    lowered = []
    for verdict in verdicts:
        mine = [remark for remark in remarks if verdict.part in remark.parts and remark.makes != "yes"]
        works = max((verdict.works, *(remark.makes for remark in mine)), key=_WORKS.index)
        because = (*verdict.because, *(f"{remark.name}: {remark.says}" for remark in mine))
        lowered.append(verdict._replace(works=works, because=because))
    return tuple(lowered)
