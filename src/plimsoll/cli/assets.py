"""usage: plimsoll assets OUT_DIR [--plan PLAN.json] [options]
       plimsoll assets OUT_DIR --for guard [options]
       plimsoll assets OUT_DIR --for patch DEPLOYMENT.yaml [options]
       plimsoll assets OUT_DIR --for autoscaling TRACE... --plan PLAN.json --slo ttft=2s,tpot=50ms [options]

Writes what a team needs to launch a vLLM server and to watch it, from one plan, right for its vLLM version: a start script,
systemd units, a compose file, Kubernetes manifests, an HAProxy configuration, guard's configuration, alert rules with their
tests, and dashboards. For servers that run in Kubernetes already: guard beside them (--for guard), and plimsoll.inside, probes
and a grace period as a patch of their Deployment (--for patch). For servers that come and go with their traffic: a KEDA
ScaledObject whose rule keeps the promise in a replay of that traffic (--for autoscaling).

{options}

The same input gives the same bytes. A file that somebody has edited is kept and named; OUT_DIR/plimsoll-assets.json holds the
checksums by which that is known. Secrets are never generated: each file says where they are read from.

Exit codes: 0 done; 1 --check found a difference, an edited file was kept although what is generated has changed, or the plan
says that the server does not start; 2 your input is wrong; 3 nothing can be read or written there.
Read on: docs/assets.md, docs/kubernetes.md, docs/launch.md, docs/monitoring.md
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import plimsoll
from plimsoll.assets import files, kubernetes
from plimsoll.assets.inside_wheel import make_wheel, wheel_name
from plimsoll.assets.launch import WAYS, launch_files
from plimsoll.assets.launch_command import facts_of, planned_line, ready, release_of, why_it_does_not_fit
from plimsoll.assets.monitoring import monitoring_files
from plimsoll.assets.patch import patch_files
from plimsoll.assets.rendering import headed
from plimsoll.assets.settings import AssetSettings, Cluster
from plimsoll.cli.main import OptionsCommand
from plimsoll.errors import BadInput, Found
from plimsoll.guard.adapters.cluster import LEASE_NAME, NAMESPACE, OBJECT_NAME
from plimsoll.launch.command_line import engine_meant, launches_in
from plimsoll.launch.files import read_objects
from plimsoll.launch.options import Words, count, option, options_of, switch
from plimsoll.models.files import parse_json, read_json
from plimsoll.plan.read import installed_vllm
from plimsoll.redaction import redact_words
from plimsoll.render import assets as report
from plimsoll.render.terminal import bar, show
from plimsoll.vllm.versions import Behaviour, Engine, engine_named

WHAT = ("systemd", "compose", "kubernetes", "monitoring")
IN_CLUSTER = ("guard", "patch")  # for servers that exist: no plan is needed
AUTOSCALING = "autoscaling"
KINDS = (*WHAT, "all", *IN_CLUSTER, AUTOSCALING)
SCALING_OPTIONS = ("keep", "start_seconds", "prometheus")
LAUNCH_OPTIONS = ("server_image", "workload", "requests", "limits", "toleration", "node_selector", "host", "gateway")
PLAN_MAX_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class AssetsOptions(Words):
    plan: str | None = option("PLAN.json", "what `plan --json` or `tune --json` printed; -: standard input; else monitoring")
    vllm: str | None = option("VERSION", "without a plan: default the vLLM installed beside plimsoll, else the newest known")
    kind: str | None = option(
        "WHAT", f"{', '.join(WHAT)} or all; guard, patch or autoscaling; default: what can be made", name="--for", choices=KINDS
    )
    slo: str | None = option("ttft=2s", "what users were promised: the first token within; no alert asks for tpot=50ms yet")
    job: str | None = option("NAME", "what your Prometheus calls the job that scrapes the engines; default: vllm")
    check: bool = switch("write nothing; show how OUT_DIR differs from what would be generated, and exit 1 if it does")
    force: bool = switch("overwrite files that somebody has edited")
    json: bool = switch("one JSON object, schema plimsoll.assets/1")
    namespace: tuple[str, ...] = option(
        "NAME", "of the engines, several with commas; guard lives in the first; default: models",
        default=(), may_repeat=True, heading="Kubernetes (--for guard, patch or kubernetes)",
    )  # fmt: skip
    name: str | None = option("NAME", "of guard's objects (plimsoll-guard), or of a launched server (vllm)")
    selector: str | None = option("LABELS", "of the engines' pods, such as app=vllm,tier=chat; default: app=vllm")
    image: str | None = option("IMAGE", "plimsoll's own, for guard and the init container; default: plimsoll:VERSION")
    replicas: int | None = option("N", "of guard, or of a launched server; default: 1", read=partial(count, most=500))
    port: int | None = option("N", "of the engines, with --for guard; default: 8000", read=partial(count, most=65535))
    server_image: str | None = option(
        "IMAGE", "vLLM's; default: vllm/vllm-openai of the plan's release", heading="A launched server (--for kubernetes)"
    )
    workload: str | None = option(
        "KIND", "statefulset or deployment; default: statefulset", choices=("statefulset", "deployment")
    )
    requests: tuple[str, ...] = option("cpu=8,memory=64Gi", "resources that it asks for", default=(), may_repeat=True)
    limits: tuple[str, ...] = option("memory=96Gi", "and may not exceed, beside the plan's GPUs", default=(), may_repeat=True)
    toleration: tuple[str, ...] = option("TAINT", "KEY[=VALUE][:EFFECT] that it bears", default=(), may_repeat=True)
    node_selector: tuple[str, ...] = option("LABEL=VALUE", "of the nodes it runs on", default=(), may_repeat=True)
    host: str | None = option("NAME", "by which clients reach it; default: llm.example.com")
    gateway: str | None = option("NAMESPACE/NAME", "a Gateway: an HTTPRoute is written instead of an Ingress")
    keep: int | None = option(
        "PERCENT", "of all requests must be served as promised (99)", read=partial(count, most=99), heading="--for autoscaling"
    )
    start_seconds: int | None = option("S", "until a new replica serves (180)", read=partial(count, most=7200))
    prometheus: str | None = option("URL", "that KEDA asks; default: the operator's, in monitoring")


def run(options: AssetsOptions) -> int:
    """Read the plan, make the texts, compare, write."""
    words = [*options.rest, *(options.verbatim or ())]
    is_patch = options.kind == "patch"
    if options.kind == AUTOSCALING:
        return _autoscaling(options, words)
    if len(words) != 1 + is_patch or not words[0].strip("-"):
        usage = "OUT_DIR --for patch DEPLOYMENT.yaml" if is_patch else "OUT_DIR [--plan PLAN.json]"
        raise BadInput(f"say where: plimsoll assets {usage}")
    _check_goes_with(options)
    if is_patch:
        return _patch(options, words[0], words[1])
    plan = None if options.plan is None else _plan(options.plan)
    wish = options.kind
    if plan is None and wish not in (None, "monitoring", *IN_CLUSTER):
        raise BadInput(
            f"--for {wish} needs a plan: plimsoll plan --json --gpu NAME vllm serve MODEL ... > plan.json; then --plan"
        )
    ways = (wish,) if wish not in (None, "all") else WHAT if plan is not None else ("monitoring",)
    try:
        settings, notes = _settings(options, plan)
    except Found as error:
        if options.json and plan is not None:
            release, model, nothing = str(plan["vllm"]), str(plan["model"]), files.Changes()
            none = report.AssetsReport(words[0], release, model, nothing, (str(error),), options.check)
            show(report.as_json(none, starts=False))
        raise
    if "monitoring" in ways and not settings.own_job:
        notes = (
            *notes,
            f'alerts ask for job="{settings.job}"; if your Prometheus calls the engines\' job otherwise: --job NAME',
        )
    return _carry_out(options, words[0], settings, _wanted(settings, plan, ways), ways, notes)


def _patch(options: AssetsOptions, folder: str, file: str) -> int:
    """Write the patch of a file's servers."""
    starts = read_objects(file, sys.stdin.buffer if file == "-" and sys.stdin is not None else None)
    cluster = _cluster(options)
    texts, notes = patch_files(starts, cluster.image, options.vllm)
    engine = engine_meant(starts[0].launch, options.vllm)
    made_by = _made_by(options, engine.release, None, None, Path(file).name)
    settings = AssetSettings(engine.release, cluster=cluster, made_by=made_by)
    wanted = {path: headed(path, text, made_by).encode() for path, text in texts.items()}
    return _carry_out(options, folder, settings, wanted, ("patch",), (*notes, *_guesses(options)))


def _autoscaling(options: AssetsOptions, words: list[str]) -> int:
    """Write the rule that keeps the promise for this traffic; exit code 1 where none does."""
    from plimsoll.assets.autoscaling import PROMETHEUS, autoscaling_files, kept_text
    from plimsoll.cli.simulate import say_compiling
    from plimsoll.simulate.compiled import telling
    from plimsoll.simulate.inputs import read_inputs
    from plimsoll.simulate.options import ReplayOptions
    from plimsoll.tune.autoscale import POLL_S, find_rule
    from plimsoll.tune.goodput import Job, Traffic, parse_slo

    if len(words) < 2 or options.plan in (None, "-") or options.slo is None:
        raise BadInput(
            "say where, for which traffic, with which plan and promise: plimsoll assets OUT_DIR --for autoscaling TRACE "
            "--plan PLAN.json --slo ttft=2s,tpot=50ms"
        )
    _check_goes_with(options)
    prometheus = options.prometheus or PROMETHEUS
    if not re.fullmatch(r"https?://[\w.:/\[\]-]{1,200}", prometheus):
        raise BadInput(f"--prometheus {prometheus[:60]!r}: it is a URL such as {PROMETHEUS}")
    settings, notes = _settings(options, _plan(options.plan or ""))
    keep, start_s = (options.keep or 99) / 100, options.start_seconds or 180
    given = read_inputs(ReplayOptions(rest=tuple(words[1:]), plan=options.plan))
    slo = parse_slo(options.slo)
    traffic = Traffic(given.trace, 1.0, slo)
    with telling(say_compiling), bar("replaying", "rules") as progress:
        found = find_rule(traffic, Job(given.settings, given.step_time), keep, start_s, progress)
    if found.chosen is None:
        raise Found(f"no number of replicas keeps {slo} for {keep:.0%} of this traffic: the server itself is too slow")
    about = f"{given.trace.name}, {given.trace.size:,} requests in {traffic.span_s / 60:.0f} min, {slo}"
    always = found.trials[0].rule.fewest
    saves = "no rule saves anything" if found.chosen.mean_replicas >= always else "without a rule it takes"
    notes = (*notes, *given.notes, f"{kept_text(found.chosen)}, also with a tenth more traffic; {saves}: {always} all the time")
    if given.engines.number > 1:
        notes = (*notes, f"of a replica's {given.engines.number} engines one is replayed: fewer replicas will do")
    if traffic.span_s < 10 * (start_s + POLL_S):
        notes = (*notes, f"the traffic lasts {traffic.span_s:.0f} s and a start {start_s} s: a longer recording would say more")
    texts = autoscaling_files(settings, found, prometheus, about)
    wanted = {path: headed(path, text, settings.made_by).encode() for path, text in texts.items()}
    return _carry_out(options, words[0], settings, wanted, (AUTOSCALING,), notes)


def _plan(path: str) -> Mapping[str, Any]:
    if path == "-" and sys.stdin is None:
        raise BadInput("--plan -: there is no standard input")
    if path != "-" and not Path(path).exists():
        raise BadInput(f"--plan {path}: no such file")
    name = "standard input" if path == "-" else path
    try:
        if path == "-":
            loaded: Mapping[str, Any] = parse_json(sys.stdin.buffer.read(PLAN_MAX_BYTES + 1), PLAN_MAX_BYTES, name)
        else:
            loaded = read_json(Path(path), PLAN_MAX_BYTES)
        plan = loaded.get("plan") if loaded.get("schema") == "plimsoll.tune/1" else loaded  # what a tuning chose is a plan
        if not isinstance(plan, dict):
            raise BadInput(f"{name}: that tuning chose nothing")
        return plan
    except BadInput as error:
        raise type(error)(f"{error}; --plan wants what `plimsoll plan --json` or `plimsoll tune --json` printed") from None


def _settings(options: AssetsOptions, plan: Mapping[str, Any] | None) -> tuple[AssetSettings, tuple[str, ...]]:
    """What every file is made from, and what should be known of it."""
    ttft_s, job, asked = _ttft_s(options.slo), options.job or "", options.vllm
    # A job's name as Prometheus's own configuration or an operator of Kubernetes gives it.
    if options.job is not None and not re.fullmatch(r"[A-Za-z0-9_][\w.:/\-]{0,199}", job):
        raise BadInput(f"--job {job[:40]!r}: it is the name of a job in Prometheus: letters, digits and _ . : / -")
    cluster = _cluster(options)
    if plan is None:
        engine = _not_too_old(engine_named(asked or installed_vllm()))
        settings = AssetSettings(
            engine.release, ttft_s=ttft_s, own_job=job, cluster=cluster, made_by=_made_by(options, engine.release, None, None)
        )
        return settings, (*([engine.note] if engine.note else []), *_guesses(options))
    name = options.plan or ""
    facts = facts_of(plan, name)
    engine = _not_too_old(engine_named(release_of(plan, name), f"{name}:"))
    if asked is not None and engine_named(asked).release != engine.release:
        raise BadInput(f"the plan is for vLLM {engine}; plan it again with --vllm {asked}")
    if not facts.fits:
        why = f"the plan says that this server does not start: {why_it_does_not_fit(plan)}; nothing was written"
        raise Found(f"{why}. `plimsoll plan` without --json says what would help")
    line = planned_line(plan, name)
    made = ready(launches_in(line)[0], engine, facts)
    settings = AssetSettings(
        engine.release,
        facts,
        made.command,
        ttft_s,
        made.timers,
        kubernetes.one_name(options.name, "--name", "vllm", NAMESPACE),
        own_job=job,
        cluster=replace(cluster, port=made.command.port),
        targets=(f"127.0.0.1:{made.command.port}",),
        wheel=wheel_name(),
        made_by=_made_by(options, engine.release, plan, line),
    )
    cache = plan.get("kv")
    doubt: tuple[str, ...] = ()
    if isinstance(cache, dict) and cache.get("fits_at_low_end") is False:  # it fits by its central figures alone
        doubt = ("by the plan's own band the KV cache may turn out too small for one request, and then vLLM does not start",)
    return settings, (*doubt, *made.notes, *_guesses(options))


def _check_goes_with(options: AssetsOptions) -> None:
    """BadInput for an option that changes nothing of what is asked for."""
    launched = options.kind in (None, "all", "kubernetes") and options.plan is not None
    is_scaled = options.kind == AUTOSCALING
    taken = {
        "plan": options.kind not in IN_CLUSTER,
        "slo": options.kind != "patch",
        "job": options.kind != "patch",
        "namespace": launched or is_scaled or options.kind == "guard",
        "image": launched or options.kind in IN_CLUSTER,
        "name": launched or is_scaled or options.kind == "guard",
        "replicas": launched or options.kind == "guard",
        "selector": options.kind == "guard",
        "port": options.kind == "guard",
    }
    taken |= dict.fromkeys(LAUNCH_OPTIONS, launched) | dict.fromkeys(SCALING_OPTIONS, is_scaled)
    taken["workload"] = launched or is_scaled
    if (launched or is_scaled) and sum(text.count(",") + 1 for text in options.namespace) > 1:
        raise BadInput("--namespace: a launched server has one; --for guard takes several")
    for field, is_taken in taken.items():
        if getattr(options, field) and not is_taken:
            raise BadInput(f"{options_of(options)[field].name} changes nothing here (plimsoll assets --help)")


def _cluster(options: AssetsOptions) -> Cluster:
    """What the user wants of the objects in Kubernetes."""
    amounts, asked = "cpu=8 or memory=64Gi", () if options.selector is None else (options.selector,)
    selector = kubernetes.pairs_of(asked, "--selector", kubernetes.LABEL_VALUE, "LABEL=VALUE, several with commas")
    limits = kubernetes.pairs_of(options.limits, "--limits", kubernetes.QUANTITY, amounts)
    if any(resource.endswith("/gpu") for resource, _ in limits):
        raise BadInput("--limits: the GPUs are those of the plan")
    if options.kind not in ("guard", AUTOSCALING) and options.name == LEASE_NAME:
        raise BadInput(f"--name {LEASE_NAME}: guard's objects beside the server are called so")
    return Cluster(
        namespaces=kubernetes.words_of(options.namespace, "--namespace", NAMESPACE, "the name of a namespace") or ("models",),
        guard=kubernetes.one_name(options.name, "--name", LEASE_NAME, NAMESPACE) if options.kind == "guard" else LEASE_NAME,
        selector=",".join(f"{label}={value}" for label, value in selector),
        image=kubernetes.one_image(options.image, "--image", kubernetes.default_image()),
        server_image=kubernetes.one_image(options.server_image, "--server-image"),
        replicas=options.replicas or 1,
        port=options.port or 8000,
        workload={"deployment": "Deployment"}.get(options.workload or "", "StatefulSet"),
        host=kubernetes.one_name(options.host, "--host", "llm.example.com"),
        gateway=kubernetes.one_name(options.gateway, "--gateway", "", f"{NAMESPACE}/{OBJECT_NAME}"),
        requests=kubernetes.pairs_of(options.requests, "--requests", kubernetes.QUANTITY, amounts),
        limits=limits,
        tolerations=kubernetes.tolerations_of(options.toleration),
        node_selector=kubernetes.pairs_of(options.node_selector, "--node-selector", kubernetes.LABEL_VALUE, "LABEL=VALUE"),
    )


def _guesses(options: AssetsOptions) -> tuple[str, ...]:
    """What was not said and had to be assumed, of objects in Kubernetes."""
    said = []
    if options.kind == "guard" and not (options.selector and options.namespace):
        where = ", ".join(options.namespace) or "models"
        said.append(
            f"guard looks for pods with {options.selector or 'app=vllm'} in {where}: --selector and --namespace say otherwise"
        )
    if options.kind in ("guard", "patch", "kubernetes") and options.image is None:
        said.append(
            f"the image is {kubernetes.default_image()}, which your cluster must be able to pull: --image says otherwise"
        )
    return tuple(said)


def _not_too_old(engine: Engine) -> Engine:
    """The same engine; BadInput for one from before vLLM's present engine and metrics."""
    if not Behaviour.WORKER_EXTENSIONS.is_in(engine.release):
        raise BadInput(f"files are made for vLLM {Behaviour.WORKER_EXTENSIONS.since} and newer, not for {engine}")
    return engine


def _ttft_s(text: str | None) -> float:
    """The promise for the first token in `ttft=2s,tpot=50ms`."""
    found = {"ttft": AssetSettings.ttft_s}
    for part in () if text is None else text.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot)\s*=\s*(\d{1,6}(?:\.\d{1,6})?)\s*(ms|s)\s*", part)
        if match is None or float(match[2]) == 0:
            raise BadInput(f"--slo {text!r}: it is ttft=2s,tpot=50ms, or one of the two")
        found[match[1]] = float(match[2]) * (0.001 if match[3] == "ms" else 1)
    return found["ttft"]


def _made_by(
    options: AssetsOptions, release: str, plan: Mapping[str, Any] | None, line: str | None, file: str = ""
) -> tuple[str, ...]:
    """Which plan, version and command: without the folder and the switches, which change no byte."""
    is_named = options.kind in (*IN_CLUSTER, AUTOSCALING)
    words = ["plimsoll", "assets", "OUT_DIR", *(["--for", str(options.kind)] if is_named else [])]
    words += [file] if file else [Path(word).name for word in options.rest[1:]]
    for name, info in options_of(options).items():
        value = getattr(options, name) if info.metavar and name != "kind" else None
        for text in value if isinstance(value, tuple) else () if value is None else (str(value),):
            words += [info.name, text.rpartition("/")[2] if name == "plan" else text]
    said = " ".join(word if word.isprintable() else "?" for word in map(shlex.quote, redact_words(words)))
    lines = [f"Made by plimsoll {plimsoll.__version__} for vLLM {release}: {said}"]
    if plan is not None:
        digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        lines += [f"Plan {digest[:16]}: {line}"]
    return (*lines, "Edits are kept when it is made again, unless --force is said.")


def _wanted(settings: AssetSettings, plan: Mapping[str, Any] | None, ways: tuple[str, ...]) -> dict[str, bytes]:
    """Every file for these ways, by its path in the folder."""
    texts: dict[str, str] = {}
    launched = [way for way in ways if way in WAYS]
    if "monitoring" in ways:
        texts |= monitoring_files(settings)
    if "guard" in ways:
        texts |= kubernetes.guard_files(
            settings, "guard", monitoring_files(settings), (), guard_replicas=settings.cluster.replicas, has_api_key=False,
            has_plan=False, secret_variables=(), server_file="",
        )  # fmt: skip
    texts |= launch_files(settings, launched)
    wanted = {
        path: headed(path, text, settings.made_by).encode() for path, text in texts.items() if path.partition("/")[0] in ways
    }
    if launched and plan is not None:  # the plan that guard compares a start with, and the wheel of plimsoll.inside
        text = json.dumps(plan, indent=2, ensure_ascii=False).encode() + b"\n"
        wanted |= {f"{way}/plan.json": text for way in launched}
        if settings.command is not None and settings.command.has_gate:
            content = make_wheel().content
            wanted |= {f"{way}/{settings.wheel}": content for way in launched if way != "kubernetes"}
    return wanted


def _carry_out(
    options: AssetsOptions,
    folder: str,
    settings: AssetSettings,
    wanted: dict[str, bytes],
    ways: tuple[str, ...],
    notes: tuple[str, ...],
) -> int:
    known = files.recorded_in(files.read_there(folder, [files.MANIFEST]).get(files.MANIFEST))
    recorded = {path: sha for path, sha in known.items() if path.partition("/")[0] in ways}
    there = files.read_there(folder, {**wanted, **recorded})
    changes = files.decide(wanted, there, recorded, is_forced=options.force and not options.check)
    lines: tuple[str, ...] = ()
    if options.check:
        lines = tuple(files.differences(wanted, there, (*changes.remove, *changes.left)))
    else:
        files.write_files(folder, {path: wanted[path] for path in changes.write})
        files.remove_files(folder, changes.remove)
        files.write_files(folder, {files.MANIFEST: files.manifest(wanted, known, changes, settings.made_by)})
    model = settings.plan.model if settings.plan is not None else None
    made = report.AssetsReport(folder, settings.vllm, model, changes, notes, options.check, lines)
    show(report.as_json(made) if options.json else report.as_text(made))
    return 0 if made.is_fine else 1


COMMAND = OptionsCommand("assets", AssetsOptions, run, __doc__)
