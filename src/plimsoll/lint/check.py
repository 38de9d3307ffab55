"""Lints files that start vLLM: flags, the plan where the card is known, and the traps of a deployment.

A trap kills a server that only starts slowly, cuts requests off or leaves a dead one down. docs/launch.md says how each was
learned, docs/lint.md lists the rules. Each check takes a server and yields its traps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plimsoll.errors import PlimsollError
from plimsoll.findings import Severity
from plimsoll.launch.check_flags import FlagReport, FlagStatus, check, with_branches
from plimsoll.launch.command_line import config_of, engine_meant
from plimsoll.lint.deployment import Deployment, deployments_in
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import plan_launch
from plimsoll.redaction import redact_value, redact_words
from plimsoll.units import GIB, format_gib
from plimsoll.vllm.flags import flags_of

START_S = 600.0  # a start's time beside reading its weights: compiling, capturing graphs, a cold cache
WEIGHTS_PER_S = 100e6  # bytes, from a slow disk
PATIENCE_S = 300.0  # a busy server may not answer a probe for this long
TEARDOWN_S = 30.0  # vLLM's own, after its last request
DEFAULT_GRACE_S = {"compose": 10.0, "kubernetes": 30.0, "systemd": 90.0}
CONTAINER_SHM = 64 << 20
SHM_FOR_A_RANK = GIB  # NCCL and vLLM's own queues between the ranks
BESIDE_PINNED = 8 * GIB  # host memory that the server needs anyway


@dataclass(frozen=True, slots=True)
class Trap:
    """One finding of lint: where, what, why and how to mend it."""

    file: str
    line: int
    source: str  # the server: "compose.yaml, service llm"
    rule: str
    severity: Severity  # critical will happen, a warning may, info is worth knowing and fails nothing
    title: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class LintedServer:
    """One server of a file, the version and card it was judged by, and its traps."""

    source: str
    model: str | None
    vllm: str
    because: str
    card: str | None  # None: not known, so nothing was planned
    traps: tuple[Trap, ...]


def lint_file(path: str, options: ServerOptions) -> list[LintedServer]:
    """Lints every vLLM server in a file; BadInput where it cannot be read or starts none."""
    return [_linted(deployment, options) for deployment in deployments_in(path)]


def _linted(at: Deployment, options: ServerOptions) -> LintedServer:
    folder = str(Path(at.file).parent)
    engine = engine_meant(at.launch, options.vllm)
    checked = with_branches(check(at.launch, engine, None, config_of(at.launch, folder)))
    card = options.gpu or at.card
    plan, problem = None, ""
    if card is not None or options.gpu_memory_gib is not None:
        planned = ServerOptions(
            gpu=card, gpu_memory_gib=options.gpu_memory_gib, gpus=options.gpus, used_gib=options.used_gib, vllm=engine.asked
        )
        try:
            plan = plan_launch(planned, at.launch, folder, learned=False)
        except PlimsollError as error:
            problem = str(error)
    weights = plan.ledger.weights.value * max(1, plan.ledger.settings.gpus) if plan is not None else None
    server = _Server(at, checked, weights)
    checks = (_flags, _probes, _stopping, _shared_memory, _pinned_memory, _restarts, _secrets)
    traps = [trap for check in checks for trap in check(server)]
    # The plan's own findings about flags are judged already.
    findings, advices = (plan.findings, plan.advice) if plan is not None else ((), ())
    for finding in findings:
        if finding.code != "startup.bad-flag" and finding.severity is not Severity.INFO:
            fix = "; ".join(f"{advice.flag} {advice.value}: {advice.why}" for advice in advices[:2]) or "docs/plan.md"
            traps.append(server.trap(str(finding.code), finding.severity, "command", finding.title, finding.because, fix))
    if problem:
        why = "the plan needs the model's shape and a card that is known"
        traps.append(server.trap("plan.unknown", Severity.INFO, "command", f"not planned: {problem}", why, "plimsoll plan"))
    traps.sort(key=lambda trap: (trap.line, trap.rule))
    return LintedServer(at.launch.source, checked.model, engine.release, engine.because or "asked for", card, tuple(traps))


@dataclass(frozen=True, slots=True)
class _Server:
    """A deployment with the figures that several checks need."""

    at: Deployment
    checked: FlagReport
    weights_bytes: int | None  # of the whole model; None where it was not planned

    def trap(self, rule: str, severity: Severity, where: str | int, title: str, why: str, fix: str) -> Trap:
        """Returns a trap. `where`: a line, or the deployment's field whose line is meant."""
        line = where if isinstance(where, int) else self.at.lines.get(where, self.at.line)
        return Trap(self.at.file, line, self.at.launch.source, rule, severity, title, why, fix)

    def line_of(self, word: str) -> int:
        """Returns the line on which the server's part of the file names a word; the begin of its command if none does."""
        lines = self.at.text.split("\n")
        # A script sets its variables above the start.
        first = 1 if self.at.kind == "script" and not word.startswith("-") else self.at.line
        named = (number for number, line in enumerate(lines, 1) if number >= first and word in line)
        return next(named, self.at.lines.get("command", self.at.line))

    def value(self, flag: str) -> str | None:
        """Returns the last value that the command gives a flag; None where it gives none."""
        values = [a.values[-1] for a in self.checked.line.arguments if a.row is not None and a.row.name == flag and a.values]
        return values[-1] if values else None

    def number(self, flag: str, default: float = 0.0) -> float:
        try:
            return float(self.value(flag) or default)
        except ValueError:
            return default  # a variable that was not seen

    @property
    def ranks(self) -> int:
        """The number of ranks that share a machine and its /dev/shm."""
        ranks = self.number("--tensor-parallel-size", 1) * self.number("--pipeline-parallel-size", 1)
        return max(1, int(ranks / max(1.0, self.at.machines, self.number("--nnodes", 1))))


def _flags(server: _Server) -> Iterator[Trap]:
    """Yields a trap for each flag that the version refuses, ignores or deprecates."""
    for item in server.checked.items:
        if item.status.is_problem or item.status is FlagStatus.DEPRECATED:
            loud = Severity.WARNING if item.status.is_problem else Severity.INFO
            since = f" since {item.since}" if item.since else ""
            title = f"{item.name}: {item.status.value}{since} in vLLM {server.checked.engine.release}"
            fix = item.instead or "leave it out; `plimsoll flags` writes the command anew"
            severity, word = Severity.CRITICAL if item.status.is_refused else loud, item.status.value
            yield server.trap(f"flag.{word}", severity, server.line_of(item.name), title, item.note or word, fix)


def _probes(server: _Server) -> Iterator[Trap]:
    """Yields traps of probes that end a server while it still loads, or do not wait for a busy one."""
    at, needs = server.at, START_S + (server.weights_bytes or 0) / WEIGHTS_PER_S
    probe, alive = at.startup or at.liveness, at.liveness
    if at.unit_type in ("notify", "notify-reload"):
        why = "vLLM never tells systemd that it is ready, so systemd ends it after TimeoutStartSec (90 s by default)"
        yield server.trap("probe.notify", Severity.CRITICAL, "unit_type", f"Type={at.unit_type}", why, "Type=exec")
    if alive is not None and at.kind != "compose" and alive.patience_s < PATIENCE_S:
        title = f"the liveness probe kills after {alive.patience_s:.0f} s without an answer"
        why = "a long prefill or a compilation can keep /health waiting longer, and the kill fails every request in flight"
        fix = f"periodSeconds: 30 and failureThreshold: {PATIENCE_S / 30:.0f}, on /health"
        yield server.trap("probe.liveness", Severity.WARNING, alive.line, title, why, fix)
    if probe is None or probe.delay_s + probe.patience_s >= needs:
        return
    given = probe.delay_s + probe.patience_s
    size = f", {format_gib(server.weights_bytes)} of weights among it" if server.weights_bytes else ""
    if at.kind == "compose":
        title = f"the health check gives up {given:.0f} s after the start"
        why = f"a start may take {needs:.0f} s{size}; until then it is unhealthy, and whatever waits for it or heals it acts"
        severity, fix = Severity.WARNING, f"start_period: {needs:.0f}s"
    else:
        name = "startup" if at.startup else "liveness"
        title = f"the {name} probe kills a server that has not answered {given:.0f} s after its start"
        why = f"a start may take {needs:.0f} s{size}; a server that is killed while it loads never comes up"
        severity = Severity.CRITICAL if given < PATIENCE_S else Severity.WARNING
        fix = f"a startupProbe on /health with periodSeconds: 10 and failureThreshold: {needs / 10:.0f}"
    yield server.trap("probe.slow-start", severity, probe.line, title, why, fix)


def _stopping(server: _Server) -> Iterator[Trap]:
    """Yields traps of stops that cut requests off."""
    at = server.at
    if at.kind == "script":
        return
    knows = "--shutdown-timeout" in flags_of(server.checked.engine.release)
    drain = server.number("--shutdown-timeout") if knows else 0.0
    grace = DEFAULT_GRACE_S[at.kind] if at.grace_s is None else at.grace_s
    key = {"compose": "stop_grace_period", "kubernetes": "terminationGracePeriodSeconds", "systemd": "TimeoutStopSec"}[at.kind]
    needs = drain + at.before_stop_s + TEARDOWN_S
    if (drain or at.before_stop_s) and grace < needs:
        default = " (the default)" if at.grace_s is None else ""
        before = f", {at.before_stop_s:.0f} s before it" if at.before_stop_s else ""
        why = f"{drain:.0f} s of --shutdown-timeout{before} and {TEARDOWN_S:.0f} s of teardown: the kill comes first"
        title = f"{key} is {grace:.0f} s{default}, and a stop takes {needs:.0f} s"
        fix = {"compose": f"{key}: {needs:.0f}s", "kubernetes": f"{key}: {needs:.0f}", "systemd": f"{key}={needs:.0f}"}[at.kind]
        yield server.trap("stop.grace", Severity.CRITICAL, "grace_s", title, why, fix)
    if knows and not drain and not at.drains_first and not at.has_template:
        why = "vLLM's default is 0: SIGTERM aborts every request in flight"
        fix = f"--shutdown-timeout 60, and {key} of at least {60 + at.before_stop_s + TEARDOWN_S:.0f} s"
        yield server.trap("stop.no-drain", Severity.INFO, "command", "no --shutdown-timeout", why, fix)
    if at.kind == "systemd" and at.kill_mode != "mixed" and at.launch.image is None:  # whose processes are not the unit's
        why = "systemd sends SIGTERM to every process of the unit, and each request in flight fails"
        title = f"KillMode={at.kill_mode or 'control-group (the default)'}"
        yield server.trap("stop.kill-mode", Severity.WARNING, "kill_mode", title, why, "KillMode=mixed")


def _shared_memory(server: _Server) -> Iterator[Trap]:
    """Yields a trap if shared memory is too small for several ranks."""
    at, ranks = server.at, server.ranks
    if ranks < 2 or at.has_host_shm or (at.has_template and at.shm_bytes is None):
        return
    there, needs = CONTAINER_SHM if at.shm_bytes is None else at.shm_bytes, ranks * SHM_FOR_A_RANK
    if there >= needs:
        return
    title = f"shared memory of {format_gib(there)}{'' if at.shm_bytes else ' (the default)'} for {ranks} ranks"
    why = "NCCL and vLLM's own queues between the ranks lie in /dev/shm; too little ends a start with a bus error"
    run = f"--shm-size {needs // GIB}g, or --ipc host"
    fixes = {"compose": f"shm_size: {needs // GIB}gb", "kubernetes": "an emptyDir with medium: Memory, mounted at /dev/shm"}
    fix = fixes.get(at.kind, run)
    yield server.trap("shm.small", Severity.CRITICAL, "shm_bytes", title, why, fix)


def _pinned_memory(server: _Server) -> Iterator[Trap]:
    """Yields traps of pinned host memory that no limit allows for."""
    gpus = server.ranks * max(1, int(server.number("--data-parallel-size", 1)))
    pinned = server.number("--kv-offloading-size") + gpus * (server.number("--cpu-offload-gb") + server.number("--swap-space"))
    sleeps = "--enable-sleep-mode" in server.checked.line.given
    if server.at.kind == "script" or (not pinned and not sleeps):
        return
    size, limit = int(pinned * GIB) + (server.weights_bytes or 0) * sleeps, server.at.memory_limit_bytes
    what = f"{format_gib(size)} of pinned host memory" if size else "the weights pinned in host memory while it sleeps"
    why = (
        "pinned memory is never swapped: without a limit the kernel kills whatever it likes, under too small a one this server"
    )
    fix = f"a memory limit of at least {format_gib(size + BESIDE_PINNED)}" if size else "a memory limit beyond the weights"
    if limit is None:
        yield server.trap("memory.pinned", Severity.WARNING, "memory", f"{what}, and no memory limit", why, fix)
    elif limit < size + BESIDE_PINNED:
        title = f"{what}, and a memory limit of {format_gib(limit)}"
        yield server.trap("memory.pinned", Severity.CRITICAL, "memory", title, why, fix)


def _restarts(server: _Server) -> Iterator[Trap]:
    """Yields traps of restart policies that leave a dead server down."""
    at = server.at
    policy = (at.restart or "no").lower()
    if at.kind == "script" or at.is_job or policy in ("always", "unless-stopped"):
        return
    key = {"compose": "restart", "kubernetes": "restartPolicy", "systemd": "Restart"}[at.kind]
    title = f"{key}: {at.restart or 'no (the default)'}"
    why = "vLLM ends with exit code 0 when its engine dies: this policy takes that for a wish and leaves it down"
    fix = {"compose": "restart: unless-stopped", "kubernetes": "restartPolicy: Always", "systemd": "Restart=always"}[at.kind]
    yield server.trap("restart.exit-zero", Severity.WARNING, "restart", title, why, fix)


def _secrets(server: _Server) -> Iterator[Trap]:
    """Yields traps of secrets in the file."""
    at = server.at
    values, words = dict(at.launch.environment), list(at.launch.arguments)
    named = [name for name, value in values.items() if redact_value(name, value) != value and not _is_elsewhere(value)]
    hidden = zip(["", *words], zip(words, redact_words(words), strict=True), strict=False)
    flags = [before for before, (word, shown) in hidden if word != shown and not _is_elsewhere(word)]
    elsewhere = {
        "compose": "env_file: or secrets:, outside version control", "kubernetes": "a Secret, with valueFrom.secretKeyRef",
        "systemd": "EnvironmentFile= that only root reads, or LoadCredential=", "script": "a variable that is set elsewhere",
    }[at.kind]  # fmt: skip
    for name in (*named, *(flag.partition("=")[0] for flag in flags)):
        why = "whoever reads the file, its history or the process list has it"
        title = f"a secret stands in the file: {name}"
        yield server.trap("secret.open", Severity.CRITICAL, server.line_of(name), title, why, elsewhere)


def _is_elsewhere(value: str) -> bool:
    """True if it is a reference or a placeholder: `$KEY`, `<your token>`."""
    return "$" in value or re.fullmatch(r"(?:.*=)?<.*>", value) is not None
