"""The planned command, ready to be launched: plan figures read back, plimsoll.inside, timers and allocator added.

BadInput for a command that no file can start. Notes list changes, and facts that the user has to know.
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
from plimsoll.launch.inside_command import InsideLaunch, Plugins, fit, with_remarks
from plimsoll.net.client import table
from plimsoll.redaction import REDACTED
from plimsoll.vllm.extension_points import NEEDS, InsidePart, answers_in, verdicts
from plimsoll.vllm.flags import flags_of
from plimsoll.vllm.versions import Engine


def vendor_of(gpu: str) -> Vendor:
    """Returns the card's vendor; an unknown card counts as NVIDIA's, as in vLLM's stock build."""
    try:
        return gpu_named(gpu).vendor
    except BadInput:
        return Vendor.NVIDIA


# Reads the output of `plimsoll plan --json`: the figures that files are made from, and the planned command.

SCHEMA = "plimsoll.plan/1"


def facts_of(plan: Mapping[str, Any], name: str) -> PlanFacts:
    """Reads the figures of a plan; BadInput, with the file's name, for anything else."""
    if plan.get("schema") != SCHEMA:
        raise BadInput(f"{name}: not a plan; plimsoll plan --json ... writes one")
    if "compare" in plan:
        raise BadInput(f"{name}: several plans side by side; files are made from the plan of one command, without --compare")

    def whole(path: str) -> int:
        found = _at(plan, path)
        if not isinstance(found, int) or isinstance(found, bool) or abs(found) > 2**60:
            raise BadInput(f"{name}: the plan has no {path}")
        return found

    connector = _at(plan, "settings.kv_connector")
    return PlanFacts(
        model=_text(plan, name, "model"),
        fits=_at(plan, "fits") is True,
        gpu=_text(plan, name, "gpu.name"),
        gpus=whole("gpu.count"),
        requested_bytes=whole("ledger.requested.value"),
        weights_bytes=whole("ledger.weights.value"),
        kv_bytes=whole("ledger.kv.value"),
        slack_bytes=whole("ledger.slack.value"),
        kv_tokens=whole("kv.tokens"),
        tensor_parallel=whole("settings.tensor_parallel_size"),
        pipeline_parallel=whole("settings.pipeline_parallel_size"),
        kv_connector=connector if isinstance(connector, str) else None,
    )


def _at(plan: Mapping[str, Any], path: str) -> object:
    found: object = plan
    for key in path.split("."):
        found = table(found).get(key)
    return found


def _text(plan: Mapping[str, Any], name: str, path: str) -> str:
    found = _at(plan, path)
    if not isinstance(found, str) or not found or not found.replace("\n", " ").isprintable():
        raise BadInput(f"{name}: the plan has no {path}")
    return found


def release_of(plan: Mapping[str, Any], name: str) -> str:
    return _text(plan, name, "vllm")


def planned_line(plan: Mapping[str, Any], name: str) -> str:
    """Returns the planned command as one line of shell, its secrets hidden."""
    line = _text(plan, name, "flags.rewritten")
    if "\n" in line:
        raise BadInput(f"{name}: it plans several commands; files are made from one")
    return line


def why_it_does_not_fit(plan: Mapping[str, Any]) -> str:
    """Returns the first finding's title of a plan that does not fit."""
    findings = plan.get("findings")
    title = table(findings[0]).get("title") if isinstance(findings, list) and findings else None
    return title if isinstance(title, str) else "too little memory"


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
    """A command that can be launched, the timers around it, and notes on both."""

    command: Command
    timers: Timers
    notes: tuple[str, ...]


def ready(launch: Launch, engine: Engine, plan: PlanFacts) -> Ready:
    """Returns the planned command made ready; BadInput where no file can start it."""
    if launch.unresolved:
        raise BadInput(f"the planned command has a variable without a value: ${launch.unresolved[0]}; plan it with a value")
    checked = check(replace(launch, entry=EntryPoint.SERVE), engine)
    line = read_command_line(checked.rewritten[2:], engine.release)
    _refuse(line.arguments, line.model)
    environment = tuple(pair for pair in checked.rewritten_environment if REDACTED not in pair[1])
    hidden = [name for name, value in checked.rewritten_environment if REDACTED in value]
    # The words without secrets and without the timeout, which is added again.
    arguments, notes = list[str](), list(checked.notes)
    for argument in line.arguments:
        name = _name(argument)
        if name in SECRET_FLAGS and any(REDACTED in value for value in argument.values):
            hidden.append(SECRET_FLAGS[name])
            if len(argument.values) > 1:
                notes.append(f"{name} had several values; {SECRET_FLAGS[name]} holds one")
        elif name != SHUTDOWN:
            arguments += spelled(argument)
    typed = (_values(line.arguments, SHUTDOWN) or [""])[-1]
    wished = int(typed) if typed.isdecimal() and len(typed) < 10 else None
    timers = timers_of(wished, plan.weights_bytes * plan.tensor_parallel * plan.pipeline_parallel)
    if typed and str(timers.shutdown_s) != typed:
        why = "requests need time to end, guard waits half an hour at most"
        notes.append(f"{SHUTDOWN} {typed} became {timers.shutdown_s}: {why}")
    if SHUTDOWN in flags_of(engine.release):
        arguments += [SHUTDOWN, str(timers.shutdown_s)]
    else:
        notes.append(f"vLLM {engine} has no {SHUTDOWN}: what still runs when it is stopped is lost, so the gate waits for it")
    environment = _allocator(environment, line.arguments, plan, notes)
    if dict(environment).get(DEV_MODE) == "1":
        notes.append(f"{DEV_MODE}=1 opens vLLM's admin endpoints to whoever reaches its port: keep that to the proxy alone")
    arguments = [*([line.model] if line.model is not None else []), *arguments]
    fitted, why = fit_inside(Launch("plan", EntryPoint.SERVE, tuple(arguments), environment), engine)
    if why:
        notes.append(f"the gate cannot be in this server ({why}): ready means healthy then, and guard only observes")
    command = Command(
        words=("vllm", "serve", *arguments) if why else fitted.checked.rewritten,
        environment=environment if why else fitted.checked.rewritten_environment,
        secrets=tuple(dict.fromkeys(hidden)),
        port=_port(line.arguments),
        has_gate=not why,
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


def _port(arguments: Sequence[Argument]) -> int:
    typed = (_values(arguments, "--port") or ["8000"])[-1]
    if not typed.isdecimal() or not 0 < int(typed) < 65536:
        raise BadInput(f"--port {typed} is no port")
    return int(typed)


def _allocator(
    environment: tuple[tuple[str, str], ...], arguments: Sequence[Argument], plan: PlanFacts, notes: list[str]
) -> tuple[tuple[str, str], ...]:
    """Adds expandable segments, which keep gaps from growing, unless vLLM does not start with them.

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


def fit_inside(launch: Launch, engine: Engine) -> tuple[InsideLaunch, str]:
    """Returns the launch with probe and gate, if release and command allow them; and why there can be no gate, or ""."""
    answers = answers_in(engine.release)
    by_entry_point = any(answer.name == "stat loggers" and "entry point" in answer.note for answer in answers)
    fitted = fit(launch, engine, None, Plugins(has_stat_logger=by_entry_point, has_probe=True))
    judged = with_remarks(verdicts(answers, NEEDS), fitted.remarks)
    gate = next(verdict for verdict in judged if verdict.part is InsidePart.GATE)
    return fitted, "; ".join(gate.because) if gate.works == "no" else ""
