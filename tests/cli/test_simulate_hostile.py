"""`plimsoll simulate` and what a user or the world does wrong: one line, the right exit code, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.cli.simulate import COMPILING
from tests.cli.complaints import complaint
from tests.each import each

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SMALL = "synthetic:requests=20,rate=20,prompt=100,output=10"
COUNTS = (
    "--num-blocks --block-size --max-num-seqs --max-num-batched-tokens --max-model-len --long-prefill-token-threshold "
    "--base-ns --token-ns --seq-ns --ctx-ps --limit"
).split()
NUMBERS = "--watermark --speedup --from-s --until-s".split()
PATHS = "--steps --requests --html".split()


@each("value", ["", "x", "nan", "inf", "-1", "1e400", "99999999999999999999", "1.5", "\x00", None])
@each("name", COUNTS)
def test_a_count_that_is_none(name: str, value: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Empty, not a number, negative, endless, a fraction, missing: the line names the option."""
    assert main(["simulate", SMALL, name, *([] if value is None else [value])]) == 2
    assert name in complaint(capsys)


@each("value", ["", "x", "nan", "inf", "-1", "1e400", "\x00", None])
@each("name", NUMBERS)
def test_a_number_that_is_none(name: str, value: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for what may be a fraction."""
    assert main(["simulate", SMALL, name, *([] if value is None else [value])]) == 2
    assert name in (said := complaint(capsys)) or "window" in said


@each(
    ("words", "said"),
    [
        ([], "which trace?"),
        (["--json"], "which trace?"),
        ([SMALL, "--no-such"], "--no-such"),
        ([SMALL, "--steps", ""], "--steps"),
        ([SMALL, "--requests", "-"], "--requests"),
        ([SMALL, "--html", "a.html", "--steps", "a.html"], "overwrite"),
        ([SMALL, "--rate", "10"], "--rate"),
        ([SMALL, "--seed", "1"], "--seed"),
        ([SMALL, "--trace-block-size", "16"], "--trace-block-size"),
        ([SMALL, "--vllm", "0.32.0"], "--vllm"),
        ([SMALL, "--used-gib", "1"], "--used-gib"),
        ([SMALL, "--async-scheduling", "--no-async-scheduling"], "not both"),
        ([SMALL, "vllm", "serve", "m", "--gpu", "H100"], "`--`"),
        ([SMALL, "--token-ns", "10000000000000"], "more than a day"),
        ([SMALL, "--seq-ns", "10000000000000"], "more than a day"),
        ([SMALL, "--ctx-ps", "10000000000000"], "more than a day"),
        ([SMALL, "--speedup", "1e-12"], "hundred years"),
        ([SMALL, "--max-num-batched-tokens", "2147483646"], "--max-num-batched-tokens"),
        ([SMALL, "--num-blocks", "2147483646"], "--num-blocks"),
        ([SMALL, "--block-size", "2147483646"], "--block-size"),
        ([SMALL, "--groups", "full:16,sliding:16:64", "--num-blocks", "50"], "does not start"),
        ([SMALL, "--groups", "full:16,mamba:16", "--block-size", "32"], "--block-size"),
        ([SMALL, "--save-times", "t.json"], "--fit"),
        ([SMALL, "--fit-series", "s.csv"], "--fit"),
        ([SMALL, "--times", "t.json", "--base-ns", "1"], "--times"),
        ([SMALL, "--no-such=3"], "--no-such"),
        ([SMALL, "-x"], "-x"),
        ([SMALL, "--json=1"], "--json takes no value"),
        ([SMALL, "--limit", "3", "--limit", "4"], "twice"),
        ([SMALL, "--limit", "ten"], "--limit: 'ten' is not a whole number, such as 2048"),
        ([SMALL, "--num-blocks", "1"], "null block"),
        ([SMALL, "--num-blocks", "0"], "at least 2"),
        ([SMALL, "--block-size", "0"], "--block-size"),
        ([SMALL, "--max-num-seqs", "0"], "--max-num-seqs"),
        ([SMALL, "--limit", "0"], "--limit"),
        ([SMALL, "--speedup", "0"], "--speedup"),
        ([SMALL, "--watermark", "1"], "--watermark"),
        ([SMALL, "--max-num-batched-tokens", "8"], "--max-num-seqs"),
        ([SMALL, "--no-chunked-prefill"], "--max-model-len"),
        ([SMALL, "--scheduling-policy", "lifo"], "fcfs or priority"),
        ([SMALL, "--from-s", "5", "--until-s", "2"], "window"),
        ([SMALL, "--from-s", "100000"], "window"),
        ([SMALL, "--groups", ""], "--groups"),
        ([SMALL, "--groups", "full"], "full:BLOCK"),
        ([SMALL, "--groups", "full:0"], "--groups"),
        ([SMALL, "--groups", "full:x"], "--groups"),
        ([SMALL, "--groups", "sliding:16"], "WINDOW"),
        ([SMALL, "--groups", "linear:16"], "linear"),
        ([SMALL, "--groups", "full:16,mamba:32"], "same block size"),
        ([SMALL, "--groups", "full:16", "--block-size", "32"], "--block-size"),
        (["synthetic:requests=0"], "requests"),
        (["synthetic:requests=many"], "many"),
        (["synthetic:colour=red"], "colour"),
        (["synthetic:requests=99999999999"], "requests"),
        (["no/such/file"], "no/such/file"),
        ([""], "not a file"),
        ([SMALL, "vllm", "serve", LLAMA], "vllm"),
        ([SMALL, "--gpu", "H100"], "vllm serve"),
        ([SMALL, "--gpu", "H1000", "--", "vllm", "serve", LLAMA], "H1000"),
        ([SMALL, "--gpu", "H100", "--", "vllm", "serve"], "no model"),
        ([SMALL, "--gpu", "H100", "--"], "command"),
        ([SMALL, "--gpu", "H100", "--plan", "p.json", "--", "vllm", "serve", LLAMA], "not both"),
        ([SMALL, "--gpu", "H100", "--block-size", "32", "--", "vllm", "serve", LLAMA], "--block-size"),
        ([SMALL, "--gpu", "L4", "--", "vllm", "serve", "meta-llama/Llama-3.1-70B-Instruct"], "no KV block"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 and one line that says what is wrong."""
    assert main(["simulate", *words]) == 2
    assert said in complaint(capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no request"),
        ("\n\n", "no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("hello\n", "line 1"),
        ("{}\n", "line 1"),
        ("{\n", "line 1"),
        ("\x00\x00\x00", "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,-5,3\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,nan,3\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,1e30,3\n", "line 2"),
    ],
)
def test_a_file_that_is_no_trace(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in it, or nothing that can be read: named with its line."""
    (tmp_path / "t").write_text(text, encoding="utf-8")
    assert main(["simulate", str(tmp_path / "t")]) == 2
    assert said in complaint(capsys)
    assert main(["simulate", str(tmp_path)]) == 2
    assert str(tmp_path) in complaint(capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "inf"], "--rate"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "0"], "--rate"),
        (["--rate", "fast"], "fast"),
        (["--arrivals", "poisson"], "--rate"),
        (["--arrivals", "never", "--rate", "3"], "never"),
        (["--arrivals", "bursty", "--rate", "3", "--burstiness", "0"], "--burstiness"),
        (["--rate", "3", "--seed", "-1"], "--seed"),
        (["--seed", "1"], "--seed"),
        (["--rate", "3", "--trace-block-size", "0"], "--trace-block-size"),
        (["--rate", "3", "--trace-block-size", "99999999999"], "--trace-block-size"),
    ],
)
def test_arrivals_that_cannot_be(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths alone with a rate or a process that says nothing."""
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,completion_tokens\n100,10\n100,10\n", encoding="utf-8")
    assert main(["simulate", str(trace), *words]) == 2
    assert said in complaint(capsys)


def _plan(**changes: object) -> dict[str, object]:
    kv = {"num_blocks": 100, "block_size": 16, "max_model_len": 4096, "groups": [{"kind": "full", "block_size": 16}]}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
    return {"schema": "plimsoll.plan/1", "kv": {**kv, **changes}, "settings": limits}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ([1], "object"),
        ({}, "not a plan"),
        ({"schema": "plimsoll.flags/1"}, "not a plan"),
        ({"schema": "plimsoll.plan/1"}, "kv"),
        ({"schema": "plimsoll.plan/1", "kv": []}, "kv"),
        (_plan(num_blocks=None), "num_blocks"),
        (_plan(num_blocks=10**30), "num_blocks"),
        (_plan(num_blocks=1e3), "num_blocks"),
        (_plan(num_blocks=True), "num_blocks"),
        (_plan(num_blocks=-3), "num_blocks"),
        (_plan(num_blocks=1), "no KV block"),
        (_plan(block_size=0), "block"),
        (_plan(groups="full"), "groups"),
        (_plan(groups=[3]), "group"),
        (_plan(groups=[{"kind": "cross", "block_size": 16}]), "cross"),
        (_plan(groups=[{"kind": ["full"], "block_size": 16}]), "full"),
        (_plan(groups=[{"kind": "sliding", "block_size": 16, "window": None}]), "window"),
    ],
)
def test_a_file_that_is_no_plan(plan: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not JSON, not a plan, or a plan with a number that cannot be: exit 2 and one line."""
    file = tmp_path / "plan.json"
    file.write_text(plan if isinstance(plan, str) else json.dumps(plan), encoding="utf-8")
    assert main(["simulate", SMALL, "--plan", str(file)]) == 2
    assert said in complaint(capsys)


@pytest.mark.parametrize("path", ["no-such-folder", "", "/dev/zero"])
def test_a_plan_that_cannot_be_read(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, a folder, or a device that never ends."""
    assert main(["simulate", SMALL, "--plan", path]) == 2
    complaint(capsys)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("path", ["no/such/folder/f.csv", ".", "no/such/folder/f.csv.gz"])
def test_what_cannot_be_written_is_the_worlds_fault(name: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the path, and exit code 3."""
    assert main(["simulate", SMALL, name, path]) == 3
    assert "cannot be written" in complaint(capsys)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110
@pytest.mark.parametrize("name", PATHS)
def test_a_disk_that_is_full(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Found out at the first row or at the last: one line and exit code 3."""
    assert main(["simulate", SMALL, name, "/dev/full"]) == 3
    assert "/dev/full" in complaint(capsys)


def _python(code: str, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.real
def test_an_interruption(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a run is one line and exit code 130."""
    pipe = tmp_path / "steps"
    os.mkfifo(pipe)
    words = ["simulate", "synthetic:requests=3000,rate=1", "--steps", str(pipe)]
    # A shell starts what it puts into the background deaf to Ctrl-C, and its children inherit that.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "plimsoll", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        with pipe.open() as steps:  # until it is read from, the run cannot go on: it is in the middle for certain
            assert steps.readline().startswith("step,")
            run.send_signal(signal.SIGINT)
            while steps.read(1 << 20):
                pass
        out, err = run.communicate()
    assert run.returncode == 130
    assert out == ""
    assert err.removeprefix(COMPILING + "\n") == "plimsoll: interrupted\n"


@pytest.mark.real
def test_a_reader_that_went_away() -> None:
    """`| head` is nobody's fault: exit 0 and not a word."""
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "plimsoll", "simulate", SMALL, "--json"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert done.stderr.removeprefix(COMPILING + "\n") == ""


def test_without_numpy(tmp_path: Path) -> None:
    """The command says what to install; it is the user's to do."""
    (tmp_path / "numpy.py").write_text("raise ImportError('not here')\n", encoding="utf-8")
    done = _python(f"import sys; from plimsoll.cli.main import main; sys.exit(main(['simulate', '{SMALL}']))", path=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "plimsoll: simulate needs numpy and numba: pip install 'plimsoll-line[simulate]'\n"


@pytest.mark.parametrize(
    "words",
    [
        ["flags", "--", "vllm", "serve", LLAMA],
        ["plan", "--gpu", "H100", "--", "vllm", "serve", LLAMA],
        ["plan", "--gpu", "H100", "--json", "--", "vllm", "serve", LLAMA],
        ["simulate", "--help"],
        ["--help"],
    ],
)
def test_other_commands_start_without_numpy(words: list[str]) -> None:
    """numpy and numba are `simulate`'s alone, and cost nobody else a moment."""
    code = (
        f"import sys; from plimsoll.cli.main import main; code = main({words!r}); "
        "sys.exit(code or bool({'numpy', 'numba'} & set(sys.modules)))"
    )
    done = _python(code)
    assert done.returncode == 0, done.stderr


_WRITTEN = {
    "simulate": ("--steps", "--requests", "--html", "--save-times"),
    "tune": ("--html", "--commands", "--save-times", "--into"),
    "sweep": ("--html", "--csv", "--save-times", "--into"),
}


def test_a_trace_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output that is the input, also by another name, is refused before anything is opened."""
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", encoding="ascii")
    link = tmp_path / "link.csv"
    link.symlink_to(trace)
    before = trace.read_bytes()
    for command, names in _WRITTEN.items():
        for name in names:
            assert main([command, str(trace), name, str(link)]) == 2
            assert "overwrite" in complaint(capsys)
            for read in ("--fit", "--fit-series", "--times", "--last" if command == "tune" else "--plan"):
                assert main([command, SMALL, read, str(trace), name, str(link)]) == 2
                assert "overwrite" in complaint(capsys)
    assert trace.read_bytes() == before


def test_control_characters_of_a_name_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """An escape in a file name is shown as a question mark."""
    assert main(["simulate", "nosuch\x1b[31m.csv"]) == 2
    assert "\x1b" not in complaint(capsys)
