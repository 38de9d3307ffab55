"""The planned command, ready to be launched: plan figures read back, plimsoll.inside, timers and allocator added.

What no file could be made for is BadInput. What is changed or has to be known is a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from plimsoll.assets.settings import Command, PlanFacts, Timers, timers_of
from plimsoll.errors import BadInput
from plimsoll.hardware.cards import Vendor, gpu_named
from plimsoll.launch.check_flags import check, spelled
from plimsoll.launch.command_line import Argument, EntryPoint, Launch, read_command_line
from plimsoll.launch.inside_command import Plugins, fit, with_remarks
from plimsoll.redaction import REDACTED
from plimsoll.vllm.extension_points import NEEDS, InsidePart, answers_in, verdicts
from plimsoll.vllm.flags import flags_of
from plimsoll.vllm.versions import Engine


def vendor_of(gpu: str) -> Vendor:
    """The card's vendor; an unknown card counts as NVIDIA's, as in vLLM's stock build."""
    try:
        return gpu_named(gpu).vendor
    except BadInput:
        return Vendor.NVIDIA


# What `plimsoll plan --json` printed, read back: the figures that files are made from, and the command that was planned.

SCHEMA = "plimsoll.plan/1"


def facts_of(plan: Mapping[str, Any], name: str) -> PlanFacts:
    """The figures of a plan; BadInput, with the file's name, for anything else."""
    if plan.get("schema") != SCHEMA:
        raise BadInput(f"{name}: not a plan; plimsoll plan --json ... writes one")
    if "compare" in plan:
        raise BadInput(f"{name}: several plans side by side; files are made from the plan of one command, without --compare")
    reader = _PlanReader(plan, name)
    connector = reader.there("settings", "kv_connector")
    return PlanFacts(
        model=reader.text("model"),
        fits=reader.there("fits") is True,
        gpu=reader.text("gpu", "name"),
        gpus=reader.whole("gpu", "count"),
        requested_bytes=reader.whole("ledger", "requested", "value"),
        weights_bytes=reader.whole("ledger", "weights", "value"),
        kv_bytes=reader.whole("ledger", "kv", "value"),
        slack_bytes=reader.whole("ledger", "slack", "value"),
        kv_tokens=reader.whole("kv", "tokens"),
        tensor_parallel=reader.whole("settings", "tensor_parallel_size"),
        pipeline_parallel=reader.whole("settings", "pipeline_parallel_size"),
        kv_connector=connector if isinstance(connector, str) else None,
    )


def release_of(plan: Mapping[str, Any], name: str) -> str:
    """The vLLM release that was planned for."""
    return _PlanReader(plan, name).text("vllm")


def planned_line(plan: Mapping[str, Any], name: str) -> str:
    """The planned command as one line of shell, its secrets hidden."""
    line = _PlanReader(plan, name).text("flags", "rewritten")
    if "\n" in line:
        raise BadInput(f"{name}: it plans several commands; files are made from one")
    return line


def why_it_does_not_fit(plan: Mapping[str, Any]) -> str:
    """The first finding's title, of a plan that does not fit."""
    findings = plan.get("findings")
    first = findings[0] if isinstance(findings, list) and findings else None
    title = first.get("title") if isinstance(first, dict) else None
    return title if isinstance(title, str) else "too little memory"


class _PlanReader:
    """Values at a path, each checked for what it is."""

    def __init__(self, plan: Mapping[str, Any], name: str) -> None:
        self._plan, self._name = plan, name

    def there(self, *path: str) -> object:
        found: object = self._plan
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def text(self, *path: str) -> str:
        found = self.there(*path)
        if not isinstance(found, str) or not found or not found.replace("\n", " ").isprintable():
            raise BadInput(f"{self._name}: the plan has no {'.'.join(path)}")
        return found

    def whole(self, *path: str) -> int:
        found = self.there(*path)
        if not isinstance(found, int) or isinstance(found, bool) or abs(found) > 2**60:
            raise BadInput(f"{self._name}: the plan has no {'.'.join(path)}")
        return found


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
SEGMENTS = "expandable_segments:True"
SHUTDOWN = "--shutdown-timeout"
DEV_MODE = "VLLM_SERVER_DEV_MODE"
# The variable that vLLM or the hub reads where the flag was given a secret.
SECRET_FLAGS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
_HERE = "is not on the machines that the files are for; plan the flags themselves"
_TLS = "is for TLS in vLLM itself; the files speak HTTP behind a proxy, which is the place for it"
_NODES = "is for several machines or several servers; the files are for one server on one machine"
REFUSED = {
    "--config": _HERE, "--uds": "has no port, and the files need one", "--ssl-keyfile": _TLS, "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS, "--headless": _NODES, "--nnodes": _NODES, "--node-rank": _NODES,
    "--data-parallel-address": _NODES, "--data-parallel-start-rank": _NODES, "--data-parallel-external-lb": _NODES,
    "--data-parallel-hybrid-lb": _NODES, "--data-parallel-multi-port-external-lb": _NODES,
    "--grpc": "has no HTTP, and the files need it",
}  # fmt: skip
_OWN_POOL = ("--enable-sleep-mode", "--enable-cumem-allocator")
_CONNECTORS = ("--kv-transfer-config", "--kv-offloading-size")


class Ready(NamedTuple):
    """A command that can be launched, the timers around it, and what should be known of both."""

    command: Command
    timers: Timers
    notes: tuple[str, ...]


def ready(launch: Launch, engine: Engine, plan: PlanFacts) -> Ready:
    """The planned command made ready; BadInput where no file could be made that starts it."""
    if launch.unresolved:
        raise BadInput(f"the planned command has a variable without a value: ${launch.unresolved[0]}; plan it with a value")
    checked = check(replace(launch, entry=EntryPoint.SERVE), engine)
    line = read_command_line(checked.rewritten[2:], engine.release)
    _refuse(line.arguments, line.model)
    environment, hidden = _without_secrets(checked.rewritten_environment)
    arguments, more_hidden, notes = _arguments(line.arguments)
    timers, said = _timers(line.arguments, plan)
    notes = [*checked.notes, *notes, *said]
    if SHUTDOWN in flags_of(engine.release):
        arguments += [SHUTDOWN, str(timers.shutdown_s)]
    else:
        notes.append(f"vLLM {engine} has no {SHUTDOWN}: what still runs when it is stopped is lost, so the gate waits for it")
    environment = _allocator(environment, line.arguments, plan, notes)
    if dict(environment).get(DEV_MODE) == "1":
        notes.append(f"{DEV_MODE}=1 opens vLLM's admin endpoints to whoever reaches its port: keep that to the proxy alone")
    model = (line.model,) if line.model is not None else ()
    words, environment, has_gate = _with_inside((*model, *arguments), environment, engine, notes)
    command = Command(
        words=words,
        environment=environment,
        secrets=tuple(dict.fromkeys((*hidden, *more_hidden))),
        port=_port(line.arguments),
        has_gate=has_gate,
        has_connector=bool(_has(line.arguments, *_CONNECTORS)) or plan.kv_connector is not None,
    )
    return Ready(command, timers, tuple(dict.fromkeys(notes)))


def _name(argument: Argument) -> str:
    return argument.row.name if argument.row is not None else argument.spelling


def _values(arguments: Sequence[Argument], name: str) -> list[str]:
    return [value for argument in arguments if _name(argument) == name for value in argument.values]


def _has(arguments: Sequence[Argument], *names: str) -> str:
    return next((_name(a) for a in arguments if _name(a) in names and not a.is_negated), "")


def _refuse(arguments: Sequence[Argument], model: str | None) -> None:
    for argument in arguments:
        name = _name(argument)
        if name in REFUSED and not argument.is_negated and not (name == "--nnodes" and argument.values == ("1",)):
            raise BadInput(f"{name} {REFUSED[name]}")
        if name not in SECRET_FLAGS and any(REDACTED in value for value in argument.values):
            raise BadInput(f"{name} has a value that the plan hides; give it as a variable of the environment instead")
    if model is not None and REDACTED in model:
        raise BadInput("the model's name has a part that the plan hides")
    if model is not None and model.startswith((".", "~")):
        raise BadInput(f"{model} means another folder elsewhere; plan the model with its whole path")


def _without_secrets(pairs: Sequence[tuple[str, str]]) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    kept = tuple((name, value) for name, value in pairs if REDACTED not in value)
    return kept, [name for name, value in pairs if REDACTED in value]


def _arguments(given: Sequence[Argument]) -> tuple[list[str], list[str], list[str]]:
    """The words without secrets and without the timeout, which is put in anew; the variables that hold the secrets."""
    words: list[str] = []
    hidden: list[str] = []
    notes: list[str] = []
    for argument in given:
        name = _name(argument)
        if name in SECRET_FLAGS and any(REDACTED in value for value in argument.values):
            hidden.append(SECRET_FLAGS[name])
            if len(argument.values) > 1:
                notes.append(f"{name} had several values; {SECRET_FLAGS[name]} holds one")
        elif name != SHUTDOWN:
            words += spelled(argument)
    return words, hidden, notes


def _timers(arguments: Sequence[Argument], plan: PlanFacts) -> tuple[Timers, list[str]]:
    typed = _values(arguments, SHUTDOWN)
    wished = int(typed[-1]) if typed and typed[-1].isdecimal() and len(typed[-1]) < 10 else None
    timers = timers_of(wished, plan.weights_bytes * plan.tensor_parallel * plan.pipeline_parallel)
    if typed and str(timers.shutdown_s) != typed[-1]:
        return timers, [
            f"{SHUTDOWN} {typed[-1]} became {timers.shutdown_s}: requests need time to end, guard waits half an hour at most"
        ]
    return timers, []


def _port(arguments: Sequence[Argument]) -> int:
    typed = (_values(arguments, "--port") or ["8000"])[-1]
    if not typed.isdecimal() or not 0 < int(typed) < 65536:
        raise BadInput(f"--port {typed} is no port")
    return int(typed)


def _allocator(
    environment: tuple[tuple[str, str], ...], arguments: Sequence[Argument], plan: PlanFacts, notes: list[str]
) -> tuple[tuple[str, str], ...]:
    """Expandable segments where they keep gaps from growing, and not where vLLM does not start with them.

    With a KV connector vLLM refuses them (0.21.0 and later). With sleep mode it refused them (0.8.0 to 0.20.0), and has a pool
    of its own since. With several GPUs the custom all-reduce cannot share such memory, and the workers die while graphs are
    captured (vLLM's issue 42609).
    """
    names = dict(environment)
    own = names.get(ALLOCATOR, names.get("PYTORCH_ALLOC_CONF"))
    breaks = _has(arguments, *_CONNECTORS, *_OWN_POOL) or (f"{plan.gpus} GPUs" if plan.gpus > 1 else "")
    if own is not None:
        if breaks and SEGMENTS in own.replace(" ", ""):
            notes.append(f"{SEGMENTS} is yours and stays; beside {breaks} vLLM may not start with it")
        return environment
    if breaks or vendor_of(plan.gpu) is not Vendor.NVIDIA:
        return environment
    return (*environment, (ALLOCATOR, SEGMENTS))


def _with_inside(
    arguments: Sequence[str], environment: tuple[tuple[str, str], ...], engine: Engine, notes: list[str]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], bool]:
    """The command with the probe and the gate, where the release and the command take them."""
    launch = Launch("plan", EntryPoint.SERVE, tuple(arguments), environment)
    answers = answers_in(engine.release)
    by_entry_point = any(answer.name == "stat loggers" and "entry point" in answer.note for answer in answers)
    fitted = fit(launch, engine, None, Plugins(has_stat_logger=by_entry_point, has_probe=True))
    judged = with_remarks(verdicts(answers, NEEDS), fitted.remarks)
    gate = next(verdict for verdict in judged if verdict.part is InsidePart.GATE)
    if gate.works == "no":
        notes.append(
            f"the gate cannot be in this server ({'; '.join(gate.because)}): ready means healthy then, and guard only observes"
        )
        return ("vllm", "serve", *arguments), environment, False
    return fitted.checked.rewritten, fitted.checked.rewritten_environment, True
