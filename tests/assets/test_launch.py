"""The files of every way to launch, read back by what will read them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import yaml

from plimsoll.assets.launch import WAYS, launch_files
from plimsoll.assets.settings import AssetSettings
from plimsoll.launch.files import read_launches
from tests.assets.plans import MODELS, SECRET, WHEEL, plan_of, random_plan, settings_of
from tests.assets.started import environment_of, object_in, started_words
from tests.each import each
from tests.options import guard_options

LLAMA = MODELS[0]
TOKEN = "a-token-that-is-long-enough"


def _files(*words: str, before: tuple[str, ...] = (), **more: str) -> dict[str, str]:
    return launch_files(settings_of(plan_of(*before, "vllm", "serve", LLAMA, *words, **more)), WAYS)


@each("seed", range(12))
def test_all_ways_start_the_same_command(seed: int, tmp_path: Path) -> None:
    """Quotes, dollars and percent signs arrive as they were planned; only --host is left out in a container."""
    made = settings_of(random_plan(random.Random(seed)))
    assert made.command is not None
    words = started_words(launch_files(made, WAYS), tmp_path)
    assert words["systemd"] == list(made.command.words)
    assert words["compose"] == words["kubernetes"]
    assert " ".join(words["compose"]) in (
        " ".join(made.command.words),
        re.sub(r" --host(?: |=)\S+", "", " ".join(made.command.words)),
    )


def test_our_own_reader_finds_the_command_in_each_file(tmp_path: Path) -> None:
    """`plimsoll flags FILE` reads what was generated; the wheel is no part of the command, a path of one's own is."""
    for own in ((), (("PYTHONPATH", "/opt/mine"),)):
        before = ("env", *(f"{name}={value}" for name, value in own)) if own else ()
        for path, text in _files("--max-model-len", "8k", before=before).items():
            if path.endswith(("start.sh", "compose.yaml", "vllm.yaml")):
                file = tmp_path / path.replace("/", "-")
                file.write_text(text, encoding="utf-8")
                launch = read_launches(str(file))[0]
                assert launch.arguments[:3] == (LLAMA, "--max-model-len", "8k"), path
                assert launch.unresolved == ()
                if path.endswith("start.sh"):
                    assert tuple(pair for pair in launch.environment if pair[0] == "PYTHONPATH") == own


def test_the_environment_arrives_in_all_ways(tmp_path: Path) -> None:
    """A value with every awkward character is the same to all readers; one's own PYTHONPATH stands behind the wheel."""
    value = "50% of $5 'quoted' # $(date)"
    files = _files(before=("env", f"MY_NOTE={value}", "PYTHONPATH=/opt/mine"))
    folder = tmp_path / "a folder of mine"
    folder.mkdir()
    found = environment_of(files, folder)
    assert (found["MY_NOTE"], found["PYTHONPATH"]) == (value, f"{folder}/{WHEEL}:/opt/mine")
    compose = yaml.safe_load(files["compose/compose.yaml"])["services"]["vllm"]["environment"]
    assert (compose["MY_NOTE"].replace("$$", "$"), compose["PYTHONPATH"]) == (value, f"/plimsoll/{WHEEL}:/opt/mine")
    container = object_in(files["kubernetes/vllm.yaml"], "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    (pod,) = [one["value"] for one in container["env"] if one["name"] == "MY_NOTE"]
    assert pod.replace("$$", "$") == value


def test_no_secret_is_in_any_file() -> None:
    """What the plan hides is asked for by name, in each way's own manner."""
    files = _files("--api-key", SECRET)
    assert not any(SECRET in text or "[redacted]" in text for text in files.values())
    assert "EnvironmentFile=/etc/plimsoll/vllm.env" in files["systemd/vllm.service"]
    assert "VLLM_API_KEY=\n" in files["systemd/vllm.env.example"]
    assert yaml.safe_load(files["compose/compose.yaml"])["services"]["vllm"]["environment"]["VLLM_API_KEY"].startswith(
        "${VLLM_"
    )
    assert "secretKeyRef" in files["kubernetes/vllm.yaml"]
    for way in WAYS:
        assert "api_key_file" in files[f"{way}/plimsoll.toml"]


@each("way", WAYS)
@each("words", [(), ("--api-key", SECRET), ("--kv-offloading-size", "8")])
def test_guards_configuration_is_one(way: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """guard itself reads it, with the tokens and the plan beside it, and knows how to stop and start the server."""
    text = _files(*words)[f"{way}/plimsoll.toml"]
    for name in ("gate.token", "guard.token", "guard-read.token", "api.key"):
        (tmp_path / name).write_text(TOKEN + name, encoding="utf-8")
        (tmp_path / name).chmod(0o600)
    (tmp_path / "plan.json").write_text(json.dumps(plan_of("vllm", "serve", LLAMA, *words)), encoding="utf-8")
    path = tmp_path / "plimsoll.toml"
    path.write_text(re.sub(r'"/[^"]*/(gate\.token|guard\.token|guard-read\.token|api\.key)"', r'"\1"', text), encoding="utf-8")
    asked = guard_options(["--config", str(path), "--act"], {})
    (engine,) = asked.config.engines
    assert engine.token is not None
    assert asked.config.warnings == ()
    assert (engine.restart is not None) == (way != "compose" and words != ("--kv-offloading-size", "8"))


def test_the_unit_says_what_a_unit_of_vllm_must() -> None:
    """SIGTERM to the server alone, restarted also after exit code 0, within limits, and drained before it is stopped."""
    unit = _files()["systemd/vllm.service"]
    for line in ("KillMode=mixed", "Restart=always", "StartLimitBurst=5", "StartLimitIntervalSec=1h", "TimeoutStopSec=150"):
        assert f"\n{line}\n" in unit
    assert "-m plimsoll.inside.leave 30 8000\n" in unit


def test_a_server_without_a_gate_is_launched_without_one() -> None:
    """No token, no drain, readiness is health, and guard is told nothing that it could not do."""
    files = _files(before=("env", "VLLM_USE_RUST_FRONTEND=1"))
    assert "plimsoll.inside" not in files["systemd/vllm.service"] + files["systemd/vllm-start.sh"]
    assert "option httpchk GET /health" in files["systemd/haproxy.cfg"]
    container = object_in(files["kubernetes/vllm.yaml"], "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "30"]
    assert "restart =" not in files["systemd/plimsoll.toml"]
    assert "gate.token" not in files["compose/compose.yaml"]


def test_a_model_that_is_a_folder_is_mounted(tmp_path: Path) -> None:
    """By its whole path, to be read alone."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,'
        ' "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 512,'
        ' "torch_dtype": "bfloat16", "model_type": "llama"}',
        encoding="utf-8",
    )
    files = launch_files(settings_of(plan_of("vllm", "serve", str(tmp_path))), WAYS)
    assert f"{tmp_path}:{tmp_path}:ro" in yaml.safe_load(files["compose/compose.yaml"])["services"]["vllm"]["volumes"]
    pod = object_in(files["kubernetes/vllm.yaml"], "StatefulSet")["spec"]["template"]["spec"]
    assert {"name": "model", "hostPath": {"path": str(tmp_path), "type": "Directory"}} in pod["volumes"]


@each("release", ["0.10.2", "0.12.0", "0.20.0", "0.25.1", "0.32.0"])
def test_no_proxy_lets_an_admin_path_out(release: str) -> None:
    """Adapters, drains, figures and dev endpoints are on no list, and what clients need is."""
    made: AssetSettings = settings_of(plan_of("vllm", "serve", LLAMA, vllm=release))
    files = launch_files(made, WAYS)
    ingress = object_in(files["kubernetes/vllm.yaml"], "Ingress")["spec"]["rules"][0]["http"]["paths"]
    lists = {
        "ingress": [one["path"] for one in ingress],
        "haproxy": re.findall(r"acl for_clients path (\S+)", files["systemd/haproxy.cfg"]),
    }
    for paths in lists.values():
        assert "/v1/chat/completions" in paths
        assert not any("adapter" in path or "plimsoll" in path for path in paths)
        assert all(path.startswith(("/v1/", "/v2/")) for path in paths)
    assert lists["ingress"] == lists["haproxy"]
    assert ("/v1/messages" in lists["ingress"]) == (release not in ("0.10.2",))
