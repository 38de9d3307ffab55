"""What every command refuses (refusals.txt: one line, exit code 2, nothing done), and what it says (screens.txt)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.assets.plans import plan_of
from tests.cli.answers import CAPTURES, HEALTHY, LLAMA, ask
from tests.cli.test_tune import CHATS, PROMISE, SERVER, SPACE
from tests.each import each, rows

ROWS, SCREENS = (rows(Path(__file__).parent / name) for name in ("refusals.txt", "screens.txt"))
SMALL = "synthetic:requests=20,rate=20,prompt=100,output=10"
NAMES = {
    "$SMALL": SMALL, "$LLAMA": LLAMA, "$HEALTHY": HEALTHY,
    "$RUN": str(CAPTURES / "vllm-0.25.1-h200-traffic" / "tight.requests.jsonl.gz"),
    "$TUNE": f"{CHATS} {SPACE}", "$CHATS": CHATS, "$L4": SERVER, "$PROMISE": PROMISE,
}  # fmt: skip
COUNTS = (
    "--num-blocks --block-size --max-num-seqs --max-num-batched-tokens --max-model-len --long-prefill-token-threshold "
    "--base-ns --token-ns --seq-ns --ctx-ps --limit"
).split()
NUMBERS = "--watermark --speedup --from-s --until-s".split()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few files to name, in a world without a network, a cluster or a token."""
    for name in ("PLIMSOLL_GUARD_TOKEN", "PLIMSOLL_TOKEN", "VLLM_API_KEY", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(plan_of("vllm", "serve", LLAMA)), encoding="utf-8")
    (tmp_path / "lengths.csv").write_text("prompt_tokens,completion_tokens\n100,10\n100,10\n", encoding="utf-8")
    (tmp_path / "start.sh").write_text("vllm serve m\n", encoding="utf-8")
    (tmp_path / "commands.txt").write_text(f"vllm serve {LLAMA} --max-model-len 8K\nvllm serve {LLAMA} -tp 2\n")
    (tmp_path / "pods.toml").write_text("[discover]\nkubernetes = 'app=vllm'\n", encoding="utf-8")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{not json", encoding="utf-8")
    lines = [f"vllm serve {LLAMA} --max-model-len 8k", "vllm serve no/such-model", f"--gpuz L4 vllm serve {LLAMA}", "garbage"]
    (tmp_path / "lines.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "lines.sh").write_text(f"#!/bin/sh\n{lines[0]}\ngarbage\n{lines[0]}\n", encoding="utf-8")
    (tmp_path / "card.txt").write_text(f"--gpu L4 {lines[0]}\n", encoding="utf-8")
    (tmp_path / "captures").symlink_to(CAPTURES)
    (tmp_path / "inputs").symlink_to(CAPTURES / "outputs" / "inputs")
    return tmp_path


def test_what_is_typed_wrong_is_one_line(here: Path) -> None:
    """It says what is wrong with which word, in a line that is no longer than a screen."""
    before, wrong = sorted(path.name for path in here.iterdir()), []
    for typed, *said in ROWS:
        try:
            line = ask(_named(typed), code=2).line
            assert " => ".join(said) in line
            assert len(line) <= 2201
        except AssertionError as error:
            wrong.append(f"{typed}: {error}")
    assert wrong == []
    assert len(ROWS) > 300
    assert sorted(path.name for path in here.iterdir()) == before


def _named(text: str) -> str:
    for name, stands_for in NAMES.items():
        text = text.replace(name, stands_for)
    return text


@pytest.mark.usefixtures("here")
@each(("typed", "code", "parts"), SCREENS)
def test_what_a_screen_says(typed: str, code: str, parts: str) -> None:
    """The exit code and the words that a user looks for; the figures beside them are in captures/outputs."""
    answer = ask(_named(typed), code=int(code))
    text = answer.text if int(code) < 2 else answer.line
    for part in _named(parts).split(" && "):
        said = part.lstrip("!^")
        assert text.startswith(said) if part[0] == "^" else (said in text) is (part[0] != "!"), part


@each("value", ["", "x", "nan", "inf", "-1", "1e400", "99999999999999999999", "1.5", "\x00", None])
@each("name", [*COUNTS, *NUMBERS])
def test_a_number_that_is_none_is_named(name: str, value: str | None) -> None:
    """Empty, not a number, negative, endless, missing; a fraction and a large number where it is a count."""
    if name in COUNTS or value not in ("99999999999999999999", "1.5"):
        line = ask("simulate", SMALL, name, *([] if value is None else [value]), code=2).line
        assert name in line or (name in NUMBERS and "window" in line)


@pytest.mark.usefixtures("here")
@each(
    ("words", "said"),
    [
        (["inside", "check", "--python", "a\0b"], "cannot be run"), (["inside", "check", "--vllm-dir", "a\0b"], "--vllm-dir"),
        (["inside", "check", "--vllm-dir", "x" * 5000], "--vllm-dir"), (["inside", "wheel", "a\0b"], "zero byte"),
        (["doctor", "--explain", "x" * 5000], "there is no finding"), (["simulate", "nosuch\x1b[31m.csv"], "nosuch?[31m.csv"),
        (["standin", "--x\x1b[2J\n\x07", "y" * 10_000], "vllm"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_obey_is_not_repeated(words: list[str], said: str) -> None:
    """Control characters, zero bytes and endless words are named without them, within a screen."""
    line = ask("", *words, code=2).line
    assert said in line
    assert line.rstrip("\n").isprintable()
    assert len(line) <= 2200
