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
from plimsoll.units import GIB, filled, format_gib
from plimsoll.vllm.flags import flags_of
from plimsoll.vllm.versions import Behaviour, table

START_S = 600.0  # a start's time beside reading its weights: compiling, capturing graphs, a cold cache
WEIGHTS_PER_S = 100e6  # bytes, from a slow disk
PATIENCE_S = 300.0  # a busy server may not answer a probe for this long
TEARDOWN_S = 30.0  # vLLM's own, after its last request
DEFAULT_GRACE_S = {"compose": 10.0, "kubernetes": 30.0, "systemd": 90.0}
CONTAINER_SHM = 64 << 20
SHM_FOR_A_RANK = GIB  # NCCL and vLLM's own queues between the ranks
BESIDE_PINNED = 8 * GIB  # host memory that the server needs anyway
_TEXTS = table("traps", "lint")  # what lint says of each trap


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
    advice = "; ".join(f"{advice.flag} {advice.value}: {advice.why}" for advice in advices[:2]) or "docs/plan.md"
    for finding in findings:
        if finding.code != "startup.bad-flag" and finding.severity is not Severity.INFO:
            texts = {"code": finding.code, "title": finding.title, "because": finding.because, "advice": advice}
            traps.append(server.trap("finding", finding.severity, "command", **texts))
    if problem:
        traps.append(server.trap("not-planned", Severity.INFO, "command", problem=problem))
    traps.sort(key=lambda trap: (trap.line, trap.rule))
    return LintedServer(at.launch.source, checked.model, engine.release, engine.because or "asked for", card, tuple(traps))


@dataclass(frozen=True, slots=True)
class _Server:
    """A deployment with the figures that several checks need."""

    at: Deployment
    checked: FlagReport
    weights_bytes: int | None  # of the whole model; None where it was not planned

    def trap(self, name: str, severity: Severity, where: str | int, /, **values: object) -> Trap:
        """Returns the trap of that name. `where`: a line, or the deployment's field whose line is meant."""
        line, kind = where if isinstance(where, int) else self.at.lines.get(where, self.at.line), self.at.kind
        values |= {key: names.get(kind) for key, names in _TEXTS["keys"].items()}
        texts = [_TEXTS["traps"][name][part] for part in ("rule", "title", "why", "fix")]
        rule, *said = (filled(text if isinstance(text, str) else text[kind], values) for text in texts)
        return Trap(self.at.file, line, self.at.launch.source, rule, severity, *said)

    def line_of(self, word: str) -> int:
        """Returns the line on which the server's part of the file names a word; the begin of its command if none does."""
        lines = self.at.text.split("\n")
        # A script sets its variables above the start.
        first = 1 if self.at.kind == "script" and not word.startswith("-") else self.at.line
        named = (number for number, line in enumerate(lines, 1) if number >= first and word in line)
        return next(named, self.at.lines.get("command", self.at.line))

    def number(self, flag: str, default: float = 0.0) -> float:
        """Returns the number that the command gives a flag last."""
        values = [a.values[-1] for a in self.checked.line.arguments if a.row is not None and a.row.name == flag and a.values]
        try:
            return float(values[-1] if values else default)
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
            severity, status = Severity.CRITICAL if item.status.is_refused else loud, item.status.value
            yield server.trap(
                "flag", severity, server.line_of(item.name), name=item.name, status=status, note=item.note or status,
                since=f" since {item.since}" if item.since else "", release=server.checked.engine.release,
                instead=item.instead or "leave it out; `plimsoll flags` writes the command anew",
            )  # fmt: skip


def _probes(server: _Server) -> Iterator[Trap]:
    """Yields traps of probes that end a server while it still loads, or do not wait for a busy one."""
    at, needs = server.at, START_S + (server.weights_bytes or 0) / WEIGHTS_PER_S
    probe, alive = at.startup or at.liveness, at.liveness
    if at.unit_type in ("notify", "notify-reload"):
        yield server.trap("notify", Severity.CRITICAL, "unit_type", type=at.unit_type)
    if alive is not None and at.kind != "compose" and alive.patience_s < PATIENCE_S:
        yield server.trap("liveness", Severity.WARNING, alive.line, patience=alive.patience_s, failures=PATIENCE_S / 30)
    if probe is None or (given := probe.delay_s + probe.patience_s) >= needs:
        return
    size = f", {format_gib(server.weights_bytes)} of weights among it" if server.weights_bytes else ""
    severity = Severity.CRITICAL if given < PATIENCE_S and at.kind != "compose" else Severity.WARNING
    name, which = "health-check" if at.kind == "compose" else "slow-start", "startup" if at.startup else "liveness"
    yield server.trap(name, severity, probe.line, given=given, needs=needs, size=size, probe=which, failures=needs / 10)


def _stopping(server: _Server) -> Iterator[Trap]:
    """Yields traps of stops that cut requests off."""
    at, before = server.at, server.at.before_stop_s
    if at.kind == "script":
        return
    knows = "--shutdown-timeout" in flags_of(server.checked.engine.release)
    drain = server.number("--shutdown-timeout") if knows else 0.0
    there = DEFAULT_GRACE_S[at.kind] if at.grace_s is None else at.grace_s
    needs = drain + before + TEARDOWN_S
    if (drain or before) and there < needs:
        yield server.trap(
            "grace", Severity.CRITICAL, "grace_s", there=there, needs=needs, drain=drain, teardown=TEARDOWN_S,
            default=" (the default)" if at.grace_s is None else "", before=f", {before:.0f} s before it" if before else "",
        )  # fmt: skip
    if knows and not drain and not at.drains_first and not at.has_template:
        yield server.trap("no-drain", Severity.INFO, "command", needs=60 + before + TEARDOWN_S)
    if at.kind == "systemd" and at.kill_mode != "mixed" and at.launch.image is None:  # whose processes are not the unit's
        yield server.trap("kill-mode", Severity.WARNING, "kill_mode", mode=at.kill_mode or "control-group (the default)")


def _shared_memory(server: _Server) -> Iterator[Trap]:
    """Yields a trap if shared memory is too small for several ranks."""
    at, ranks = server.at, server.ranks
    if ranks < 2 or at.has_host_shm or (at.has_template and at.shm_bytes is None):
        return
    there, needs = CONTAINER_SHM if at.shm_bytes is None else at.shm_bytes, ranks * SHM_FOR_A_RANK
    if there < needs:
        default = "" if at.shm_bytes else " (the default)"
        yield server.trap(
            "shared-memory", Severity.CRITICAL, "shm_bytes", there=there, default=default, ranks=ranks, needs=needs // GIB
        )


def _pinned_memory(server: _Server) -> Iterator[Trap]:
    """Yields traps of pinned host memory that no limit allows for.

    torch rounds each pinned tensor up to a power of two: weights in every release, the KV cache until 0.26.
    """
    gpus = server.ranks * max(1, int(server.number("--data-parallel-size", 1)))
    rounded = 1 if Behaviour.EXACT_OFFLOAD.is_in(server.checked.engine.release) else 2
    pinned = rounded * server.number("--kv-offloading-size")
    pinned += gpus * (2 * server.number("--cpu-offload-gb") + server.number("--swap-space"))
    sleeps = "--enable-sleep-mode" in server.checked.line.given
    if server.at.kind == "script" or (not pinned and not sleeps):
        return
    size, limit = int(pinned * GIB) + (server.weights_bytes or 0) * sleeps, server.at.memory_limit_bytes
    if limit is None or limit < size + BESIDE_PINNED:
        pinned_size = f"up to {format_gib(size)} of pinned host memory"
        yield server.trap(
            "pinned-memory", Severity.WARNING if limit is None else Severity.CRITICAL, "memory",
            what=pinned_size if size else "the weights pinned in host memory while it sleeps",
            limit="no memory limit" if limit is None else f"a memory limit of {format_gib(limit)}",
            enough=f"of at least {format_gib(size + BESIDE_PINNED)}" if size else "beyond the weights",
        )  # fmt: skip


def _restarts(server: _Server) -> Iterator[Trap]:
    """Yields traps of restart policies that leave a dead server down."""
    at = server.at
    if at.kind != "script" and not at.is_job and (at.restart or "no").lower() not in ("always", "unless-stopped"):
        yield server.trap("restart", Severity.WARNING, "restart", policy=at.restart or "no (the default)")


def _secrets(server: _Server) -> Iterator[Trap]:
    """Yields traps of secrets in the file."""
    values, words = dict(server.at.launch.environment), list(server.at.launch.arguments)
    named = [name for name, value in values.items() if redact_value(name, value) != value and not _is_elsewhere(value)]
    hidden = zip(["", *words], zip(words, redact_words(words), strict=True), strict=False)
    flags = [before for before, (word, shown) in hidden if word != shown and not _is_elsewhere(word)]
    for name in (*named, *(flag.partition("=")[0] for flag in flags)):
        yield server.trap("secret", Severity.CRITICAL, server.line_of(name), name=name)


def _is_elsewhere(value: str) -> bool:
    """True if it is a reference or a placeholder: `$KEY`, `%(ENV_KEY)s`, `<your token>`."""
    return "$" in value or re.fullmatch(r"(?:.*=)?(?:<.*>|%\(\w+\)s)", value) is not None
