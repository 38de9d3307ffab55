"""The command as a user meets it: exit codes, one-line errors, no tracebacks; and `flags`, with what it says of a command."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import plimsoll
from plimsoll.cli import flags as flags_command
from plimsoll.cli.flags import FlagsOptions
from plimsoll.cli.main import COMMANDS, main, parse
from plimsoll.launch.options import options_of
from tests.cli.answers import LLAMA, ask, ask_process, shell
from tests.each import cases, each

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "article-start.sh")


def test_the_first_screen() -> None:
    """--version prints the version and nothing else; without words the commands are listed."""
    assert ask("--version").out == f"plimsoll {plimsoll.__version__}\n"
    for words in ("", "--help", "help"):
        assert all(name in ask(words).out for name in COMMANDS)


@each("name", COMMANDS)
def test_every_command_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--help is one text however it is asked for, names every option and the command's page, and fits a narrow screen."""
    shown = {ask(words).out for words in (f"{name} --help", f"{name} -h", f"help {name}")}
    assert len(shown) == 1
    (text,) = shown
    assert text.startswith(f"usage: plimsoll {name}")
    assert f"docs/{name}.md" in text
    assert (ROOT / "docs" / f"{name}.md").is_file()
    assert max(map(len, text.splitlines())) <= 128
    command = importlib.import_module(f"plimsoll.cli.{name}").COMMAND
    told_elsewhere = {info.name for info in command.unlisted} if name in ("sweep", "whatif") else set()
    if name == "tune":
        told_elsewhere = set("--fit-series --save-times --arrivals --burstiness --seed".split())
    assert {info.name for info in command.known.values() if info.name not in text and info.help} <= told_elsewhere
    monkeypatch.setenv("COLUMNS", "80")
    listed = [line for line in ask(f"help {name}").out.splitlines() if line.startswith(" " * 24)]
    assert max(map(len, listed), default=0) <= 80


@pytest.mark.real
@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_a_shell_completes_words(kind: str, tmp_path: Path) -> None:
    """`plimsoll completion SHELL` prints a script that the shell takes; what it calls offers commands, options and values."""
    script = ask_process(["completion", kind]).out
    if shutil.which(kind):
        (tmp_path / "completion").write_text(script, encoding="utf-8")
        subprocess.run([kind, "-n", str(tmp_path / "completion")], check=True)
    wanted = {"pla": "plan", "plan --gpus": "--gpus", "plan --gpu H10": "H100 SXM 80GB", "guardctl stat": "status",
              "plan x": "file"}  # fmt: skip
    for typed, offered in wanted.items():
        words = f"plimsoll {typed}"
        place = words.split()[-1] if kind == "fish" else str(words.count(" "))
        environ = {"COMP_WORDS": words, "COMP_CWORD": place, "_PLIMSOLL_COMPLETE": f"{kind}_complete"}
        command = [sys.executable, "-m", "plimsoll"]
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
        assert offered in done.stdout, (typed, done)


def test_ours_are_taken_wherever_they_stand_before_the_dashes() -> None:
    """Exact matches win, everything else is handed on in order; behind the dashes nothing is ours."""
    found = parse(FlagsOptions, ["vllm", "--json", "serve", "m", "--vllm=0.6.0", "-dph", "--port", "1", "--vll", "x"])
    assert found.rest == ("vllm", "serve", "m", "-dph", "--port", "1", "--vll", "x")
    assert (found.vllm, found.json, found.verbatim, found.pid) == ("0.6.0", True, None, None)
    found = parse(FlagsOptions, ["--", "--json", "--help", "--", "x"])
    assert (found.verbatim, found.json) == (("--json", "--help", "--", "x"), False)
    assert parse(FlagsOptions, ["--vllm", "1", "--vllm=1"]).vllm == "1", "the same value twice is no mistake"
    assert "never-existed    --json" in ask("flags -- vllm serve m --json", code=1).out


@given(st.lists(st.one_of(st.text(max_size=12), st.from_regex(r"--?[a-z]{1,4}(=[a-z]*)?", fullmatch=True)), max_size=8))
def test_no_word_is_lost(words: list[str]) -> None:
    """Whatever is typed that is not ours comes out again, in order."""
    ours = {"--", "-h", "--help", *(info.name for info in options_of(FlagsOptions).values())}
    foreign = [word for word in words if word.partition("=")[0] not in ours]
    assert list(parse(FlagsOptions, foreign).rest) == foreign


@pytest.mark.parametrize("through_stdin", [False, True])
def test_garbage_is_one_line_and_exit_2(through_stdin: bool, tmp_path: Path) -> None:
    """Empty, binary, unbalanced, endless or beside the point: exit 2 and one short line, from a file and from a pipe."""
    for name, content in {
        "empty.sh": b"", "blank.sh": b" \n\n", "binary": bytes(range(256)) * 40,
        "quotes.sh": b"vllm serve 'model --port 8000\n", "long.sh": b"vllm serve m " + b"x" * 10_000_000,
        "latin1.sh": "vllm serve modèle".encode("latin-1"), "nothing.sh": b"echo hello\n", "broken.yaml": b"services: [\n",
        "list.yaml": b"- 1\n- 2\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        where = "-" if through_stdin else str(tmp_path / name)
        assert len(ask("flags", where, code=2, given=content).line) < 400, name


def test_what_another_branch_of_a_script_gives_is_checked(tmp_path: Path) -> None:
    """A flag that only the else branch adds stops the server as surely; what each branch may leave out is no fault."""
    script = tmp_path / "start.sh"
    script.write_text('if x; then E="--enforce-eager"; else E="--swap-space 4"; fi\nvllm serve m $E\n', encoding="utf-8")
    (item,) = [i for i in ask("flags --vllm 0.32.0 --json", str(script), code=1).body["items"] if i["status"] == "removed"]
    assert (item["name"], item["value"]) == ("--swap-space", "4")
    assert item["note"].endswith("; in another branch of the script")
    script.write_text("if x; then E=--enforce-eager; else E=--enable-lora; fi\nvllm serve m --max-loras 2 $E\n")
    ask("flags --vllm 0.32.0", str(script))


@each("words", cases("cli", "secrets_are_hidden_wherever_they_stand_and_are_to_be_put_back"))
def test_secrets_are_hidden_wherever_they_stand_and_are_to_be_put_back(words: list[str]) -> None:
    """As a stray word, in the model's address, behind a dotted key or a mistyped flag, in JSON, in the environment."""
    text = ask("flags --", *words, code=None).out
    for out in (text, ask("flags --json --", *words, code=None).out):
        assert "abcdefghijklmnopqrstuvwxyz" not in out
        assert "hunter2secret" not in out
    is_redacted = "[redacted]" in text.partition("Rewritten")[2]
    assert ("put yours back before you run it" in text) is is_redacted
    assert is_redacted or words[-1] in ("m", "hf_abcdefghijklmnopqrstuvwxyz"), "a word that is left out needs none"


def test_terminal_escapes_are_not_obeyed_and_the_rewritten_line_survives_a_shell(tmp_path: Path) -> None:
    """Control characters show as what they are; bash reads from the rewritten line exactly the words that were meant."""
    for options in ("flags --", "flags --json --"):
        out = ask(options, "vllm", "serve", "m\x1b[2J", "--made-\x1b[31mup", "x\x07", code=1).out
        assert not {"\x1b", "\x07"} & set(out)
    words = ["m", "--served-model-name", "a b", "it's", 'say "x"', "cost$HOME", "back\\slash", "--hf-overrides", '{"k": "$X"}']
    line = ask("flags --json -- vllm serve", *words).body["rewritten"]
    assert shell(f'vllm() {{ printf "%s\\0" "$@"; }}; HOME=/nowhere; {line}').stdout.split("\0")[1:-1] == words
    script = tmp_path / "s.sh"
    script.write_text("vllm serve ~/models/x $EXTRA_ARGS --port $PORT\n", encoding="utf-8")
    assert ask("flags --json", str(script)).body["rewritten"] == "vllm serve ~/models/x $EXTRA_ARGS --port $PORT"


def test_pipes_are_read_and_written_like_files() -> None:
    """`<(command)` works, a closed standard input is one line, a reader that goes away is no error, a full disk is exit 3."""
    done = shell("plimsoll flags - <&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = shell("plimsoll flags --json <(echo vllm serve m --port 1)")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["rewritten"] == "vllm serve m --port 1"
    done = shell("plimsoll flags --json vllm serve m --swap-space 4 | true; exit ${PIPESTATUS[0]}")
    assert (done.stderr, done.returncode) == ("", 1)  # the verdict stands
    for words in ("--version", "--help", f"flags {SCRIPT}"):
        done = shell(f"plimsoll {words} > /dev/full")
        assert (done.returncode, done.stderr.count("\n")) == (3, 1), words


def test_a_running_server_is_read_from_its_own_process() -> None:
    """--pid checks the command line and environment that a live process was really started with."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", "vllm", "serve", "m", "--swap-space", "4"]
    with subprocess.Popen(command, env={**os.environ, "VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}) as process:
        try:
            while b"vllm" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():  # until then it is a copy of this test
                time.sleep(0.01)
            body = ask(f"flags --vllm 0.32.0 --json --pid {process.pid}", code=1).body
        finally:
            process.kill()
    statuses = {item["name"]: item["status"] for item in body["items"]}
    assert (statuses["--swap-space"], statuses["VLLM_ATTENTION_BACKEND"]) == ("removed", "no-effect")


def test_a_mistake_of_ours_is_one_line_unless_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a bug shows no traceback; PLIMSOLL_DEBUG=1 brings it back."""

    def broken(_: object) -> int:
        raise RuntimeError("token=abcdef0123456789abcdef")

    monkeypatch.setattr(flags_command.COMMAND, "run", broken)
    monkeypatch.delenv("PLIMSOLL_DEBUG", raising=False)
    answer = ask("flags", code=70)
    assert (answer.out, answer.err.count("\n"), "abcdef0123456789" in answer.err) == ("", 1, False)
    monkeypatch.setenv("PLIMSOLL_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main(["flags"])


def _python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; {code}"]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=60)


def test_what_is_not_installed_is_named_with_what_brings_it(tmp_path: Path) -> None:
    """numpy for simulate, the packages of a stand-in for standin and demo: one line with the command that mends it."""
    code = "from plimsoll.cli.main import main; sys.exit(main(['simulate', 'synthetic:requests=20']))"
    wanted = "simulate needs numpy and numba: pip install 'plimsoll-line[simulate]'"
    broken = "numpy cannot be imported: not here"  # it is there, and a library of the system is not
    for error, exit_code, says in (("ModuleNotFoundError", 2, wanted), ("ImportError", 3, broken)):
        (tmp_path / "numpy.py").write_text(f"raise {error}('not here')\n", encoding="utf-8")
        done = _python(code, PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", f"plimsoll: {says}\n")
    missing = "numpy pydantic starlette uvicorn uvloop httptools".split()
    for command in ("standin", "demo"):
        code = (
            f"sys.modules.update(dict.fromkeys({missing})); from plimsoll.cli.main import main; sys.exit(main(['{command}']))"
        )
        done = _python(code)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert done.stderr.startswith("plimsoll: a stand-in needs numpy, pydantic, starlette, uvicorn, ")
        assert f"pip install 'plimsoll-line[{command}]', or in a clone pip install '.[{command}]'" in done.stderr


def test_other_commands_start_without_numpy() -> None:
    """numpy and numba are `simulate`'s alone, and cost nobody else a moment."""
    serve = ["--", "vllm", "serve", LLAMA]
    card: list[Any] = ["plan", "--gpu", "H100"]
    for words in (["flags", *serve], [*card, *serve], [*card, "--json", *serve], ["simulate", "--help"], ["--help"]):
        done = _python(
            f"from plimsoll.cli.main import main; code = main({words!r}); "
            "sys.exit(code or bool({'numpy', 'numba'} & set(sys.modules)))"
        )
        assert done.returncode == 0, (words, done.stderr)


def test_a_temporary_folder_that_cannot_be_made_is_the_worlds_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """demo's one line says what to set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    answer = ask("demo", code=3)
    assert (answer.err.count("\n"), "set TMPDIR" in answer.err) == (1, True)
