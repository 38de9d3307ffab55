"""Pages: read as scripts, run, and written between their marks; what is not true fails with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.marked import placed
from lab.page import ANY, Command, PageError, commands_of, same, told_of, wrong
from lab.run_page import ROOT, NotTrue, run_page
from tests.each import cases, each
from tests.fakes import eventually

PAGE, TRUE = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.md", "true_page.md"))
SLEEPS = f"7000.{os.getpid()}"  # seconds that nobody else sleeps for


def command(shown: str, above: str = "") -> Command:
    """The one command of a page that shows this, from its third line on."""
    (found,) = commands_of(f"{above}\n```console\n$ it\n{shown}```\n")
    return found


def test_commands_are_found_with_what_they_print_and_what_is_said_above_them() -> None:
    """In order, over several lines where a shell would go on, and only in console blocks."""
    one, two, three, four = commands_of(PAGE)
    assert (one.line, one.text, one.shown, one.shown_line) == (11, "one --flag \\\n    more", ("a 10",), 13)
    assert two.text == "cat > file <<'EOF'\n$ is not a command here\nEOF"
    assert (two.line, two.shown) == (14, ())
    assert (three.text, three.shown) == ("three", ("b", "c"))
    assert {(each.above.exit_code, each.above.limit_s, each.above.by_words) for each in (one, two, three)} == {(1, 90.0, True)}
    assert (four.bare, one.bare) == ("four", one.text)
    assert (four.text, four.shown, four.above.exit_code, four.above.rules) == ("four     # with a remark", (), 0, ())
    # A page with a mistake in it is not taken for one without commands: it is said with its line.
    for page, line in (
        ("\n```console\noutput without a command\n```\n", "3:"),
        ("<!-- run: numbers may be anything -->\n```console\n$ x\n```\n", "1:"),
        ("\n\n<!-- the page: weather fine -->\n", "3:"),
    ):
        with pytest.raises(PageError, match=line):
            (commands_of(page), told_of(page))


@each(("shown", "above", "printed", "wanted"), cases("lab", "what is shown and printed"))
def test_what_is_shown_must_be_printed_but_for_its_cuts_and_numbers(shown: str, above: str, printed: str, wanted: Any) -> None:
    """To the letter and in order, with the line that is not so; versions and addresses never may, dates and clocks may."""
    found = wrong(command(shown, above), printed)
    assert (found is not None if wanted is True else found) == wanted


@given(st.text(), st.text())
def test_nothing_is_the_same_as_something_else(one: str, other: str) -> None:
    """Without leave to differ, two texts are the same only if they are."""
    assert same(one, other, 0.0) is (one == other)
    assert same(one, one, ANY)


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text.replace("SLEEPS", SLEEPS), encoding="utf-8")
    return path


def is_asleep() -> bool:
    """Whether a process of these tests is still there."""
    return bool(subprocess.run(["pgrep", "-fx", f"sleep {SLEEPS}"], capture_output=True, check=False).stdout)


def test_a_true_page_runs_in_one_shell_with_a_readers_home_and_ports(tmp_path: Path) -> None:
    """What a command sets, the next one has; home and ports are as on the page; a command that reads finds nothing to read."""
    said: list[str] = []
    run_page(page(tmp_path, TRUE), say=said.append)
    assert len(said) == 8
    assert not is_asleep()


@each(("true", "false", "line", "said"), cases("lab", "false pages"))
def test_a_false_page_fails_with_one_line_that_names_page_and_line(
    tmp_path: Path, true: str, false: str, line: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is not so: an output, an exit code, a command, a process that is left; and then nothing is left all the same."""
    monkeypatch.setattr("lab.run_page.GRACE_S", 0.5)
    assert TRUE.count(true) == 1
    path = page(tmp_path, TRUE.replace(true, false))
    with pytest.raises(NotTrue) as failed:
        run_page(path)
    (text,) = str(failed.value).splitlines()
    assert text.startswith(f"{path}:{line}: " if line else f"{path}: "), text
    assert said in text
    assert not is_asleep()


def test_a_page_that_is_written_is_true_and_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """What was not so is replaced, the rest stays with its cuts; with all it started; who is left out must be there."""
    path = page(tmp_path, f"<!-- run: within 1 s -->\n```console\n$ setsid sleep {SLEEPS} & sleep {SLEEPS}\n```\n")
    with pytest.raises(NotTrue, match=r"page\.md:3: not over after 1 s"):
        run_page(path)
    assert not is_asleep()
    path = page(tmp_path, "```console\n$ false\n$ echo a\na\n```\n")
    run_page(path, left_out=["false"])
    with pytest.raises(NotTrue, match="left out and not there: true"):
        run_page(path, left_out=["false", "true"])
    above = "<!-- run: numbers differ -->\n"
    path = page(tmp_path, above + "```console\n$ echo a\nb\n$ seq 9\n4\n[...]\n9\n```\n")
    run_page(path, write=True)
    assert path.read_text(encoding="utf-8") == above + "```console\n$ echo a\na\n$ seq 9\n1\n[...]\n9\n```\n"
    run_page(path)


@pytest.mark.real
@pytest.mark.parametrize("ends", ["it", "its parent"])
def test_a_run_that_is_stopped_leaves_nothing(tmp_path: Path, ends: str) -> None:
    """SIGTERM to it, and SIGKILL to whoever started it."""
    path = page(tmp_path, f"```console\n$ setsid sleep {SLEEPS} & sleep {SLEEPS}\n```\n")
    words = [sys.executable, "-m", "lab.run_page", str(path)]
    if ends == "its parent":
        words = ["sh", "-c", '"$@"; true', "sh", *words]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    eventually(is_asleep, 30)
    process.send_signal(signal.SIGTERM if ends == "it" else signal.SIGKILL)
    process.wait(20)
    eventually(lambda: not is_asleep(), 30)


def test_only_what_is_between_the_marks_changes() -> None:
    """Put there twice, it is there once; a page without its marks is left alone, and one line says which."""
    made, page = placed("before <b> old <e> after", "<b>", "<e>", " new ", Path("page.md")), Path("page.md")
    assert made == "before <b> new <e> after" == placed(made, "<b>", "<e>", " new ", page)
    for text in ("", "before <b> old", "old <e> after", "<e> before <b>"):
        with pytest.raises(SystemExit, match=r"page\.md has no place"):
            placed(text, "<b>", "<e>", "new", page)
