"""`plimsoll doctor --bundle`, and what never leaves doctor by any way: secrets, prompts, answers."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.cli.answers import CPU, FORWARD, SPLIT, STORM_PAGE, Answer, ask, ask_process
from tests.each import cases, each
from tests.planted import BODY, PROMPT, SECRET, every_secret, leaks, members

ERROR = "(EngineCore pid=7) ERROR 11-15 09:00:00 [core.py:1] "
USER_TEXTS = (
    f"INFO 11-15 09:00:00 [logger.py:39] Received request a: prompt: '{PROMPT}', params: SamplingParams(n=1)",
    f"INFO 11-15 09:00:00 [logger.py:80] Generated response a: output: '{PROMPT}', finish_reason: stop",
    f'ERROR 11-15 09:00:00 [a.py:1] body {{"messages": [{{"role": "user", "content": "{PROMPT}"}}], "model": "m"}} was refused',
    f"ERROR 11-15 09:00:00 [a.py:1] RequestOutput(prompt='{PROMPT}', outputs=[CompletionOutput(text='{PROMPT}')])",
)
(POD,) = cases("cli", "a_pod_as_kubectl_describes_it")
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


def shown(answers: Mapping[str, Answer]) -> dict[str, str]:
    """Everything a person or a program gets to see."""
    return {f"{name} {stream}": text for name, one in answers.items() for stream, text in (("out", one.out), ("err", one.err))}


def assert_nothing_leaks(texts: Mapping[str, str]) -> None:
    """No line of any of them holds what was planted."""
    for name, text in texts.items():
        assert not leaks(name), name
        for line in text.splitlines():
            assert not leaks(line), (name, line)


def everything_of(path: Path) -> dict[str, str]:
    """Text, JSON and every member of the bundle that come of this file or folder."""
    archive = path.parent / "case.tar.gz"
    ways = {"text": "", "json": "--json", "bundle": f"--force --bundle {archive}"}
    answers = {name: ask(f"doctor {words}", str(path), code=None) for name, words in ways.items()}
    assert all(one.code in (0, 1) for one in answers.values()), answers["bundle"].err
    return {**shown(answers), **members(archive)}


@each("planted", [*every_secret(), *USER_TEXTS])
def test_nothing_secret_of_a_log_is_ever_shown(planted: str, tmp_path: Path) -> None:
    """A secret or what a user wrote, in the error that is quoted, in the arguments, in between: not in text, JSON, bundle."""
    path = tmp_path / "server.log"
    path.write_text(failing(planted))
    seen = everything_of(path)
    assert_nothing_leaks(seen)
    assert "case/logs/server.log" in seen


def test_no_secret_of_any_other_kind_of_input_is_shown(tmp_path: Path) -> None:
    """Packed logs, docker's JSON, dmesg, a pod, nvidia-smi, a metrics page, names of files: nothing planted is left."""
    folder, secrets = tmp_path / "inputs", every_secret()
    folder.mkdir()
    (folder / "packed.log.gz").write_bytes(gzip.compress(failing(*secrets, *USER_TEXTS).encode()))
    single = failing(*on_one_line(secrets), *USER_TEXTS).splitlines()
    for name, wrap in WRAPPINGS.items():
        (folder / f"{name}.log").write_text("\n".join(map(wrap, single)))
    (folder / f"hf_{SECRET}{SECRET}.log").write_text(failing())
    (folder / "dmesg.txt").write_text(
        "".join(f"[ 12.5] Out of memory: Killed process 77 ({one}) total-vm:1kB\n" for one in on_one_line(secrets))
    )
    (folder / "pod.txt").write_text(POD.format(argument=f"--api-key={SECRET}", secret=SECRET))
    # `kubectl describe pod` prints each argument on a line of its own: the value stands below its flag.
    (folder / "pod-below.txt").write_text(POD.format(argument=f"--api-key\n      {SECRET}", secret=SECRET))
    (folder / "smi.txt").write_text(
        "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |\n| Processes: |\n"
        f"|    0   N/A  N/A      1234      C   python --api-key {SECRET}     71000MiB |\n"
    )
    (folder / "page.txt").write_text(
        "# TYPE vllm:num_requests_running gauge\n"
        + "".join(f'vllm:num_requests_running{{engine="{n}",model_name="hf_{BODY[:34]}"}} {n}\n' for n in (1, 2))
    )
    assert_nothing_leaks(everything_of(folder))
    for path in sorted(folder.iterdir()):
        assert_nothing_leaks(everything_of(path))
        (folder / "case.tar.gz").unlink()


@each("wrapping", WRAPPINGS)
def test_a_secret_over_several_lines_is_hidden_in_any_wrapping(wrapping: str, tmp_path: Path) -> None:
    """A list of keys in YAML, a private key: each line has docker's, Kubernetes' or vLLM's own words in front of it."""
    path = tmp_path / "server.log"
    for secret in every_secret():
        if "\n" in secret:
            path.write_text("\n".join(map(WRAPPINGS[wrapping], failing(secret).splitlines())))
            assert_nothing_leaks(everything_of(path))


def test_no_secret_of_standard_input_or_of_an_address_is_shown(tmp_path: Path) -> None:
    """What comes through a pipe, and the password of an address that does not answer."""
    archive = tmp_path / "case.tar.gz"
    piped = ask_process(["doctor", "-", "--bundle", str(archive)], given=failing(*every_secret()).encode())
    refused = ask(f"doctor http://me:{SECRET}@127.0.0.1:1/metrics?token={SECRET} --timeout 2", code=3)
    missing = ask(f"doctor /nowhere/hf_{SECRET}{SECRET}.log", code=2)
    assert_nothing_leaks({**shown({"piped": piped, "refused": refused, "missing": missing}), **members(archive)})


def test_the_bundle_says_what_is_in_it(tmp_path: Path) -> None:
    """CONTENTS.txt comes first and names every member; a snapshot is named and not copied."""
    archive = tmp_path / "ticket.tar.gz"
    assert f"Wrote {archive}" in ask("doctor", FORWARD, STORM_PAGE, SPLIT, "--bundle", str(archive), code=1).out
    found = members(archive)
    assert next(iter(found)) == "ticket/CONTENTS.txt"
    contents = found["ticket/CONTENTS.txt"]
    assert all(name == "ticket/CONTENTS.txt" or name.removeprefix("ticket/") in contents for name in found)
    assert "ticket/logs/oom-forward-uni.log" in found
    assert any(name.startswith("ticket/metrics/") for name in found)
    assert "split-frames.pickle.gz: a memory snapshot is never copied" in contents
    assert not any(name.endswith((".pickle", ".pickle.gz")) for name in found)
    said_there = json.loads(found["ticket/doctor.json"])
    assert said_there["schema"] == "plimsoll.doctor/1"
    assert "runtime.forward" in {finding["code"] for finding in said_there["findings"]}
    assert found["ticket/report.txt"].startswith("memory failure: yes")


def test_a_bundle_is_not_overwritten_unless_told_and_keeps_logs_of_one_name_apart(tmp_path: Path) -> None:
    """A file that is there stays; --force replaces it; vllm.log of two replicas are two; --json is still one object."""
    archive = tmp_path / "case.tar"
    archive.write_text("precious")
    assert "already there" in ask("doctor", FORWARD, "--bundle", str(archive), code=2).line
    assert archive.read_text() == "precious"
    for name, log in (("a", CPU / "healthy.log"), ("b", FORWARD)):
        (tmp_path / name).mkdir()
        shutil.copy(log, tmp_path / name / "vllm.log")
    logs = [str(tmp_path / name / "vllm.log") for name in "ab"]
    assert ask("doctor --force --json --bundle", str(archive), *logs, code=1).body["schema"] == "plimsoll.doctor/1"
    assert "case/CONTENTS.txt" in members(archive)
    assert len([name for name in members(archive) if "/logs/" in name]) == 2
