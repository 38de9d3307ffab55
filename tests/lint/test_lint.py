"""The traps that `plimsoll lint` finds, and what it leaves alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.cli.main import main
from plimsoll.errors import PlimsollError
from plimsoll.lint.check import lint_file
from plimsoll.lint.deployment import seconds, size
from plimsoll.plan.options import ServerOptions
from plimsoll.units import GIB
from plimsoll.vllm.versions import table
from tests.each import each

ROOT = Path(__file__).parents[2]
TRAPS = yaml.load((Path(__file__).parent / "traps.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
COMPOSE, POD = TRAPS["files"]["c.yaml"], TRAPS["files"]["p.yaml"]
WORDS = ("command", "service", "container", "pod")
SECRET = "hf_0123456789012345678901234567890123"


def rules(folder: Path, text: str, name: str = "file.yaml", **filled: str) -> list[tuple[str, int]]:
    """The rule and the line of every trap in a text whose words in capitals are filled in."""
    for word in WORDS:
        text = text.replace(word.upper(), filled.get(word, ""))
    (folder / name).write_text(re.sub(r", *\]", "]", text))
    servers = lint_file(str(folder / name), ServerOptions())
    return [(trap.rule, trap.line) for server in servers for trap in server.traps]


@each("row", TRAPS["rows"])
def test_each_trap_is_found_where_it_stands_and_nowhere_else(tmp_path: Path, row: dict[str, Any]) -> None:
    """A file without traps is passed, and one change of it gives one trap, with its line."""
    text = TRAPS["files"][row["file"]].replace(*row.get("change", ("", "")), 1)
    found = rules(tmp_path, text, row["file"], **{word: row[word] for word in WORDS if word in row})
    assert [f"{rule} {line}" for rule, line in found] == row.get("traps", [])


def test_a_card_that_the_manifest_names_is_planned_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that does not fit the node's card is a finding of plan, with plan's advice, and so is one that --gpu names."""
    for accelerators in ("{L4: 2}", "'L4:2'"):
        run = "vllm serve meta-llama/Llama-3.3-70B-Instruct -tp $SKYPILOT_NUM_GPUS_PER_NODE"
        (tmp_path / "t.yaml").write_text(f"resources: {{accelerators: {accelerators}}}\nrun: {run}\n")
        assert main(["lint", "--json", str(tmp_path / "t.yaml")]) == 1
        body = json.loads(capsys.readouterr().out)
        assert (body["servers"][0]["gpu"], body["servers"][0]["findings"][0]["rule"]) == ("L4", "startup.weights-do-not-fit")
    selector = "nodeSelector: {nvidia.com/gpu.product: NVIDIA-L4}"
    text = POD.replace("Qwen/Qwen3-8B", "meta-llama/Llama-3.3-70B-Instruct")
    assert ("startup.weights-do-not-fit", 11) in rules(tmp_path, text, "p.yaml", pod=selector)
    (tmp_path / "c.yaml").write_text(COMPOSE.replace("COMMAND", "").replace("SERVICE", ""))
    assert main(["lint", "--gpu", "T4", "--json", str(tmp_path / "c.yaml")]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "plimsoll.lint/1"
    assert (body["fine"], body["servers"][0]["gpu"]) == (False, "T4")
    assert {"rule", "severity", "file", "line", "title", "why", "fix"} == set(body["servers"][0]["findings"][0])


def test_what_the_command_prints_and_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trap is file:line: severity rule, without a secret; info fails nothing; a file without vLLM is wrong unless skipped."""
    leaks = tmp_path / "leaks.yaml"
    leaks.write_text(COMPOSE.replace("COMMAND", "").replace("SERVICE", f"environment: {{HF_TOKEN: {SECRET}}}"))
    for more in ([], ["--json"]):
        assert main(["lint", *more, str(leaks)]) == 1
        out = capsys.readouterr().out
        assert "HF_TOKEN" in out
        assert SECRET not in out
    good, bad, other = tmp_path / "good.yaml", tmp_path / "bad.yaml", tmp_path / "other.yaml"
    good.write_text(COMPOSE.replace("--shutdown-timeout 60 COMMAND", "").replace("SERVICE", ""))
    bad.write_text(COMPOSE.replace("COMMAND", "--swap-space 4").replace("SERVICE", ""))
    other.write_text("a: 1\n")
    assert main(["lint", str(good)]) == 0
    assert f"{good}:4: info stop.no-drain" in capsys.readouterr().out
    assert main(["lint", str(good), str(bad)]) == 1
    assert f"{bad}:4: critical flag.removed" in capsys.readouterr().out
    assert main(["lint", str(other)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    template = tmp_path / "template.yaml"
    template.write_text("{{- range .Values.models }}\nimage: vllm/vllm-openai:v0.30.0\n{{- end }}\n")
    assert main(["lint", "--skip-others", str(other), str(template), str(good)]) == 0
    assert "passed over" in capsys.readouterr().out
    assert main(["lint"]) == 2


def test_what_assets_writes_has_no_trap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files that plimsoll generates pass its own lint."""
    plan = tmp_path / "plan.json"
    assert (
        main(["plan", "--gpu", "H100", "--vllm", "0.32.0", "--json", "--", "vllm", "serve", "Qwen/Qwen3-8B", "-tp", "2"]) == 0
    )
    plan.write_text(capsys.readouterr().out)
    assert main(["assets", str(tmp_path / "out"), "--plan", str(plan)]) == 0
    files = [path for path in (tmp_path / "out").rglob("*") if path.suffix in (".yaml", ".service")]
    assert main(["lint", "--skip-others", *map(str, files)]) == 0, capsys.readouterr().out


def test_the_hook_runs_the_command_and_every_rule_is_on_the_page() -> None:
    """For files that may start vLLM; docs/lint.md lists the rules that the code has, and no others."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hook["entry"].startswith("plimsoll lint --skip-others")
    for name, matches in (("compose.yaml", True), ("k8s/vllm.yml", True), ("vllm.service", True), ("a.py", False)):
        assert bool(re.search(hook["files"], name)) is matches
    there = {row["rule"] for row in table("traps", "lint")["traps"].values() if "{" not in row["rule"]}
    page = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`((?:plan|probe|stop|shm|memory|restart|secret)\.[a-z-]+)`", page)) == there


def test_durations_and_sizes() -> None:
    """As Compose, systemd and Kubernetes write them."""
    spans = {"90": 90, "1m30s": 90, "2min 30s": 150, "1h": 3600, "500ms": 0.5, "infinity": float("inf"), "x": None}
    assert {text: seconds(text) for text in spans} == spans
    sizes = {"16gb": 16 * GIB, "16Gi": 16 * GIB, "64m": 64 << 20, "1024": 1024, "1.5g": 3 << 29, "": None}
    assert {text: size(text) for text in sizes} == sizes


_WORDS = st.sampled_from(
    "services:|  a:|    image: vllm/vllm-openai|    command: x|    healthcheck: 3|    deploy: []|    shm_size: {}"
    "|    environment: {HF_TOKEN: [1]}|kind: Pod|spec: {containers: [{image: vllm, livenessProbe: [], env: [{name: 1}]}]}"
    "|[Service]|ExecStart=vllm serve|MemoryMax=|TimeoutStopSec=x|Restart=|- ~|    ipc: [host]".split("|")
)  # fmt: skip


@given(st.lists(_WORDS, max_size=12))
def test_any_file_gives_traps_or_one_line(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    """Whatever stands where a probe, a size or a list should, lint answers or says in one line what is wrong."""
    path = tmp_path_factory.mktemp("lint") / "file.yaml"
    path.write_text("\n".join(lines))
    try:
        for server in lint_file(str(path), ServerOptions()):
            assert all(trap.line >= 1 and trap.fix for trap in server.traps)
    except PlimsollError as error:
        line = str(error)
    else:
        line = ""
    assert "\n" not in line
