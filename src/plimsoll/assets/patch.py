"""A patch for vLLM servers that Kubernetes runs already: plimsoll.inside from our image, its flags, probes, drain and grace.

It adds only missing fields. Fields that a Deployment has already stay, and are named with the reason. Deployments and the like
get a strategic-merge patch. In other objects (KServe's, LeaderWorkerSets) kustomize replaces whole lists, so they get a JSON
patch, and so does a command line with a secret in it: a list would repeat the secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import yaml

from plimsoll.assets.kubernetes import INSIDE_WHEEL, SECRET
from plimsoll.assets.launch_command import SHUTDOWN, fit_inside
from plimsoll.assets.settings import timers_of
from plimsoll.errors import BadInput, Found
from plimsoll.guard.adapters.cluster import OBJECT_NAME
from plimsoll.launch.command_line import EntryPoint, Launch, engine_meant, find_in_container, version_in_image
from plimsoll.launch.manifests import LLM_SERVICE, LLM_SERVICE_ARGUMENTS, ManifestStart, Tree, container_of
from plimsoll.net.client import table, tables
from plimsoll.redaction import redact_words
from plimsoll.vllm.versions import Behaviour, Engine

TEMPLATED = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Pod")  # kinds whose lists Kubernetes merges by name
ROLLED = ("Deployment", "StatefulSet", "DaemonSet")  # kinds that `kubectl rollout undo` knows
PROBE_FLAG = "--worker-extension-cls"
GROUPED = {"leaderWorkerTemplate", "headGroupSpec"}  # fields under which pods of other templates may work for the server
MERGED_BY = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}
DEPLOYMENT_MODE = "serving.kserve.io/deploymentMode"
INSIDE = "plimsoll-inside"  # the init container, and the volume that it fills
MOUNT, TOKENS = "/plimsoll", "/run/plimsoll"
TOKEN_VARIABLES = {"PLIMSOLL_TOKEN", "PLIMSOLL_TOKEN_FILE"}
START_S = 1800  # the weights are unknown here: a start that hangs is ended after half an hour
_HEALTH_PATHS = ("/health", "/v1/models", "/ping", "/")
_SERVE = re.compile(r"(?:\bvllm\s+serve|-m\s*vllm\.entrypoints\.openai\.api_server)(?=\s|$)")
_OWN_PATH = re.compile(r"(?<![\w$])PYTHONPATH=(\S*)")
_WORD = re.compile(r"[ \t]*(?:\\\n[ \t]*)*(?P<word>[^\s\\;&|<>()-][^\s;&|<>()]*)")


@dataclass(slots=True)
class ContainerPatch:
    """Fields to add to one container of one object, and those left as they are."""

    start: ManifestStart
    engine: Engine
    body: dict[str, Any] = field(default_factory=dict)  # fields of the container
    pod: dict[str, Any] = field(default_factory=dict)  # fields of the pod's specification
    added: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    holds_secret: bool = False  # in its arguments

    @property
    def where(self) -> str:
        return self.start.launch.source.partition(", ")[2]

    def about(self) -> list[str]:
        """Returns lines on what was added, what was left alone and what else should be known."""
        release = f"vLLM {self.engine.release}" + (f", {self.engine.because}" if self.engine.because else "")
        lines = [f"{self.where} ({release}): added {', '.join(self.added)}"] if self.added else []
        lines += [f"{self.where}: left alone: {why}" for why in self.left]
        return [*lines, *(f"{self.where}: {note}" for note in self.notes)]

    def refused(self, why: str) -> ContainerPatch:
        return ContainerPatch(self.start, self.engine, left=[f"all of it: {why}"])

    def set(self, name: str, value: str) -> None:
        self.body.setdefault("env", []).append({"name": name, "value": value})
        self.added.append(name)


def patch_files(starts: Sequence[ManifestStart], image: str, asked: str | None) -> tuple[dict[str, str], list[str]]:
    """Returns the files under patch/, and notes on what was added and left alone; Found if nothing fits any server."""
    named = [start for start in starts if re.fullmatch(OBJECT_NAME, _target(start)[1]) and "initContainers" not in start.path]
    patches = [_patch(start, image, asked) for start in named]
    if not patches:
        raise BadInput("no object with a name in it; `kubectl get deploy NAME -o yaml` prints one")
    wanted = [patch for patch in patches if patch.body or patch.pod]
    if not wanted:
        why = "; ".join(f"{patch.where}: {' '.join(patch.left).removeprefix('all of it: ')}" for patch in patches)
        raise Found(f"nothing to patch: {why}")
    by_object: dict[tuple[str, str, str], list[ContainerPatch]] = {}
    for patch in wanted:
        by_object.setdefault(_target(patch.start), []).append(patch)
    files: dict[str, str] = {}
    entries: list[dict[str, Any]] = []
    for (kind, name, namespace), parts in by_object.items():
        path = f"{kind.lower()}-{name}.yaml"
        is_merged = kind in TEMPLATED and not any(part.holds_secret for part in parts)
        made = _merge_patch(parts) if is_merged else _json_patch(parts)
        at = f"{kind.lower()} {name}" + (f" -n {namespace}" if namespace else "")
        lines = [f"# {line}" for part in parts for line in part.about()]
        if kind in ("Pod", "Job"):
            lines.append("# Kubernetes changes none of these in place: delete it, then apply the patched object.")
        else:
            lines.append(f"# By kubectl alone: kubectl patch {at} {'' if is_merged else '--type json '}--patch-file {path}")
            undo = f"rollout undo {at}" if kind in ROLLED else "replace -f THE-OBJECT-AS-IT-WAS.yaml (no resourceVersion in it)"
            lines.append(f"# Back again: kubectl {undo}")
        files[f"patch/{path}"] = "\n".join([*lines, _dump(made)])
        target = {"kind": kind, "name": name} | ({"namespace": namespace} if namespace else {})
        entries.append({"path": path} if is_merged else {"path": path, "target": target})
    component = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component", "patches": entries}
    files["patch/kustomization.yaml"] = f"{_HEAD}{_dump(component)}"
    return files, [note for patch in patches for note in patch.about()]


_HEAD = f"""\
# Beside your Deployment, in a kustomization of yours (GitOps keeps it there, and reverts what kubectl patches):
#   resources: [your Deployment]
#   components: [this folder]
# Before that, in the namespace of the Deployment: kubectl create secret generic {SECRET} --from-file=gate.token
# Applying it and taking it back both roll the pods. To take it back, take the line under `components:` out.
"""


def _target(start: ManifestStart) -> tuple[str, str, str]:
    metadata = table(start.owner.get("metadata"))
    return start.kind, str(metadata.get("name") or ""), str(metadata.get("namespace") or "")


# One container


def _patch(start: ManifestStart, image: str, asked: str | None) -> ContainerPatch:
    engine = engine_meant(start.launch, asked)
    patch = ContainerPatch(start, engine)
    if start.path[-1] != "model" and not isinstance(start.body.get("name"), str):
        return patch.refused("it has no name, by which Kubernetes would merge a patch")
    if any(each.get("name") == INSIDE for each in tables(start.pod.get("initContainers"))):
        return patch.refused("it has plimsoll.inside already")
    if not Behaviour.WORKER_EXTENSIONS.is_in(engine.release):
        return patch.refused(f"plimsoll.inside is for vLLM {Behaviour.WORKER_EXTENSIONS.since} and newer")
    fitted, why = fit_inside(start.launch, engine)
    if why:
        return patch.refused(f"no gate in this server: {why}")
    added, changed = fitted.added, fitted.changed
    backends = ("--distributed-executor-backend", "--data-parallel-backend")
    if GROUPED & set(start.path) or any(_value_of(start.launch, flag) == "ray" for flag in backends):
        # Every worker imports the probe, and those in other pods would not find it.
        added, changed = tuple(word for at, word in enumerate(added) if PROBE_FLAG not in (word, added[at - 1])), ()
        patch.left.append(f"{PROBE_FLAG}: workers in other pods have no wheel")
    variables = _variables(start.body)
    ours = (MOUNT,) if TOKEN_VARIABLES & variables.keys() else (MOUNT, TOKENS)
    mounts = [str(each.get("mountPath")).rstrip("/") for each in tables(start.body.get("volumeMounts"))]
    if taken := [path for path in mounts if path in ours]:
        return patch.refused(f"something else is mounted at {taken[0]}")
    if "PYTHONPATH" in variables and variables["PYTHONPATH"] is None:
        return patch.refused(f"PYTHONPATH comes from another object; put {INSIDE_WHEEL} in front of it there")
    own_paths = [path for word in _words(start.body) for path in _OWN_PATH.findall(word)]
    if any(INSIDE_WHEEL not in path and "PYTHONPATH" not in path for path in own_paths):
        return patch.refused(f"its script sets PYTHONPATH; put {INSIDE_WHEEL} in front of it there")
    if added and not _add_words(patch, added):
        flags = " ".join(added)
        return patch.refused(f"its script has no clear place for flags, or holds a secret; first add {flags} yourself")
    image_release = version_in_image(start.launch.image) if start.launch.image else None
    if not (asked or image_release or start.launch.vllm):
        patch.notes.append(f"its image names no release: the flags are those of vLLM {engine.release}; --vllm says otherwise")
    if owner := _maker(start.owner):
        patch.notes.append(f"{owner} makes this object and would undo the patch: patch that one instead")
    _add_wheel(patch, image, variables)
    for name, value in changed:
        patch.set(name, value)
    patch.notes += [f"{remark.name}: {remark.says}" for remark in fitted.remarks]
    _add_probes(patch)
    return patch


def _maker(owner: dict[str, Tree]) -> str:
    """Returns the object from which a controller makes this one; "" if it names none."""
    metadata = table(owner.get("metadata"))
    for maker in tables(metadata.get("ownerReferences")):
        return f"{maker.get('kind')} {maker.get('name')}"
    service = table(metadata.get("labels")).get("serving.kserve.io/inferenceservice")
    return f"InferenceService {service}" if service and owner.get("kind") in TEMPLATED else ""


def _variables(body: dict[str, Tree]) -> dict[str, str | None]:
    """Returns the variables of a container; None for one whose value is elsewhere."""
    return {
        str(each.get("name")): None if "valueFrom" in each else str(each.get("value") or "") for each in tables(body.get("env"))
    }


def _add_words(patch: ContainerPatch, words: tuple[str, ...]) -> bool:
    """Puts flags where the container takes them: behind its arguments, into its script, or into KServe's variable."""
    start, body = patch.start, patch.start.body
    if start.kind == LLM_SERVICE and not body.get("command"):
        own = _variables(body).get(LLM_SERVICE_ARGUMENTS)
        if own and _is_secret(own.split()):
            return False
        patch.set(LLM_SERVICE_ARGUMENTS, " ".join(filter(None, (own, *words))))
        return True
    command, given = _words(body, "command"), _words(body, "args")
    all_words = [*command, *given]
    is_shell = bool(all_words) and re.search(r"(?:^|/)(?:ba|da|a|z|k)?sh$", all_words[0])
    at = next((n for n, word in enumerate(all_words[:-1], 1) if is_shell and re.fullmatch(r"-[a-zA-Z]*c", word)), 0)
    while 0 < at < len(all_words) - 1 and all_words[at].startswith("-"):  # the shell's further options: `bash -lc -- SCRIPT`
        at += 1
    if not at:  # no shell runs
        patch.body["args"], patch.holds_secret = [*given, *words], _is_secret(given)
        patch.added.append(" ".join(words))
        return _is_as_wished(patch, words)
    script = all_words[at]
    lines = [(place, script[: place.start()].rpartition("\n")[2]) for place in _SERVE.finditer(script)]
    places = [place for place, before in lines if not before.lstrip().startswith("#")]
    if len(places) != 1 or _is_secret(script.split()):
        return False
    end = places[0].end()
    if start.launch.entry is EntryPoint.SERVE and (model := _WORD.match(script, end)):
        end = model.end()
    key, at = ("command", at) if at < len(command) else ("args", at - len(command))
    words_there = command if key == "command" else given
    patch.body[key] = [*words_there[:at], f"{script[:end]} {' '.join(words)}{script[end:]}", *words_there[at + 1 :]]
    patch.added.append(f"{' '.join(words)} in its script")
    if not _is_as_wished(patch, words):
        del patch.body[key], patch.added[-1]
        return False
    return True


def _words(body: dict[str, Tree], *keys: str) -> list[str]:
    lists = [body.get(key) for key in keys or ("command", "args")]
    return [word for words in lists if isinstance(words, list) for word in words if isinstance(word, str)]


def _is_secret(words: Sequence[str]) -> bool:
    return list(redact_words(words)) != list(words)


def _is_as_wished(patch: ContainerPatch, words: tuple[str, ...]) -> bool:
    """True if the changed container starts the same command with our words added and nothing else."""
    start = patch.start
    changed: dict[str, Tree] = {**start.body, **{key: value for key, value in patch.body.items() if key in ("command", "args")}}
    if start.path and start.path[-1] == "model":  # KServe's runtime has the rest of it
        return True
    launch = find_in_container(container_of(changed), start.launch.source)
    given = launch.arguments if launch is not None else ()
    places = [at for at in range(len(given)) if given[at : at + len(words)] == words]
    return bool(places) and (*given[: places[0]], *given[places[0] + len(words) :]) == tuple(start.launch.arguments)


def _add_wheel(patch: ContainerPatch, image: str, variables: dict[str, str | None]) -> None:
    """Adds the init container with the wheel, first in Python's search path, and the token of the gate."""
    own = variables.get("PYTHONPATH") or ""
    if INSIDE_WHEEL not in own.split(":"):
        patch.set("PYTHONPATH", INSIDE_WHEEL + (f":{own}" if own else ""))
    # Limits equal its requests, or the pod would lose its QoS class Guaranteed and with it its dedicated cores.
    resources = {"cpu": "500m", "memory": "256Mi"}
    security = {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    # The user is the image's own or the pod's: OpenShift refuses one outside the namespace's range.
    if table(patch.start.pod.get("securityContext")).get("runAsUser") != "0":
        security["runAsNonRoot"] = True
    patch.pod["initContainers"] = [{
        "name": INSIDE, "image": image, "command": ["plimsoll", "inside", "wheel", INSIDE_WHEEL],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": security,
        "volumeMounts": [{"name": INSIDE, "mountPath": MOUNT}],
    }]  # fmt: skip
    patch.pod["volumes"] = [{"name": INSIDE, "emptyDir": {}}]
    patch.body["volumeMounts"] = [{"name": INSIDE, "mountPath": MOUNT, "readOnly": True}]
    patch.added.append("an init container that copies the wheel")
    if TOKEN_VARIABLES & variables.keys():
        patch.left.append("the gate's token: it has one")
        return
    items = [{"key": "gate.token", "path": "gate.token"}]
    patch.pod["volumes"].append({"name": "plimsoll-token", "secret": {"secretName": SECRET, "items": items}})
    patch.body["volumeMounts"].append({"name": "plimsoll-token", "mountPath": TOKENS, "readOnly": True})
    patch.set("PLIMSOLL_TOKEN_FILE", f"{TOKENS}/gate.token")


def _add_probes(patch: ContainerPatch) -> None:
    """Adds readiness by the gate, a patient startup probe, a drain before SIGTERM and enough grace for all of it."""
    launch, body, pod = patch.start.launch, patch.start.body, patch.start.pod
    may_be_knative = _may_be_knative(patch)
    if any(word.startswith("--ssl-") for word in launch.arguments) or patch.start.kind == LLM_SERVICE:
        patch.left.append("probes and preStop: the server speaks TLS; a readiness probe is /plimsoll/ready with scheme HTTPS")
        return
    # KServe's runtime, a file or words from elsewhere may name another port.
    is_elsewhere = patch.start.path[-1] == "model" or _value_of(launch, "--config") is not None
    is_elsewhere = is_elsewhere or any(
        word.startswith("$") and not before.startswith("-") for before, word in pairwise(launch.arguments)
    )
    typed = _value_of(launch, "--port") or ("" if is_elsewhere else "8000")
    wished = _value_of(launch, SHUTDOWN) or ""
    if not typed.isdecimal() or not 0 < int(typed) < 65536:
        why = "its port is not known here; readiness is /plimsoll/ready, and preStop is in docs/inside.md"
        patch.left.append(f"probes and preStop: {why}")
        return
    port, timers = int(typed), timers_of(int(wished) if wished.isdecimal() and len(wished) < 6 else None)
    patch.body |= _probes(patch, body, port)
    if may_be_knative:
        patch.left.append("preStop and terminationGracePeriodSeconds: Knative refuses both")
        return
    has_flag = SHUTDOWN in " ".join(launch.arguments)
    leaving_s = timers.drain_s if has_flag else timers.shutdown_s
    if table(body.get("lifecycle")).get("preStop"):
        drain = f"python3 -m plimsoll.inside.leave {leaving_s} {port}"
        patch.left.append(f"preStop: it has one; `{drain}` in it would drain the server")
    else:
        command = ["python3", "-m", "plimsoll.inside.leave", str(leaving_s), str(port)]
        patch.body["lifecycle"] = {"preStop": {"exec": {"command": command}}}
        patch.added.append(f"preStop ({leaving_s} s)")
    given = pod.get("terminationGracePeriodSeconds")
    grace = int(given) if isinstance(given, str) and given.isdecimal() else 30
    if grace < timers.grace_s:
        patch.pod["terminationGracePeriodSeconds"] = timers.grace_s
        patch.added.append(f"terminationGracePeriodSeconds {timers.grace_s} (was {grace})")
    else:
        patch.left.append(f"terminationGracePeriodSeconds: {grace} s are enough")


def _may_be_knative(patch: ContainerPatch) -> bool:
    """True if KServe may pass the pod to Knative; adds a note on the consequences."""
    start = patch.start
    mode = table(table(start.owner.get("metadata")).get("annotations")).get(DEPLOYMENT_MODE)
    if start.kind != "InferenceService" or mode in ("RawDeployment", "Standard"):
        return False
    says = "Knative takes the init container only with its feature kubernetes.podspec-init-containers"
    without = f"; without Knative annotate {DEPLOYMENT_MODE}: Standard (RawDeployment in older KServe) first"
    patch.notes.append(says + ("" if mode else without))
    return True


def _probes(patch: ContainerPatch, body: dict[str, Tree], port: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    readiness = body.get("readinessProbe")
    path = table(table(readiness).get("httpGet")).get("path")
    # Alive: five minutes without an answer. Never readiness: a drain would kill the server.
    for name, ask, every_s, timeout_s, failures, about, there in (
        ("startupProbe", "/health", 10, 5, START_S // 10, f"({START_S // 60} min)", "it has one"),
        ("readinessProbe", "/plimsoll/ready", 2, 2, 2, "/plimsoll/ready", ""),
        ("livenessProbe", "/health", 30, 10, 10, "(5 min)", "it has one; `plimsoll lint` says if it is too short"),
    ):
        if not body.get(name):
            made[name] = {"httpGet": {"path": ask, "port": port}, "periodSeconds": every_s, "timeoutSeconds": timeout_s,
                          "failureThreshold": failures}  # fmt: skip
            patch.added.append(f"{name} {about}")
        elif there:
            patch.left.append(f"{name}: {there}")
        elif path == ask:
            patch.left.append(f"{name}: it asks the gate")
        elif path in _HEALTH_PATHS:
            made[name] = {"httpGet": {"path": ask}}
            patch.added.append(f"{name} {path} -> {ask}")
        else:
            kind = next((key for key in ("exec", "tcpSocket", "grpc", "httpGet") if key in table(readiness)), "probe")
            patch.left.append(f"{name}: its {kind} is yours; a drain takes effect only with {ask} in it")
    return made


def _value_of(launch: Launch, flag: str) -> str | None:
    found = None
    for at, word in enumerate(launch.arguments):
        name, given, value = word.partition("=")
        if name == flag:
            found = value if given else launch.arguments[at + 1] if at + 1 < len(launch.arguments) else None
    return found


# The two forms


def _merge_patch(parts: Sequence[ContainerPatch]) -> dict[str, Any]:
    start = parts[0].start
    kind, name, namespace = _target(start)
    spec: dict[str, Any] = {}
    for part in parts:
        for key, value in part.pod.items():
            known = spec.setdefault(key, value)
            if isinstance(value, list):
                known += [each for each in value if each not in known]
            else:
                spec[key] = max(known, value)
        spec.setdefault("containers", []).append({"name": part.start.body["name"], **part.body})
    where = start.path[: start.path.index("containers")]
    made: dict[str, Any] = spec
    for key in reversed(where):
        made = {key: made}
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": start.owner.get("apiVersion") or "apps/v1", "kind": kind, "metadata": metadata, **made}


def _json_patch(parts: Sequence[ContainerPatch]) -> list[dict[str, Any]]:
    """Returns operations that append to lists and add fields; none rewrites an existing value."""
    operations: list[dict[str, Any]] = []
    done: set[str] = set()
    for part in parts:
        path = part.start.path
        pod = "/" + "/".join(path[: path.index("containers")] if "containers" in path else path[:-1])
        for at, there, fields in ((pod, part.start.pod, part.pod), ("/" + "/".join(path), part.start.body, part.body)):
            for key, value in fields.items():
                operations += _operations(f"{at}/{key}", there.get(key), value, MERGED_BY.get(key, ""), done)
    return operations


def _operations(path: str, there: Tree, value: Any, by: str, done: set[str]) -> list[dict[str, Any]]:
    if isinstance(there, dict) and isinstance(value, dict):
        return [each for key, inner in value.items() for each in _operations(f"{path}/{key}", there.get(key), inner, "", done)]
    if isinstance(value, list) and isinstance(there, list) and value[: len(there)] == there:  # arguments, with ours behind them
        return [{"op": "add", "path": f"{path}/-", "value": word} for word in value[len(there) :]]
    if not isinstance(value, list) or not by:
        return [{"op": "add", "path": path, "value": value}]
    known = [str(each.get(by)) for each in tables(there)]
    operations: list[dict[str, Any]] = []
    if not known and path not in done:
        operations.append({"op": "add", "path": path, "value": []})
    done.add(path)
    for each in value:
        mark = f"{path} {each[by]}"
        if each[by] in known:
            operations.append({"op": "replace", "path": f"{path}/{known.index(each[by])}", "value": each})
        elif mark not in done:
            operations.append({"op": "add", "path": f"{path}/-", "value": each})
        done.add(mark)
    return operations


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, lists indented, nothing shared."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - yaml's signature
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text and all(line == line.rstrip() for line in text.split("\n")) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _dump(tree: Any) -> str:
    plain = json.loads(json.dumps(tree))  # the reader's own mappings are plain ones
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, width=200, allow_unicode=True)
