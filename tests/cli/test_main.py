"""The command as a user meets it: exit codes, one-line errors, no tracebacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import plimsoll
from plimsoll.cli import flags as flags_command
from plimsoll.cli.main import COMMANDS, main
from tests.each import each

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "article-start.sh"
LOG = ROOT / "tests" / "captures" / "vllm-0.25.1-h200" / "base.log"


def _one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("plimsoll: ")
    return captured.err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the version and nothing else."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"plimsoll {plimsoll.__version__}\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_the_first_screen(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without words the commands are listed."""
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@each("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """COMMAND --help prints usage and names its page, which exists."""
    shown = []
    for words in ([name, "--help"], [name, "-h"], ["help", name]):
        assert main(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert shown[0].startswith(f"usage: plimsoll {name}")
    assert f"docs/{name}.md" in shown[0]
    assert (ROOT / "docs" / f"{name}.md").is_file()


def test_help_fits_a_narrow_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On 80 columns the options and what they mean are broken at blanks."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["help", "guard"]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("  --", " " * 24))]
    assert max(map(len, listed)) <= 80


@pytest.mark.real
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_words(shell: str, tmp_path: Path) -> None:
    """`plimsoll completion SHELL` prints a script that the shell takes; what it calls offers commands, options and values."""
    script = subprocess.run(
        [sys.executable, "-m", "plimsoll", "completion", shell], capture_output=True, text=True, check=True
    ).stdout
    if shutil.which(shell):
        path = tmp_path / "completion"
        path.write_text(script, encoding="utf-8")
        subprocess.run([shell, "-n", str(path)], check=True)
    wanted = {
        "pla": "plan",
        "plan --gpus": "--gpus",
        "plan --gpu H10": "H100 SXM 80GB",
        "guardctl stat": "status",
        "plan x": "file",
    }
    for typed, offered in wanted.items():
        words = f"plimsoll {typed}"
        environ = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_PLIMSOLL_COMPLETE": f"{shell}_complete"}
        if shell == "fish":
            environ["COMP_CWORD"] = words.split()[-1]
        done = subprocess.run(
            [sys.executable, "-m", "plimsoll"], env={**os.environ, **environ}, capture_output=True, text=True, check=False
        )
        assert offered in done.stdout, (typed, done)


def test_a_word_that_is_not_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A typing mistake in a command is exit code 2; for a shell the line names those that are known."""
    assert main(["completion", "tcsh"]) == 2
    assert "bash|zsh|fish" in _one_line(capsys)
    assert main(["flgas"]) == 2
    assert "no command 'flgas'; did you mean plimsoll flags?" in _one_line(capsys)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.sh", b""),
        ("blank.sh", b" \n\n"),
        ("binary", bytes(range(256)) * 40),
        ("quotes.sh", b"vllm serve 'model --port 8000\n"),
        ("long.sh", b"vllm serve m " + b"x" * 10_000_000),
        ("latin1.sh", "vllm serve modèle".encode("latin-1")),
        ("nothing.sh", b"echo hello\n"),
        ("broken.yaml", b"services: [\n"),
        ("list.yaml", b"- 1\n- 2\n"),
    ],
)
@pytest.mark.parametrize("through_stdin", [False, True])
def test_garbage_is_one_line_and_exit_2(
    name: str, content: bytes, through_stdin: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Empty, binary, unbalanced, endless or beside the point: exit 2 and one clear line, from a file and from a pipe."""
    path = tmp_path / name
    path.write_bytes(content)
    command = [sys.executable, "-m", "plimsoll", "flags", "-" if through_stdin else str(path)]
    with path.open("rb") as stdin:
        done = subprocess.run(
            command,
            stdin=stdin if through_stdin else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 400
    assert done.stderr.startswith("plimsoll: ")
    assert "Traceback" not in done.stderr
    assert capfd.readouterr().out == ""


@each(
    ("words", "said"),
    [
        (["flags"], "nothing to look at"),
        (["flags", "--vllm"], "--vllm needs a value"),
        (["flags", "--vllm", "banana", "--", "vllm", "serve", "m"], "is not a version"),
        (["flags", "--vllm", "0.6.0", "--vllm", "0.7.0", "--", "vllm", "serve", "m"], "given twice"),
        (["flags", "no-such-file.sh"], "no such file"),
        (["flags", "--", "ls", "-l"], "no vLLM start"),
        (["flags", "ls -l"], "no vLLM start"),
        (["flags", "--pid", "x"], "not a process id"),
        (["flags", "--pid", "4194999"], "4194999"),
        (["flags", "--pid", "1", "vllm", "serve", "m"], "give no command"),
        (["flags", "start.sh", "--", "vllm", "serve", "m"], "not both"),
        (["flags", "--vlm", "0.19.0", str(SCRIPT)], "--vlm is no option of plimsoll flags; did you mean --vllm?"),
        (["flags", "--json=yes", str(SCRIPT)], "--json takes no value"),
        (["doctor", "--explian", "x"], "there is no option '--explian'; did you mean --explain?"),
        (["demo", "--balancer", "nginx"], "--balancer 'nginx': it is own or haproxy"),
        (["flags", str(SCRIPT), "--jsn"], "--jsn is no option of plimsoll flags"),
        (["flags", str(SCRIPT), "compose.yaml"], "one file at a time"),
        (["flags", "--vlm", "0.19.0", "vllm", "serve", "m"], "--vlm is no option of plimsoll flags"),
        (["flags", str(LOG)], "plimsoll doctor"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is typed wrong is named in one line."""
    assert main(words) == 2
    assert said in _one_line(capsys)


def test_the_script_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object of the promised schema, and exit 1 says that something is wrong."""
    assert main(["flags", "--vllm", "0.32.0", "--json", str(SCRIPT)]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "plimsoll.flags/1"
    assert body["vllm"] == "0.32.0"
    assert {"name", "status", "since", "instead", "note"} <= set(body["items"][0])
    assert {"name": "--swap-space", "status": "removed", "since": "0.18.0"}.items() <= next(
        i for i in body["items"] if i["name"] == "--swap-space"
    ).items()
    assert body["rewritten"].endswith("--attention-backend FLASH_ATTN")


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "m", "--port", "8000", "--vllm", "0.32.0", "--json"],
        ["--vllm=0.32.0", "--json", "--", "vllm", "serve", "m", "--port", "8000"],
        ["--vllm", "0.32.0", "--json", "vllm serve m --port 8000"],
        ["--vllm", "0.32.0", "--json", "--", "env", "CUDA_VISIBLE_DEVICES=0", "vllm", "serve", "m", "--port", "8000"],
        ["--vllm", "0.32.0", "--json", "python3 -m vllm.entrypoints.openai.api_server --model m --port 8000"],
    ],
)
def test_a_pasted_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The line works as pasted, behind --, in one pair of quotes, and with what people put in front of it."""
    assert main(["flags", *words]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["rewritten"].endswith("vllm serve m --port 8000")


def test_what_another_branch_of_a_script_gives_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that only the else branch adds stops the server as surely; what each branch may leave out is no fault."""
    script = tmp_path / "start.sh"
    script.write_text('if x; then E="--enforce-eager"; else E="--swap-space 4"; fi\nvllm serve m $E\n', encoding="utf-8")
    assert main(["flags", "--vllm", "0.32.0", "--json", str(script)]) == 1
    (item,) = [i for i in json.loads(capsys.readouterr().out)["items"] if i["status"] == "removed"]
    assert (item["name"], item["value"]) == ("--swap-space", "4")
    assert item["note"].endswith("; in another branch of the script")
    script.write_text(
        "if x; then E=--enforce-eager; else E=--enable-lora; fi\nvllm serve m --max-loras 2 $E\n", encoding="utf-8"
    )
    assert main(["flags", "--vllm", "0.32.0", str(script)]) == 0


def test_behind_the_dashes_our_own_options_are_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    """After -- every word is vLLM's, also one that we would know."""
    assert main(["flags", "--", "vllm", "serve", "m", "--json"]) == 1
    assert "never-existed    --json" in capsys.readouterr().out


def test_secrets_are_not_shown_and_are_to_be_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the text nor in the JSON; a command with [redacted] in it cannot be run, and a line says so."""
    command = ["env", "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz", "vllm", "serve", "m", "--api-key", "hunter2secret"]
    for words in (["flags", "--", *command], ["flags", "--json", "--", *command]):
        main(words)
        out = capsys.readouterr().out
        assert "hunter2secret" not in out
        assert "hf_abcdef" not in out
        assert "[redacted]" in out
    main(["flags", "HF_TOKEN=hf_abcdefghijklmnop", "vllm", "serve", "m"])
    assert "put yours back before you run it" in capsys.readouterr().out
    main(["flags", "vllm", "serve", "m"])
    assert "put yours back" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "m", "hf_abcdefghijklmnopqrstuvwxyz"],
        ["vllm", "serve", "https://joe:hf_abcdefghijklmnopqrstuvwxyz@host/m"],
        ["vllm", "serve", "m", "--kv-transfer-config.kv_connector_extra_config.token", "hf_abcdefghijklmnopqrstuvwxyz"],
        ["vllm", "serve", "m", "--api-kye", "abcdefghijklmnopqrstuvwxyz-hf"],
        ["vllm", "serve", "m", "--kv-transfer-config", '{"password": "hf_abcdefghijklmnopqrstuvwxyz"}'],
        ["env", "OPENAI_API_KEY=abcdefghijklmnopqrstuvwxyz", "vllm", "serve", "m"],
    ],
)
def test_secrets_are_hidden_wherever_they_stand(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As a stray word, in the model's address, behind a dotted key or a mistyped flag, in JSON, in the environment."""
    for options in ([], ["--json"]):
        main(["flags", *options, "--", *words])
        assert "abcdefghijklmnopqrstuvwxyz" not in capsys.readouterr().out


def test_terminal_escapes_in_the_input_are_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters show as what they are."""
    for options in ([], ["--json"]):
        main(["flags", *options, "--", "vllm", "serve", "m\x1b[2J", "--made-\x1b[31mup", "x\x07"])
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\x07" not in out


def test_the_rewritten_line_survives_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bash reads from the rewritten line exactly the words that were meant: quotes, dollars, blanks, home folders."""
    words = ["m", "--served-model-name", "a b", "it's", 'say "x"', "cost$HOME", "back\\slash", "--hf-overrides", '{"k": "$X"}']
    assert main(["flags", "--json", "--", "vllm", "serve", *words]) == 0
    line = json.loads(capsys.readouterr().out)["rewritten"]
    done = subprocess.run(
        ["bash", "-c", f'vllm() {{ printf "%s\\0" "$@"; }}; HOME=/nowhere; {line}'], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\0")[1:-1] == words
    script = tmp_path / "s.sh"
    script.write_text("vllm serve ~/models/x $EXTRA_ARGS --port $PORT\n", encoding="utf-8")
    main(["flags", "--json", str(script)])
    assert json.loads(capsys.readouterr().out)["rewritten"] == "vllm serve ~/models/x $EXTRA_ARGS --port $PORT"


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["flags", str(SCRIPT)]])
def test_a_full_disk_is_the_worlds_fault(words: list[str]) -> None:
    """What cannot be written is one line and exit code 3."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "plimsoll", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1


def test_pipes_are_read_and_written_like_files(capsys: pytest.CaptureFixture[str]) -> None:
    """`<(command)` works, a closed standard input is one line, a reader that goes away is no error."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m plimsoll flags - <&-"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    command = f"{sys.executable} -m plimsoll flags --json <(echo vllm serve m --port 1)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rewritten"] == "vllm serve m --port 1"
    assert capsys.readouterr().err == ""
    command = f"{sys.executable} -m plimsoll flags {SCRIPT} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


def test_a_running_server_is_read_from_its_own_process(capsys: pytest.CaptureFixture[str]) -> None:
    """--pid checks the command line and environment that a live process was really started with."""
    command = [sys.executable, "-c", "import time; time.sleep(60)", "vllm", "serve", "m", "--swap-space", "4"]
    with subprocess.Popen(command, env={**os.environ, "VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}) as process:
        try:
            shown = Path(f"/proc/{process.pid}/cmdline")
            while b"vllm" not in shown.read_bytes():  # until then it is a copy of this test
                time.sleep(0.01)
            code = main(["flags", "--vllm", "0.32.0", "--json", "--pid", str(process.pid)])
            body = json.loads(capsys.readouterr().out)
        finally:
            process.kill()
    assert code == 1
    statuses = {item["name"]: item["status"] for item in body["items"]}
    assert statuses["--swap-space"] == "removed"
    assert statuses["VLLM_ATTENTION_BACKEND"] == "no-effect"


def test_a_mistake_of_ours_is_one_line_unless_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even a bug shows no traceback; PLIMSOLL_DEBUG=1 brings it back."""

    def broken(_: object) -> int:
        raise RuntimeError("token=abcdef0123456789abcdef")

    monkeypatch.setattr(flags_command.COMMAND, "run", broken)
    monkeypatch.delenv("PLIMSOLL_DEBUG", raising=False)
    assert main(["flags"]) == 70
    assert "abcdef0123456789" not in _one_line(capsys)
    monkeypatch.setenv("PLIMSOLL_DEBUG", "1")
    with pytest.raises(RuntimeError):
        main(["flags"])
