"""`assets --for autoscaling`: the files say what the replay chose, and the alert fires where the ScaledObject ends."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from plimsoll.assets.autoscaling import autoscaling_files
from plimsoll.assets.settings import AssetSettings, Cluster
from plimsoll.tune.autoscale import IN_FLIGHT, WAITING, Autoscaling, ScalingRule, ScalingTrial
from tests.assets.plans import plan_of
from tests.cli.answers import LLAMA, ask

FIXED = ScalingTrial(ScalingRule("", 0, 3, 3), 100, 100, 3.0, 3, 0)


def files(rule: ScalingRule) -> dict[str, str]:
    chosen, broken = ScalingTrial(rule, 99, 100, 1.5, 3, 4), ScalingTrial(rule, 50, 100, 1.0, 1, 0)
    settings = AssetSettings("0.32.0", name="chat", cluster=Cluster(namespaces=("prod",), workload="Deployment"))
    return autoscaling_files(settings, Autoscaling(chosen, (FIXED, broken, chosen), 0.99, 120), "http://p:9090", "a trace")


def test_the_scaled_object_says_what_was_replayed() -> None:
    """Bounds, figure, threshold, windows; waiting alone or with what runs; the alert asks for the same figure at the end."""
    for metric, words in ((IN_FLIGHT, ("num_requests_running", "num_requests_waiting")), (WAITING, ("num_requests_waiting",))):
        rule = ScalingRule(metric, 16, 2, 7, 30, 600)
        scaled, alert = yaml.safe_load_all(files(rule)["autoscaling/scaledobject.yaml"])
        spec = scaled["spec"]
        assert (scaled["kind"], spec["scaleTargetRef"]) == ("ScaledObject", {"kind": "Deployment", "name": "chat"})
        assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["pollingInterval"]) == (2, 7, 15)
        behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert [behaviour[way]["stabilizationWindowSeconds"] for way in ("scaleUp", "scaleDown")] == [30, 600]
        (trigger,) = spec["triggers"]
        assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "16")
        query = trigger["metadata"]["query"]
        assert [word for word in ("num_requests_running", "num_requests_waiting") if word in query] == list(words)
        (rules,) = alert["spec"]["groups"][0]["rules"]
        assert rules["alert"] == "VllmCannotScaleFurther"
        assert f"({query} > {16 * 7})" in rules["expr"]
        assert 'namespace="prod",horizontalpodautoscaler="keda-hpa-chat"' in rules["expr"]


def test_the_table_has_everything_that_was_tried() -> None:
    """The number that keeps it all the time first, what breaks the promise marked, the chosen one marked."""
    text = files(ScalingRule(IN_FLIGHT, 16, 1, 4))["autoscaling/tried.txt"]
    rows = text.splitlines()[-3:]
    assert rows[0].startswith("as many all the time")
    assert rows[1].endswith("breaks the promise")
    assert rows[2].endswith("<- chosen")
    assert "hold for 99% of all" in text


def test_the_command_writes_both_files_and_says_what_a_rule_saves(tmp_path: Path) -> None:
    """From a plan, a trace and a promise; the same call again changes nothing; a server that is too slow is exit code 1."""
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    plan.write_text(json.dumps(plan_of("vllm", "serve", LLAMA)), encoding="utf-8")
    trace = "synthetic:requests=150,rate=3,prompt=200,output=40"
    words = f"assets {out} --for autoscaling {trace} --plan {plan} --name chat --workload deployment"
    body = ask(f"{words} --slo ttft=2s,tpot=100ms --json").body
    assert sorted(path.name for path in (out / "autoscaling").iterdir()) == ["scaledobject.yaml", "tried.txt"]
    assert any("also with a tenth more traffic" in note for note in body["notes"])
    assert ask(f"{words} --slo ttft=2s,tpot=100ms --check").code == 0
    assert "no number of replicas keeps tpot=1ms" in ask(f"{words} --slo tpot=1ms", code=1).err
    plan.write_text(json.dumps(plan_of("vllm", "serve", LLAMA, "--data-parallel-size", "2")), encoding="utf-8")
    notes = ask(f"{words} --slo ttft=2s,tpot=100ms --json").body["notes"]
    assert "of a replica's 2 engines one is replayed: fewer replicas will do" in notes
