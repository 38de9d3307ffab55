"""`plimsoll plan --compare FILE` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plimsoll.cli.main import main

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def _file(folder: Path, *lines: str) -> str:
    file = folder / "commands.txt"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(file)


def test_a_line_may_name_its_own_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One model on two cards: what stands in front of `vllm serve` is that line's, and the other card's neighbours are not."""
    command = f"vllm serve {LLAMA} --max-model-len 8K"
    file = _file(tmp_path, f"--gpu L4 --vllm 0.25.1 {command}", command)
    assert main(["plan", "--gpu", "H100", "--used-gib", "2", "--vllm", "0.32.0", "--compare", file, "--json"]) == 0
    plans = [one["plan"] for one in json.loads(capsys.readouterr().out)["compare"]]
    assert [plan["gpu"]["name"] for plan in plans] == ["L4", "H100 SXM 80GB"]
    assert [plan["vllm"] for plan in plans] == ["0.25.1", "0.32.0"]


def test_a_mistyped_option_on_a_line_is_said_in_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not dropped in silence: that line is not planned, and the message names what may stand there."""
    file = _file(tmp_path, f"vllm serve {LLAMA}", f"--gpuz L4 vllm serve {LLAMA}")
    assert main(["plan", "--gpu", "H100", "--compare", file]) == 1
    out = capsys.readouterr().out
    assert "B  commands.txt:2: not planned: `--gpuz L4`" in out
    assert "--gpu-memory-gib" in out


@pytest.mark.parametrize(("card", "said"), [([], "--gpu"), (["--gpu", "H1000"], "H1000")])
def test_a_card_that_is_missing_or_unknown_is_said_once(
    card: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit 2, not a table without figures; lines that all name their own card need none."""
    file = _file(tmp_path, f"vllm serve {LLAMA} --max-model-len 8K", f"vllm serve {LLAMA} -tp 2")
    assert main(["plan", *card, "--compare", file]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
    own = _file(tmp_path, f"--gpu L4 vllm serve {LLAMA} --max-model-len 8K")
    assert main(["plan", *card, "--compare", own]) == 0


def test_a_command_beside_the_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that was typed is left unread."""
    file = _file(tmp_path, f"vllm serve {LLAMA}")
    assert main(["plan", "--gpu", "H100", "--compare", file, "vllm", "serve", LLAMA]) == 2
    assert "'vllm' stands beside it" in capsys.readouterr().err


def test_a_line_that_is_no_start_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not dropped in silence; in a script, other commands are what belongs there."""
    lines = (f"vllm serve {LLAMA} --max-model-len 8K", "garbage", f"vllm serve {LLAMA} --max-model-len 4K")
    assert main(["plan", "--gpu", "H100", "--compare", _file(tmp_path, *lines)]) == 0
    assert "note: commands.txt:2: `garbage` begins no vLLM start" in capsys.readouterr().out
    assert main(["plan", "--gpu", "H100", "--compare", _file(tmp_path, *lines), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 1
    assert main(["plan", "--gpu", "H100", "--compare", _file(tmp_path, "#!/bin/sh", *lines)]) == 0
    assert "garbage" not in capsys.readouterr().out


def test_a_refused_flag_is_shown_and_called_what_a_plan_alone_calls_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag that only one start has stands under its letter as it was written, and memory is not blamed for it."""
    command = f"vllm serve {LLAMA} --max-model-len 8K"
    file = _file(tmp_path, command, f"{command} --swap-space 4")
    assert main(["plan", "--gpu", "H100", "--vllm", "0.32.0", "--compare", file]) == 1
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.split() == ["A", "B"])
    assert lines[head + 1].strip() == "--swap-space 4"
    assert lines[head + 2].split() == ["*", "verdict", "fits", "does", "not", "start"]
