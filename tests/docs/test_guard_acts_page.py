"""docs/guard-acts.md: its steps, ends, reasons and budgets are those of the code, and what it shows can be used."""

from __future__ import annotations

import re
from pathlib import Path

from lab import write_guard_page
from plimsoll.cli.guardctl import REFUSALS_PAGE, WHAT_TO_DO
from plimsoll.guard.act.decide import Restart, spent
from plimsoll.guard.act.policy import DAY_S, ActPolicy
from plimsoll.guard.act.steps import BROKEN, COURSES, SERVING, End, Step, open_action
from plimsoll.guard.judge.policy import GRADES
from plimsoll.guard.judge.tracker import Grade
from tests.each import each, sure
from tests.options import guard_options
from tests.real.small_farm import need, ran

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guard-acts.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "plimsoll"


def between(begin: str, end: str) -> str:
    """The part of the page from one mark to another."""
    found = PAGE.partition(begin)[2].partition(end)[0]
    assert found, begin
    return found


def blocks(language: str) -> list[str]:
    """What stands in fences of this language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def words(steps: tuple[Step, ...]) -> str:
    """A course as the page writes it."""
    return " ".join(steps)


def test_the_tables_of_steps_ends_and_conditions_are_those_of_the_code() -> None:
    """Every step once, in its words, as often as it is tried, in the order of every action; each end, each reason to act."""
    assert f"{write_guard_page.STEPS_BEGIN}\n{write_guard_page.steps()}\n" in PAGE
    assert write_guard_page.steps().count("\n") == len(Step) + 1
    courses = {"restart of one that serves": SERVING, "restart of one that serves nobody": BROKEN}
    courses |= {str(grade): COURSES[grade][0] for grade in (Grade.SHED, Grade.COMPACT)}
    for name, steps in courses.items():
        assert f"\n{name:<36}{words(steps)}\n" in PAGE
    for end in End:
        assert f"\n| `{end}` | " in PAGE
    for kind, grade in GRADES.items():
        assert f"`{kind}`" in next(line for line in PAGE.splitlines() if line.startswith(f"| `{grade}` | "))


def test_every_reason_has_its_row() -> None:
    """Each word with which guard refuses, no other, in the order in which they are looked at; guardctl's advice leads there."""
    code = (SOURCE / "guard" / "act" / "decide.py").read_text(encoding="utf-8")
    decided = list(dict.fromkeys(re.findall(r'yield "([A-Z]\w+)", ', code)))
    assert len(decided) > 10
    asked: set[str] = set()
    for path in [*(SOURCE / "guard" / "daemon").glob("*.py"), *(SOURCE / "guard" / "api").glob("*.py")]:
        code = path.read_text(encoding="utf-8")
        asked |= set(re.findall(r'BlockedAction\([^)]*?"([A-Z]\w+)", ', code)) | set(re.findall(r'_refused\("(\w+)", ', code))
    assert "NotWatched" in asked
    first, _, second = between("<!-- reasons:", "<!-- end of reasons -->").partition("Only for what a person asks for")
    rows = [re.findall(r"`(\w+)`", line.split(" | ")[0]) for line in first.splitlines() if line.startswith("| `")]
    assert rows == [[reason] for reason in decided]
    starts = [line.split(" | ")[0] for line in second.splitlines() if line.startswith("| `")]
    assert {word for start in starts for word in re.findall(r"`(\w+)`", start)} == asked - set(decided)
    assert len(WHAT_TO_DO) > 10
    assert all(f"\n| `{reason}` | " in first + second for reason in WHAT_TO_DO)
    assert REFUSALS_PAGE == "docs/guard-acts.md#when-it-refuses"
    assert "\n## When it refuses\n" in PAGE


def test_the_example_of_the_budget_is_reckoned_right() -> None:
    """One engine that is restarted whenever it may be, minute by minute over a day."""
    restarts: list[Restart] = []
    for minute in range(int(DAY_S / 60) + 1):
        if not spent(restarts, "a", ActPolicy(), minute * 60.0):
            restarts.append(Restart(minute * 60.0, "a"))
    shown = "  ".join(f"{int(one.at // 3600)}:{int(one.at % 3600 // 60):02}" for one in restarts)
    assert between("<!-- budget:", "The fleet's budget").split("-->")[1].strip() == f"```text\n{shown}\n```"


@each("step", Step)
def test_what_follows_a_kill_is_what_the_code_does(step: Step) -> None:
    """For each step of each action: closed, back, or on with the same step, as the row of that step says."""
    table = between("| killed in |", "\n\n")
    row = next(line for line in table.splitlines() if f"`{step}`" in line.split(" | ")[0])
    for grade, broken in ((Grade.RESTART, False), (Grade.RESTART, True), (Grade.SHED, False), (Grade.COMPACT, False)):
        course = open_action("x", "a", grade, "asked", is_broken=broken)
        if step not in course.steps or (step in (Step.LOCK, Step.UNLOCK) and grade is not Grade.RESTART):
            continue
        turned = course._replace(step=step).begun().taken_over()
        if turned.is_over:
            assert "ends the action" in row
        elif turned.is_undoing:
            assert "puts the engine back" in row
        elif turned.step is Step.UNSHED:
            assert "ends the shedding" in row
        else:
            assert turned.step is step or turned.step is Step.PROBATION
            assert any(word in row for word in ("goes on", "begins the probation", "looks first"))


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    """What the page shows can be used as it is, once its file is there."""
    (tmp_path / "gate.token").write_text("a-token-that-is-long-enough", encoding="utf-8")
    path = tmp_path / "plimsoll.toml"
    path.write_text(blocks("toml")[0], encoding="utf-8")
    asked = guard_options(["--config", str(path), "--act"], {})
    assert {engine.name for engine in asked.config.engines} == {"a", "b"}
    assert asked.is_acting


def test_the_units_are_units(tmp_path: Path) -> None:
    """systemd itself has nothing to say of them, once the programs are there; and guard reads the engine's flags in them."""
    units = dict(zip(re.findall(r"^`([\w-]+\.service)`", PAGE, re.MULTILINE), blocks("ini"), strict=True))
    assert len(units) == 3
    assert "KillMode=mixed" in units["vllm-a.service"]
    assert "KillMode=process" in units["plimsoll-guard-own.service"]
    command = sure(re.search(r"ExecStart=/usr/bin/plimsoll guard (.*)", units["plimsoll-guard-own.service"]))
    asked = guard_options(command[1].split(), {})
    assert [one.url for one in asked.config.engines] == ["http://127.0.0.1:8000"]
    program = need("systemd-analyze", "systemd")
    paths = []
    for name, text in units.items():
        paths.append(tmp_path / name)
        paths[-1].write_text(re.sub(r"/usr/bin/(?:vllm|plimsoll)", "/bin/true", text), encoding="utf-8")
    done = ran(program, "verify", "--man=no", *map(str, paths))
    told = [line for line in (done.stdout + done.stderr).splitlines() if any(name in line for name in units)]
    assert (done.returncode, told) == (0, [])
