"""kubectl's, docker's and systemd's words: killed for memory, by a probe, evicted, looping, stopped, never started."""

from __future__ import annotations

import pytest
from hypothesis import given

from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.pods import judge_pods
from plimsoll.doctor.rules.supervisors import PodFacts
from plimsoll.findings import Code
from tests.doctor.pasted_text import pasted, scrambled
from tests.doctor.pod_texts import CRASH_LOOP_YAML, DESCRIBE_OOM, DESCRIBE_PROBE, DOCKER_INSPECT, OOM_JSON, SYSTEMD_OOM
from tests.each import each


def codes(text: str) -> list[Code]:
    """The codes found in a text, in order."""
    return [finding.code for finding in judge_pods(pasted(text)).findings]


def test_oom_killed_with_its_limit_and_its_loop() -> None:
    """The cause comes first, the loop after it; the limit and the run time are in the sentence."""
    verdict = judge_pods(pasted(DESCRIBE_OOM))
    assert [finding.code for finding in verdict.findings] == [Code.HOST_OUT_OF_MEMORY, Code.ENGINE_CRASH_LOOP]
    oom, loop = verdict.findings
    assert "64.0 GiB" in oom.because
    assert "after 372 s" in oom.because
    assert "7 restarts" in loop.title
    (ending,) = verdict.facts.endings
    assert (ending.name, ending.reason, ending.exit_code) == ("vllm", "OOMKilled", 137)
    assert verdict.facts.restarts == 7
    assert verdict.facts.shm_mounted is True


def test_a_probe_that_kills_a_loading_server_is_not_memory() -> None:
    """137 from the kubelet: the patience of the probe stands against the time it had run."""
    verdict = judge_pods(pasted(DESCRIBE_PROBE))
    assert verdict.findings[0].code is Code.OTHER_PROBE
    assert "gives up after 90 s" in verdict.findings[0].because
    assert "had run 95 s" in verdict.findings[0].because
    assert not any(finding.code.is_memory for finding in verdict.findings)
    assert Code.OTHER_KILLED not in [finding.code for finding in verdict.findings]


def test_a_probe_that_saw_a_dead_engine_did_its_work() -> None:
    """HTTP 503 at the probe is vLLM's word for a dead engine."""
    text = DESCRIBE_PROBE.replace(
        'Get "http://10.1.2.3:8000/health": dial tcp 10.1.2.3:8000: connect: connection refused',
        "HTTP probe failed with statuscode: 503",
    )
    assert codes(text)[0] is Code.ENGINE_DEAD


def test_yaml_and_json_say_the_same() -> None:
    """`get pod -o yaml` and `-o json`: container, code, reason, restarts, limit and probe."""
    yaml = judge_pods(pasted(CRASH_LOOP_YAML))
    assert [finding.code for finding in yaml.findings] == [Code.ENGINE_CRASH_LOOP]  # exit code 1: the log tells why
    assert yaml.facts.endings[0].name == "vllm"
    assert yaml.facts.endings[0].seconds == 65
    assert yaml.facts.memory_limit_bytes == 32 << 30
    assert yaml.facts.probes[0].patience_s == 30 + 5 * 6
    json = judge_pods(pasted(OOM_JSON))
    assert json.findings[0].code is Code.HOST_OUT_OF_MEMORY
    assert json.facts.endings[0].name == "vllm"
    assert json.facts.restarts == 2


def test_137_without_a_reason_is_only_a_kill() -> None:
    """Reason Error and code 137: killed, by whom is not known; memory is not named."""
    text = DESCRIBE_OOM.replace("OOMKilled", "Error")
    assert codes(text) == [Code.OTHER_KILLED, Code.ENGINE_CRASH_LOOP]


def test_completed_without_a_stop_is_a_dead_engine() -> None:
    """vLLM ends with 0 when its engine died; with a stop event it is a stop."""
    text = DESCRIBE_OOM.replace("OOMKilled", "Completed").replace("137", "0")
    assert codes(text)[0] is Code.ENGINE_DEAD
    stop = "  Normal   Killing  2m   kubelet   Stopping container vllm\n"
    assert codes(text + stop)[0] is Code.OTHER_STOPPED_BY_OPERATOR


@each(
    ("line", "expected"),
    [
        ("Warning  Evicted  5m  kubelet  The node was low on resource: memory. Threshold quantity: 100Mi, available: 51Mi.",
         Code.HOST_OUT_OF_MEMORY),
        ("Warning  Evicted  5m  kubelet  The node was low on resource: ephemeral-storage. Using 90Gi", Code.OTHER_DISK),
        ('Warning  Evicted  5m  kubelet  Usage of EmptyDir volume "shm" exceeds the limit "1Gi".', Code.OTHER_BAD_CONFIG),
        ("Warning  FailedScheduling  9m  sched  0/4 nodes available: 4 Insufficient nvidia.com/gpu.", Code.OTHER_BAD_CONFIG),
        ("Warning  FailedScheduling  9m  sched  0/4 nodes are available: 4 Insufficient memory.", Code.OTHER_BAD_CONFIG),
        ('Warning  Failed  1m (x4 over 3m)  kubelet  Failed to pull image "vllm:v9": not found', Code.OTHER_DOWNLOAD),
        ("Normal  Preempted  1m  default-scheduler  Preempted by pod a1b2 on node gpu-1", Code.OTHER_STOPPED_BY_OPERATOR),
        ("Warning  UnexpectedAdmissionError  1m  kubelet  Allocate failed: requested number of devices unavailable",
         Code.OTHER_HARDWARE),
        ("vllm-0   0/1   OOMKilled   2 (30s ago)   9m", Code.HOST_OUT_OF_MEMORY),
        ("vllm-0   0/1   ImagePullBackOff   0   9m", Code.OTHER_DOWNLOAD),
        ("vllm-0   0/1   CrashLoopBackOff   7 (2m ago)   20m", Code.ENGINE_CRASH_LOOP),
    ],
)  # fmt: skip
def test_single_lines(line: str, expected: Code) -> None:
    """One event or one row of `kubectl get pods` is enough, and gives one finding."""
    assert codes(line) == [expected]


def test_waiting_for_a_gpu_is_no_cause_once_the_pod_has_run() -> None:
    """An early FailedScheduling does not explain a later end."""
    early = "  Warning  FailedScheduling  30m  default-scheduler  0/4 nodes are available: 4 Insufficient nvidia.com/gpu.\n"
    assert codes(DESCRIBE_OOM + early)[0] is Code.HOST_OUT_OF_MEMORY
    assert Code.OTHER_BAD_CONFIG not in codes(DESCRIBE_OOM + early)


def test_a_readiness_probe_kills_nobody() -> None:
    """Not ready is not dead."""
    assert (
        codes("Warning  Unhealthy  5m (x9 over 8m)  kubelet  Readiness probe failed: HTTP probe failed with statuscode: 503")
        == []
    )


def test_docker_inspect() -> None:
    """OOMKilled true with the limit; false leaves only the exit code, which proves nothing."""
    verdict = judge_pods(pasted(DOCKER_INSPECT))
    assert [finding.code for finding in verdict.findings] == [Code.HOST_OUT_OF_MEMORY, Code.ENGINE_CRASH_LOOP]
    assert "48.0 GiB" in verdict.findings[0].because
    assert verdict.facts.shm_bytes == 64 << 20
    assert codes(DOCKER_INSPECT.replace('"OOMKilled": true', '"OOMKilled": false'))[0] is Code.OTHER_KILLED
    running = DOCKER_INSPECT.replace('"OOMKilled": true', '"OOMKilled": false').replace('"Running": false', '"Running": true')
    assert codes(running.replace('"RestartCount": 4', '"RestartCount": 0')) == []


def test_docker_ps_takes_the_servers_row() -> None:
    """Among several ended containers the one with vllm in it counts; the others are notes."""
    verdict = judge_pods(
        pasted("""
        CONTAINER ID   IMAGE                      COMMAND              CREATED       STATUS                       NAMES
        1a2b3c4d5e6f   vllm/vllm-openai:v0.32.0   "vllm serve model"   2 hours ago   Exited (139) 3 minutes ago   llm
        9f8e7d6c5b4a   postgres:16                "docker-entrypoint"  3 weeks ago   Exited (0) 2 weeks ago       db
        """)
    )
    assert [finding.code for finding in verdict.findings] == [Code.ENGINE_DEAD]
    assert "db" in verdict.facts.notes[0]


def test_systemd_says_oom_and_counts_restarts() -> None:
    """The unit's own result, the restart counter and the start limit."""
    verdict = judge_pods(pasted(SYSTEMD_OOM))
    assert [finding.code for finding in verdict.findings] == [Code.HOST_OUT_OF_MEMORY, Code.ENGINE_CRASH_LOOP]
    assert verdict.facts.endings[0].exit_code == -9
    assert verdict.facts.restarts == 5


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm.service: Main process exited, code=exited, status=1/FAILURE", []),
        ("vllm.service: Main process exited, code=exited, status=2/INVALIDARGUMENT", [Code.STARTUP_BAD_FLAG]),
        ("vllm.service: Main process exited, code=exited, status=127/n/a", [Code.OTHER_INSTALLATION]),
        ("vllm.service: Main process exited, code=killed, status=9/KILL", [Code.OTHER_KILLED]),
        ("vllm.service: Main process exited, code=dumped, status=11/SEGV", [Code.ENGINE_DEAD]),
        ("vllm.service: start operation timed out. Terminating.", [Code.OTHER_TIMEOUT]),
        ("vllm.service: Start request repeated too quickly.", [Code.ENGINE_CRASH_LOOP]),
        ("user@1000.service: A process of this unit has been killed by the OOM killer.", []),
    ],
)
def test_systemd_lines(line: str, expected: list[Code]) -> None:
    """Single lines of the journal; a unit of the system itself is not the server."""
    assert codes(line) == expected


def test_systemctl_status() -> None:
    """The block that `systemctl status` prints names the unit once, above."""
    text = """
    ● vllm.service - vLLM server
         Loaded: loaded (/etc/systemd/system/vllm.service; enabled; preset: enabled)
         Active: failed (Result: signal) since Sun 2026-11-15 08:00:00 UTC; 3min ago
       Main PID: 4242 (code=killed, signal=KILL)
    """
    verdict = judge_pods(pasted(text))
    assert [finding.code for finding in verdict.findings] == [Code.OTHER_KILLED]
    assert verdict.facts.endings[0].reason == "signal"


def test_a_vllm_log_is_none_of_this() -> None:
    """Words that also occur in a server's log give nothing."""
    verdict = judge_pods(pasted("Warning: tokenizer\nINFO: state: ok\nreason: stop\nMemory: 3\nKilling time\nexit code: -9"))
    assert verdict.findings == []
    assert verdict.facts == PodFacts()


@given(scrambled(DESCRIBE_OOM, DESCRIBE_PROBE, CRASH_LOOP_YAML, OOM_JSON, DOCKER_INSPECT, SYSTEMD_OOM))
def test_no_text_breaks_it(log: Log) -> None:
    """Cut, mixed and random lines give a verdict, and memory is named only where the supervisor names it."""
    verdict = judge_pods(log)
    said = any(word in line.text for line in log.lines for word in ("OOM", "oom-kill", "low on resource: memory"))
    for finding in verdict.findings:
        assert finding.evidence
        assert said or not finding.code.is_memory
