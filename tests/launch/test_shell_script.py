"""What `commands_in` promises, much of it checked against a real bash."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import BadInput, TooLarge
from plimsoll.launch.shell_script import ShellCommand, commands_in
from tests.each import each


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


# Each prints what vllm is given; every variable is set, so bash and we must agree to the byte.
SCRIPTS = {
    "plain": "vllm serve m --port 8000",
    "continuation": "vllm serve m \\\n  --port 8000 \\\n  --host x\n",
    "comment behind words": "vllm serve m # --port 8000\n",
    "hash inside a word": "vllm serve a#b '#c'",
    "comment ends a continuation": "vllm serve m \\\n  # --port 1 \\\n\nvllm serve n",
    "single quotes": "vllm serve 'a $B \\ \"c\"' ''",
    "double quotes": 'B=1; vllm serve "a $B \\" \\\\ \\$B \\x" ""',
    "ansi quotes": "vllm serve $'a\\tb\\n\\'c\\x41\\101\\u00e9'",
    "escapes": "vllm serve a\\ b \\$x \\\\ \\'",
    "joined quotes": "A=x; vllm serve 'a'\"$A\"b",
    "flags in a string": 'ARGS="--a b  --c"; vllm serve m $ARGS "$ARGS"',
    "appending by value": 'ARGS="--a"; ARGS="$ARGS --x 1"; ARGS+=" --y"; vllm serve $ARGS',
    "split joins its neighbours": 'A=" b c "; vllm serve a${A}d "x"$A',
    "empty variables vanish": 'A=; vllm serve m $A "$A" ${A}',
    "defaults": 'E=; vllm serve ${U:-x} ${U-y z} "${U:-a b}" ${E:-e} "${E-e}" ${E:-"q r"} ${U:+no} ${E+yes}',
    "assigning defaults": ': "${P:=8000}" ${Q:=a b}; vllm serve $P "$Q" ${P:+set}',
    "nested defaults": 'B=b; vllm serve ${U:-${V:-$B c}} "${U:-"${V:-$B c}"}"',
    "array": 'ARGS=(--a "b c" # why\n  --d\n)\nvllm serve "${ARGS[@]}" ${ARGS[@]}',
    "array grows": 'A=(a); A+=(b "c d"); B=("${A[@]}" e); vllm serve "${B[@]}" "${B[*]}" "$B" "${B[2]}" x"${B[@]}"y',
    "empty array": 'A=(); vllm serve "${A[@]}" ${A[@]+"${A[@]}"} end',
    "array under set -u": 'A=(x "y z"); vllm serve ${A[@]+"${A[@]}"}',
    "redirections": 'L=/dev/null; vllm serve m 2>&1 1>&2 </dev/null 3>"$L" --x 2>/dev/null 1>&2',
    "pipe and list": "vllm serve a | cat && vllm serve b; vllm serve c || vllm serve d",
    "prefix assignment does not reach its own words": "A=1; A=2 vllm serve $A",
    "declare and friends": 'readonly A=1; declare -x B="x y"; typeset C=3; export D=$B; vllm serve $A "$D" $C',
    "here-document": "cat >/dev/null <<EOF\nvllm serve 'no\nEOF\ncat >/dev/null <<-'X Y'\n\tit's\n\tX Y\nvllm serve m",
    "here-string": "cat >/dev/null <<< 'vllm serve'; vllm serve m",
    "function, group, subshell": "f() { vllm serve a; }; f; { A=2; }; (vllm serve b $A)",
    "if and case that are taken": "if true; then vllm serve a; fi\ncase x in (y|x) vllm serve b ;; esac; vllm serve c",
    "tests": "[[ a < b && ( -n x ) ]] && vllm serve m; ((1 << 2 > 3)) && vllm serve n",
    "unset": "A=1; unset A; vllm serve ${A-none}",
    "dollars that mean nothing": 'vllm serve $ a$ "$" "a$ b" $% "%s"',
    "json": """vllm serve m --override-generation-config '{"a": [1, 2]}' --x "{\\"b\\": 1}" {"c":1}""",
    "equals signs": "vllm serve --a=b --c='d e' f=$((2))g | cat >/dev/null; vllm serve A=1",
}
BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="needs bash to compare with")
@each("name", SCRIPTS)
def test_words_are_those_of_a_real_bash(name: str) -> None:
    """For scripts whose variables are all set, vllm is given exactly the words that bash gives it."""
    script = SCRIPTS[name]
    assert BASH is not None
    prefix = "vllm() { printf '%s\\0' \"$@\" >&9; printf '\\n\\0' >&9; }\n"
    run = subprocess.run(
        [BASH, "--norc", "-c", f"exec 9>&1\n{prefix}{script}"],
        capture_output=True,
        env={"LC_ALL": "C.UTF-8"},
        check=False,
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
    assert only(script).environment == (
        ("B", "2"),
        ("C", "3"),
        ("A", "1"),
        ("D", "4"),
        ("E", "5"),
        ("F", "6 7"),
    )


def test_set_a_exports_and_unset_withdraws() -> None:
    """`set -a` exports what is assigned until `set +a`, and `unset` and `export -n` take back."""
    commands = commands_in("set -a\nA=1\nB=2\nset +a\nC=3\nunset A\nvllm serve\nexport -n B\nvllm serve")
    assert [command.environment for command in commands[-2:]] == [(("B", "2"),), ()]


def test_what_is_not_set_stays_and_is_listed() -> None:
    """Unset variables and substitutions stay as they are written, whole, and are listed in order."""
    command = only('N=$(nproc --all)\nvllm serve $MODEL "${A}_b" --tp $N ${#X} `a b` ${Y%/} "$@" ${Z:?needed}')
    assert command.words[2:] == (
        "$MODEL",
        "${A}_b",
        "--tp",
        "$(nproc --all)",
        "${#X}",
        "`a b`",
        "${Y%/}",
        "$@",
        "$Z",
    )
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


@pytest.mark.parametrize(
    ("script", "words", "guessed"),
    [
        ("if x; then TP=4; else TP=8; fi\nvllm serve $TP", ("4",), ("TP",)),
        ('P=1\n[ -z "$P" ] && P=2\nvllm serve $P', ("1",), ("P",)),
        ('P=$1\nif [ -z "$P" ]; then P=2; fi\nvllm serve $P', ("2",), ("P",)),
        ("A=--x\nif y; then A+=' --y'; fi\nvllm serve $A", ("--x", "--y"), ("A",)),
        ("M=m\nwhile [ $# -gt 0 ]; do case $1 in -m) M=$2; shift 2;; esac; done\nvllm serve $M", ("m",), ("M",)),
        ("P=1\nfor P in 8000 8001; do vllm serve $P; done", ("$P",), ()),
        ("A=1\nif x; then y; fi\nA=2\nvllm serve $A", ("2",), ()),
    ],
)
def test_branches_are_not_followed(script: str, words: tuple[str, ...], guessed: tuple[str, ...]) -> None:
    """Inside a branch the first value stays and additions count, and what depends on it is named."""
    command = next(command for command in commands_in(script) if command.words[0] == "vllm")
    assert command.words[2:] == words
    assert command.guessed == guessed


@pytest.mark.parametrize(
    ("script", "otherwise"),
    [
        ("if x; then A='--b'; else A='--c 4'; fi; vllm serve m $A", ["--c 4"]),
        ("A=--b; if x; then A='--c 4'; elif y; then A=--d; fi; vllm serve m $A", ["--c 4", "--d"]),
        ("if x; then A=(--b); else A=(--c 4); fi; vllm serve m ${A[@]}", ["--c 4"]),
        ("if x; then A=--b; else A=--b; fi; vllm serve m $A", []),
        ("if x; then A=--b; else A=--c; fi; A=--e; vllm serve m $A", []),
        ("if x; then A=--b; else A=--c; fi; unset A; vllm serve m $A", []),
        ("if x; then A=--b; else A=--c; fi; vllm serve m", []),
        ("A=--c; x && A=--b; vllm serve m $A", ["--b"]),
    ],
)
def test_a_start_with_the_values_of_other_branches(script: str, otherwise: list[str]) -> None:
    """What a branch that was not taken would have run is kept beside the command, one value at a time."""
    command = commands_in(script)[-1]
    assert [" ".join(other.words[3:]) for other in command.otherwise] == otherwise


def test_branches_without_number_stay_bounded() -> None:
    """Only so many other values are kept."""
    script = "A=--a\n" + "\n".join(f"if x; then A=--b{number}; fi" for number in range(500)) + "\nvllm serve m $A"
    assert 1 < len(commands_in(script)[-1].otherwise) <= 16


def test_lines_are_those_where_commands_start() -> None:
    """The line is the 1-based first line of the command, also behind continuations and here-documents."""
    script = "#!/bin/sh\n\na \\\n b\ncat <<E\nx\nE\nA='1\n2' c; d\n"
    assert [(command.words[0], command.line) for command in commands_in(script)] == [
        ("a", 3),
        ("cat", 5),
        ("c", 8),
        ("d", 9),
    ]


def test_windows_line_ends_are_line_ends() -> None:
    """A file with CRLF reads as the same file with LF."""
    script = "export A=1 \\\n  B=2\nvllm serve 'a\nb' \\\n  --x\n"
    unix, windows = commands_in(script), commands_in(script.replace("\n", "\r\n"))
    assert unix == windows


def test_apostrophes_in_nested_here_documents_and_comments_are_not_quotes() -> None:
    """What stands in a here-document or comment inside `$(...)` does not open a quote."""
    script = "J=$(cat <<'E'\nit's (\nE\n)\nK=$(a # don't\n)\nvllm serve m"
    assert only(script).words == ("vllm", "serve", "m")


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("a\nb 'c\nd\n", 2),
        ('a\n\necho "b\n${C:-x}\n', 3),
        ("a `b\n", 1),
        ("a\nb $(c 'd)\n", 2),
        ("a ${b\n", 1),
        ("\nA=(b\n", 2),
        ("a $'b\n", 1),
    ],
)
def test_what_never_closes_is_bad_input_with_its_line(script: str, line: int) -> None:
    """A quote or bracket that never closes is one sentence with the line where it opened."""
    with pytest.raises(BadInput, match=rf"^line {line}: the .* that opens here is never closed$"):
        commands_in(script)


@each(
    "unit",
    ["(", '"', "'", "`", "$((((", "${a:-", '"${a:-"', '"$(', "((", "<<a ", "A=(", "\\", "case a in ", "[[ ", "f("],
)
def test_hostile_text_ends(unit: str) -> None:
    """A long run of openers ends in commands or in BadInput: no recursion, no hang."""
    text = unit * (20_000 // len(unit))
    assert "\n" not in complaint_about(text)


@pytest.mark.parametrize("line", ['A="$A$A"', 'A+="$A"', "A=(${A[@]} ${A[@]})", ': "${B:=$A}"; A="$B$B"; unset B'])
def test_variables_that_multiply_are_refused(line: str) -> None:
    """A script that doubles a variable on each line is TooLarge, long before memory is."""
    with pytest.raises(TooLarge):
        commands_in("A=xxxxxxxxxxxxxxxx\n" + f"{line}\n" * 60)


def test_work_grows_with_the_size_of_the_text() -> None:
    """Twice the text gives twice the commands and no more; a million would be refused."""
    small, large = (len(commands_in("export A=1\nvllm serve $A\n" * count)) for count in (500, 1000))
    assert large == 2 * small
    with pytest.raises(TooLarge):
        commands_in("a\n" * 500_000)


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
