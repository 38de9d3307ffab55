"""`plimsoll inside` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.vllm.extension_points import NEEDS
from tests.each import each
from tests.vllm.vllm_like import files_that_meet_all, write_vllm

SOURCES = str(Path(__file__).parents[2] / "src")


def _one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("plimsoll: ")
    assert "mistake of ours" not in captured.err
    return captured.err


@each(
    ("words", "said"),
    [
        ([], "plimsoll inside check"),
        (["chekc"], "plimsoll inside check"),
        (["check", "--python"], "--python needs a value"),
        (["check", "--python", ""], "--python is empty"),
        (["check", "--python", "/nowhere/python"], "cannot be run"),
        (["check", "--python", "/etc"], "is a folder"),
        (["check", "--python", "a\0b"], "cannot be run"),
        (["check", "--python", "/bin/true"], "not a Python"),
        (["check", "--vllm-dir", "/nowhere"], "no such folder"),
        (["check", "--vllm-dir", "/etc"], "no vllm package"),
        (["check", "--vllm-dir", "a\0b"], "--vllm-dir"),
        (["check", "--vllm-dir", "x" * 5000], "--vllm-dir"),
        (["check", "--vllm-dir", "/etc", "--python", "p"], "give one"),
        (["check", "--jsno"], "no option --jsno"),
        (["check", "no-such-file.sh"], "no such file"),
        (["check", "--", "ls", "-l"], "no vLLM start"),
        (["wheel", "a", "b"], "one folder"),
        (["wheel", "--jsno"], "one folder"),
        (["wheel", ""], "name is empty"),
        (["wheel", "--for", "helm"], "it is kubernetes, docker or pip"),
        (["wheel", "--for"], "--for needs a value"),
        (["wheel", "a\0b"], "zero byte"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is typed wrong is named in one line."""
    code = main(["inside", *words])
    line = _one_line(capsys)
    assert code == 2, line
    assert said in line


def test_no_vllm_here_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    """One line that says where to look instead."""
    assert main(["inside", "check"]) == 3
    assert "--python or --vllm-dir" in _one_line(capsys)


def test_a_vllm_that_takes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, the verdict in the first line, and the flags to be typed."""
    write_vllm(tmp_path, "0.32.0")
    assert main(["inside", "check", "--vllm-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("vLLM 0.32.0: takes plimsoll.inside (tested on CPU)\n")
    assert "--worker-extension-cls plimsoll.inside.Probe --middleware plimsoll.inside.Gate" in out


def test_a_vllm_that_lacks_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, the parts that suffer, what is lost, and where it was looked for."""
    files = files_that_meet_all()
    files["v1/engine/async_llm.py"] = files["v1/engine/async_llm.py"].replace("collective_rpc", "collective_call")
    write_vllm(tmp_path, "0.31.0", files)
    assert main(["inside", "check", "--vllm-dir", str(tmp_path), "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "plimsoll.inside/1"
    assert {part["part"]: part["works"] for part in body["parts"]}["gate"] == "partly"
    assert len(body["needs"]) == len(NEEDS)
    need = next(need for need in body["needs"] if need["state"] != "found")
    assert (need["name"], need["where"], need["state"]) == ("calls into workers", "v1/engine/async_llm.py", "different")
    assert need["lost"] == "no /plimsoll/compact and no /plimsoll/snapshot"
    assert body["evidence"] == "by signature, read from the wheel"


def test_a_command_is_judged_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that is printed has plimsoll.inside in it, hides secrets, and a refused flag makes exit 1."""
    write_vllm(tmp_path, "0.32.0")
    base = ["inside", "check", "--vllm-dir", str(tmp_path), "--json", "--"]
    assert main([*base, "vllm", "serve", "m", "--api-key", "hunter2secret"]) == 0
    out = capsys.readouterr().out
    assert "hunter2secret" not in out
    line = json.loads(out)["commands"][0]["rewritten"]
    assert line.endswith("--worker-extension-cls plimsoll.inside.Probe --middleware plimsoll.inside.Gate")
    assert main([*base, "vllm", "serve", "m", "--swap-space", "4"]) == 1
    assert json.loads(capsys.readouterr().out)["commands"][0]["refused"] == ["--swap-space"]
    assert main([*base, "env", "VLLM_USE_RUST_FRONTEND=1", "vllm", "serve", "m"]) == 1
    assert {part["part"]: part["works"] for part in json.loads(capsys.readouterr().out)["parts"]}["gate"] == "no"


def test_a_hidden_secret_is_to_be_put_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in `plimsoll flags`: the shown command cannot be run with [redacted] in it."""
    write_vllm(tmp_path, "0.32.0")
    main(["inside", "check", "--vllm-dir", str(tmp_path), "--", "env", "HF_TOKEN=hf_abcdefghijklmnop", "vllm", "serve", "m"])
    assert "put yours back before you run it" in capsys.readouterr().out


def test_a_script_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `plimsoll flags` reads, this reads."""
    write_vllm(tmp_path, "0.32.0")
    script = tmp_path / "start.sh"
    script.write_text("vllm serve m --port $PORT\n", encoding="utf-8")
    assert main(["inside", "check", "--vllm-dir", str(tmp_path), str(script)]) == 0
    assert "vllm serve m --port $PORT --worker-extension-cls" in capsys.readouterr().out


def test_another_python_must_see_plimsoll(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Python without plimsoll is exit 1 and told how to get it; with it on the command's own PYTHONPATH it is well."""
    write_vllm(tmp_path, "0.32.0")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    check = ["inside", "check", "--python", str(bare), "--", "env"]
    assert main([*check, f"PYTHONPATH={tmp_path}", "vllm", "serve", "m"]) == 1
    assert "plimsoll inside wheel" in capsys.readouterr().out
    assert main([*check, f"PYTHONPATH={tmp_path}:{SOURCES}", "vllm", "serve", "m"]) == 0
    assert "no entry points" in capsys.readouterr().out


def test_an_unknown_version_is_met_by_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fork, a nightly or a version that is none is judged by what it has, and that is said."""
    for number, version in enumerate(("0.99.0", "0.31.1.dev7+gabcdef", "banana")):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_vllm(folder, version)
        assert main(["inside", "check", "--vllm-dir", str(folder), "--json"]) == 0
        body = json.loads(capsys.readouterr().out)
        assert body["vllm"] == version
        assert body["stands_for_it"] == "0.32.0"
        assert body["evidence"] == "by signature, read from its sources"
        assert body["notes"]


def test_the_wheel_is_written_and_the_next_steps_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is where it is said to be; --for leaves the other ways out; --json lists what is in it."""
    assert main(["inside", "wheel", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("Kubernetes", "docker run", "pip install", "--for patch"))
    (written,) = (tmp_path / "new").iterdir()
    assert str(written) in out
    before = written.read_bytes()
    assert main(["inside", "wheel", str(tmp_path / "pod" / "inside.whl")]) == 0
    assert (tmp_path / "pod" / "inside.whl").read_bytes() == before
    capsys.readouterr()
    assert main(["inside", "wheel", str(tmp_path / "new"), "--for", "docker"]) == 0
    assert "Kubernetes" not in capsys.readouterr().out
    assert main(["inside", "wheel", "--json", str(tmp_path / "new")]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == "plimsoll.inside-wheel/1"
    assert body["bytes"] == len(before) == written.stat().st_size
    assert "plimsoll/inside/gate.py" in body["members"]


def test_a_wheel_that_cannot_be_written_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in the folder's place is one line."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["inside", "wheel", str(tmp_path / "file")]) == 3
    assert "cannot be written" in _one_line(capsys)


DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec: {template: {spec: {containers: [{name: vllm, image: "IMAGE", args: [a/b, ARGS]}]}}}
"""
BOTH = "--worker-extension-cls, plimsoll.inside.Probe, --middleware, plimsoll.inside.Gate"


@each(("image", "words", "more", "code", "says"), [
    ("vllm/vllm-openai:v0.25.1", "--port, '80'", [], 0, "by the tag of the image vllm/vllm-openai:v0.25.1; no vLLM was read"),
    ("vllm/vllm-openai:v0.25.1", "--port, '80'", ["--require", "gate"], 1, "the command does not ask for it"),
    ("vllm/vllm-openai:v0.25.1", BOTH, ["--require", "gate,probe", "--require", "drain"], 0, "takes plimsoll.inside"),
    ("vllm/vllm-openai:v0.25.1", f"{BOTH}, --swap-space, '4'", ["--require", "gate"], 1, "this vLLM refuses the command"),
    ("vllm/vllm-openai:v0.32.0", f"{BOTH}, --grpc", ["--require", "gate"], 1, "gate: no: --grpc: a gRPC server"),
    ("vllm/vllm-openai:latest", "--port, '80'", [], 0, "its image names no release: judged as"),
    ("vllm/vllm-openai:latest", BOTH, ["--vllm", "0.22.0"], 0, "vLLM 0.22.0: takes plimsoll.inside"),
    ("vllm/vllm-openai:v0.25.1", BOTH, ["--require", "wings"], 2, "it is one of probe, gate"),
    ("vllm/vllm-openai:v0.25.1", BOTH, ["--vllm", "0.22.0", "--vllm-dir", "/x"], 2, "give one"),
])  # fmt: skip
def test_a_deployment_is_judged_by_its_image(
    image: str, words: str, more: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No vLLM has to be at hand; what CI requires must work in that release and be asked for by the command."""
    (tmp_path / "d.yaml").write_text(DEPLOYMENT.replace("IMAGE", image).replace("ARGS", words), encoding="utf-8")
    capsys.readouterr()
    assert main(["inside", "check", *more, str(tmp_path / "d.yaml")]) == code
    captured = capsys.readouterr()
    assert says in " ".join((captured.out + captured.err).split())


def test_two_releases_in_one_file_are_two_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each image is judged by its own tag, and JSON holds both."""
    texts = [
        DEPLOYMENT.replace("IMAGE", f"vllm/vllm-openai:v{release}").replace("ARGS", BOTH) for release in ("0.22.0", "0.25.1")
    ]
    (tmp_path / "d.yaml").write_text("---\n".join(texts), encoding="utf-8")
    assert main(["inside", "check", str(tmp_path / "d.yaml")]) == 0
    out = capsys.readouterr().out
    assert "vLLM 0.22.0: takes" in out
    assert "vLLM 0.25.1: takes" in out
    assert main(["inside", "check", "--json", str(tmp_path / "d.yaml")]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [body["vllm"], *(other["vllm"] for other in body["others"])] == ["0.22.0", "0.25.1"]
