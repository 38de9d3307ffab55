"""The patch of a Deployment that exists: what is added, what is left alone, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.cli.main import main
from tests.each import cases, each

DEPLOYMENTS = Path(__file__).parents[1] / "captures" / "deployments"
FLAGS = ["--worker-extension-cls", "plimsoll.inside.Probe", "--middleware", "plimsoll.inside.Gate"]
KEY = "sk-0123456789abcdefghij"
DEPLOYMENT = Path(__file__).with_name("deployment.yaml").read_text(encoding="utf-8")


def deployment(container: str, image: str = "vllm/vllm-openai:v0.32.0", pod: str = "enableServiceLinks: false") -> str:
    """A Deployment with these lines in its container."""
    return DEPLOYMENT.replace("POD", pod).replace("IMAGE", image).replace("CONTAINER", container)


def patched(text: str, tmp_path: Path, *words: str) -> tuple[Any, str]:
    """The patch of one object, and its file's comments."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "d.yaml").write_text(text, encoding="utf-8")
    assert main(["assets", str(tmp_path / "out"), "--for", "patch", str(tmp_path / "d.yaml"), *words]) == 0
    (file,) = (path for path in (tmp_path / "out" / "patch").iterdir() if path.name != "kustomization.yaml")
    made = file.read_text(encoding="utf-8")
    return yaml.safe_load(made), made


def container_in(patch: dict[str, Any]) -> dict[str, Any]:
    """The only container of a strategic-merge patch."""
    (found,) = patch["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@each(("container", "field", "gives"), [
    ("args: [Qwen/Qwen3-8B, --port, '9000']", "args", ["Qwen/Qwen3-8B", "--port", "9000", *FLAGS]),
    ("command: [vllm, serve, Qwen/Qwen3-8B]", "args", FLAGS),
    ("command: [sh, -c, exec vllm serve Qwen/Qwen3-8B --port 9000]", "command",
     ["sh", "-c", f"exec vllm serve Qwen/Qwen3-8B {' '.join(FLAGS)} --port 9000"]),
    ("{command: [bash, -lc], args: [python3 -m vllm.entrypoints.openai.api_server --model a/b]}", "args",
     [f"python3 -m vllm.entrypoints.openai.api_server {' '.join(FLAGS)} --model a/b"]),
    ("{command: [bash, -lc, --], args: ['ulimit -n 65536; vllm serve a/b']}", "args",
     [f"ulimit -n 65536; vllm serve a/b {' '.join(FLAGS)}"]),
    ("args: [a/b, --middleware, plimsoll.inside.Gate]", "args", ["a/b", *FLAGS[2:], *FLAGS[:2]]),
    ("args: [a/b, --distributed-executor-backend=ray]", "args", ["a/b", "--distributed-executor-backend=ray", *FLAGS[2:]]),
    ("command: [sh, -c, \"# vllm serve\\nPYTHONPATH=$PYTHONPATH:/x vllm serve a/b\"]", "command",
     ["sh", "-c", f"# vllm serve\nPYTHONPATH=$PYTHONPATH:/x vllm serve a/b {' '.join(FLAGS)}"]),
])  # fmt: skip
def test_flags_go_where_the_container_takes_them(container: str, field: str, gives: list[str], tmp_path: Path) -> None:
    """Behind its arguments, behind a command that has none, or into the shell's script right behind the model."""
    if container.startswith("{"):
        inner = yaml.safe_load(container)
        container = "\n          ".join(f"{key}: {value!r}" for key, value in inner.items())
    assert container_in(patched(deployment(container), tmp_path)[0])[field] == gives
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            path.unlink()


def test_the_waits_nest(tmp_path: Path) -> None:
    """Drain, requests in flight and teardown end within the grace; a longer one of the user's own stays."""
    patch, _ = patched(deployment("args: [a/b, --shutdown-timeout, '120']"), tmp_path)
    container = container_in(patch)
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][3])
    assert before + 120 + 30 < patch["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    startup, alive = container["startupProbe"], container["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > alive["periodSeconds"] * alive["failureThreshold"] >= 300
    long, text = patched(deployment("args: [a/b]", pod="terminationGracePeriodSeconds: 900"), tmp_path, "--force")
    assert "terminationGracePeriodSeconds" not in long["spec"]["template"]["spec"]
    assert "left alone: terminationGracePeriodSeconds: 900 s are enough" in text


def test_what_is_there_stays_and_is_said(tmp_path: Path) -> None:
    """Probes, hooks, a token, a Python path and another worker extension of the user's own."""
    text = (DEPLOYMENTS / "own-probes.yaml").read_text(encoding="utf-8").replace(
        "VLLM_PLUGINS, value: team", "PLIMSOLL_TOKEN, value: x}\n            - {name: VLLM_PLUGINS, value: team"
    )  # fmt: skip
    patch, said = patched(text, tmp_path)
    container = container_in(patch)
    assert not {"readinessProbe", "livenessProbe", "startupProbe"} & container.keys()
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables == {
        "PYTHONPATH": "/plimsoll/inside.whl:/opt/team",
        "PLIMSOLL_PROBE": "plugin",
        "VLLM_PLUGINS": "team,plimsoll,plimsoll_probe",
    }
    for left in ("startupProbe: it has one", "readinessProbe: its exec is yours", "the gate's token: it has one"):
        assert f"left alone: {left}" in said
    probe = "args: [a/b]\n          readinessProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 7}"
    patch, _ = patched(deployment(probe), tmp_path, "--force")
    assert container_in(patch)["readinessProbe"] == {"httpGet": {"path": "/plimsoll/ready"}}, "only its path"
    own = "args: [a/b]\n          volumeMounts: [{name: a, mountPath: /run/plimsoll}]"
    own += "\n          env: [{name: PLIMSOLL_TOKEN_FILE, value: /run/plimsoll/own}]"
    patch, said = patched(deployment(own), tmp_path, "--force")
    assert "left alone: the gate's token: it has one" in said
    assert [each["mountPath"] for each in container_in(patch)["volumeMounts"]] == ["/plimsoll"]


def test_what_is_not_known_of_a_pod_is_left_alone(tmp_path: Path) -> None:
    """Other pods' workers get no probe to import; a port that KServe's runtime names is not guessed; a Pod has no undo."""
    group = (DEPLOYMENTS / "leader-worker-set.yaml").read_text(encoding="utf-8")
    made, said = patched(group, tmp_path)
    assert "--worker-extension-cls" not in str(made)
    assert "left alone: --worker-extension-cls: workers in other pods have no wheel" in said
    made, said = patched(group.replace("kind: LeaderWorkerSet", "kind: DisaggregatedSet"), tmp_path / "other")
    assert "--worker-extension-cls" not in str(made), "whatever the kind is called"
    served = (DEPLOYMENTS / "inference-service.yaml").read_text(encoding="utf-8")
    model = served[: served.index("    containers:")] + "    model: {modelFormat: {name: vLLM}, args: [a]}\n"
    for text, has_probes in ((model, False), (model.replace("[a]", "[a, --port=8080]"), True)):
        made, said = patched(text, tmp_path / f"{has_probes}")
        assert any("Probe" in each["path"] for each in made) is has_probes
        assert not any("lifecycle" in each["path"] for each in made), "Knative would refuse it"
        assert "podspec-init-containers; without Knative annotate serving.kserve.io/deploymentMode" in said
    for number, hides in enumerate(("args: [--config, /etc/vllm.yaml]", "command: [sh, -c, vllm serve a/b $EXTRA]")):
        made, said = patched(deployment(hides), tmp_path / f"hides-{number}")
        assert "readinessProbe" not in str(made)
        assert "its port is not known here" in said
    made, _ = patched(deployment("command: [sh, -c, vllm serve $MODEL --dtype $DTYPE]"), tmp_path / "model")
    assert "readinessProbe" in str(made), "a model and a flag's value hide no port"
    standard = text.replace("metadata: {", "metadata: {annotations: {serving.kserve.io/deploymentMode: Standard}, ")
    made, said = patched(standard, tmp_path / "standard")
    assert "Knative" not in said
    assert any("lifecycle" in each["path"] for each in made)
    container = "{name: a, image: 'vllm/vllm-openai:v0.32.0', args: [a]}"
    _, said = patched(f"kind: Pod\nmetadata: {{name: a}}\nspec: {{containers: [{container}]}}\n", tmp_path / "pod")
    assert "rollout undo" not in said
    assert "delete it, then apply" in said


def test_the_init_container_takes_nothing_from_the_pod(tmp_path: Path) -> None:
    """It keeps the QoS class Guaranteed, starts where the pod's user is root, and names no user that OpenShift would refuse."""
    for user, is_checked in (("0", None), ("1000", True)):
        pod = f"securityContext: {{runAsUser: {user}}}"
        patch, _ = patched(deployment("args: [a/b]", pod=pod), tmp_path, "--force")
        (made,) = patch["spec"]["template"]["spec"]["initContainers"]
        assert made["resources"]["requests"] == made["resources"]["limits"]
        assert made["resources"]["limits"].keys() == {"cpu", "memory"}
        assert (made["securityContext"].get("runAsNonRoot"), "runAsUser" in made["securityContext"]) == (is_checked, False)


def test_a_secret_in_the_command_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key among the arguments gives a JSON patch that appends; one in a script is refused, in a line without it."""
    patch, text = patched(deployment(f"args: [a/b, --api-key, {KEY}]"), tmp_path)
    assert isinstance(patch, list)
    assert [each["value"] for each in patch if each["path"].endswith("/args/-")] == FLAGS
    (tmp_path / "s.yaml").write_text(deployment(f"command: [sh, -c, vllm serve a/b --api-key {KEY}]"), encoding="utf-8")
    capsys.readouterr()
    assert main(["assets", str(tmp_path / "two"), "--for", "patch", str(tmp_path / "s.yaml")]) == 1
    captured = capsys.readouterr()
    assert "holds a secret" in captured.err
    assert KEY not in text + captured.out + captured.err


@each(("text", "code", "says"), [
    *((deployment(own, **more), 1, says) for own, more, says in cases("assets", "what_cannot_be_patched")),
    *((text, 2, says) for text, says in cases("assets", "what_is_no_deployment")),
    (deployment("args: [a/b]").replace("- name: vllm\n          image", "- image"), 1, "it has no name"),
])  # fmt: skip
def test_what_cannot_be_patched_is_said(
    text: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the reason and nothing written: exit 1 for a server that takes no patch, 2 for another file."""
    (tmp_path / "d.yaml").write_text(text, encoding="utf-8")
    assert main(["assets", str(tmp_path / "out"), "--for", "patch", str(tmp_path / "d.yaml")]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert says in captured.err
    assert not (tmp_path / "out").exists()
