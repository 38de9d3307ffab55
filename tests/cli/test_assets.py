"""`plimsoll assets` as a user meets it."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from plimsoll.assets.inside_wheel import make_wheel
from plimsoll.cli.main import main
from tests.assets.plans import MODELS, SECRET, plan_of
from tests.each import each

LAUNCH = ("systemd", "compose", "kubernetes")


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    """The plan of a plain command with a secret in it."""
    return plan_of("vllm", "serve", MODELS[0], "--max-model-len", "8k", "--api-key", SECRET)


@pytest.fixture
def here(tmp_path: Path, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with plan.json in it, where the command is run."""
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _made(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main(["assets", "out", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["fine"] else 1)
    return found


def _refused(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "mistake of ours" not in captured.err
    return captured.err


def test_everything_is_made_from_one_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files for every way to launch, and monitoring; the list of them; and nothing outside the folder."""
    found = _made(capsys, "--plan", "plan.json")
    assert found["schema"] == "plimsoll.assets/1"
    assert {path.partition("/")[0] for path in found["written"]} == {*LAUNCH, "monitoring"}
    assert {*found["written"], "plimsoll-assets.json"} == set(_tree(here / "out"))
    assert sorted(p.name for p in here.iterdir()) == ["out", "plan.json"]


def test_what_tune_chose_is_a_plan(here: Path, plan: dict[str, Any]) -> None:
    """`tune --json` holds the plan of the command that it chose: the files are those of that plan."""
    (here / "tuned.json").write_text(json.dumps({"schema": "plimsoll.tune/1", "plan": plan}), encoding="utf-8")
    assert main(["assets", "one", "--for", "systemd", "--plan", "plan.json"]) == 0
    assert main(["assets", "two", "--for", "systemd", "--plan", "tuned.json"]) == 0
    assert (here / "two/systemd/plan.json").read_bytes() == (here / "one/systemd/plan.json").read_bytes()
    assert json.loads((here / "two/systemd/plan.json").read_text(encoding="utf-8")) == plan
    assert "exec vllm serve" in (here / "two/systemd/vllm-start.sh").read_text(encoding="utf-8")


def test_the_same_input_gives_the_same_bytes(here: Path) -> None:
    """In another folder, at another time, asked for in another order."""
    for way in ("monitoring", "kubernetes", "compose", "systemd"):
        assert main(["assets", "one", "--for", way, "--plan", "plan.json"]) == 0
    assert main(["assets", "--plan", "plan.json", "two"]) == 0
    assert _tree(here / "one") == _tree(here / "two")


def test_every_file_says_what_made_it_and_no_secret(here: Path) -> None:
    """The plan, the version and the command, redacted, in every text; JSON has it in its own way, or in the list."""
    assert main(["assets", "out", "--plan", "plan.json"]) == 0
    for path, content in _tree(here / "out").items():
        assert SECRET.encode() not in content, path
        if not path.endswith(("plan.json", ".whl")):
            text = content.decode()
            assert "plimsoll assets OUT_DIR --plan plan.json" in text, path
            assert "0.32.0" in text, path
            assert "--max-model-len 8k --api-key" in text, path


def test_a_second_run_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even a time stamp of a file."""
    _made(capsys, "--plan", "plan.json")
    before = {p: p.stat().st_mtime_ns for p in (here / "out").rglob("*.yaml")}
    found = _made(capsys, "--plan", "plan.json")
    assert found["written"] == []
    assert {p: p.stat().st_mtime_ns for p in (here / "out").rglob("*.yaml")} == before


def test_check_says_how_it_differs_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 where nothing differs; 1 with a diff where something was edited, is missing or is too many."""
    assert main(["assets", "out", "--plan", "plan.json", "--check"]) == 1
    assert not (here / "out").exists()
    assert main(["assets", "out", "--plan", "plan.json"]) == 0
    assert main(["assets", "out", "--plan", "plan.json", "--check"]) == 0
    unit = here / "out/systemd/vllm.service"
    unit.write_text(unit.read_text(encoding="utf-8").replace("KillMode=mixed", "KillMode=control-group"), encoding="utf-8")
    (here / "out/compose/haproxy.cfg").unlink()
    before = _tree(here / "out")
    capsys.readouterr()
    assert main(["assets", "out", "--plan", "plan.json", "--check", "--force"]) == 1
    out = capsys.readouterr().out
    assert "-KillMode=control-group" in out
    assert "+KillMode=mixed" in out
    assert "+++ compose/haproxy.cfg (generated)" in out
    assert "2 files" in out
    assert _tree(here / "out") == before


def test_edits_are_kept_until_force_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named each time; told as a problem when what is generated has changed; overwritten with --force alone."""
    _made(capsys, "--plan", "plan.json")
    edited = here / "out/systemd/vllm.service"
    edited.write_text("# mine\n", encoding="utf-8")
    assert _made(capsys, "--plan", "plan.json")["kept"] == ["systemd/vllm.service"]
    changed = plan_of("vllm", "serve", MODELS[1], "--shutdown-timeout", "90")
    (here / "plan.json").write_text(json.dumps(changed), encoding="utf-8")
    found = _made(capsys, "--plan", "plan.json")
    assert (found["fine"], found["outdated"]) == (False, ["systemd/vllm.service"])
    assert edited.read_text(encoding="utf-8") == "# mine\n"
    assert "--shutdown-timeout 90" in (here / "out/systemd/vllm-start.sh").read_text(encoding="utf-8")
    assert "systemd/vllm.service" in _made(capsys, "--plan", "plan.json", "--force")["written"]
    assert "KillMode=mixed" in edited.read_text(encoding="utf-8")


def test_what_is_no_longer_generated_goes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An older wheel of plimsoll.inside, say; but not one that somebody changed, and not what was never ours."""
    _made(capsys, "--plan", "plan.json", "--for", "systemd")
    listed = here / "out/plimsoll-assets.json"
    body = json.loads(listed.read_text(encoding="utf-8"))
    for name in ("old.whl", "edited.whl", "foreign.whl"):
        (here / "out/systemd" / name).write_bytes(b"x")
    body["files"] |= {
        "systemd/old.whl": hashlib.sha256(b"x").hexdigest(),
        "systemd/edited.whl": hashlib.sha256(b"y").hexdigest(),
    }
    listed.write_text(json.dumps(body), encoding="utf-8")
    found = _made(capsys, "--plan", "plan.json", "--for", "systemd")
    assert (found["removed"], found["left"]) == (["systemd/old.whl"], ["systemd/edited.whl"])
    assert sorted(p.name for p in (here / "out/systemd").glob("*.whl") if "inside" not in p.name) == [
        "edited.whl",
        "foreign.whl",
    ]


def test_one_way_leaves_the_others_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--for compose neither writes nor removes what belongs to systemd."""
    _made(capsys, "--plan", "plan.json", "--for", "systemd")
    found = _made(capsys, "--plan", "plan.json", "--for", "compose")
    assert all(path.startswith("compose/") for path in found["written"])
    assert (here / "out/systemd/vllm.service").exists()
    assert _made(capsys, "--plan", "plan.json", "--for", "systemd", "--check")["fine"]


@pytest.mark.usefixtures("here")
def test_monitoring_needs_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """General thresholds, the version that was asked for, and nothing to launch."""
    found = _made(capsys, "--vllm", "0.25.1")
    assert found["vllm"] == "0.25.1"
    assert found["model"] is None
    assert {path.partition("/")[0] for path in found["written"]} == {"monitoring"}


@pytest.mark.usefixtures("here")
def test_the_plan_may_come_from_a_pipe(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`plimsoll plan --json ... | plimsoll assets out --plan -`."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(plan).encode())))
    assert main(["assets", "out", "--plan", "-", "--for", "systemd"]) == 0


def test_the_wheel_is_the_one_that_inside_wheel_writes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, in each folder that mounts it."""
    _made(capsys, "--plan", "plan.json")
    wheel = make_wheel()
    assert all((here / "out" / way / wheel.name).read_bytes() == wheel.content for way in ("systemd", "compose"))


def test_a_plan_that_does_not_fit_is_not_launched(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1 with the plan's own reason, and nothing is written."""
    broken = plan_of("vllm", "serve", MODELS[0], memory_gib="4")
    (here / "plan.json").write_text(json.dumps(broken), encoding="utf-8")
    assert main(["assets", "out", "--plan", "plan.json"]) == 1
    said = _refused(capsys)
    assert "does not start" in said
    assert "`plimsoll plan` without --json says what would help" in said
    assert not (here / "out").exists()


def test_a_plan_that_hangs_on_its_estimate_is_launched_with_a_note(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is written, for it fits; that it may not start is said, and a sure plan has no such note."""
    assert not any("may turn out too small" in note for note in _made(capsys, "--plan", "plan.json")["notes"])
    plan = json.loads((here / "plan.json").read_text(encoding="utf-8"))
    plan["kv"]["fits_at_low_end"] = False
    (here / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    assert any("may turn out too small" in note for note in _made(capsys, "--plan", "plan.json")["notes"])


def test_a_tuning_is_a_plan_too_and_plans_side_by_side_are_none(
    here: Path, plan: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of the setting it chose; what --compare printed is named for what it is."""
    (here / "tuning.json").write_text(json.dumps({"schema": "plimsoll.tune/1", "plan": plan}), encoding="utf-8")
    assert _made(capsys, "--plan", "tuning.json")["model"] == plan["model"]
    (here / "tuning.json").write_text('{"schema": "plimsoll.tune/1", "plan": null}', encoding="utf-8")
    assert main(["assets", "out", "--plan", "tuning.json"]) == 2
    assert "chose nothing" in _refused(capsys)
    (here / "plan.json").write_text('{"schema": "plimsoll.plan/1", "compare": []}', encoding="utf-8")
    assert main(["assets", "out", "--plan", "plan.json"]) == 2
    assert "several plans side by side" in _refused(capsys)


@pytest.mark.usefixtures("here")
@each(
    ("words", "said"),
    [
        ([], "say where"),
        (["a", "b"], "say where"),
        (["out", "--for", "nomad"], "--for 'nomad'"),
        (["out", "--for", "systemd"], "needs a plan"),
        (["out", "--for", "all"], "needs a plan"),
        (["out", "--plan"], "--plan needs a value"),
        (["out", "--plan", "nowhere.json"], "nowhere.json"),
        (["out", "--plan", "plan.json", "--vllm", "0.25.1"], "the plan is for vLLM 0.32.0"),
        (["out", "--vllm", "soon"], "is not a version"),
        (["out", "--vllm", "0.7.3"], "0.8.0 and newer"),
        (["out", "--slo", "ttft=soon"], "--slo"),
        (["out", "--slo", ""], "--slo"),
        (["out", "--job", 'a"b'], "--job"),
        (["out", "--job", ""], "--job"),
        (["out", "--plan", "plan.json", "--copies", "3"], "no option '--copies'"),
        (["plan.json"], "a folder is needed"),
        (["out", "--plan", __file__], "--plan wants what `plimsoll plan --json` or"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, and the line says what and where."""
    assert main(["assets", *words]) == 2
    assert said in _refused(capsys)


def test_a_promise_to_users_is_read(here: Path) -> None:
    """Seconds and milliseconds; the files say which promise they were made for."""
    assert main(["assets", "out", "--slo", "ttft=1.5s,tpot=40ms"]) == 0
    text = (here / "out/plimsoll-assets.json").read_text(encoding="utf-8")
    assert "--slo ttft=1.5s,tpot=40ms" in text


def test_the_job_of_the_users_prometheus_is_what_the_rules_ask_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rules, their tests and the scrape agree on it; and without it the answer says under which name they listen."""
    assert main(["assets", "out", "--job", "podMonitor/models/vllm"]) == 0
    assert "--job NAME" not in capsys.readouterr().out
    for name in ("rules.yml", "rules_test.yml", "prometheus.yml"):
        text = (here / "out/monitoring" / name).read_text(encoding="utf-8")
        assert "podMonitor/models/vllm" in text, name
        assert 'job="vllm"' not in text, name
    assert main(["assets", "usual"]) == 0
    assert 'note: alerts ask for job="vllm"' in capsys.readouterr().out
    top = (here / "usual/monitoring/rules.yml").read_text(encoding="utf-8").partition("groups:")[0]
    assert '# The rules ask for job="vllm" (the engines) and job="plimsoll-guard" (guard)' in top


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """All that the command takes."""
    assert main(["assets", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(
        option in out
        for option in ("--plan", "--vllm", "--for", "--slo", "--job", "--check", "--force", "--json", "docs/assets.md")
    )
