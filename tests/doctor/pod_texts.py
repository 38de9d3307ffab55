"""What kubectl, docker and systemd print about a server that ended, written by hand in their shapes."""

DESCRIBE_OOM = """
Name:             vllm-llama-6d5f7b9c8-x2x7q
Namespace:        serving
Node:             gpu-node-3/10.0.0.7
Status:           Running
Containers:
  vllm:
    Container ID:  containerd://0a1b2c
    Image:         vllm/vllm-openai:v0.32.0
    State:          Waiting
      Reason:       CrashLoopBackOff
    Last State:     Terminated
      Reason:       OOMKilled
      Exit Code:    137
      Started:      Sun, 15 Nov 2026 08:00:00 +0000
      Finished:     Sun, 15 Nov 2026 08:06:12 +0000
    Ready:          False
    Restart Count:  7
    Limits:
      memory:          64Gi
      nvidia.com/gpu:  1
    Requests:
      memory:          32Gi
    Mounts:
      /dev/shm from shm (rw)
      /models from models (ro)
Events:
  Type     Reason   Age                 From     Message
  ----     ------   ----                ----     -------
  Warning  BackOff  2m (x31 over 40m)   kubelet  Back-off restarting failed container vllm in pod vllm-llama-6d5f7b9c8-x2x7q
"""
DESCRIBE_PROBE = """
Name:             vllm-0
Containers:
  vllm:
    State:          Running
      Started:      Sun, 15 Nov 2026 08:03:00 +0000
    Last State:     Terminated
      Reason:       Error
      Exit Code:    137
      Started:      Sun, 15 Nov 2026 08:00:00 +0000
      Finished:     Sun, 15 Nov 2026 08:01:35 +0000
    Restart Count:  2
    Liveness:   http-get http://:8000/health delay=60s timeout=1s period=10s #success=1 #failure=3
    Mounts:
      /models from models (ro)
Events:
  Type     Reason     Age                From     Message
  ----     ------     ----               ----     -------
  Warning  Unhealthy  4m (x6 over 6m)    kubelet  Liveness probe failed: Get "http://10.1.2.3:8000/health": dial tcp 10.1.2.3:8000: connect: connection refused
  Normal   Killing    4m (x2 over 6m)    kubelet  Container vllm failed liveness probe, will be restarted
"""  # noqa: E501
CRASH_LOOP_YAML = """
apiVersion: v1
kind: Pod
spec:
  containers:
  - name: vllm
    livenessProbe:
      failureThreshold: 6
      httpGet:
        path: /health
      initialDelaySeconds: 30
      periodSeconds: 5
    resources:
      limits:
        memory: 32Gi
        nvidia.com/gpu: "1"
status:
  containerStatuses:
  - containerID: containerd://0a1b2c
    lastState:
      terminated:
        containerID: containerd://0a1b2c
        exitCode: 1
        finishedAt: "2026-11-15T08:01:05Z"
        reason: Error
        startedAt: "2026-11-15T08:00:00Z"
    name: vllm
    ready: false
    restartCount: 12
    state:
      waiting:
        message: back-off 5m0s restarting failed container=vllm
        reason: CrashLoopBackOff
  phase: Running
"""
OOM_JSON = """
{
    "status": {
        "containerStatuses": [
            {
                "lastState": {
                    "terminated": {
                        "exitCode": 137,
                        "finishedAt": "2026-11-15T08:01:05Z",
                        "reason": "OOMKilled",
                        "startedAt": "2026-11-15T08:00:00Z"
                    }
                },
                "name": "vllm",
                "restartCount": 2
            }
        ]
    }
}
"""
DOCKER_INSPECT = """
[
    {
        "Id": "0a1b2c3d",
        "State": {
            "Status": "exited",
            "Running": false,
            "OOMKilled": true,
            "Dead": false,
            "Pid": 0,
            "ExitCode": 137,
            "Error": "",
            "StartedAt": "2026-11-15T08:00:00.123456789Z",
            "FinishedAt": "2026-11-15T08:10:00.123456789Z"
        },
        "Name": "/vllm",
        "RestartCount": 4,
        "HostConfig": {
            "Memory": 51539607552,
            "ShmSize": 67108864
        }
    }
]
"""
SYSTEMD_OOM = """
systemd[1]: vllm.service: A process of this unit has been killed by the OOM killer.
systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL
systemd[1]: vllm.service: Failed with result 'oom-kill'.
systemd[1]: vllm.service: Scheduled restart job, restart counter is at 5.
systemd[1]: vllm.service: Start request repeated too quickly.
"""
