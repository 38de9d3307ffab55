"""What `commands_in` promises, much of it checked against a real bash."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch import shell_script
from plimsoll.launch.shell_script import ShellCommand, commands_in
from tests.each import each, rows
from tests.launch.test_check import CASES


def only(text: str) -> ShellCommand:
    (command,) = commands_in(text)
    return command


def complaint_about(text: str) -> str:
    """The sentence of the BadInput that the text causes, or nothing."""
    try:
        commands_in(text)
    except BadInput as error:
        return str(error)
    return ""


SCRIPTS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "scripts.yaml").read_text(encoding="utf-8"))
BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="needs bash to compare with")
@each("name", SCRIPTS)
def test_words_are_those_of_a_real_bash(name: str) -> None:
    """For scripts whose variables are all set, vllm is given exactly the words that bash gives it."""
    script = SCRIPTS[name]
    assert BASH is not None
    prefix = "vllm() { printf '%s\\0' \"$@\" >&9; printf '\\n\\0' >&9; }\n"
    run = subprocess.run(
        [BASH, "--norc", "-c", f"exec 9>&1\n{prefix}{script}"], capture_output=True, env={"LC_ALL": "C.UTF-8"}, check=False
    )
    theirs = run.stdout.decode()
    starts = [command for command in commands_in(script) if command.words[0] == "vllm"]
    if name == "pipe and list":  # the last one stands behind a `||` that bash does not take
        starts = starts[:-1]
    if name == "equals signs":  # arithmetic is the shell's to compute
        theirs = theirs.replace("f=2g", "f=$((2))g")
    ours = "".join("".join(f"{word}\0" for word in (*start.words[1:], "\n")) for start in starts)
    assert ours == theirs


def test_exports_and_prefix_assignments_are_the_environment() -> None:
    """The environment is what was exported so far, in order, then what stands in front of the command."""
    script = "A=1\nexport B=2 C\nC=3\nexport A\ndeclare -x D=4\nE=5 F='6 7' vllm serve m\nexport G=8\n"
    assert only(script).environment == (("B", "2"), ("C", "3"), ("A", "1"), ("D", "4"), ("E", "5"), ("F", "6 7"))


def test_set_a_exports_and_unset_withdraws() -> None:
    """`set -a` exports what is assigned until `set +a`, and `unset` and `export -n` take back."""
    commands = commands_in("set -a\nA=1\nB=2\nset +a\nC=3\nunset A\nvllm serve\nexport -n B\nvllm serve")
    assert [command.environment for command in commands[-2:]] == [(("B", "2"),), ()]


def test_what_is_not_set_stays_and_is_listed() -> None:
    """Unset variables and substitutions stay as they are written, whole, and are listed in order."""
    command = only('N=$(nproc --all)\nvllm serve $MODEL "${A}_b" --tp $N ${#X} `a b` ${Y%/} "$@" ${Z:?needed}')
    assert command.words[2:] == ("$MODEL", "${A}_b", "--tp", "$(nproc --all)", "${#X}", "`a b`", "${Y%/}", "$@", "$Z")
    assert command.unresolved == ("MODEL", "A", "$(nproc --all)", "X", "`a b`", "Y", "@", "Z")


def test_a_default_wins_over_a_variable_that_only_names_an_unset_one() -> None:
    """`MODEL=$1; ${MODEL:-x}` is x, as it is when the script is run without arguments."""
    command = only('MODEL=$1\nMODEL="${MODEL:-x}"\nvllm serve $MODEL ${2:-8000}')
    assert (command.words[2:], command.unresolved) == (("x", "8000"), ())


def test_adding_to_a_callers_variable_is_not_missing() -> None:
    """`PATH=/x:$PATH` in the environment lists nothing; another variable behind an export is listed."""
    command = only("export PATH=/opt/bin:$PATH\nexport HF_HOME=$BASE/hf\nvllm serve m")
    assert command.environment == (("PATH", "/opt/bin:$PATH"), ("HF_HOME", "$BASE/hf"))
    assert command.unresolved == ("BASE",)


@each(("script", "words", "guessed"), rows(CASES, "branches"))
def test_branches_are_not_followed(script: str, words: str, guessed: str) -> None:
    """Inside a branch the first value stays and additions count, and what depends on it is named."""
    command = next(command for command in commands_in(script.replace("\\n", "\n")) if command.words[0] == "vllm")
    assert (" ".join(command.words[2:]), " ".join(command.guessed)) == (words, guessed)


@each(("script", "otherwise"), rows(CASES, "other branches"))
def test_a_start_with_the_values_of_other_branches(script: str, otherwise: str) -> None:
    """What a branch that was not taken would have run is kept beside the command, one value at a time."""
    command = commands_in(script)[-1]
    assert " | ".join(" ".join(other.words[3:]) for other in command.otherwise) == otherwise


def test_branches_without_number_stay_bounded() -> None:
    """Only so many other values are kept."""
    script = "A=--a\n" + "\n".join(f"if x; then A=--b{number}; fi" for number in range(500)) + "\nvllm serve m $A"
    assert 1 < len(commands_in(script)[-1].otherwise) <= 16


def test_lines_are_those_where_commands_start() -> None:
    """The line is the 1-based first line of the command, also behind continuations and here-documents."""
    script = "#!/bin/sh\n\na \\\n b\ncat <<E\nx\nE\nA='1\n2' c; d\n"
    assert [(command.words[0], command.line) for command in commands_in(script)] == [("a", 3), ("cat", 5), ("c", 8), ("d", 9)]


def test_windows_line_ends_are_line_ends() -> None:
    """A file with CRLF reads as the same file with LF."""
    script = "export A=1 \\\n  B=2\nvllm serve 'a\nb' \\\n  --x\n"
    unix, windows = commands_in(script), commands_in(script.replace("\n", "\r\n"))
    assert unix == windows


def test_apostrophes_in_nested_here_documents_and_comments_are_not_quotes() -> None:
    """What stands in a here-document or comment inside `$(...)` does not open a quote."""
    script = "J=$(cat <<'E'\nit's (\nE\n)\nK=$(a # don't\n)\nvllm serve m"
    assert only(script).words == ("vllm", "serve", "m")


def test_a_comment_in_backticks_is_nothing() -> None:
    """As people comment a line that goes on."""
    assert only("vllm serve `# it's the model` \\\n  m `#name`\\\n `date #x`\n").words == ("vllm", "serve", "m", "`date #x`")


@each(("script", "line"), rows(CASES, "never closed"))
def test_what_never_closes_is_bad_input_with_its_line(script: str, line: str) -> None:
    """A quote or bracket that never closes is one sentence with the line where it opened."""
    with pytest.raises(BadInput, match=rf"^line {line}: the .* that opens here is never closed$"):
        commands_in(script.replace("\\n", "\n"))


@each("unit", ["(", '"', "'", "`", "$((((", "${a:-", '"${a:-"', '"$(', "((", "<<a ", "A=(", "\\", "case a in ", "[[ ", "f("])
def test_hostile_text_ends(unit: str) -> None:
    """A long run of openers ends in commands or in BadInput: no recursion, no hang."""
    text = unit * (8_000 // len(unit))
    assert "\n" not in complaint_about(text)


@each("line", ['A="$A$A"', 'A+="$A"', "A=(${A[@]} ${A[@]})", ': "${B:=$A}"; A="$B$B"; unset B'])
def test_variables_that_multiply_are_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that doubles a variable on each line is TooLarge, long before memory is."""
    monkeypatch.setattr(shell_script, "WORK_MAX", 1 << 20)
    with pytest.raises(TooLarge):
        commands_in("A=xxxxxxxxxxxxxxxx\n" + f"{line}\n" * 60)


def test_work_grows_with_the_size_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the text gives twice the commands and no more; what is beyond the budget is refused."""
    small, large = (len(commands_in("export A=1\nvllm serve $A\n" * count)) for count in (500, 1000))
    assert large == 2 * small
    monkeypatch.setattr(shell_script, "WORK_MAX", 1 << 20)
    with pytest.raises(TooLarge):
        commands_in("a\n" * 50_000)


@given(st.text(alphabet=st.sampled_from("ab=A1 \n\t'\"\\$`(){}[]@*<>|&;#-+:,!?\r") | st.characters(), max_size=80))
def test_any_text_is_commands_or_bad_input(text: str) -> None:
    """Nothing but BadInput is ever raised, and every command has a word and a line within the text."""
    if sentence := complaint_about(text):
        assert "\n" not in sentence
        return
    for command in commands_in(text):
        assert command.words
        assert 1 <= command.line <= text.count("\n") + 1


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12), min_size=1))
def test_quoted_words_come_back(words: list[str]) -> None:
    """What `shlex.join` quotes is read back as exactly these words."""
    words = ["vllm", *(word.replace("\r\n", "\r") for word in words)]
    assert only(shlex.join(words)).words == tuple(words)
