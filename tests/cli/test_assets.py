"""`plimsoll assets` as a user meets it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.assets.inside_wheel import make_wheel
from tests.assets.plans import MODELS, SECRET, plan_of
from tests.cli.answers import ask


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    """The plan of a plain command with a secret in it."""
    return plan_of("vllm", "serve", MODELS[0], "--max-model-len", "8k", "--api-key", SECRET)


@pytest.fixture
def here(tmp_path: Path, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with plan.json in it, where the command is run."""
    _write("plan.json", plan, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(name: str, body: object, folder: Path = Path()) -> None:
    (folder / name).write_text(json.dumps(body), encoding="utf-8")


def _tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _made(words: str = "", folder: str = "out", plan: str = "--plan plan.json") -> dict[str, Any]:
    answer = ask(f"assets {folder} {plan} {words} --json", code=None)
    assert answer.code == (0 if answer.body["fine"] else 1)
    return answer.body


def test_everything_is_made_from_one_plan(here: Path) -> None:
    """Files for every way to launch, and monitoring; a second run changes not even a time stamp; nothing is made outside."""
    found = _made()
    assert found["schema"] == "plimsoll.assets/1"
    assert {path.partition("/")[0] for path in found["written"]} == {"systemd", "compose", "kubernetes", "monitoring"}
    assert {*found["written"], "plimsoll-assets.json"} == set(_tree(here / "out"))
    assert sorted(p.name for p in here.iterdir()) == ["out", "plan.json"]
    wheel = make_wheel()
    assert all((here / "out" / way / wheel.name).read_bytes() == wheel.content for way in ("systemd", "compose"))
    before = {p: p.stat().st_mtime_ns for p in (here / "out").rglob("*.yaml")}
    assert _made()["written"] == []
    assert {p: p.stat().st_mtime_ns for p in (here / "out").rglob("*.yaml")} == before


def test_what_tune_chose_is_a_plan_and_plans_side_by_side_are_none(here: Path, plan: dict[str, Any]) -> None:
    """`tune --json` holds the plan of the command that it chose: the files are those of that plan; it may come from a pipe."""
    _write("tuned.json", {"schema": "plimsoll.tune/1", "plan": plan})
    _made("--for systemd", "one")
    assert _made("--for systemd", "two", "--plan tuned.json")["model"] == plan["model"]
    assert (here / "two/systemd/plan.json").read_bytes() == (here / "one/systemd/plan.json").read_bytes()
    assert json.loads((here / "two/systemd/plan.json").read_text(encoding="utf-8")) == plan
    assert "exec vllm serve" in (here / "two/systemd/vllm-start.sh").read_text(encoding="utf-8")
    _write("tuned.json", {"schema": "plimsoll.tune/1", "plan": None})
    assert "chose nothing" in ask("assets out --plan tuned.json", code=2).line
    _write("plan.json", {"schema": "plimsoll.plan/1", "compare": []})
    assert "several plans side by side" in ask("assets out --plan plan.json", code=2).line


def test_the_same_input_gives_the_same_bytes_that_say_what_made_them(here: Path) -> None:
    """In another folder, asked for in another order; the plan, the version and the command, redacted, in every text."""
    for way in ("monitoring", "kubernetes", "compose", "systemd"):
        _made(f"--for {way}", "one")
    _made("", "two")
    assert _tree(here / "one") == _tree(here / "two")
    for path, content in _tree(here / "one").items():
        assert SECRET.encode() not in content, path
        if not path.endswith(("plan.json", ".whl")):
            for said in ("plimsoll assets OUT_DIR --plan plan.json", "0.32.0", "--max-model-len 8k --api-key"):
                assert said in content.decode(), path


def test_check_says_how_it_differs_and_writes_nothing(here: Path) -> None:
    """0 where nothing differs; 1 with a diff where something was edited, is missing or is too many."""
    check = "assets out --plan plan.json --check"
    ask(check, code=1)
    assert not (here / "out").exists()
    _made()
    ask(check)
    unit = here / "out/systemd/vllm.service"
    unit.write_text(unit.read_text(encoding="utf-8").replace("KillMode=mixed", "KillMode=control-group"), encoding="utf-8")
    (here / "out/compose/haproxy.cfg").unlink()
    before = _tree(here / "out")
    out = ask(f"{check} --force", code=1).out
    for said in ("-KillMode=control-group", "+KillMode=mixed", "+++ compose/haproxy.cfg (generated)", "2 files"):
        assert said in out
    assert _tree(here / "out") == before


def test_what_is_no_longer_generated_goes_and_one_way_leaves_the_others_alone(here: Path) -> None:
    """An older wheel of plimsoll.inside, say; but not one that somebody changed, what was never ours, or another way's."""
    _made("--for systemd")
    body = json.loads((here / "out/plimsoll-assets.json").read_text(encoding="utf-8"))
    for name in ("old.whl", "edited.whl", "foreign.whl"):
        (here / "out/systemd" / name).write_bytes(b"x")
    for name, content in (("old", b"x"), ("edited", b"y")):
        body["files"][f"systemd/{name}.whl"] = hashlib.sha256(content).hexdigest()
    _write("plimsoll-assets.json", body, here / "out")
    found = _made("--for systemd")
    assert (found["removed"], found["left"]) == (["systemd/old.whl"], ["systemd/edited.whl"])
    left = {p.name for p in (here / "out/systemd").glob("*.whl") if "inside" not in p.name}
    assert left == {"edited.whl", "foreign.whl"}
    assert all(path.startswith("compose/") for path in _made("--for compose")["written"])
    assert (here / "out/systemd/vllm.service").exists()


def test_a_plan_that_does_not_fit_is_not_launched_and_one_in_doubt_has_a_note(here: Path, plan: dict[str, Any]) -> None:
    """Exit 1 with the plan's own reason and nothing written; a plan that hangs on its estimate is written, and that is said."""
    for low, is_noted in ((True, False), (False, True)):
        _write("plan.json", {**plan, "kv": {**plan["kv"], "fits_at_low_end": low}})
        assert any("may turn out too small" in note for note in _made("", "noted")["notes"]) is is_noted
    _write("plan.json", plan_of("vllm", "serve", MODELS[0], memory_gib="4"))
    line = ask("assets out --plan plan.json", code=1).line
    assert "does not start" in line
    assert "`plimsoll plan` without --json says what would help" in line
    assert not (here / "out").exists()


def test_the_promise_and_the_job_of_the_users_prometheus_are_in_the_files(here: Path) -> None:
    """Rules, their tests and the scrape agree on the job; without it the answer says under which name they listen."""
    assert "--job NAME" not in ask("assets out --job podMonitor/models/vllm --slo ttft=1.5s,tpot=40ms").out
    assert "--slo ttft=1.5s,tpot=40ms" in (here / "out/plimsoll-assets.json").read_text(encoding="utf-8")
    for name in ("rules.yml", "rules_test.yml", "prometheus.yml"):
        text = (here / "out/monitoring" / name).read_text(encoding="utf-8")
        assert ("podMonitor/models/vllm" in text, 'job="vllm"' in text) == (True, False), name
    assert 'note: alerts ask for job="vllm"' in ask("assets usual").out
    top = (here / "usual/monitoring/rules.yml").read_text(encoding="utf-8").partition("groups:")[0]
    assert '# The rules ask for job="vllm" (the engines) and job="plimsoll-guard" (guard)' in top
