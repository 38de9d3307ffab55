"""`plimsoll doctor --bundle`, and what never leaves doctor by any way: secrets, prompts, answers."""

from __future__ import annotations

import gzip
import json
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.cli.doctor_runs import CPU, FORWARD, SPLIT, STORM_PAGE, Said, one_line, said, said_by_process
from tests.planted import BODY, PROMPT, SECRET, every_secret, leaks, members

Capsys = pytest.CaptureFixture[str]
ERROR = "(EngineCore pid=7) ERROR 11-15 09:00:00 [core.py:1] "
USER_TEXTS = (
    f"INFO 11-15 09:00:00 [logger.py:39] Received request a: prompt: '{PROMPT}', params: SamplingParams(n=1)",
    f"INFO 11-15 09:00:00 [logger.py:80] Generated response a: output: '{PROMPT}', finish_reason: stop",
    f'ERROR 11-15 09:00:00 [a.py:1] body {{"messages": [{{"role": "user", "content": "{PROMPT}"}}], "model": "m"}} was refused',
    f"ERROR 11-15 09:00:00 [a.py:1] RequestOutput(prompt='{PROMPT}', outputs=[CompletionOutput(text='{PROMPT}')])",
)
POD = """Name: vllm-0
Containers:
  vllm:
    Args:
      serve
      m
      {argument}
      --port
      8000
    Last State:  Terminated
      Reason: OOMKilled
      Message: HF_TOKEN={secret}
      Exit Code: 137
    Restart Count: 4
    Environment:
      HF_TOKEN:  {secret}
"""
WRAPPINGS: dict[str, Callable[[str], str]] = {
    "docker": lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-11-15T09:00:00Z"}),
    "compose": lambda line: f"vllm-1  | {line}",
    "kubectl": lambda line: f"[pod/vllm-0/vllm] {line}",
    "cri": lambda line: f"2026-11-15T09:00:00.123456789Z stderr F {line}",
    "journald": lambda line: f"Nov 15 09:00:00 host vllm[77]: {line}",
    "prefixed": lambda line: f"{ERROR}{line}",
}


def on_one_line(secrets: Iterable[str]) -> list[str]:
    """Those that a line of a log can hold."""
    return [secret for secret in secrets if not set(secret) & {"\n", "\0"}]


def failing(*planted: str) -> str:
    """A server that died of an error whose words, arguments and surroundings hold what was planted."""
    lines = [
        "(APIServer pid=1) INFO 11-15 09:00:00 [api_server.py:1] vLLM API server version 0.25.1",
        f"(APIServer pid=1) INFO 11-15 09:00:00 [utils.py:2] non-default args: {{'model': 'm', 'api_key': ['{SECRET}']}}",
        *(line for one in planted for line in one.split("\n")),
        "(EngineCore pid=7) Traceback (most recent call last):",
        '(EngineCore pid=7)   File "/opt/vllm/v1/worker/gpu_model_runner.py", line 5, in execute_model',
        *(f"(EngineCore pid=7) RuntimeError: cannot use {one}" for one in on_one_line(planted)),
        *(f"{ERROR}{one}" for one in on_one_line(planted)),
        "(APIServer pid=1) ERROR 11-15 09:00:01 [a.py:2] EngineDeadError: EngineCore encountered an issue.",
    ]
    return "\n".join(lines) + "\n"


def shown(answers: Mapping[str, Said]) -> dict[str, str]:
    """Everything a person or a program gets to see."""
    return {f"{name} {stream}": text for name, one in answers.items() for stream, text in (("out", one.out), ("err", one.err))}


def assert_nothing_leaks(texts: Mapping[str, str]) -> None:
    """No line of any of them holds what was planted."""
    for name, text in texts.items():
        assert not leaks(name), name
        for line in text.splitlines():
            assert not leaks(line), (name, line)


def everything_of(words: list[str], folder: Path, capsys: Capsys, *more: str) -> dict[str, str]:
    """Text, JSON and every member of the bundle that come of these words."""
    archive = folder / "case.tar.gz"
    answers = {
        "text": said(capsys, *words, *more),
        "json": said(capsys, *words, *more, "--json"),
        "bundle": said(capsys, *words, *more, "--bundle", str(archive), "--force"),
    }
    assert all(one.code in (0, 1) for one in answers.values()), answers["bundle"].err
    return {**shown(answers), **members(archive)}


@pytest.mark.parametrize("secret", every_secret(), ids=range(len(every_secret())))
def test_no_secret_of_a_log_is_ever_shown(secret: str, tmp_path: Path, capsys: Capsys) -> None:
    """Planted in the error that is quoted, in the arguments and in between: not in the text, the JSON or the bundle."""
    path = tmp_path / "server.log"
    path.write_text(failing(secret))
    seen = everything_of([str(path)], tmp_path, capsys)
    assert_nothing_leaks(seen)
    assert "case/logs/server.log" in seen


@pytest.mark.parametrize("line", USER_TEXTS, ids=range(len(USER_TEXTS)))
def test_what_users_wrote_is_hidden(line: str, tmp_path: Path, capsys: Capsys) -> None:
    """Prompts and answers are in nothing that doctor prints or packs."""
    path = tmp_path / "server.log"
    path.write_text(failing(line))
    assert_nothing_leaks(everything_of([str(path)], tmp_path, capsys))


def test_no_secret_of_any_other_kind_of_input_is_shown(tmp_path: Path, capsys: Capsys) -> None:
    """Packed logs, docker's JSON, dmesg, a pod, nvidia-smi, a metrics page, names of files: nothing planted is left."""
    secrets = every_secret()
    plain = failing(*secrets, *USER_TEXTS)
    (tmp_path / "packed.log.gz").write_bytes(gzip.compress(plain.encode()))
    single = failing(*on_one_line(secrets), *USER_TEXTS).splitlines()
    for name, wrap in WRAPPINGS.items():
        (tmp_path / f"{name}.log").write_text("\n".join(map(wrap, single)))
    (tmp_path / f"hf_{SECRET}{SECRET}.log").write_text(failing())
    (tmp_path / "dmesg.txt").write_text(
        "".join(f"[ 12.5] Out of memory: Killed process 77 ({one}) total-vm:1kB\n" for one in on_one_line(secrets))
    )
    (tmp_path / "pod.txt").write_text(POD.format(argument=f"--api-key={SECRET}", secret=SECRET))
    (tmp_path / "smi.txt").write_text(
        "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |\n| Processes: |\n"
        f"|    0   N/A  N/A      1234      C   python --api-key {SECRET}     71000MiB |\n"
    )
    (tmp_path / "page.txt").write_text(
        "# TYPE vllm:num_requests_running gauge\n"
        + "".join(f'vllm:num_requests_running{{engine="{n}",model_name="hf_{BODY[:34]}"}} {n}\n' for n in (1, 2))
    )
    for path in sorted(tmp_path.iterdir()):
        assert_nothing_leaks(everything_of([str(path)], tmp_path, capsys))
        (tmp_path / "case.tar.gz").unlink()
    assert_nothing_leaks(everything_of([str(tmp_path)], tmp_path, capsys))


def test_a_key_below_its_flag_in_a_pods_description_is_hidden(tmp_path: Path, capsys: Capsys) -> None:
    """`kubectl describe pod` prints each argument on a line of its own: the value stands below its flag."""
    path = tmp_path / "pod.txt"
    path.write_text(POD.format(argument=f"--api-key\n      {SECRET}", secret=SECRET))
    assert_nothing_leaks(everything_of([str(path)], tmp_path, capsys))


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_secret_over_several_lines_is_hidden_in_any_wrapping(wrapping: str, tmp_path: Path, capsys: Capsys) -> None:
    """A list of keys in YAML, a private key: each line has docker's, Kubernetes' or vLLM's own words in front of it."""
    path = tmp_path / "server.log"
    shown_secrets = []
    for secret in every_secret():
        if "\n" not in secret:
            continue
        path.write_text("\n".join(map(WRAPPINGS[wrapping], failing(secret).splitlines())))
        seen = everything_of([str(path)], tmp_path, capsys)
        shown_secrets += [secret] if any(map(leaks, seen.values())) else []
    assert shown_secrets == []


def test_no_secret_of_standard_input_or_of_an_address_is_shown(tmp_path: Path) -> None:
    """What comes through a pipe, and the password of an address that does not answer."""
    archive = tmp_path / "case.tar.gz"
    piped = said_by_process(["-", "--bundle", str(archive)], given=failing(*every_secret()).encode())
    refused = said_by_process([f"http://me:{SECRET}@127.0.0.1:1/metrics?token={SECRET}", "--timeout", "2"])
    assert refused.code == 3
    assert_nothing_leaks({**shown({"piped": piped, "refused": refused}), **members(archive)})
    missing = said_by_process([f"/nowhere/hf_{SECRET}{SECRET}.log"])
    assert not leaks(missing.err)


def test_the_bundle_says_what_is_in_it(tmp_path: Path, capsys: Capsys) -> None:
    """CONTENTS.txt comes first and names every member; a snapshot is named and not copied."""
    archive = tmp_path / "ticket.tar.gz"
    answer = said(capsys, FORWARD, STORM_PAGE, SPLIT, "--bundle", str(archive))
    assert answer.code == 1
    assert f"Wrote {archive}" in answer.out
    found = members(archive)
    assert next(iter(found)) == "ticket/CONTENTS.txt"
    contents = found["ticket/CONTENTS.txt"]
    for name in found:
        assert name == "ticket/CONTENTS.txt" or name.removeprefix("ticket/") in contents, name
    assert "ticket/logs/oom-forward-uni.log" in found
    assert any(name.startswith("ticket/metrics/") for name in found)
    assert "split-frames.pickle.gz: a memory snapshot is never copied" in contents
    assert not any(name.endswith((".pickle", ".pickle.gz")) for name in found)
    said_there = json.loads(found["ticket/doctor.json"])
    assert said_there["schema"] == "plimsoll.doctor/1"
    assert "runtime.forward" in {finding["code"] for finding in said_there["findings"]}
    assert found["ticket/report.txt"].startswith("memory failure: yes")


def test_a_bundle_is_not_overwritten_unless_told(tmp_path: Path, capsys: Capsys) -> None:
    """A file that is there stays; --force replaces it."""
    archive = tmp_path / "case.tar"
    archive.write_text("precious")
    answer = said(capsys, FORWARD, "--bundle", str(archive))
    assert answer.code == 2
    assert "already there" in one_line(answer)
    assert archive.read_text() == "precious"
    assert said(capsys, FORWARD, "--bundle", str(archive), "--force").code == 1
    assert "case/CONTENTS.txt" in members(archive)


def test_a_bundle_and_json_are_still_one_object(tmp_path: Path, capsys: Capsys) -> None:
    """With --json standard output stays one object."""
    answer = said(capsys, FORWARD, "--bundle", str(tmp_path / "case.tar"), "--json")
    assert answer.body["schema"] == "plimsoll.doctor/1"


def test_two_logs_of_one_name_are_both_kept(tmp_path: Path, capsys: Capsys) -> None:
    """vllm.log of two replicas: neither replaces the other in the archive."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(CPU / "healthy.log" if name == "a" else FORWARD, tmp_path / name / "vllm.log")
    archive = tmp_path / "case.tar"
    said(capsys, str(tmp_path / "a" / "vllm.log"), str(tmp_path / "b" / "vllm.log"), "--bundle", str(archive))
    with tarfile.open(archive) as opened:
        names = [name for name in opened.getnames() if "/logs/" in name]
    assert len(names) == len(set(names)) == 2
