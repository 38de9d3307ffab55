"""What is generated for Kubernetes, put together by the real `kubectl kustomize` and judged by what reads it next."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from lab.run_page import run_page
from plimsoll.cli.main import main
from tests.assets.plans import MODELS, plan_of
from tests.each import each, sure
from tests.real.small_farm import need, ran

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
DEPLOYMENTS = Path(__file__).parents[1] / "captures" / "deployments"
NEWEST = max(all_versions(), key=lambda version: tuple(map(int, version.split("."))))
OWN_KINDS = ("PodMonitor", "PrometheusRule", "HTTPRoute", "InferenceService", "LLMInferenceService", "LeaderWorkerSet")
COMPONENTS_SINCE = (1, 21)  # kubectl 1.20, which Debian 12 has, brings kustomize 2.0: no components, no patches by target


def kustomize(folder: Path) -> str:
    """What `kubectl kustomize` prints for a folder."""
    done = ran(need("kubectl", "kubernetes-client"), "kustomize", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing is deprecated"
    return done.stdout


def reads_components() -> bool:
    """Whether this kubectl is newer than Debian 12's."""
    found = sure(re.search(r"v(\d+)\.(\d+)\.", ran(need("kubectl", "kubernetes-client"), "version", "--client").stdout))
    return (int(found[1]), int(found[2])) >= COMPONENTS_SINCE


def validated(text: str) -> list[dict[str, Any]]:
    """The objects of a stream, each of Kubernetes's own kinds checked against the newest schema that is known here."""
    objects = [one for one in yaml.safe_load_all(text) if one is not None]
    for one in objects:
        if one["kind"] not in OWN_KINDS:
            kubernetes_validate.validate(one, NEWEST, strict=True)
    return objects


def overlay(folder: Path, resource: str, *components: str) -> Path:
    """A kustomization of a user's own, with our folder as its base and these components."""
    (folder / "mine").mkdir(exist_ok=True)
    tree = {"resources": [resource], "components": list(components)} if components else {"resources": [resource]}
    (folder / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "mine"


def test_guard_is_built_with_and_without_its_components(tmp_path: Path) -> None:
    """The base stands alone; each component adds what it is for; a cluster without operators leaves theirs out."""
    words = ["--namespace", "models,chat", "--selector", "app=vllm", "--image", "registry.example.com/plimsoll:1"]
    assert main(["assets", str(tmp_path), "--for", "guard", *words]) == 0
    base = validated(kustomize(tmp_path / "guard"))
    kinds = [one["kind"] for one in base]
    wanted = "ServiceAccount Role RoleBinding ConfigMap Service Deployment PodDisruptionBudget NetworkPolicy"
    assert set(wanted.split()) == set(kinds)
    folders = sorted(path.name for path in (tmp_path / "guard" / "components").iterdir())
    assert {"act", "grafana", "prometheus-operator", "volume"} <= set(folders)
    everything = overlay(tmp_path, "../guard", *(f"../guard/components/{name}" for name in folders))
    if not reads_components():
        with pytest.raises(AssertionError, match="components"):
            kustomize(everything)
        return
    objects = validated(kustomize(everything))
    assert {"PodMonitor", "PrometheusRule", "PersistentVolumeClaim"} <= {one["kind"] for one in objects}
    (guard,) = [one for one in objects if one["kind"] == "Deployment"]
    assert guard["spec"]["template"]["spec"]["containers"][0]["command"][-1] == "--act"
    dashboards = [one for one in objects if one["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    assert len(dashboards) == 2
    assert all(json.loads(text)["panels"] for one in dashboards for text in one["data"].values())


@pytest.mark.parametrize("words", [(), ("--workload", "deployment", "--replicas", "3", "--gateway", "infra/edge")])
def test_a_launch_is_built(words: tuple[str, ...], tmp_path: Path) -> None:
    """Server and guard in one build, and the server's manifest has no trap."""
    (tmp_path / "plan.json").write_text(json.dumps(plan_of("vllm", "serve", MODELS[0])), encoding="utf-8")
    assert main(["assets", str(tmp_path), "--for", "kubernetes", "--plan", str(tmp_path / "plan.json"), *words]) == 0
    objects = validated(kustomize(tmp_path / "kubernetes"))
    assert {"vllm", "vllm-api", "plimsoll-guard"} == {one["metadata"]["name"] for one in objects if one["kind"] == "Service"}
    assert main(["lint", str(tmp_path / "kubernetes" / "vllm.yaml")]) == 0


@each("name", sorted(path.name for path in DEPLOYMENTS.iterdir()))
def test_a_patch_fits_its_deployment(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """kustomize applies it, the schema holds, flags and lint find nothing that was not there before, and the gate is in."""
    folder = tmp_path / name
    folder.mkdir()
    before = DEPLOYMENTS / name
    assert main(["assets", str(folder), "--for", "patch", str(before), "--image", "registry.example.com/plimsoll:1"]) == 0
    mine = overlay(folder, "before.yaml", "../patch")
    (mine / "before.yaml").write_text(before.read_text(encoding="utf-8"), encoding="utf-8")
    if not reads_components():
        return
    after = folder / "after.yaml"
    after.write_text(kustomize(mine), encoding="utf-8")
    validated(after.read_text(encoding="utf-8"))
    traps = []
    for path in (before, after):
        capsys.readouterr()
        main(["lint", "--json", str(path)])
        (server,) = json.loads(capsys.readouterr().out)["servers"]
        traps.append({trap["rule"] for trap in server["findings"]})
    assert traps[1] <= traps[0]
    assert main(["flags", str(after)]) == 0
    assert "plimsoll.inside.Gate" in capsys.readouterr().out
    assert main(["inside", "check", str(after)]) == 0
    # What was there is still there: undone by hand, it is the same object.
    old, new = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in (before, after))
    assert _contains(new, old.get("items", [old])[0])


def _contains(new: Any, old: Any) -> bool:
    """Whether all that the old object says is in the new one, but for what the patch changes by name."""
    if isinstance(old, dict):
        return all(key in new and (key in _CHANGED or _contains(new[key], value)) for key, value in old.items())
    if isinstance(old, list) and all(isinstance(each, dict) for each in old):
        return all(any(_contains(candidate, each) for candidate in new) for each in old)
    return bool(new == old)


_CHANGED = ("args", "command", "terminationGracePeriodSeconds", "value", "path", "status")


def test_the_page_shows_what_its_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of docs/kubernetes.md, in order, from `kubectl get deploy` to guard's status and back."""
    if not reads_components():
        return
    played = Path(__file__).parents[2] / "lab" / "kubernetes"
    monkeypatch.setenv("PATH", f"{played}{os.pathsep}{os.environ['PATH']}")
    run_page(PAGE)


def test_the_plugin_asks_kubectl_and_guard(tmp_path: Path) -> None:
    """`doctor POD` reads log, earlier log, describe and events; `status` asks inside guard's pod; no token is in sight."""
    assert main(["assets", str(tmp_path), "--for", "guard"]) == 0
    plugin = tmp_path / "guard" / "kubectl-plimsoll"
    assert os.access(plugin, os.X_OK)
    checked = ran(need("shellcheck", "shellcheck"), str(plugin))
    assert (checked.returncode, checked.stdout) == (0, "")
    fake = tmp_path / "bin" / "kubectl"
    fake.parent.mkdir()
    shutil.copy(Path(__file__).with_name("played_kubectl.sh"), fake)
    fake.chmod(0o755)
    plimsoll = Path(os.environ.get("VIRTUAL_ENV", Path(__file__).parents[2] / ".venv")) / "bin"
    environment = {"PATH": f"{fake.parent}:{plimsoll}:/usr/bin:/bin", "ASKED": str(tmp_path / "asked"), "HOME": str(tmp_path)}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return ran("bash", str(plugin), *words, env=environment | more)

    found = run("doctor", "pod/chat-0", "-n", "models", "--context", "prod")
    assert found.returncode == 1, found.stderr
    assert "OOMKilled" in found.stdout
    lines = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert all(line.startswith("-n models --context prod ") for line in lines)
    assert [line.split()[4] for line in lines] == ["describe", "logs", "logs", "get"]
    (tmp_path / "asked").unlink()
    status = run("status", "-n", "models", "models/chat-0")
    assert status.returncode == 1
    assert "kubectl -n models port-forward svc/plimsoll-guard 9790" in status.stdout
    asked = (tmp_path / "asked").read_text(encoding="utf-8").strip()
    assert asked.startswith("-n models exec deploy/plimsoll-guard -c guard -- plimsoll guardctl status --token-file /etc/")
    assert asked.endswith("/guard-read.token models/chat-0")
    assert "guard's pod reads it" in run("doctor", "chat-0", PATH=f"{fake.parent}:/usr/bin:/bin").stderr
    assert "exec -i deploy/plimsoll-guard" in (tmp_path / "asked").read_text(encoding="utf-8")
    for words, code in (((), 2), (("doctor",), 2), (("doctor", "a", "--nope"), 2), (("doctor", "gone"), 3)):
        assert run(*words).returncode == code


def test_prometheus_finds_engines_by_either_kind_of_address(tmp_path: Path) -> None:
    """The PodMonitor's relabelings, read by promtool: an address of IPv6 stands in brackets."""
    words = ["--namespace", "models", "--selector", "app=vllm", "--image", "registry.example.com/plimsoll:1"]
    assert main(["assets", str(tmp_path), "--for", "guard", *words]) == 0
    file = tmp_path / "guard/components/prometheus-operator/monitors.yaml"
    monitor = next(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    rules = [
        {re.sub("([A-Z])", lambda letter: f"_{letter[1].lower()}", name): value for name, value in rule.items()}
        for rule in monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]
    ]
    pods = [{"targets": ["x:1"], "labels": {"__meta_kubernetes_pod_ip": address}} for address in ("10.0.0.7", "fd00::7")]
    tree = {"scrape_configs": [{"job_name": "pods", "static_configs": pods, "relabel_configs": rules}]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    words = ["check", "service-discovery", str(tmp_path / "prometheus.yml"), "pods"]
    found = json.loads(ran(need("promtool", "prometheus"), *words).stdout)
    addresses = [(one["labels"]["__address__"], one["labels"]["instance"]) for one in found]
    assert addresses == [(one, one) for one in ("10.0.0.7:8000", "[fd00::7]:8000")]
