"""The manifests against the API's own schemas, and the promises that a schema does not know."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from plimsoll.assets.launch import launch_files
from plimsoll.assets.settings import Cluster, Toleration
from plimsoll.cli.main import main
from plimsoll.guard.adapters.cluster import API_CALLS
from plimsoll.tune.autoscale import IN_FLIGHT, ScalingRule
from tests.assets.plans import MODELS, SECRET, plan_of, random_plan, settings_of
from tests.assets.roles import Right, rights_of, role_objects
from tests.assets.test_autoscaling import files as scaling_files
from tests.each import sure, times
from tests.options import guard_options

MINORS = sorted({tuple(map(int, version.split(".")[:2])) for version in all_versions()})[-4:]
CRDS = Path(__file__).parents[1] / "captures" / "crds.json"
PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
PLAIN = plan_of("vllm", "serve", MODELS[0], "--api-key", SECRET)
TOKEN = "a-token-that-is-long-enough"
WISHES = Cluster(
    namespaces=("chat",), image="registry.example.com/plimsoll:1", server_image="registry.example.com/vllm:v0.32.0", replicas=3,
    workload="Deployment", host="chat.example.com", gateway="infra/edge", requests=(("cpu", "8"), ("memory", "64Gi")),
    limits=(("memory", "96Gi"),), tolerations=(Toleration("nvidia.com/gpu", effect="NoSchedule"), Toleration("team", "llm")),
    node_selector=(("nvidia.com/gpu.product", "NVIDIA-L40S"),),
)  # fmt: skip


USUAL = Cluster()


def _launched(plan: dict[str, Any], cluster: Cluster = USUAL) -> list[dict[str, Any]]:
    files = launch_files(replace(settings_of(plan), cluster=cluster), ["kubernetes"])
    return [one for name in ("vllm", "guard") for one in yaml.safe_load_all(files[f"kubernetes/{name}.yaml"])]


def _of_kind(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (found,) = [one for one in objects if one["kind"] == kind and name in ("", one["metadata"]["name"])]
    return found


def _guard(tmp_path: Path, *words: str) -> dict[str, str]:
    """The files of `--for guard`, by their paths below guard/."""
    assert main(["assets", str(tmp_path / "out"), "--for", "guard", *words]) == 0
    folder = tmp_path / "out" / "guard"
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in folder.rglob("*") if p.is_file()}


def test_every_object_is_valid_in_the_last_four_minors() -> None:
    """No field that the API does not have or of another kind, with every wish; `make soak` tries all four, this two."""
    plans = [(PLAIN, USUAL), (PLAIN, WISHES), (random_plan(random.Random(1)), USUAL), (random_plan(random.Random(2)), WISHES)]
    objects = [one for plan, cluster in plans for one in _launched(plan, cluster) if one["kind"] != "HTTPRoute"]
    distinct = {json.dumps(one, sort_keys=True): one for one in objects}
    for major, minor in MINORS[:: times(3, 1)]:
        for one in distinct.values():
            kubernetes_validate.validate(one, f"{major}.{minor}", strict=True)
    broken = _of_kind(_launched(PLAIN), "StatefulSet")
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, f"{MINORS[-1][0]}.{MINORS[-1][1]}", strict=True)


def test_the_server_has_no_rights_and_probes_that_are_what_each_is_for() -> None:
    """No token, no role; ready is the gate's word, alive is /health with five minutes' patience; GPUs by their maker's name."""
    objects = _launched(PLAIN)
    pod = _of_kind(objects, "StatefulSet")["spec"]["template"]["spec"]
    account = _of_kind(objects, "ServiceAccount", "vllm")
    assert account["automountServiceAccountToken"] is pod["automountServiceAccountToken"] is False
    bound = {subject["name"] for one in objects if one["kind"] == "RoleBinding" for subject in one["subjects"]}
    assert bound == {"plimsoll-guard"}
    container = pod["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/plimsoll/ready"
    alive = container["livenessProbe"]
    assert alive["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/health"
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 300
    for gpu, key in (("H100", "nvidia.com/gpu"), ("MI300X", "amd.com/gpu")):
        plan = plan_of("vllm", "serve", MODELS[0], "--tensor-parallel-size", "2", gpu=gpu)
        container = _of_kind(_launched(plan), "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"] == {key: "2"}


def test_what_one_object_names_the_others_have() -> None:
    """Selectors, service names, accounts and ports fit together, and a Service called vllm becomes no setting of vLLM's."""
    objects = _launched(PLAIN)
    assert {one["metadata"]["namespace"] for one in objects} == {"models"}
    stateful, guard = _of_kind(objects, "StatefulSet"), _of_kind(objects, "Deployment")
    labels, guard_labels = (one["spec"]["template"]["metadata"]["labels"] for one in (stateful, guard))
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    assert stateful["spec"]["serviceName"] in services
    assert services["vllm"]["selector"] == services["vllm-api"]["selector"] == labels
    assert services["plimsoll-guard"]["selector"] == guard_labels
    assert _of_kind(objects, "PodDisruptionBudget", "vllm")["spec"]["selector"]["matchLabels"] == labels
    policy = _of_kind(objects, "NetworkPolicy", "vllm")["spec"]["ingress"][0]["from"]
    assert [peer["podSelector"]["matchLabels"] for peer in policy if "podSelector" in peer] == [guard_labels]
    for one in (stateful, guard):
        pod = one["spec"]["template"]["spec"]
        assert pod["enableServiceLinks"] is False
        names = {volume["name"] for volume in pod["volumes"]}
        names |= {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for c in [*pod["containers"], *pod.get("initContainers", [])] for mount in c["volumeMounts"]}
        assert mounted == names


# Guard alone
def test_guard_needs_no_plan(tmp_path: Path) -> None:
    """Every option stands where it belongs, the pod may write nothing but its volumes, and is no root."""
    files = _guard(
        tmp_path, "--namespace", "models,chat", "--name", "watch", "--selector", "app=llm,tier=a", "--image", "r.example/p:1",
        "--replicas", "2", "--port", "9000",
    )  # fmt: skip
    objects = list(yaml.safe_load_all(files["guard.yaml"]))
    for one in objects:
        kubernetes_validate.validate(one, f"{MINORS[-1][0]}.{MINORS[-1][1]}", strict=True)
    deployment = _of_kind(objects, "Deployment", "watch")["spec"]
    container = deployment["template"]["spec"]["containers"][0]
    assert (deployment["replicas"], deployment["strategy"]["type"], container["image"]) == (2, "Recreate", "r.example/p:1")
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert deployment["template"]["spec"]["securityContext"]["runAsNonRoot"]
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
    assert probes == ["/healthz"] * 3
    assert "--act" not in container["command"]
    assert {one["metadata"]["namespace"] for one in objects if one["kind"] == "Role"} == {"models", "chat"}
    config = files["plimsoll.toml"]
    for line in ('selector = "app=llm,tier=a"', 'namespace = ["models", "chat"]', "port = 9000", 'lease = "watch"'):
        assert line in config
    monitors = list(yaml.safe_load_all(files["components/prometheus-operator/monitors.yaml"]))
    engines = _of_kind(monitors, "PodMonitor", "watch-engines")
    assert engines["spec"]["selector"]["matchLabels"] == {"app": "llm", "tier": "a"}
    assert engines["spec"]["namespaceSelector"]["matchNames"] == ["models", "chat"]


def test_guard_reads_its_configuration(tmp_path: Path) -> None:
    """guard takes the file as it is written, with the Secret mounted: it discovers, and would act if it were told to."""
    text = _guard(tmp_path, "--namespace", "models,chat", "--selector", "app=vllm")["plimsoll.toml"]
    for name in ("gate.token", "guard.token", "guard-read.token"):
        (tmp_path / name).write_text(TOKEN + name, encoding="utf-8")
        (tmp_path / name).chmod(0o600)
    path = tmp_path / "plimsoll.toml"
    path.write_text(re.sub(r'"/etc/plimsoll-secrets/', f'"{tmp_path}/', text), encoding="utf-8")
    asked_for = guard_options(["--config", str(path), "--act"], {})
    found = sure(asked_for.config.discover.kubernetes)
    assert (found.selector, found.namespaces, found.act) == ("app=vllm", ("models", "chat"), True)
    assert asked_for.config.warnings == ()


def test_one_secret_is_named_everywhere(tmp_path: Path) -> None:
    """Server, guard, monitor and the commands to make it agree on one name and on its keys."""
    files = _guard(tmp_path)
    launched = launch_files(settings_of(PLAIN), ["kubernetes"])
    text = "".join([*files.values(), *launched.values()])
    assert set(re.findall(r"secretName: (\S+)", text)) == {"plimsoll"}
    assert set(re.findall(r"create secret generic (\S+)", text)) == {"plimsoll"}
    keys = set(re.findall(r"- key: (\S+)", text)) | set(re.findall(r"^ +key: (\S+token)", text, re.MULTILINE))
    assert keys == {"gate.token", "guard.token", "guard-read.token", "VLLM_API_KEY"}


def test_roles_allow_the_calls_and_no_others() -> None:
    """Each call of guard's table is allowed where it is made; each right is of a call; a part that is left out has none."""
    cluster = Cluster(namespaces=("models", "chat"), guard="watch")
    rights = rights_of(role_objects(cluster))
    wanted = {
        Right(call.verb, call.group, call.resource, space, call.name.replace("plimsoll-guard", "watch"))
        for call in API_CALLS
        for space in {"fleet": cluster.namespaces, "own": ("models",), "cluster": ("",)}[call.scope]
    }
    assert rights == wanted
    observing = rights_of(role_objects(cluster, ["observe"]))
    assert not any(right.resource == "pods/eviction" for right in observing)
    assert observing < rights
    (bound,) = {one["subjects"][0]["namespace"] for one in role_objects(cluster) if "subjects" in one}
    assert bound == "models"


def _unknown(value: Any, tree: Any, path: str = "") -> list[str]:
    """Fields of an object that its CRD does not have; what the tree does not describe may be anything."""
    if isinstance(value, list) and isinstance(tree, list):
        return [name for each in value for name in _unknown(each, tree[0], f"{path}[]")]
    if not isinstance(value, dict) or not isinstance(tree, dict):
        return []
    if "*" in tree:
        return [name for each in value.values() for name in _unknown(each, tree["*"], f"{path}.*")]
    return [
        name
        for key, each in value.items()
        for name in ([f"{path}.{key}"] if key not in tree else _unknown(each, tree[key], f"{path}.{key}"))
    ]


def test_objects_of_operators_have_only_fields_that_their_crds_have(tmp_path: Path) -> None:
    """PodMonitors, PrometheusRules, the HTTPRoute, the ScaledObject, and what docs/kubernetes.md shows; the check can fail."""
    known = json.loads(CRDS.read_text(encoding="utf-8"))
    files = _guard(tmp_path)
    texts = [files[f"components/prometheus-operator/{name}.yaml"] for name in ("monitors", "rules")]
    texts.append(scaling_files(ScalingRule(IN_FLIGHT, 16, 2, 7, 30, 600))["autoscaling/scaledobject.yaml"])
    shown = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    objects = [one for text in (*texts, *shown) for one in yaml.safe_load_all(text) if "kind" in one]
    objects += _launched(PLAIN, WISHES)
    checked = [one for one in objects if one["kind"] in known]
    assert {one["kind"] for one in checked} == set(known)
    assert [name for one in checked for name in _unknown(one, known[one["kind"]])] == []
    assert _unknown({"spec": {"hostname": "a"}}, known["HTTPRoute"]) == [".spec.hostname"]
    (scaled,) = [one for one in objects if one["kind"] == "ScaledObject"]  # its behaviour is an autoscaler's of Kubernetes
    spec = {"scaleTargetRef": scaled["spec"]["scaleTargetRef"], "minReplicas": 2, "maxReplicas": 7}
    spec["behavior"] = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "a"}, "spec": spec}
    kubernetes_validate.validate(scaler, f"{MINORS[-1][0]}.{MINORS[-1][1]}", strict=True)
    # The template of KServe's LLMInferenceService is a pod's specification; only a pod must have an image and a name.
    (service,) = [one for one in objects if one["kind"] == "LLMInferenceService"]
    (container,) = service["spec"]["template"]["containers"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": service["spec"]["template"]}
    kubernetes_validate.validate(pod, f"{MINORS[-1][0]}.{MINORS[-1][1]}", strict=True)
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(service), encoding="utf-8")
    assert main(["flags", str(tmp_path / "service.yaml")]) == 0
    assert main(["inside", "check", "--require", "gate,probe", "--vllm", "0.25.1", str(tmp_path / "service.yaml")]) == 0
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/plimsoll"}
