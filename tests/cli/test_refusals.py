"""What every command refuses: each row of refusals.txt is one line of complaint, exit code 2 and nothing done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.assets.plans import plan_of
from tests.cli.answers import CAPTURES, HEALTHY, LLAMA, ask
from tests.each import each

ROWS = [
    line.split(" => ", 1) for line in (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]  # fmt: skip
SMALL = "synthetic:requests=20,rate=20,prompt=100,output=10"
NAMES = {
    "$SMALL": SMALL, "$LLAMA": LLAMA, "$HEALTHY": HEALTHY,
    "$RUN": str(CAPTURES / "vllm-0.25.1-h200-traffic" / "tight.requests.jsonl.gz"),
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
    (tmp_path / "captures").symlink_to(CAPTURES)
    return tmp_path


def test_what_is_typed_wrong_is_one_line(here: Path) -> None:
    """It says what is wrong with which word, in a line that is no longer than a screen."""
    before, wrong = sorted(path.name for path in here.iterdir()), []
    for typed, said in ROWS:
        words = typed
        for name, stands_for in NAMES.items():
            words = words.replace(name, stands_for)
        try:
            line = ask(words, code=2).line
            assert said in line
            assert len(line) <= 2201
        except AssertionError as error:
            wrong.append(f"{typed}: {error}")
    assert wrong == []
    assert len(ROWS) > 300
    assert sorted(path.name for path in here.iterdir()) == before


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
        (["inside", "check", "--python", "a\0b"], "cannot be run"),
        (["inside", "check", "--vllm-dir", "a\0b"], "--vllm-dir"),
        (["inside", "check", "--vllm-dir", "x" * 5000], "--vllm-dir"),
        (["inside", "wheel", "a\0b"], "zero byte"),
        (["doctor", "--explain", "x" * 5000], "there is no finding"),
        (["simulate", "nosuch\x1b[31m.csv"], "nosuch?[31m.csv"),
        (["standin", "--x\x1b[2J\n\x07", "y" * 10_000], "vllm"),
    ],
)
def test_what_a_terminal_would_obey_is_not_repeated(words: list[str], said: str) -> None:
    """Control characters, zero bytes and endless words are named without them, within a screen."""
    line = ask("", *words, code=2).line
    assert said in line
    assert line.rstrip("\n").isprintable()
    assert len(line) <= 2200
