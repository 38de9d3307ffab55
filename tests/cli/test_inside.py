"""`plimsoll inside` as a user meets it."""

from __future__ import annotations

import sys
from pathlib import Path

from plimsoll.vllm.extension_points import NEEDS
from tests.cli.answers import ask
from tests.each import each
from tests.vllm.vllm_like import files_that_meet_all, write_vllm

SOURCES = str(Path(__file__).parents[2] / "src")
FLAGS = "--worker-extension-cls plimsoll.inside.Probe --middleware plimsoll.inside.Gate"


def test_a_vllm_that_takes_everything_and_one_that_lacks_something(tmp_path: Path) -> None:
    """Exit 0, the verdict first, and the flags to be typed; else exit 1, what is lost, and where it was looked for."""
    write_vllm(tmp_path, "0.32.0")
    out = ask(f"inside check --vllm-dir {tmp_path}").out
    assert out.startswith("vLLM 0.32.0: takes plimsoll.inside (tested on CPU)\n")
    assert FLAGS in out
    files = files_that_meet_all()
    files["v1/engine/async_llm.py"] = files["v1/engine/async_llm.py"].replace("collective_rpc", "collective_call")
    (tmp_path / "other").mkdir()
    write_vllm(tmp_path / "other", "0.31.0", files)
    body = ask(f"inside check --vllm-dir {tmp_path}/other --json", code=1).body
    assert (body["schema"], body["evidence"]) == ("plimsoll.inside/1", "by signature, read from the wheel")
    assert {part["part"]: part["works"] for part in body["parts"]}["gate"] == "partly"
    assert len(body["needs"]) == len(NEEDS)
    need = next(need for need in body["needs"] if need["state"] != "found")
    assert (need["name"], need["where"], need["state"]) == ("calls into workers", "v1/engine/async_llm.py", "different")
    assert need["lost"] == "no /plimsoll/compact and no /plimsoll/snapshot"


def test_a_command_is_judged_and_rewritten(tmp_path: Path) -> None:
    """The line has plimsoll.inside in it, hides secrets that are to be put back, and a refused flag makes exit 1."""
    write_vllm(tmp_path, "0.32.0")
    base = f"inside check --vllm-dir {tmp_path}"
    answer = ask(f"{base} --json -- vllm serve m --api-key hunter2secret")
    assert "hunter2secret" not in answer.out
    assert answer.body["commands"][0]["rewritten"].endswith(FLAGS)
    body = ask(f"{base} --json -- vllm serve m --swap-space 4", code=1).body
    assert body["commands"][0]["refused"] == ["--swap-space"]
    body = ask(f"{base} --json -- env VLLM_USE_RUST_FRONTEND=1 vllm serve m", code=1).body
    assert {part["part"]: part["works"] for part in body["parts"]}["gate"] == "no"
    hidden = ask(f"{base} -- env HF_TOKEN=hf_abcdefghijklmnop vllm serve m", code=None).out
    assert "put yours back before you run it" in hidden
    script = tmp_path / "start.sh"
    script.write_text("vllm serve m --port $PORT\n", encoding="utf-8")
    assert "vllm serve m --port $PORT --worker-extension-cls" in ask(f"{base} {script}").out


def test_another_python_must_see_plimsoll(tmp_path: Path) -> None:
    """A Python without plimsoll is exit 1 and told how to get it; with it on the command's own PYTHONPATH it is well."""
    write_vllm(tmp_path, "0.32.0")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    check = f"inside check --python {bare} -- env PYTHONPATH={tmp_path}"
    assert "plimsoll inside wheel" in ask(f"{check} vllm serve m", code=1).out
    assert "no entry points" in ask(f"{check}:{SOURCES} vllm serve m").out


@each("version", ["0.99.0", "0.31.1.dev7+gabcdef", "banana"])
def test_an_unknown_version_is_met_by_its_sources(version: str, tmp_path: Path) -> None:
    """A fork, a nightly or a version that is none is judged by what it has, and that is said."""
    (tmp_path / version).mkdir()
    write_vllm(tmp_path / version, version)
    body = ask(f"inside check --vllm-dir {tmp_path}/{version} --json").body
    assert (body["vllm"], body["stands_for_it"], bool(body["notes"])) == (version, "0.32.0", True)
    assert body["evidence"] == "by signature, read from its sources"


def test_the_wheel_is_written_and_the_next_steps_are_said(tmp_path: Path) -> None:
    """The file is where it is said to be; --for leaves the other ways out; --json lists what is in it."""
    out = ask(f"inside wheel {tmp_path}/new").out
    assert all(word in out for word in ("Kubernetes", "docker run", "pip install", "--for patch"))
    (written,) = (tmp_path / "new").iterdir()
    assert str(written) in out
    ask(f"inside wheel {tmp_path}/pod/inside.whl")
    assert (tmp_path / "pod" / "inside.whl").read_bytes() == written.read_bytes()
    assert "Kubernetes" not in ask(f"inside wheel {tmp_path}/new --for docker").out
    body = ask(f"inside wheel --json {tmp_path}/new").body
    assert (body["schema"], body["bytes"]) == ("plimsoll.inside-wheel/1", written.stat().st_size)
    assert "plimsoll/inside/gate.py" in body["members"]


DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec: {template: {spec: {containers: [{name: vllm, image: "vllm/vllm-openai:TAG", args: [a/b, ARGS]}]}}}
"""
BOTH = "--worker-extension-cls, plimsoll.inside.Probe, --middleware, plimsoll.inside.Gate"


@each(("tag", "words", "more", "code", "says"), [
    ("v0.25.1", "--port, '80'", "", 0, "by the tag of the image vllm/vllm-openai:v0.25.1; no vLLM was read"),
    ("v0.25.1", "--port, '80'", "--require gate", 1, "the command does not ask for it"),
    ("v0.25.1", BOTH, "--require gate,probe --require drain", 0, "takes plimsoll.inside"),
    ("v0.25.1", f"{BOTH}, --swap-space, '4'", "--require gate", 1, "this vLLM refuses the command"),
    ("v0.32.0", f"{BOTH}, --grpc", "--require gate", 1, "gate: no: --grpc: a gRPC server"),
    ("latest", "--port, '80'", "", 0, "its image names no release: judged as"),
    ("latest", BOTH, "--vllm 0.22.0", 0, "vLLM 0.22.0: takes plimsoll.inside"),
])  # fmt: skip
def test_a_deployment_is_judged_by_its_image(tag: str, words: str, more: str, code: int, says: str, tmp_path: Path) -> None:
    """No vLLM has to be at hand; what CI requires must work in that release and be asked for by the command."""
    (tmp_path / "d.yaml").write_text(DEPLOYMENT.replace("TAG", tag).replace("ARGS", words), encoding="utf-8")
    assert says in ask(f"inside check {more} {tmp_path}/d.yaml", code=code).text


def test_two_releases_in_one_file_are_two_reports(tmp_path: Path) -> None:
    """Each image is judged by its own tag, and JSON holds both."""
    texts = [DEPLOYMENT.replace("TAG", f"v{release}").replace("ARGS", BOTH) for release in ("0.22.0", "0.25.1")]
    (tmp_path / "d.yaml").write_text("---\n".join(texts), encoding="utf-8")
    out = ask(f"inside check {tmp_path}/d.yaml").out
    assert ("vLLM 0.22.0: takes" in out, "vLLM 0.25.1: takes" in out) == (True, True)
    body = ask(f"inside check --json {tmp_path}/d.yaml").body
    assert [body["vllm"], *(other["vllm"] for other in body["others"])] == ["0.22.0", "0.25.1"]
