"""The manifests against the API's own schemas, and the promises that a schema does not know."""

from __future__ import annotations

import random
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from plimsoll.assets.launch import launch_files
from tests.assets.plans import MODELS, SECRET, plan_of, random_plan, settings_of
from tests.each import each, times

MINORS = sorted({tuple(map(int, version.split(".")[:2])) for version in all_versions()})[-4:]
PLAIN = plan_of("vllm", "serve", MODELS[0], "--api-key", SECRET)


def _objects(plan: dict[str, Any]) -> list[dict[str, Any]]:
    files = launch_files(settings_of(plan), ["kubernetes"])
    return [one for name in ("vllm", "guard") for one in yaml.safe_load_all(files[f"kubernetes/{name}.yaml"])]


@each("minor", MINORS)
@each("seed", [None, *range(times(1, 20))])
def test_every_object_is_valid_in_the_last_four_minors(minor: tuple[int, int], seed: int | None) -> None:
    """No field that the API does not have, none of another kind, for a plain plan and for random ones."""
    plan = PLAIN if seed is None else random_plan(random.Random(seed))
    objects = _objects(plan)
    assert len(objects) == 14
    for one in objects:
        kubernetes_validate.validate(one, f"{minor[0]}.{minor[1]}", strict=True)


def test_a_wrong_field_would_be_seen() -> None:
    """The check is one that can fail."""
    broken = next(one for one in _objects(PLAIN) if one["kind"] == "StatefulSet")
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, f"{MINORS[-1][0]}.{MINORS[-1][1]}", strict=True)


def test_guard_has_no_more_rights_than_its_deeds_need() -> None:
    """It may see pods, evict the server's own, and keep one lease; it may change nothing else."""
    (role,) = [one for one in _objects(PLAIN) if one["kind"] == "Role"]
    rights = {
        (r, v, tuple(rule.get("resourceNames", ()))) for rule in role["rules"] for r in rule["resources"] for v in rule["verbs"]
    }
    assert rights == {
        ("pods", "get", ()), ("pods", "list", ()), ("pods/eviction", "create", ("vllm-0",)), ("leases", "create", ()),
        ("leases", "get", ("plimsoll-guard",)), ("leases", "update", ("plimsoll-guard",)),
    }  # fmt: skip


def test_the_server_has_no_rights_at_all() -> None:
    """Neither its account nor its pod is given a token, and no role names it."""
    objects = _objects(PLAIN)
    (account,) = [one for one in objects if one["kind"] == "ServiceAccount" and one["metadata"]["name"] == "vllm"]
    pod = next(one for one in objects if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    assert account["automountServiceAccountToken"] is pod["automountServiceAccountToken"] is False
    assert all(
        subject["name"] == "plimsoll-guard" for one in objects if one["kind"] == "RoleBinding" for subject in one["subjects"]
    )


def test_probes_are_what_each_is_for() -> None:
    """Ready is the gate's word, alive is /health with five minutes' patience, and a start may take its time."""
    container = next(one for one in _objects(PLAIN) if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]["containers"][
        0
    ]
    assert container["readinessProbe"]["httpGet"]["path"] == "/plimsoll/ready"
    alive = container["livenessProbe"]
    assert alive["httpGet"]["path"] == "/health"
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 300
    assert container["startupProbe"]["httpGet"]["path"] == "/health"


def test_a_service_called_vllm_does_not_become_vllms_setting() -> None:
    """Kubernetes would set VLLM_PORT=tcp://..., and vLLM refuses that."""
    assert all(
        one["spec"]["template"]["spec"]["enableServiceLinks"] is False
        for one in _objects(PLAIN)
        if one["kind"] in ("StatefulSet", "Deployment")
    )


def test_what_one_object_names_the_others_have() -> None:
    """Selectors, service names, claims, accounts and ports fit together."""
    objects = _objects(PLAIN)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for one in objects:
        by_kind.setdefault(one["kind"], []).append(one)
        assert one["metadata"]["namespace"] == "models"
    (stateful,) = by_kind["StatefulSet"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    services = {one["metadata"]["name"]: one["spec"] for one in by_kind["Service"]}
    assert stateful["spec"]["serviceName"] in services
    assert services["vllm"]["selector"] == services["vllm-api"]["selector"] == labels
    assert services["vllm"]["clusterIP"] == "None"
    assert by_kind["PodDisruptionBudget"][0]["spec"]["selector"]["matchLabels"] == labels
    ports = {port["name"] for port in stateful["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {"http"}
    (guard,) = by_kind["Deployment"]
    policy = next(one for one in by_kind["NetworkPolicy"] if one["metadata"]["name"] == "vllm")
    allowed = [peer["podSelector"]["matchLabels"] for peer in policy["spec"]["ingress"][0]["from"] if "podSelector" in peer]
    assert allowed == [guard["spec"]["template"]["metadata"]["labels"]]
    assert services["plimsoll-guard"]["selector"] == guard["spec"]["template"]["metadata"]["labels"]
    claims = [one["metadata"]["name"] for one in by_kind["PersistentVolumeClaim"]]
    assert [
        v["persistentVolumeClaim"]["claimName"]
        for v in guard["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in v
    ] == claims


def test_gpus_are_asked_for_by_their_makers_name() -> None:
    """As many as the plan needs."""
    for gpu, key in (("H100", "nvidia.com/gpu"), ("MI300X", "amd.com/gpu")):
        plan = plan_of("vllm", "serve", MODELS[0], "--tensor-parallel-size", "2", gpu=gpu)
        container = next(one for one in _objects(plan) if one["kind"] == "StatefulSet")["spec"]["template"]["spec"][
            "containers"
        ][0]
        assert container["resources"]["limits"] == {key: "2"}
