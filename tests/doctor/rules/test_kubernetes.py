"""kubectl's, docker's and systemd's words: killed for memory, by a probe, evicted, looping, stopped, never started."""

from __future__ import annotations

from hypothesis import given

from plimsoll.doctor.rules.log_text import Log
from plimsoll.doctor.rules.pods import judge_pods
from plimsoll.doctor.rules.supervisors import PodFacts
from plimsoll.findings import Code
from tests.doctor.pasted_text import pasted, printed, scrambled
from tests.each import each

CRASH_LOOP_YAML, DESCRIBE_OOM, DESCRIBE_PROBE, DOCKER_INSPECT, OOM_JSON, SYSTEMD_OOM = printed(
    "CRASH_LOOP_YAML", "DESCRIBE_OOM", "DESCRIBE_PROBE", "DOCKER_INSPECT", "OOM_JSON", "SYSTEMD_OOM"
)
RAM, LOOP, KILLED = Code.HOST_OUT_OF_MEMORY, Code.ENGINE_CRASH_LOOP, Code.OTHER_KILLED
DEAD_AT_PROBE = DESCRIBE_PROBE.replace(
    'Get "http://10.1.2.3:8000/health": dial tcp 10.1.2.3:8000: connect: connection refused',
    "HTTP probe failed with statuscode: 503",
)
COMPLETED = DESCRIBE_OOM.replace("OOMKilled", "Completed").replace("137", "0")
KILLING = "  Normal   Killing  2m   kubelet   Stopping container vllm\n"
EARLY = "  Warning  FailedScheduling  30m  default-scheduler  0/4 nodes are available: 4 Insufficient nvidia.com/gpu.\n"
NOT_OOM = DOCKER_INSPECT.replace('"OOMKilled": true', '"OOMKilled": false')
RUNNING = NOT_OOM.replace('"Running": false', '"Running": true').replace('"RestartCount": 4', '"RestartCount": 0')
DOCKER_PS = """
CONTAINER ID   IMAGE                      COMMAND              CREATED       STATUS                       NAMES
1a2b3c4d5e6f   vllm/vllm-openai:v0.32.0   "vllm serve model"   2 hours ago   Exited (139) 3 minutes ago   llm
9f8e7d6c5b4a   postgres:16                "docker-entrypoint"  3 weeks ago   Exited (0) 2 weeks ago       db
"""
STATUS = """
● vllm.service - vLLM server
     Loaded: loaded (/etc/systemd/system/vllm.service; enabled; preset: enabled)
     Active: failed (Result: signal) since Sun 2026-11-15 08:00:00 UTC; 3min ago
   Main PID: 4242 (code=killed, signal=KILL)
"""


@each(("text", "codes", "because"), [
    (DESCRIBE_OOM, [RAM, LOOP], ["64.0 GiB", "after 372 s"]), (OOM_JSON, [RAM], []),
    (DOCKER_INSPECT, [RAM, LOOP], ["48.0 GiB"]),
    (SYSTEMD_OOM, [RAM, LOOP], []), (CRASH_LOOP_YAML, [LOOP], []),  # exit code 1: the log tells why
    (DESCRIBE_PROBE, [Code.OTHER_PROBE], ["gives up after 90 s", "had run 95 s"]), (DEAD_AT_PROBE, [Code.ENGINE_DEAD], []),
    (DESCRIBE_OOM.replace("OOMKilled", "Error"), [KILLED, LOOP], []), (COMPLETED, [Code.ENGINE_DEAD, LOOP], []),
    (COMPLETED + KILLING, [Code.OTHER_STOPPED_BY_OPERATOR, LOOP], []), (DESCRIBE_OOM + EARLY, [RAM, LOOP], []),
    (NOT_OOM, [KILLED, LOOP], []), (RUNNING, [], []), (DOCKER_PS, [Code.ENGINE_DEAD], []), (STATUS, [KILLED], ["'signal'"]),
    # One event, one row of `kubectl get pods` or one line of the journal is enough, and gives one finding.
    ("Warning  Evicted  5m  kubelet  The node was low on resource: memory. Threshold quantity: 100Mi, available: 51Mi.",
     [RAM], []),
    ("Warning  Evicted  5m  kubelet  The node was low on resource: ephemeral-storage. Using 90Gi", [Code.OTHER_DISK], []),
    ('Warning  Evicted  5m  kubelet  Usage of EmptyDir volume "shm" exceeds the limit "1Gi".', [Code.OTHER_BAD_CONFIG], []),
    ("Warning  FailedScheduling  9m  sched  0/4 nodes available: 4 Insufficient nvidia.com/gpu.", [Code.OTHER_BAD_CONFIG], []),
    ("Warning  FailedScheduling  9m  sched  0/4 nodes are available: 4 Insufficient memory.", [Code.OTHER_BAD_CONFIG], []),
    ('Warning  Failed  1m (x4 over 3m)  kubelet  Failed to pull image "vllm:v9": not found', [Code.OTHER_DOWNLOAD], []),
    ("Normal  Preempted  1m  default-scheduler  Preempted by pod a1b2 on node gpu-1", [Code.OTHER_STOPPED_BY_OPERATOR], []),
    ("Warning  UnexpectedAdmissionError  1m  kubelet  Allocate failed: requested number of devices unavailable",
     [Code.OTHER_HARDWARE], []),
    ("Warning  Unhealthy  5m (x9 over 8m)  kubelet  Readiness probe failed: HTTP probe failed with statuscode: 503", [], []),
    ("vllm-0   0/1   OOMKilled   2 (30s ago)   9m", [RAM], []),
    ("vllm-0   0/1   ImagePullBackOff   0   9m", [Code.OTHER_DOWNLOAD], []),
    ("vllm-0   0/1   CrashLoopBackOff   7 (2m ago)   20m", [LOOP], []),
    ("vllm.service: Main process exited, code=exited, status=1/FAILURE", [], []),
    ("vllm.service: Main process exited, code=exited, status=2/INVALIDARGUMENT", [Code.STARTUP_BAD_FLAG], []),
    ("vllm.service: Main process exited, code=exited, status=127/n/a", [Code.OTHER_INSTALLATION], []),
    ("vllm.service: Main process exited, code=killed, status=9/KILL", [KILLED], []),
    ("vllm.service: Main process exited, code=dumped, status=11/SEGV", [Code.ENGINE_DEAD], []),
    ("vllm.service: start operation timed out. Terminating.", [Code.OTHER_TIMEOUT], []),
    ("vllm.service: Start request repeated too quickly.", [LOOP], []),
    ("user@1000.service: A process of this unit has been killed by the OOM killer.", [], []),  # a unit of the system itself
])  # fmt: skip
def test_the_cause_comes_first_and_the_loop_after_it(text: str, codes: list[Code], because: list[str]) -> None:
    """Memory is named only where the supervisor names it; the limit, the patience of a probe and the run time are told."""
    findings = judge_pods(pasted(text)).findings
    assert [finding.code for finding in findings] == codes
    assert all(words in findings[0].because for words in because)


@each(("text", "ending", "restarts", "others"), [
    (DESCRIBE_OOM, ("vllm", "OOMKilled", 137, 372), 7, {"shm_mounted": True}),
    (CRASH_LOOP_YAML, ("vllm", "Error", 1, 65), 12, {"memory_limit_bytes": 32 << 30}),
    (OOM_JSON, ("vllm", "OOMKilled", 137, None), 2, {}),
    (DOCKER_INSPECT, (None, "OOMKilled", 137, None), 4, {"shm_bytes": 64 << 20}),
    (SYSTEMD_OOM, (None, "oom-kill", -9, None), 5, {}),
    (STATUS, ("vllm.service", "signal", -9, None), None, {}),
    (DOCKER_PS, ("llm", "", 139, None), None, {"notes": ("a container ended with exit code 0: db",)}),
])  # fmt: skip
def test_facts_of_every_supervisor(
    text: str, ending: tuple[str | None, str, int, int | None], restarts: int | None, others: dict[str, object]
) -> None:
    """Container or unit, reason, code and run time of the last end, restarts, limits and mounts."""
    facts = judge_pods(pasted(text)).facts
    last = facts.endings[-1]
    name, reason, code, seconds = ending
    assert (last.reason, last.exit_code, facts.restarts) == (reason, code, restarts)
    assert name is None or last.name == name
    assert seconds is None or last.seconds == seconds
    assert {field: getattr(facts, field) for field in others} == others


def test_a_probe_is_as_patient_as_its_yaml_says_and_a_vllm_log_is_none_of_this() -> None:
    """Delay, period and failures; words that also occur in a server's log give nothing."""
    assert judge_pods(pasted(CRASH_LOOP_YAML)).facts.probes[0].patience_s == 30 + 5 * 6
    words = "Warning: tokenizer\nINFO: state: ok\nreason: stop\nMemory: 3\nKilling time\nexit code: -9"
    assert judge_pods(pasted(words)) == ([], PodFacts())


@given(scrambled(DESCRIBE_OOM, DESCRIBE_PROBE, CRASH_LOOP_YAML, OOM_JSON, DOCKER_INSPECT, SYSTEMD_OOM))
def test_no_text_breaks_it(log: Log) -> None:
    """Cut, mixed and random lines give a verdict, and memory is named only where the supervisor names it."""
    said = any(word in line.text for line in log.lines for word in ("OOM", "oom-kill", "low on resource: memory"))
    for finding in judge_pods(log).findings:
        assert finding.evidence
        assert said or not finding.code.is_memory
