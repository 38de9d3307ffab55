"""Pages of the docs against the code: what they show is printed, what is generated is in step, what they name exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import (
    knobs_score,
    write_catalogue_docs,
    write_guard_page,
    write_inside_docs,
    write_inside_page,
    write_monitoring_page,
    write_walks,
)
from lab.write_guard_page import KEYS
from plimsoll.assets.alerts import groups_of
from plimsoll.assets.inside_wheel import wheel_name
from plimsoll.assets.launch import WAYS, launch_files
from plimsoll.assets.monitoring import alerts_of
from plimsoll.assets.settings import AssetSettings, timers_of
from plimsoll.cli.guardctl import VERBS
from plimsoll.cli.main import COMMANDS, main
from plimsoll.guard.adapters.command import CommandRestarterConfig
from plimsoll.guard.adapters.haproxy import HaproxyConfig
from plimsoll.guard.adapters.locks import EtcdLockConfig
from plimsoll.inside.endpoints import ENDPOINTS
from tests.assets.plans import plan_of, settings_of
from tests.each import each, sure
from tests.options import guard_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TRACES = ROOT.parent / "shared" / "data" / "traces"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "lab").glob("*.md")])
Capsys = pytest.CaptureFixture[str]


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


@each("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere_and_what_can_be_typed_exists(path: Path) -> None:
    """Every relative link is a file, every `make x` a target, every `python -m x` a module of ours."""
    text = path.read_text(encoding="utf-8")
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", link)]
    assert [target for target in targets if not (path.parent / target).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in re.findall(r"python -m ((?:lab|benchmarks)[\w.]*)", text):
        base = ROOT.joinpath(*module.split("."))
        assert base.with_suffix(".py").is_file() or (base / "__main__.py").is_file(), module


def test_every_command_and_every_variable_that_a_user_may_meet_is_in_the_docs() -> None:
    """A command nobody can find does not exist; nor a variable that plimsoll reads, or gives to others' commands."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"docs/{name}.md" not in readme or f"({name}.md)" not in text_of("README")] == []
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    # A message names the last itself.
    names = {name for text in sources for name in re.findall(r'"(PLIMSOLL_[A-Z_]+)"', text)} - {"PLIMSOLL_DEBUG"}
    docs = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", docs)] == []


SHOWN = [
    (page, words, output)
    for page in ("article", "certify", "doctor", "simulate")
    for words, output in re.findall(r"```console\n\$ plimsoll ([^\n]*)\n(.*?)```", text_of(page), re.DOTALL)
]


def _steady(output: str) -> list[str]:
    """Without the one figure that differs from run to run."""
    return re.sub(r"^  replay took .*$", "  replay took   -", output, flags=re.MULTILINE).splitlines()


@pytest.mark.parametrize(("page", "words", "shown"), SHOWN, ids=[f"{page}-{n}" for n, (page, _, _) in enumerate(SHOWN)])
def test_the_shown_output_is_true(
    page: str, words: str, shown: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line that is shown is printed, to the letter and in this order; [...] stands for any others."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = [word.replace("OUT_DIR", str(tmp_path)) for word in shlex.split(words)]
    if page == "simulate" and not command[1].startswith("synthetic:"):
        if not TRACES.is_dir():
            pytest.skip("the public traces are not beside the repository")
        command[1] = str(TRACES / command[1])
    main(command)
    printed = capsys.readouterr().out
    assert missing(_steady(shown), _steady(printed)) == []
    if page in ("doctor", "simulate"):
        assert len(_steady(shown)) == len(_steady(printed)), "all of it is shown"


def missing(shown: list[str], printed: list[str]) -> list[str]:
    """The shown lines that are missing; what stands together on the page stands together in the output."""
    place, is_free, lines = 0, False, []
    for line in shown:
        if line == "[...]":
            is_free = True
            continue
        found = [at for at in range(place, len(printed)) if printed[at] == line]
        if not found or (not is_free and found[0] != place):
            lines.append(line)
            continue
        place, is_free = found[0] + 1, False
    return lines


def test_a_missing_or_moved_line_is_noticed() -> None:
    """The check above can fail, and there is something to check on every page."""
    printed = ["a", "b", "c", "d"]
    assert missing(["a", "[...]", "c", "d"], printed) == missing(["[...]", "b", "[...]"], printed) == []
    assert missing(["b"], printed) == missing(["[...]", "c", "[...]", "b"], printed) == ["b"]
    assert missing(["a", "c"], printed) == ["c"]
    assert {page for page, _, _ in SHOWN} == {"article", "certify", "doctor", "simulate"}
    assert any(".pickle" in words for _, words, _ in SHOWN)


@pytest.mark.parametrize(("page", "made"), [
    pytest.param(knobs_score.PAGE, knobs_score.page, marks=pytest.mark.real),  # replays a burst with every setting
    (write_inside_docs.PAGE, write_inside_docs.page), (write_inside_page.PAGE, write_inside_page.page),
    (DOCS / "catalogue.md", lambda _: write_catalogue_docs.page()),
])  # fmt: skip
def test_a_generated_page_is_in_step(page: Path, made: Callable[[str], str]) -> None:
    """Remade with the command in its marks, it stays as it is."""
    text = page.read_text(encoding="utf-8")
    assert made(text) == text


def test_inside_promises_no_setting_that_nothing_reads_and_walks_are_as_a_profiler_sees_them() -> None:
    """And only ready is open; the files of each walk are called in that order, no more than 20, and those named exist."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "plimsoll" / "inside").glob("*.py"))
    pattern = r"PLIMSOLL_[A-Z_]+"
    assert set(re.findall(pattern, text_of("inside"))) <= set(re.findall(pattern, code))
    assert [endpoint.path for endpoint in ENDPOINTS if not endpoint.needs_token] == ["/plimsoll/ready"]
    walks, text = write_walks.section(), write_walks.PAGE.read_text(encoding="utf-8")
    assert walks in text, "python -m lab.write_walks"
    assert "\n21. " not in walks
    named = re.findall(r"`([a-z_]+/[\w/]+\.\w+)`", text)
    assert len(named) > 60
    folders = (write_walks.PACKAGE, ROOT)
    assert [path for path in (*write_walks.GUARD_FILES, *named) if not any((at / path).is_file() for at in folders)] == []


def test_the_lists_of_alerts_are_those_of_the_rules(capsys: Capsys) -> None:
    """`python -m lab.write_monitoring_page --check` has nothing to say; every alert has its paragraph, the counts are true."""
    assert write_monitoring_page.main(["--check"]) == 0, capsys.readouterr().out
    text = text_of("monitoring")
    alerts = alerts_of(groups_of(AssetSettings("0.32.0")))
    assert [name for name in (alert.name for alert in alerts) if f"### {name}\n" not in text] == []
    assert "twenty-two alerts, of which six" in text
    assert (len(alerts), sum(alert.severity == "page" for alert in alerts)) == (22, 6)


def test_launch_shows_the_unit_the_timers_and_the_files_that_are_made() -> None:
    """To the letter, without the lines on top that say what made it; with the default and the weights of the example."""
    page = text_of("launch")
    plan = plan_of("vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len", "32k", memory_gib="79.19")
    made = dataclasses.replace(settings_of(plan), wheel=wheel_name())
    unit = sure(re.search(r"<!-- unit:.*?```ini\n(.*?)```", page, re.DOTALL))
    assert unit[1] == launch_files(made, WAYS)["systemd/vllm.service"]
    table = page.partition("<!-- timers")[2].partition("<!-- end of timers")[0]
    timers = made.timers
    for name, seconds in re.findall(r"^\| (\w+) \| (\d+) s \|", table, re.MULTILINE):
        assert getattr(timers, f"{name}_s") == int(seconds), name
    assert table.count(" s |") == 6
    assert timers == dataclasses.replace(timers_of(), start_s=timers.start_s)
    beside = {"systemd/plan.json", f"systemd/{made.wheel}"}
    assert set(re.findall(r"^  (systemd/\S+)$", page, re.MULTILINE)) == {*launch_files(made, ["systemd"]), *beside}
    for path in re.findall(r"out/((?:systemd|compose|kubernetes)/[\w.-]+\.\w+)", page):
        assert path in {*launch_files(made, WAYS), *beside}, path


def test_the_tables_of_guard_config_are_what_guard_reads_by(capsys: Capsys) -> None:
    """Every key has its row and its sentence, and guardctl's page has every verb."""
    assert write_guard_page.main(["--check"]) == 0, capsys.readouterr().out
    table = write_guard_page.keys()
    rows = [(key, f"| `{key.name}` | {write_guard_page.TAKES[key.kind]} |") for key in KEYS]
    assert [row for key, row in rows if row not in table or not key.text or "|" in key.text] == []
    assert len({(key.table, key.name) for key in KEYS}) == len(KEYS) == table.count("\n") - 1
    page = text_of("guardctl")
    assert [verb for verb in VERBS if f"guardctl {verb}" not in page and f"`{verb}`" not in page] == []


def test_the_example_of_guard_config_is_a_configuration(tmp_path: Path) -> None:
    """What the page shows can be used as it is, once its files are there."""
    text = text_of("guard-config").partition("```toml\n")[2].partition("```")[0].replace("/etc/plimsoll/", "")
    for name in ("gate.token", "etcd.password"):
        (tmp_path / name).write_text("a-token-that-is-long-enough", encoding="utf-8")
    (tmp_path / "plimsoll.toml").write_text(text, encoding="utf-8")
    asked = guard_options(["--config", str(tmp_path / "plimsoll.toml"), "--act"], {})
    first, second = asked.config.engines
    assert (first.name, second.name) == ("llama-a", "llama-b")
    assert isinstance(first.balancer, HaproxyConfig)
    assert isinstance(second.restart, CommandRestarterConfig)
    assert isinstance(asked.config.lock, EtcdLockConfig)
    assert asked.is_acting
